"""The pieces of a run, made from run.toml and a store: task and seeds, model, loaders, optimizer and schedule.

Run.toml is checked against the store before any of them is made. Schedules are closed forms of the step, so that a
resumed run follows the same curve; they take the number of steps from run.toml and ignore an early stop.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hoploom.config.values import nearest
from hoploom.errors import ConfigError, HoploomError
from hoploom.load import LinkNeighborLoader, NeighborLoader
from hoploom.load.loader import Loader
from hoploom.nn import GNN, Shape
from hoploom.nn.models import KINDS
from hoploom.ranks.context import Context, unwrap
from hoploom.schema import DTYPES, NodeType, RelationName, Schema
from hoploom.store import Store
from hoploom.train.runs.link_splits import SPLITS, LinkShares, given_links, hold_out, in_graph, read_links, reverses_of
from hoploom.train.runs.run_file import LINKS, RunFile
from hoploom.train.tasks import (
    LinkPrediction,
    Mode,
    MultiLabel,
    NodeClassification,
    NodeRegression,
    Task,
    largest_label,
)

Fanouts = list[int] | dict[RelationName, list[int]]
LEAST_TAIL = 64  # seeds of a last step; fewer join the step before, for any number of ranks up to this
NODES = "nodes"  # takes the place of a split for nodes whose outputs are written
MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class TrainingSetup:
    """The task of a run, its graph, and the seeds of every split."""

    store: Store  # the graph to sample
    task: Task
    num_outputs: int
    seeds: Mapping[str, Any]  # split -> the seeds of its loader; no "val" or "test" if the run has none
    out_types: tuple[str, ...]  # node types whose rows the loss needs
    notes: tuple[str, ...] = ()  # to be printed when the run begins


def training_setup(run_file: RunFile, store: Store) -> TrainingSetup:
    """Return what a run learns from a store; raise ConfigError, with its line, if run.toml does not fit the store."""
    _check_sampling(run_file, store.schema)
    setup = _link_setup(run_file, store) if run_file.task.kind == LINKS else _node_setup(run_file, store)
    if run_file.train.monitor is None:
        return setup
    try:
        return replace(setup, task=replace(setup.task, best=run_file.train.monitor))  # type: ignore[type-var]
    except ConfigError as error:
        raise run_file.problem("train.monitor", str(error).replace("best is", "train.monitor is", 1)) from error


def _check_sampling(run_file: RunFile, schema: Schema) -> None:
    if run_file.loader.weighted and schema.weight is None:
        message = "loader.weighted is true, but the store was built without weight_attr; build it with one"
        raise run_file.problem("loader.weighted", message)
    if run_file.loader.temporal and schema.time is None:
        message = "loader.temporal is set, but the store was built without time_attr; build it with one"
        raise run_file.problem("loader.temporal", message)
    for name in run_file.loader.relation_fanouts:
        relation_of(run_file, "loader.relation_fanouts", schema, name)


def _unknown(
    run_file: RunFile, key: str, what: str, name: str, known: Sequence[str], short: Sequence[str] = ()
) -> ConfigError:
    alike = nearest(name, [*known, *short])
    hint = f"; did you mean {alike!r}?" if alike else ""
    return run_file.problem(key, f"{what}; there are {list(known)}{hint}")


def relation_of(run_file: RunFile, key: str, schema: Schema, name: str) -> RelationName:
    """Return a relation named by its three words, or by the middle one if that is enough."""
    words = {" ".join(r.key): r.key for r in schema.relations}
    found = [words[name]] if name in words else [r.key for r in schema.relations if r.name == name]
    if len(found) == 1:
        return found[0]
    what = f"{key} names {name!r}, {'several relations' if found else 'no relation'}"
    short = [] if found else [r.name for r in schema.relations]
    raise _unknown(run_file, key, what, name, list(words), short)


# --- nodes ---------------------------------------------------------------------------------------


def _node_setup(run_file: RunFile, store: Store) -> TrainingSetup:
    node_type = _labelled_type(run_file, store.schema)
    names = {split: getattr(run_file.task, split) for split in SPLITS}
    nodes = {split: store.split(name, node_type.name) for split, name in names.items() if name}
    task = _node_task(run_file, store, node_type, nodes)
    for ids in nodes.values():
        task.check(store, ids)
    homogeneous = store.schema.homogeneous
    seeds = {split: names[split] if homogeneous else (node_type.name, names[split]) for split in nodes}
    return TrainingSetup(store, task, task.columns[0], seeds, (node_type.name,))


def _labelled_type(run_file: RunFile, schema: Schema) -> NodeType:
    """Return the type of the seeds, which has the splits and the label."""
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
    if section.kind == "multi-label":
        return MultiLabel(num_labels=width, **common)
    if section.kind == "node-regression":
        return NodeRegression(num_targets=width, loss=section.loss, **common)  # type: ignore[arg-type]
    count = section.num_classes or _count_classes(run_file, store, node_type, list(nodes.values()))
    return NodeClassification(num_classes=count, **common)


def _count_classes(run_file: RunFile, store: Store, node_type: NodeType, splits: Sequence[Tensor]) -> int:
    """Return one more than the largest label of all splits."""
    label, field = run_file.task.label, node_type.fields[run_file.task.label]
    if field.shape not in ((), (1,)):
        message = f"{label!r} of {node_type.name!r} has rows of shape {list(field.shape)}, not one class each"
        raise run_file.problem("task.label", f'{message}; use task.kind = "multi-label", or another label')
    largest = largest_label(store, node_type.name, label, splits)
    if not 1 <= largest < MOST_CLASSES:
        message = f"the largest label {label!r} of the splits is {largest:g}; classes are 0, 1, 2, ..."
        raise run_file.problem("task.label", f'{message}; use another label, or task.kind = "node-regression"')
    return int(largest) + 1


# --- links ---------------------------------------------------------------------------------------


def _link_setup(run_file: RunFile, store: Store) -> TrainingSetup:
    key = _learned_relation(run_file, store.schema)
    reverses = _reverses(run_file, store.schema, key)
    graph, links, notes = store, dict[str, Tensor](), list[str]()
    if run_file.task.links is not None:
        links = read_links(run_file, store, key, run_file.task.links)
    evaluated = torch.cat([torch.empty(2, 0).long(), *(links[split] for split in SPLITS[1:] if split in links)], dim=1)
    if "train" not in links or in_graph(store, key, reverses, evaluated):
        if len(store.parts) < len(store.ranges):
            why = "validation and test links are edges of the graph" if "train" in links else "task.links is missing"
            message = f"{why}, and edges can be held out only where a process holds them all"
            raise run_file.problem("task.links", f"{message}; give the links in files, from a store without the others")
        drawn = LinkShares(run_file.seed, run_file.task.val_share, run_file.task.test_share)
        held_out = hold_out(store, key, reverses, given_links(store, key, evaluated) if links else drawn)
        found = {split: ends for split, ends in held_out.links.items() if ends.numel()}
        links = {split: ends for split, ends in found.items() if split == "train" or not links} | links
        graph, notes = held_out.store, [_held_out_note(store, held_out.store, key, reverses)]
    if "train" not in links:
        message = f"no edge of {' '.join(key)!r} is left to train on; take another relation"
        raise run_file.problem("task.relation", message)
    seeds = {split: ends if store.schema.homogeneous else (key, ends) for split, ends in links.items()}
    return TrainingSetup(graph, LinkPrediction(), run_file.model.hidden, seeds, (key[0], key[2]), tuple(notes))


def _reverses(run_file: RunFile, schema: Schema, key: RelationName) -> tuple[RelationName, ...]:
    """Return the relations that must lose the reverse of every link that is held out."""
    if run_file.task.reverse is None:
        return reverses_of(schema, key)
    if not run_file.task.reverse:
        return ()
    named = relation_of(run_file, "task.reverse", schema, run_file.task.reverse)
    if (named[0], named[2]) != (key[2], key[0]):
        message = f"task.reverse is {' '.join(named)!r}, it does not lead from {key[2]!r} back to {key[0]!r}"
        raise run_file.problem("task.reverse", f"{message}; name the one with the same links the other way round")
    return () if named == key else (named,)


def _held_out_note(store: Store, left: Store, key: RelationName, reverses: Sequence[RelationName]) -> str:
    gone = {
        name: f"{store.schema.relation(name).num_edges - left.schema.relation(name).num_edges:,}"
        for name in (key, *reverses)
    }
    text = f"{gone[key]} edges of {' '.join(key)!r} are held out of the graph"
    if reverses:
        return f"{text}; in the opposite direction, " + ", ".join(
            f"{gone[name]} of {' '.join(name)!r}" for name in reverses
        )
    return f"{text}, in both directions" if key[0] == key[2] else f"{text}; no other relation leads back"


def _learned_relation(run_file: RunFile, schema: Schema) -> RelationName:
    if run_file.task.relation is not None:
        return relation_of(run_file, "task.relation", schema, run_file.task.relation)
    if len(schema.relations) != 1:
        known = [" ".join(r.key) for r in schema.relations]
        raise run_file.problem("task.relation", f"task.relation is missing; name one of {known}")
    return schema.relations[0].key


# --- model ---------------------------------------------------------------------------------------


def make_model(run_file: RunFile, setup: TrainingSetup) -> nn.Module:
    """Return the model, with weights drawn from the file's seed."""
    torch.manual_seed(run_file.seed)
    if run_file.model.factory is not None:
        return _from_factory(run_file, setup)
    section = run_file.model
    shape = Shape(
        hidden=section.hidden,
        num_layers=len(run_file.loader.fanouts),
        out=setup.num_outputs,
        dropout=section.dropout,
        heads=section.heads if KINDS[section.name].has_heads else 1,
        norm=section.norm,
        residual=section.residual,
    )
    try:
        return GNN(section.name, setup.store.schema, shape, setup.out_types)
    except ConfigError as error:
        raise run_file.problem(
            "model.name", f"model.name = {section.name!r} does not fit the store: {error}"
        ) from error


def _from_factory(run_file: RunFile, setup: TrainingSetup) -> nn.Module:
    """Return the model that the user's function makes for the store."""
    address, folder, options = str(run_file.model.factory), run_file.model.modules, run_file.model.options
    if folder is not None and str(folder) not in sys.path:  # its modules come first
        sys.path.insert(0, str(folder))
    module_name, _, name = address.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        message = f"{module_name} cannot be imported: {_one_line(error)}; mend it, or name its folder in model.modules"
        raise run_file.problem("model.factory", message) from error
    make = getattr(module, name, None)
    if not callable(make):
        message = f"{module_name} ({module.__file__}) has no function {name!r}; write one"
        raise run_file.problem("model.factory", message)
    try:
        model = make(setup.store, setup.num_outputs, **options)
    except HoploomError:
        raise
    except Exception as error:
        message = f"{address}(store, {setup.num_outputs}, **{options}) failed: {_one_line(error)}; mend it"
        raise run_file.problem("model.factory", message) from error
    if not isinstance(model, nn.Module):
        message = f"{address} returned a {type(model).__name__}; return a torch.nn.Module"
        raise run_file.problem("model.factory", message)
    return model


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# --- loaders -------------------------------------------------------------------------------------


def train_loader(run_file: RunFile, setup: TrainingSetup, context: Context, model: nn.Module) -> Loader:
    """Return a loader of this rank's share of the training seeds, shuffled."""
    return _loader(
        run_file,
        setup,
        model,
        "train",
        per_relation(run_file, setup),
        batch_size=run_file.loader.batch_size // context.world_size,
        rank=context.rank,
        world_size=context.world_size,
        shuffle=True,
        least_tail=LEAST_TAIL,
        locality=run_file.cluster.locality,
        device=context.device,
        num_workers=run_file.loader.num_threads(context.num_cores),
    ).share_steps(run_file.loader.batch_size)


def eval_loader(run_file: RunFile, setup: TrainingSetup, context: Context, model: nn.Module, split: str) -> Loader:
    """Return a loader of all seeds of a split, in order, whose steps `evaluate` distributes over ranks."""
    fanouts = _eval_fanouts(run_file, setup)
    return _loader(run_file, setup, model, split, fanouts, device=context.device, **_whole(run_file, context))


def infer_loader(run_file: RunFile, setup: TrainingSetup, context: Context, model: nn.Module, nodes: Any) -> Loader:
    """Return batches of some nodes for a model's outputs, the same for any number of ranks.

    They have all neighbours if the model has `num_layers`, else the fanouts of evaluation.
    """
    hops = getattr(model, "num_layers", None)
    fanouts = [-1] * hops if isinstance(hops, int) and hops > 0 else _eval_fanouts(run_file, setup)
    only_nodes = replace(setup, seeds={NODES: nodes})
    return _loader(run_file, only_nodes, model, NODES, fanouts, **_whole(run_file, context))


def _eval_fanouts(run_file: RunFile, setup: TrainingSetup) -> Fanouts:
    given = run_file.loader.eval_fanouts
    return list(given) if given else per_relation(run_file, setup)


def _whole(run_file: RunFile, context: Context) -> dict[str, Any]:
    """Return the arguments of a loader that reads all seeds on every rank."""
    section = run_file.loader
    batch_size, threads = section.eval_batch_size or section.batch_size, section.num_threads(context.num_cores)
    return {"rank": 0, "world_size": 1, "batch_size": batch_size, "num_workers": threads}


def _loader(
    run_file: RunFile, setup: TrainingSetup, model: nn.Module, split: str, fanouts: Fanouts, **given: Any
) -> Loader:
    section, task, schema = run_file.loader, run_file.task, setup.store.schema
    options: dict[str, Any] = given | {
        "seed": run_file.seed,
        "replace": section.replace,
        "labor": section.labor,
        "mode": section.mode,
        "weight_attr": schema.weight if section.weighted else None,
    }
    module = unwrap(model)
    if isinstance(module, GNN):  # layer one is aggregated where its rows are stored
        floats = [DTYPES[t.fields["x"].dtype].is_floating_point for t in schema.node_types if "x" in t.fields]
        is_whole = split == "train" and run_file.train.whole_steps  # then layer one is part of the recorded step
        reduce = module.first_reduce if all(floats) and not is_whole else None
        options |= {"aggregate": reduce, "degrees": module.needs_degrees}
        _check_degrees(run_file, setup.store, module)
    if task.kind == LINKS and split != NODES:
        options |= {"neg_sampling_ratio": task.negatives, "strict_negatives": task.strict_negatives}
        return LinkNeighborLoader(setup.store, fanouts, setup.seeds[split], **options)
    if section.temporal is not None:
        options |= {"temporal_strategy": section.temporal, "time_attr": schema.time}
    return NeighborLoader(setup.store, fanouts, setup.seeds[split], **options)


def _check_degrees(run_file: RunFile, store: Store, module: GNN) -> None:
    """Raise ConfigError if the model needs in-degrees that this process does not know."""
    if module.needs_degrees and not store.deployment.makes_batches and len(store.topology) < len(store.ranges):
        message = f'model.name = "{run_file.model.name}" needs in-degrees, and a process maps the edges of its parts'
        way_out = 'set cluster.topology = "local", or take another model'
        raise run_file.problem("cluster.topology", f"{message} only; {way_out}")


def per_relation(run_file: RunFile, setup: TrainingSetup) -> Fanouts:
    """Return one list of fanouts for all relations, or one for each if run.toml has `relation_fanouts`."""
    fanouts, others, schema = run_file.loader.fanouts, run_file.loader.relation_fanouts, setup.store.schema
    if not others:
        return list(fanouts)
    apart = {relation_of(run_file, "loader.relation_fanouts", schema, name): counts for name, counts in others.items()}
    return {relation.key: list(apart.get(relation.key, fanouts)) for relation in schema.relations}


# --- optimizer and schedule ----------------------------------------------------------------------


def make_optimizer(run_file: RunFile, model: nn.Module) -> Optimizer:
    """Return the optimizer of all parameters that are learned."""
    section = run_file.optimizer
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if section.name == "sgd":
        return SGD(learned, section.lr, section.momentum, weight_decay=section.weight_decay)
    kind = AdamW if section.name == "adamw" else Adam
    return kind(learned, section.lr, weight_decay=section.weight_decay)


def make_scheduler(
    run_file: RunFile, optimizer: Optimizer, num_batches: int, mode: Mode
) -> LRScheduler | ReduceLROnPlateau | None:
    """Return the schedule for epochs of this many batches; `mode` is the one of the metric that a plateau watches."""
    section = run_file.scheduler
    if section.name == "none":
        return None
    if section.name == "plateau":
        return ReduceLROnPlateau(optimizer, mode, section.factor, section.wait, min_lr=section.min_lr)
    steps_per_epoch = math.ceil(num_batches / run_file.train.accumulate)
    if section.name == "step":
        cut_every = section.every * steps_per_epoch
        return LambdaLR(optimizer, lambda step: float(section.factor ** (step // cut_every)))
    num_steps = run_file.train.epochs * steps_per_epoch
    if run_file.train.max_steps is not None:
        num_steps = min(num_steps, run_file.train.max_steps)
    num_warm = int(section.warmup * num_steps) if section.name == "warmup-cosine" else 0
    least = section.min_lr / run_file.optimizer.lr

    def cosine(step: int) -> float:
        if step < num_warm:
            return (step + 1) / num_warm
        progress = min(1.0, (step - num_warm) / max(1, num_steps - num_warm))
        return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, cosine)
