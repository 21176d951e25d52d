"""A run of `hoploom train`: run.toml becomes a store, a task, a model, loaders and an optimizer; then fit and evaluate.

The functions for this are public, so that a script can do the same.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hoploom.deploy.open import CONNECT
from hoploom.deploy.open import open as open_store
from hoploom.errors import ConfigError, HoploomError, StoreError
from hoploom.gpu.cuda_graph import prepare_optimizer
from hoploom.gpu.placement import kernels_are_interpreted, place
from hoploom.load import LinkNeighborLoader, NeighborLoader
from hoploom.load.loader import Loader
from hoploom.load.presample import Presampling, count_visits, no_visits, read_seeds
from hoploom.nn import GNN
from hoploom.nn.decoders import DECODERS, Decoder, Dot, OfRelations
from hoploom.nn.models import types_by_layer
from hoploom.ranks.context import DEADLINE, Context, unwrap
from hoploom.ranks.environment import RankInfo
from hoploom.schema import RelationName
from hoploom.store import Store
from hoploom.store.base import Tier
from hoploom.store.format import write_whole
from hoploom.store.row_cache import CacheReport, cached, report
from hoploom.train import tasks
from hoploom.train.checkpoint import Checkpoint, learned_parts
from hoploom.train.journal import Journal, no_run
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.loop import Outcome, evaluate, fit
from hoploom.train.runs import link_splits
from hoploom.train.runs.built_in import loader_options, naming_model, read_edge_fields, shape_of
from hoploom.train.runs.link_splits import SPLITS, relation_of
from hoploom.train.runs.node_labels import labelled_type, node_task
from hoploom.train.runs.run_file import (
    BEST,
    LAST,
    LINKS,
    NO_CACHE,
    RUN_FILE,
    RunFile,
    applies,
    check_run,
    read_run_file,
    to_toml,
    values_of,
)
from hoploom.train.runs.schedules import learn_rows, make_optimizer, make_scheduler
from hoploom.train.step import Learner, MakeStepper, SideTask, Training
from hoploom.train.tasks import Task

RESULT_FILE, LINKS_FOLDER = "result.json", "links"
NUM_BATCHES = 64  # batches that are sampled to choose the rows to cache
CONNECT_KEYS = tuple(name for name in CONNECT if name != "made")  # the store decides where batches are made
LEAST_TAIL = 64  # a last step with fewer seeds joins the one before: the same steps for any number of ranks up to this
NODES = "nodes"  # the name, instead of that of a split, for nodes whose outputs are written

Fanouts = list[int] | dict[RelationName, list[int]]


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path
    outcome: Outcome
    monitor: str  # the metric that `outcome.best` is of
    test: Mapping[str, float]  # of the best checkpoint; empty without a test split, or if training was stopped
    num_parameters: int
    seconds: float
    cache: CacheReport | None = None  # of all ranks; None: nothing was cached

    @property
    def is_complete(self) -> bool:
        return self.outcome.stopped != "asked"


def run(
    run_file: RunFile, context: Context, *, resume: bool = False, progress: bool = True, checked: bool = False
) -> Result:
    """Train and evaluate as run.toml describes. All ranks call. Unless `checked`, call `check_run` first.

    >>> with hoploom.init() as context:
    ...     result = run(read_run_file("run.toml"), context)
    """
    if not checked:
        check_run(run_file, context.world_size, resume=resume)
    began, folder, values = time.perf_counter(), run_file.output.folder, values_of(run_file)
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in values.items() if applies(name, values)}
    with Journal(folder, context, loggers=run_file.output.loggers, settings=settings) as journal, ExitStack() as stack:
        graph = open_graph(run_file, context)
        setup = complete_setup(run_file, graph, context, with_cache, with_placement, trains=True)
        notes = [f"hoploom: {note}" for note in setup.notes]
        if (placed := setup.store.placed) is not None:
            notes.append(str(stack.enter_context(placed)))
        for note in notes if progress and context.is_main else ():
            print(note, file=sys.stderr, flush=True)
        made = make_model(run_file, setup)  # a user's may leave parameters unused; a decoder's are used outside forward
        own = run_file.model.factory is not None and not isinstance(getattr(made, "decoder", None), Decoder)
        model = context.wrap(made, find_unused_parameters=own)
        loader = train_loader(run_file, setup, context, model)
        optimizer = make_optimizer(run_file, model)
        scheduler = make_scheduler(run_file, optimizer, len(loader), setup.task.monitor[1])
        also = {
            name: SideTask(side.task, train_loader(run_file, side, context, model))
            for name, side in setup.sides.items()
        }
        learner = Learner(model, optimizer, setup.task, loader, scheduler, also=also)
        checkpoint = Checkpoint(folder, context)
        if resume:
            checkpoint.restore(LAST, learner.parts())
        recorded = run_file.train.whole_steps and context.device.type == "cuda"
        if recorded or resume:  # the earlier run may have been of the other kind
            prepare_optimizer(optimizer, recorded=recorded)
        if context.is_main:  # the run that this one continues may have a result
            counted = replace(run_file, model=replace(run_file.model, categories=dict(setup.categories)))
            write_whole(folder / RUN_FILE, [to_toml(counted).encode()])
            if run_file.task.kind == LINKS and run_file.task.links is None:
                columns = {str(run_file.task.relation_field): setup.relations}
                link_splits.write_links(folder / LINKS_FOLDER, setup.store, setup.seeds, columns, keep=resume)
            (folder / RESULT_FILE).unlink(missing_ok=True)
        stepper: MakeStepper | None = None
        if run_file.train.whole_steps:
            from hoploom.gpu.whole_steps import WholeStep  # imports Triton

            stepper = WholeStep
        given: dict[str, Any] = {field.name: getattr(run_file.train, field.name, None) for field in fields(Training)}
        outcome = fit(
            learner,
            Training(**given | {"seed": run_file.seed, "progress": progress}),
            context,
            validate=evaluation(run_file, setup, context, model, "val") if "val" in setup.seeds else None,
            checkpoint=checkpoint,
            journal=journal,
            stepper=stepper,
        )
        test: Mapping[str, float] = {}
        if outcome.stopped != "asked" and "test" in setup.seeds:
            best = {"model": model} | learned_parts(setup.store)
            if outcome.best is not None and checkpoint.restore(BEST, best) is None:
                raise StoreError(
                    f"{checkpoint.path(BEST)} is gone, so the best model cannot be tested; put it back and go on with "
                    "--resume, or start anew in another output.folder"
                )
            test = evaluation(run_file, setup, context, model, "test")()
        journal.test(test, step=outcome.steps)
        weights = *model.parameters(), *(learned.rows for learned in setup.store.learned)
        cache, size = None, sum(each.numel() for each in weights)
        if run_file.cluster.cache is not None:
            used = report(setup.store) or CacheReport(0, 0, 0, 0)
            summed = context.sum(torch.tensor([used.num_rows, used.num_bytes, used.hits, used.misses]))
            cache = CacheReport(*summed.tolist()) if bool(summed.any()) else None
        result = Result(folder, outcome, setup.task.monitor[0], test, size, time.perf_counter() - began, cache)
        if context.is_main and result.is_complete:
            write_whole(folder / RESULT_FILE, [result_json(result).encode()])
    return result


def evaluation(
    run_file: RunFile, setup: "TrainingSetup", context: Context, model: nn.Module, split: str
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the model on a split; the loss of a side task is named after it."""
    loaders = {
        name: (eval_loader(run_file, each, context, model, split), each.task)
        for name, each in ({"": setup} | setup.sides).items()
        if split in each.seeds
    }

    def evaluated() -> dict[str, float]:
        found = dict[str, float]()
        for side, (loader, task) in loaders.items():
            metrics = evaluate(model, loader, task, context, precision=run_file.train.precision)
            found |= {f"{side}_{name}" if side and name == "loss" else name: v for name, v in metrics.items()}
        return found

    return evaluated


# --- the store -----------------------------------------------------------------------------------


def open_graph(run_file: RunFile, context: Context) -> Store:
    """Open the store of a run; it is closed together with the context."""
    section = run_file.cluster
    options = {name: getattr(section, name) for name in CONNECT_KEYS}
    options |= {"memory": run_file.memory, "scratch": run_file.scratch}
    store = open_store(run_file.store, context=context, parts=section.parts, servers=section.servers, **options)
    if store.deployment.makes_batches and section.cache is not None:
        raise run_file.problem("cluster.cache", NO_CACHE)
    return store


def with_placement(run_file: RunFile, setup: "TrainingSetup", context: Context) -> "TrainingSetup":
    """Return the setup with its store in memory that a GPU reads, as [placement] says. All ranks call."""
    section, device = run_file.placement, context.device
    if section.topology is None and section.features is None:
        return setup
    name = "placement.features" if section.topology is None else "placement.topology"
    names_gpu, interpreted = "cuda" in f"{section.topology} {section.features}", False
    with suppress(ConfigError):  # there is no Triton
        interpreted = kernels_are_interpreted()
    if device.type == "cpu" and (names_gpu or not interpreted):
        why = "its context was made so" if torch.cuda.is_available() else "there is no GPU here"
        why = 'train.device is "cpu"' if run_file.train.device == "cpu" else why
        raise run_file.problem(name, f"{name} has no effect: this run is on cpu ({why}); leave [placement] out")
    try:
        store = place(setup.store, section.topology, section.features, device=device, among=context)
    except ConfigError as error:
        raise run_file.problem(name, f"the store cannot be placed: {error}; or leave [placement] out") from error
    return replace(setup, store=store)


def with_cache(run_file: RunFile, setup: "TrainingSetup", context: Context) -> "TrainingSetup":
    """Return the setup with a cache of the remote rows that this rank will need most."""
    size, store, section = run_file.cluster.cache, setup.store, run_file.loader
    if size is None or all(shard.tier > Tier.REMOTE for shard in store.shards):
        return setup
    schema, given, is_local = store.schema, setup.seeds["train"], run_file.cluster.locality
    weight = schema.weight if section.weighted else None
    plan = Presampling(
        batch_size=section.batch_size // context.world_size,
        rank=0 if is_local else context.rank,  # is_local: the seeds are in the parts of this rank
        world_size=1 if is_local else context.world_size,
        batches=range(NUM_BATCHES),
        seed=run_file.seed,
        num_threads=section.num_threads(context.num_cores),
        options={"replace": section.replace, "labor": section.labor, "weight_attr": weight},
    )
    by_type: dict[str, Tensor] = {}
    if run_file.task.kind == LINKS:  # both ends
        relation, ends = (schema.relations[0].key, given) if schema.homogeneous else given
        for node_type, ids in zip((relation[0], relation[2]), ends, strict=True):
            by_type[node_type] = torch.unique(torch.cat([by_type.get(node_type, ids[:0]), ids]))
    else:
        by_type = dict([read_seeds(store, given)])
    counts = no_visits(store)
    for node_type, ids in by_type.items():
        index, own = schema.type_index[node_type], torch.zeros(ids.numel(), dtype=torch.bool)
        for part in store.parts if is_local else ():
            first = part.first_nodes[index]
            own |= (ids >= first) & (ids < first + part.num_nodes[index])
        own = ids[own] if bool(own.any()) else ids
        seeds = own if schema.homogeneous else (node_type, own)
        visits = count_visits(store, per_relation(run_file, setup), seeds, plan)
        for name, found in visits.items():
            counts[name] += found
        counts.num_batches = visits.num_batches
    return replace(setup, store=cached(store, size, counts))


@dataclass(frozen=True)
class TrainingSetup:
    """The task of a run, its graph, and the seeds of every split."""

    store: Store  # the graph to sample
    task: Task
    num_outputs: int
    seeds: Mapping[str, Any]  # split -> the seeds of its loader; no "val" or "test" if the run has none
    out_types: tuple[str, ...]  # node types whose rows the loss needs
    notes: tuple[str, ...] = ()  # to be printed when the run begins
    relations: Mapping[str, Tensor] = field(default_factory=dict)  # split -> the numbers of its links' relations
    categories: Mapping[str, int] = field(default_factory=dict)  # of edge fields that the model reads
    nodes: "TrainingSetup | None" = None  # of labels of nodes that a run on links learns, too

    @property
    def sides(self) -> "dict[str, TrainingSetup]":
        """The setup of the side task by its name, if there is one, with the graph as it is now."""
        return {} if self.nodes is None else {"nodes": replace(self.nodes, store=self.store)}


def training_setup(run_file: RunFile, store: Store) -> TrainingSetup:
    """Return a run's task, graph and seeds; raise ConfigError with the line of run.toml that does not fit `store`."""
    schema = store.schema
    for option, attribute in (("weighted", "weight"), ("temporal", "time")):
        if getattr(run_file.loader, option) and getattr(schema, attribute) is None:
            message = f"loader.{option} is set, but the store was built without {attribute}_attr; build it with one"
            raise run_file.problem(f"loader.{option}", message)
    for name in run_file.loader.relation_fanouts:
        relation_of(run_file, "loader.relation_fanouts", schema, name)
    if run_file.task.kind == LINKS:
        key, graph, links, notes = link_splits.link_seeds(run_file, store)
        seeds = {split: rows[:2] if schema.homogeneous else (key, rows[:2]) for split, rows in links.items()}
        relations = {split: rows[2] for split, rows in links.items() if len(rows) > 2}
        task = link_splits.link_task(run_file, relations.values())
        setup = TrainingSetup(graph, task, run_file.model.hidden, seeds, (key[0], key[2]), notes, relations)
        if run_file.task.more:
            nodes = _node_setup(run_file, graph)
            setup = replace(
                setup,
                task=replace(task, first_column=nodes.num_outputs),
                num_outputs=nodes.num_outputs + setup.num_outputs,
                out_types=tuple(dict.fromkeys((*setup.out_types, *nodes.out_types))),
                nodes=nodes,
            )
    else:
        setup = _node_setup(run_file, store)
    if run_file.train.monitor is None:
        return setup
    try:
        return replace(setup, task=replace(setup.task, best=run_file.train.monitor))  # type: ignore[type-var]
    except ConfigError as error:
        raise run_file.problem("train.monitor", str(error).replace("best is", "train.monitor is", 1)) from error


def complete_setup(
    run_file: RunFile, store: Store, context: Context, *changes: Callable[..., TrainingSetup], trains: bool = False
) -> TrainingSetup:
    """Return the setup with `changes` and the graph's learned rows. All ranks call.

    The rows are zeros unless the run `trains`, to be read from a checkpoint.
    """
    setup, types = training_setup(run_file, store), list[str]()
    if run_file.model.factory is None:
        setup = replace(setup, categories=read_edge_fields(run_file, store, context, trains=trains))
    for change in changes:
        setup = change(run_file, setup, context)
    if run_file.model.factory is None:
        with naming_model(run_file):
            shape = shape_of(run_file, setup.num_outputs, setup.categories)
            types = types_by_layer(setup.store.schema, shape, setup.out_types)[0]
    learned, notes = learn_rows(run_file, setup.store, types, context, trains=trains)
    return replace(setup, store=learned, notes=(*setup.notes, *notes))


def _node_setup(run_file: RunFile, store: Store) -> TrainingSetup:
    node_type = labelled_type(run_file, store.schema)
    names = {split: getattr(run_file.task, split) for split in SPLITS}
    nodes = {split: store.split(name, node_type.name) for split, name in names.items() if name}
    section, splits = run_file.task, list(nodes.values())
    first, *others = section.more if section.kind == LINKS else (section.label, *section.more)
    found = {label: node_task(run_file, store, node_type, splits, label) for label in (first, *others)}
    task: tasks.LabelTask | tasks.SeveralTasks = found[first]
    if section.more:
        best, is_first = f"{first}_{task.monitor[0]}", section.kind == LINKS
        try:
            task = tasks.SeveralTasks(found, section.weights, best, node_type=node_type.name, is_first=is_first)
        except ConfigError as error:
            raise run_file.problem("task.weights", f"task.weights: {error}") from error
    for split, ids in nodes.items():
        try:
            task.check(store, ids)
        except ConfigError as error:
            raise run_file.problem(f"task.{split}", f"the split {names[split]!r}: {error}") from error
    seeds = {split: names[split] if store.schema.homogeneous else (node_type.name, names[split]) for split in nodes}
    return TrainingSetup(store, task, task.columns[0], seeds, (node_type.name,))


def make_model(run_file: RunFile, setup: TrainingSetup) -> nn.Module:
    """Return the model, with weights drawn from the file's seed."""
    torch.manual_seed(run_file.seed)
    if run_file.model.factory is not None:
        model = _from_factory(run_file, setup)
    else:
        shape = shape_of(run_file, setup.num_outputs, setup.categories)
        with naming_model(run_file):
            model = GNN(run_file.model.name, setup.store.schema, shape, setup.out_types)
    kind, task = DECODERS[run_file.model.decoder], setup.task
    if issubclass(kind, OfRelations) and isinstance(task, LinkPrediction):
        model.decoder = kind(setup.num_outputs - task.first_column, task.num_relations or 1)
    elif kind is not Dot:
        model.decoder = kind()
    return model


def _from_factory(run_file: RunFile, setup: TrainingSetup) -> nn.Module:
    """Return the model that the user's function makes for the store."""
    address, folder, options = str(run_file.model.factory), run_file.model.modules, run_file.model.options
    if folder is not None and str(folder) not in sys.path:  # its modules come first
        sys.path.insert(0, str(folder))
    module_name, _, name = address.partition(":")
    hint = f"{module_name} cannot be imported", "mend it, or name its folder in model.modules"
    try:
        module = import_module(module_name)
        if not callable(make := getattr(module, name, None)):
            message = f"{module_name} ({module.__file__}) has no function {name!r}; write one"
            raise run_file.problem("model.factory", message)
        hint = f"{address}(store, {setup.num_outputs}, **{options}) failed", "mend it"
        model = make(setup.store, setup.num_outputs, **options)
    except HoploomError:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise run_file.problem("model.factory", f"{hint[0]}: {why}; {hint[1]}") from error
    if not isinstance(model, nn.Module):
        raise run_file.problem(
            "model.factory", f"{address} returned a {type(model).__name__}; make it a torch.nn.Module"
        )
    return model


def train_loader(run_file: RunFile, setup: TrainingSetup, context: Context, model: nn.Module) -> Loader:
    """Return a loader of this rank's share of the training seeds, shuffled."""
    options = {
        "batch_size": run_file.loader.batch_size // context.world_size,
        "rank": context.rank,
        "world_size": context.world_size,
        "shuffle": True,
        "least_tail": LEAST_TAIL,
        "locality": run_file.cluster.locality,
    }
    loader = _loader(run_file, setup, context, model, "train", per_relation(run_file, setup), options)
    return loader.share_steps(run_file.loader.batch_size)


def eval_loader(run_file: RunFile, setup: TrainingSetup, context: Context, model: nn.Module, split: str) -> Loader:
    """Return a loader of all seeds of a split, in order, whose steps `evaluate` distributes over ranks."""
    given = run_file.loader.eval_fanouts
    return _loader(run_file, setup, context, model, split, list(given) if given else per_relation(run_file, setup))


def infer_loader(run_file: RunFile, setup: TrainingSetup, context: Context, model: nn.Module, nodes: Any) -> Loader:
    """Return a loader of `nodes` for inference, with the same batches for any number of ranks.

    If the model has `num_layers`, batches have all neighbours. Otherwise, they are sampled by evaluation's fanouts.
    """
    hops, only_nodes = getattr(model, "num_layers", None), replace(setup, seeds={NODES: nodes})
    if isinstance(hops, int) and hops > 0:
        return _loader(run_file, only_nodes, context, model, NODES, [-1] * hops)
    return eval_loader(run_file, only_nodes, context, model, NODES)


def _loader(
    run_file: RunFile,
    setup: TrainingSetup,
    context: Context,
    model: nn.Module,
    split: str,
    fanouts: Fanouts,
    given: Mapping[str, Any] | None = None,
) -> Loader:
    """Return a loader of a split with options `given`; by default for evaluation, where every rank has all seeds."""
    section, task, store = run_file.loader, setup.task, setup.store
    size = link_splits.eval_batch_size(run_file, task, store.schema)
    whole = {"rank": 0, "world_size": 1, "batch_size": section.eval_batch_size or size}
    options: dict[str, Any] = dict(whole if given is None else given) | {
        "device": context.device,
        "num_workers": section.num_threads(context.num_cores),
        "seed": run_file.seed,
        "replace": section.replace,
        "labor": section.labor,
        "mode": section.mode,
        "weight_attr": store.schema.weight if section.weighted else None,
    }
    module = unwrap(model)
    if isinstance(module, GNN):
        are_whole = split == "train" and run_file.train.whole_steps
        options |= loader_options(module, store, task, are_whole=are_whole)
        if module.needs_degrees and not store.deployment.makes_batches and len(store.topology) < len(store.ranges):
            message = (
                f'model.name = "{run_file.model.name}" needs in-degrees, and a process maps the edges of its parts'
            )
            way_out = 'set cluster.topology = "local", or take another model'
            raise run_file.problem("cluster.topology", f"{message} only; {way_out}")
    if isinstance(task, LinkPrediction) and split != NODES:
        options |= link_splits.link_options(run_file, store, task, split, setup.seeds)
        options["edge_label"] = setup.relations.get(split)
        return LinkNeighborLoader(store, fanouts, setup.seeds[split], **options)
    if section.temporal is not None:
        options |= {"temporal_strategy": section.temporal, "time_attr": store.schema.time}
    return NeighborLoader(store, fanouts, setup.seeds[split], **options)


def per_relation(run_file: RunFile, setup: TrainingSetup) -> Fanouts:
    """Return one list of fanouts for all relations, or one for each relation if run.toml has `relation_fanouts`."""
    fanouts, others, schema = run_file.loader.fanouts, run_file.loader.relation_fanouts, setup.store.schema
    if not others:
        return list(fanouts)
    apart = {relation_of(run_file, "loader.relation_fanouts", schema, name): counts for name, counts in others.items()}
    return {relation.key: list(apart.get(relation.key, fanouts)) for relation in schema.relations}


def result_json(result: Result) -> str:
    """Return the text of result.json."""
    outcome = result.outcome
    content: dict[str, Any] = {name: getattr(outcome, name) for name in ("stopped", "epochs", "steps")}
    content |= {"monitor": result.monitor, "best": outcome.best, "best_epoch": outcome.best_epoch}
    content |= {"test": dict(result.test), "num_parameters": result.num_parameters, "seconds": round(result.seconds, 3)}
    if outcome.whole_steps is not None:
        content["whole_steps"] = asdict(outcome.whole_steps)
    if result.cache is not None:
        content["cache"] = {name.removeprefix("num_"): count for name, count in asdict(result.cache).items()}
        content["cache"]["hit_rate"] = round(result.cache.hit_rate, 6)
    return json.dumps(content, indent=1) + "\n"


def summary(result: Result) -> str:
    """Return a summary of the result, a few lines for the terminal."""
    outcome = result.outcome
    endings = {"done": "trained for", "early": "stopped early after", "asked": "interrupted after"}
    epochs = f"{outcome.epochs} epoch{'s' * (outcome.epochs > 1)}" if outcome.epochs else "less than an epoch"
    lines = [
        f"{endings[outcome.stopped]} {epochs}, {outcome.steps:,} step{'s' * (outcome.steps != 1)}, "
        f"{result.seconds:.1f} s; {result.num_parameters:,} parameters"
    ]
    if outcome.best is not None and outcome.best_epoch is not None:
        lines.append(f"best {result.monitor} {outcome.best:.4f} on the validation split, in epoch {outcome.best_epoch}")
    if result.test:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in result.test.items() if "/" not in name)
        lines.append(f"test: {shown}")
    if outcome.whole_steps is not None:
        lines.append(f"whole steps: {outcome.whole_steps}")
    if result.cache is not None:
        lines.append(f"cache: {result.cache}")
    return "\n".join([*lines, f"written to {result.folder}"])


@dataclass(frozen=True)
class LoadedRun:
    """A trained run that `load_run` has read from its output folder."""

    model: nn.Module  # with the weights of the checkpoint, in evaluation mode
    store: Store  # the graph of the run, without the links that it held out
    task: Task
    run_file: RunFile  # the settings in the run's run.toml
    checkpoint: Path


def load_run(
    folder: str | Path, context: Context | None = None, *, checkpoint: str | None = None, overrides: Sequence[str] = ()
) -> LoadedRun:
    """Load a run of `hoploom train` from its output folder: the model with its best weights, the graph, the settings.

    >>> run = hoploom.load_run("run")
    >>> hoploom.infer(run.model, run.store, "predictions", inference=Inference(task=run.task))

    `checkpoint` is "best" or "last"; by default, it is the best one, or the last if the run did not validate.
    `overrides` are `section.key=value`, such as `["store=moved.store"]`. With a context, all ranks call. Without one,
    the model is on the CPU.
    """
    run_file, path = read_finished(folder, overrides, checkpoint)
    context = context or Context(RankInfo(), torch.device("cpu"), "gloo", DEADLINE)
    setup = complete_setup(run_file, open_graph(run_file, context), context)
    with torch.random.fork_rng(devices=[]):  # a model is made from the run's seed, which is not the caller's
        model = trained_model(run_file, setup, context, path).eval()
        return LoadedRun(model, setup.store, setup.task, run_file, path)


def read_finished(folder: str | Path, overrides: Sequence[str], checkpoint: str | None) -> tuple[RunFile, Path]:
    """Return a run's settings, from its output folder, and the path of `checkpoint` (None: "best", else "last")."""
    folder = Path(folder)
    path = folder / RUN_FILE
    if not path.exists():
        raise no_run(folder, f"it has no {RUN_FILE}")
    run_file = read_run_file(path, [f"output.folder={json.dumps(str(folder.absolute()))}", *overrides])
    names = [checkpoint] if checkpoint else [BEST, LAST]
    if not {*names} <= {BEST, LAST}:
        raise ConfigError(f"checkpoint is {checkpoint!r}; give {BEST!r} or {LAST!r}")
    paths = [run_file.output.folder / f"{name}.safetensors" for name in names]
    found = next(filter(Path.exists, paths), None)
    if found is None:
        raise ConfigError(f"{folder} has no {paths[0].name}; train first: hoploom train {path} --resume")
    return run_file, found


def trained_model(run_file: RunFile, setup: TrainingSetup, context: Context, checkpoint: Path) -> nn.Module:
    """Return the model of a run with the weights of a checkpoint."""
    model = make_model(run_file, setup).to(context.device)
    Checkpoint(checkpoint.parent, context).restore(checkpoint.stem, {"model": model} | learned_parts(setup.store))
    return model
