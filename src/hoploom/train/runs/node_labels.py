"""The task of a label of a run's nodes, and the node type that has the run's splits and labels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hoploom.schema import NodeType, Schema
from hoploom.store import Store, Wanted
from hoploom.train import tasks
from hoploom.train.runs.link_splits import SPLITS, unknown_name
from hoploom.train.runs.run_file import ERRORS, RunFile

MOST_CLASSES = 1_000_000


def node_task(
    run_file: RunFile, store: Store, node_type: NodeType, splits: Sequence[Tensor], label: str
) -> tasks.LabelTask:
    """Return the task of one label of the seeds: that of task.label, or one of task.more."""
    section, common = run_file.task, dict[str, Any](label=label, node_type=node_type.name)
    if label not in node_type.fields:
        key, _ = _keys_of(run_file, label)
        message = f"{key} names {label!r}, no field of {node_type.name!r}"
        raise unknown_name(run_file, key, message, label, list(node_type.fields))
    field, kind = node_type.fields[label], section.more.get(label, section.kind)
    width = field.shape[0] if field.shape else 1
    if kind == "multi-label":
        return tasks.MultiLabel(num_labels=width, **common)
    if kind == "node-regression":
        loss = section.loss if section.loss in ERRORS else "mse"  # that of a run on links is for links
        return tasks.NodeRegression(num_targets=width, loss=loss, **common)  # type: ignore[arg-type]
    given = section.num_classes if label == section.label else None
    return tasks.NodeClassification(given or _count_classes(run_file, store, node_type, splits, label), **common)


def labelled_type(run_file: RunFile, schema: Schema) -> NodeType:
    """Return the node type of the seeds; raise ConfigError if it lacks the splits or the label of the task."""
    wanted, task = run_file.task.node_type, run_file.task
    if wanted is not None and wanted not in schema.type_index:
        message = f"task.node_type names {wanted!r}, no node type"
        raise unknown_name(run_file, "task.node_type", message, wanted, list(schema.type_index))
    having = [t for t in schema.node_types if wanted in (None, t.name) and (task.train in t.splits or wanted)]
    if len(having) != 1:
        splits = {t.name: sorted(t.splits) for t in schema.node_types}
        where = [t.name for t in having] or "no node type"
        way_out = "name one in task.node_type" if having else "name one of them in task.train"
        message = f"the split {task.train!r} is in {where}, the splits are {splits}; {way_out}"
        raise run_file.problem("task.node_type" if having else "task.train", message)
    (node_type,) = having
    for split in SPLITS:
        name = getattr(task, split)
        if name and name not in node_type.splits:
            way_out = "" if split == "train" else f'; task.{split} = "" does without'
            message = f"task.{split} is {name!r}, {node_type.name!r} has the splits {sorted(node_type.splits)}{way_out}"
            raise run_file.problem(f"task.{split}", message)
        if name and not node_type.splits[name]:
            raise run_file.problem(f"task.{split}", f"the split {name!r} of {node_type.name!r} is empty; name another")
    if run_file.loader.temporal and schema.time not in node_type.fields:
        message = f"loader.temporal is set, but no field dates the seeds, nodes of type {node_type.name!r}"
        raise run_file.problem("loader.temporal", f"{message}; leave it out, or use NeighborLoader(input_time=...)")
    return node_type


def _keys_of(run_file: RunFile, label: str) -> tuple[str, str]:
    """Return the keys that name a label and its kind, which are one key if the label is in task.more."""
    more = f"task.more.{label}"
    return (more, more) if label in run_file.task.more else ("task.label", "task.kind")


def _count_classes(run_file: RunFile, store: Store, node_type: NodeType, splits: Sequence[Tensor], label: str) -> int:
    """Return the number of classes: one more than the largest label in all splits."""
    field, (key, kind) = node_type.fields[label], _keys_of(run_file, label)
    if field.shape not in ((), (1,)):
        message = f"{label!r} of {node_type.name!r} has rows of shape {list(field.shape)}, not one class each"
        raise run_file.problem(key, f'{message}; use {kind} = "multi-label", or another label')
    largest = -1.0
    for some in (piece for nodes in splits for piece in torch.split(nodes, tasks.LABELS_AT_ONCE) if piece.numel()):
        labels = store.features.gather([Wanted(node_type.name, label, some)])[0].double()
        largest = max(largest, float(labels.nan_to_num(-1.0).max()))
    if not 1 <= largest < MOST_CLASSES:
        message = f"the largest label {label!r} of the splits is {largest:g}; classes are 0, 1, 2, ..."
        raise run_file.problem(key, f'{message}; use another label, or {kind} = "node-regression"')
    return int(largest) + 1
