"""What run.toml wants learned of a store: the task, the graph to sample, the seeds of every split.

All that the run_file and the store must agree on is checked here, before anything is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoploom.config.values import nearest
from hoploom.errors import ConfigError
from hoploom.schema import NodeType, RelationName, Schema
from hoploom.store import Store, Wanted
from hoploom.train.runs.link_splits import SPLITS, LinkShares, hold_out
from hoploom.train.runs.run_file import LINKS, RunFile
from hoploom.train.tasks import LinkPrediction, MultiLabel, NodeClassification, NodeRegression, Task

READ_AT_ONCE = 1 << 20  # labels
MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class Goal:
    """What is learned, on which graph, around which seeds."""

    store: Store  # the graph to sample
    task: Task
    num_outputs: int
    seeds: Mapping[str, Any]  # split -> what its loader takes; no "val" or "test" where there is none
    out_types: tuple[str, ...]  # whose rows the loss needs


def goal_of(run_file: RunFile, store: Store) -> Goal:
    """Bring run.toml and store together; ConfigError, with its line, where they do not agree."""
    _check_sampling(run_file, store.schema)
    goal = _link_goal(run_file, store) if run_file.task.kind == LINKS else _node_goal(run_file, store)
    _check_monitor(run_file, goal.task)
    return goal


def _check_sampling(run_file: RunFile, schema: Schema) -> None:
    if run_file.loader.weighted and schema.weight is None:
        message = "loader.weighted is true, but the store was built without weight_attr; build it with one"
        raise run_file.problem("loader.weighted", message)
    if run_file.loader.temporal and schema.time is None:
        message = "loader.temporal is set, but the store was built without time_attr; build it with one"
        raise run_file.problem("loader.temporal", message)
    for name in run_file.loader.relation_fanouts:
        relation_of(run_file, "loader.relation_fanouts", schema, name)


def _check_monitor(run_file: RunFile, task: Task) -> None:
    wanted, known = run_file.train.monitor, ["loss", *map(str, task.metrics(torch.device("cpu")))]
    if wanted is not None and wanted not in known:
        raise _unknown(run_file, "train.monitor", f"train.monitor is {wanted!r}", wanted, known)


def _unknown(run_file: RunFile, key: str, what: str, name: str, known: Sequence[str]) -> ConfigError:
    alike = nearest(name, known)
    hint = f"; did you mean {alike!r}?" if alike else ""
    return run_file.problem(key, f"{what}; there are {list(known)}{hint}")


def relation_of(run_file: RunFile, key: str, schema: Schema, name: str) -> RelationName:
    """A relation by its three words, or by the middle one where that is enough."""
    words = {" ".join(r.key): r.key for r in schema.relations}
    found = [words[name]] if name in words else [r.key for r in schema.relations if r.name == name]
    if len(found) == 1:
        return found[0]
    what = f"{key} names {name!r}, {'several relations' if found else 'no relation'}"
    raise _unknown(run_file, key, what, name, list(words))


# --- nodes ---------------------------------------------------------------------------------------


def _node_goal(run_file: RunFile, store: Store) -> Goal:
    node_type = _labelled_type(run_file, store.schema)
    names = {split: getattr(run_file.task, split) for split in SPLITS}
    nodes = {split: store.split(name, node_type.name) for split, name in names.items() if name}
    task = _node_task(run_file, store, node_type, nodes)
    for ids in nodes.values():
        task.check(store, ids)
    homogeneous = store.schema.homogeneous
    seeds = {split: names[split] if homogeneous else (node_type.name, names[split]) for split in nodes}
    return Goal(store, task, task.columns[0], seeds, (node_type.name,))


def _labelled_type(run_file: RunFile, schema: Schema) -> NodeType:
    """The type of the seeds: it has the splits and the label."""
    wanted, task = run_file.task.node_type, run_file.task
    if wanted is not None and wanted not in schema.type_index:
        message = f"task.node_type names {wanted!r}, no node type"
        raise _unknown(run_file, "task.node_type", message, wanted, list(schema.type_index))
    having = [t for t in schema.node_types if wanted in (None, t.name) and (task.train in t.splits or wanted)]
    if len(having) != 1:
        splits = {t.name: sorted(t.splits) for t in schema.node_types}
        where = [t.name for t in having] or "no node type"
        way_out = "name one in task.node_type" if having else "name one of them in task.train"
        message = f"the split {task.train!r} is in {where}, the splits are {splits}; {way_out}"
        raise run_file.problem("task.node_type" if having else "task.train", message)
    _check_names(run_file, schema, having[0])
    return having[0]


def _check_names(run_file: RunFile, schema: Schema, node_type: NodeType) -> None:
    for split in SPLITS:
        name = getattr(run_file.task, split)
        if name and name not in node_type.splits:
            way_out = "" if split == "train" else f'; task.{split} = "" does without'
            message = f"task.{split} is {name!r}, {node_type.name!r} has the splits {sorted(node_type.splits)}{way_out}"
            raise run_file.problem(f"task.{split}", message)
        if name and not node_type.splits[name]:
            raise run_file.problem(f"task.{split}", f"the split {name!r} of {node_type.name!r} is empty; name another")
    label = run_file.task.label
    if label not in node_type.fields:
        message = f"task.label is {label!r}, no field of {node_type.name!r}"
        raise _unknown(run_file, "task.label", message, label, list(node_type.fields))
    if run_file.loader.temporal and schema.time not in node_type.fields:
        message = f"loader.temporal is set, but no field dates the seeds, nodes of type {node_type.name!r}"
        raise run_file.problem("loader.temporal", f"{message}; leave it out, or use NeighborLoader(input_time=...)")


def _node_task(
    run_file: RunFile, store: Store, node_type: NodeType, nodes: Mapping[str, Tensor]
) -> NodeClassification | MultiLabel | NodeRegression:
    section, shape = run_file.task, node_type.fields[run_file.task.label].shape
    width = shape[0] if shape else 1
    common: dict[str, Any] = {"label": section.label, "node_type": node_type.name}
    if run_file.train.monitor is not None:
        common["best"] = run_file.train.monitor
    if section.kind == "multi-label":
        return MultiLabel(num_labels=width, **common)
    if section.kind == "node-regression":
        return NodeRegression(num_targets=width, loss=section.loss, **common)  # type: ignore[arg-type]
    count = section.num_classes or _count_classes(run_file, store, node_type, list(nodes.values()))
    return NodeClassification(num_classes=count, **common)


def _count_classes(run_file: RunFile, store: Store, node_type: NodeType, splits: Sequence[Tensor]) -> int:
    """One more than the largest label of all splits."""
    label, field = run_file.task.label, node_type.fields[run_file.task.label]
    if field.shape not in ((), (1,)):
        message = f"{label!r} of {node_type.name!r} has rows of shape {list(field.shape)}, not one class each"
        raise run_file.problem("task.label", f'{message}; use task.kind = "multi-label", or another label')
    largest = largest_label(store, node_type.name, label, splits)
    if not 1 <= largest < MOST_CLASSES:
        message = f"the largest label {label!r} of the splits is {largest:g}; classes are 0, 1, 2, ..."
        raise run_file.problem("task.label", f'{message}; use another label, or task.kind = "node-regression"')
    return int(largest) + 1


def largest_label(store: Store, node_type: str, label: str, splits: Sequence[Tensor]) -> float:
    """The largest label of these nodes; -1 where there is none."""
    largest = -1.0
    for nodes in splits:
        for begin in range(0, nodes.numel(), READ_AT_ONCE):
            some = nodes[begin : begin + READ_AT_ONCE]
            labels = store.features.gather([Wanted(node_type, label, some)])[0].double()
            largest = max(largest, float(labels.nan_to_num(-1.0).max()))
    return largest


# --- links ---------------------------------------------------------------------------------------


def _link_goal(run_file: RunFile, store: Store) -> Goal:
    key = _learned_relation(run_file, store.schema)
    reverse = run_file.task.reverse
    mirror = None if reverse is None else relation_of(run_file, "task.reverse", store.schema, reverse)
    if mirror is not None and (mirror[0], mirror[2]) != (key[2], key[0]):
        message = f"task.reverse is {' '.join(mirror)!r}, it does not lead from {key[2]!r} back to {key[0]!r}"
        raise run_file.problem("task.reverse", f"{message}; name the one with the same links the other way round")
    if run_file.task.links is not None:
        graph, links = store, _read_links(run_file, run_file.task.links)
    elif len(store.parts) < len(store.ranges):
        message = "task.links is missing, and edges can be held out only where a process holds them all"
        raise run_file.problem("task.links", f"{message}; give the links in files, from a store without the others")
    else:
        shares = LinkShares(run_file.seed, run_file.task.val_share, run_file.task.test_share)
        held_out = hold_out(store, key, mirror, shares)
        graph, links = held_out.store, {split: ends for split, ends in held_out.links.items() if ends.numel()}
    if "train" not in links:
        message = f"no edge of {' '.join(key)!r} is left to train on; take another relation"
        raise run_file.problem("task.relation", message)
    seeds = {split: ends if store.schema.homogeneous else (key, ends) for split, ends in links.items()}
    task = LinkPrediction(run_file.train.monitor or LinkPrediction.best)
    return Goal(graph, task, run_file.model.hidden, seeds, (key[0], key[2]))


def _learned_relation(run_file: RunFile, schema: Schema) -> RelationName:
    if run_file.task.relation is not None:
        return relation_of(run_file, "task.relation", schema, run_file.task.relation)
    if len(schema.relations) != 1:
        known = [" ".join(r.key) for r in schema.relations]
        raise run_file.problem("task.relation", f"task.relation is missing; name one of {known}")
    return schema.relations[0].key


def _read_links(run_file: RunFile, folder: Path) -> dict[str, Tensor]:
    """train.npy, and val.npy and test.npy where they are."""
    found = {split: folder / f"{split}.npy" for split in SPLITS if (folder / f"{split}.npy").exists()}
    if "train" not in found:
        raise run_file.problem("task.links", f"{folder} has no train.npy; write the links there, [2, n] int64")
    return {split: _read_ends(run_file, path) for split, path in found.items()}


def _read_ends(run_file: RunFile, path: Path) -> Tensor:
    try:
        ends = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise run_file.problem("task.links", f"{path} is no .npy file: {error}; write it with numpy.save") from error
    if not isinstance(ends, np.ndarray) or ends.ndim != 2 or ends.shape[0] != 2 or ends.dtype.kind not in "iu":
        shown = f"{ends.dtype} {list(ends.shape)}" if isinstance(ends, np.ndarray) else "an archive"
        raise run_file.problem("task.links", f"{path} holds {shown}; give [2, n] int64, sources above destinations")
    if not ends.shape[1]:
        raise run_file.problem("task.links", f"{path} holds no link; give at least one, or remove the file")
    return torch.from_numpy(ends.astype(np.int64))
