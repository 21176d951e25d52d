"""A run of `hoploom train`: run.toml becomes a store, a task, a model, loaders and an optimizer; then fit and evaluate.

There is no training in here: the pieces are public, and a script can put them together in the same way.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hoploom.deploy.open import CONNECT
from hoploom.deploy.open import open as open_store
from hoploom.errors import ConfigError, StoreError
from hoploom.gpu.placement import kernels_are_interpreted, place
from hoploom.gpu.recordable import prepare_optimizer
from hoploom.load.presample import Presampling, count_visits, no_visits, read_seeds
from hoploom.ranks.context import DEADLINE, Context
from hoploom.ranks.environment import RankInfo
from hoploom.store import Store
from hoploom.store.base import Tier
from hoploom.store.format import write_whole
from hoploom.store.row_cache import CacheReport, Visits, cached, report
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.evaluation import evaluate
from hoploom.train.journal import Journal
from hoploom.train.learner import Learner, Training
from hoploom.train.loop import Outcome, fit
from hoploom.train.records import no_run
from hoploom.train.runs.link_splits import write_links
from hoploom.train.runs.run_file import LINKS, RunFile
from hoploom.train.runs.run_toml import (
    BEST,
    LAST,
    NO_CACHE,
    RUN_FILE,
    applies,
    check_run,
    read_run_file,
    to_toml,
    values_of,
)
from hoploom.train.runs.setup import (
    TrainingSetup,
    eval_loader,
    make_model,
    make_optimizer,
    make_scheduler,
    per_relation,
    train_loader,
    training_setup,
)
from hoploom.train.step import MakeStepper
from hoploom.train.tasks import Task

RESULT_FILE, LINKS_FOLDER = "result.json", "links"
NUM_BATCHES = 64  # that are sampled to find the nodes whose rows are cached
CONNECT_KEYS = tuple(name for name in CONNECT if name != "made")  # where batches are made, depends on the stores


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


def run(run_file: RunFile, context: Context, *, resume: bool = False, progress: bool = True) -> Result:
    """Check a run, train and evaluate as run.toml describes. All ranks call.

    >>> with hoploom.init() as context:
    ...     result = run(read_run_file("run.toml"), context)
    """
    check_run(run_file, context.world_size, resume=resume)
    return run_checked(run_file, context, resume=resume, progress=progress)


def run_checked(run_file: RunFile, context: Context, *, resume: bool = False, progress: bool = True) -> Result:
    """Train and evaluate, after `check_run`. All ranks call."""
    began, shown = time.perf_counter(), progress and context.is_main
    with _journal(run_file, context) as journal, ExitStack() as closing:
        store = open_graph(run_file, context)
        setup = training_setup(run_file, store)
        setup = with_placement(run_file, with_cache(run_file, setup, context), context)
        lines = [f"hoploom: {note}" for note in setup.notes]
        if (placed := setup.store.placed) is not None:
            closing.enter_context(placed)
            lines.append(str(placed))
        for line in lines if shown else ():
            print(line, file=sys.stderr, flush=True)
        own = run_file.model.factory is not None  # a user's model may leave parameters unused
        model = context.wrap(make_model(run_file, setup), find_unused_parameters=own)
        loader = train_loader(run_file, setup, context, model)
        optimizer = make_optimizer(run_file, model)
        scheduler = make_scheduler(run_file, optimizer, len(loader), setup.task.monitor[1])
        learner = Learner(model, optimizer, setup.task, loader, scheduler)

        checkpoint = Checkpoint(run_file.output.folder, context)
        _restore(run_file, learner, checkpoint, context, resume=resume)
        if context.is_main:
            _begin_folder(run_file, setup, resume=resume)
        outcome = fit(
            learner,
            _training(run_file, progress=progress),
            context,
            validate=_evaluation(run_file, setup, context, model, "val") if "val" in setup.seeds else None,
            checkpoint=checkpoint,
            journal=journal,
            stepper=_stepper(run_file),
        )
        test = {} if outcome.stopped == "asked" else _test(run_file, setup, learner, checkpoint, context)
        journal.test(test, step=outcome.steps)
        folder, num_parameters = run_file.output.folder, sum(p.numel() for p in model.parameters())
        seconds, cache = time.perf_counter() - began, cache_report(run_file, setup, context)
        result = Result(folder, outcome, setup.task.monitor[0], test, num_parameters, seconds, cache)
        if context.is_main and result.is_complete:
            write_whole(folder / RESULT_FILE, [result_json(result).encode()])
    return result


def _journal(run_file: RunFile, context: Context) -> Journal:
    """Return the journal of a run, made before its graph is opened: it keeps warnings about the graph and the model."""
    loggers = run_file.output.loggers if run_file.output.tensorboard else ()
    values = values_of(run_file)
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in values.items() if applies(name, values)}
    return Journal(run_file.output.folder, context, loggers=loggers, settings=settings)


def _restore(run_file: RunFile, learner: Learner, checkpoint: Checkpoint, context: Context, *, resume: bool) -> None:
    """Restore the last checkpoint of a run that continues, and prepare the optimizer to be recorded or not."""
    if resume:
        checkpoint.restore(LAST, learner.parts())
    recorded = run_file.train.whole_steps and context.device.type == "cuda"
    if recorded or resume:  # the run before may have been the other way
        prepare_optimizer(learner.optimizer, recorded=recorded)


def _begin_folder(run_file: RunFile, setup: TrainingSetup, *, resume: bool) -> None:
    """Write what a run begins with into its folder, and remove the result of the run that this one continues."""
    folder = run_file.output.folder
    write_whole(folder / RUN_FILE, [to_toml(run_file).encode()])
    if run_file.task.kind == LINKS and run_file.task.links is None:
        write_links(folder / LINKS_FOLDER, setup.store, setup.seeds, keep=resume)
    (folder / RESULT_FILE).unlink(missing_ok=True)


def _training(run_file: RunFile, *, progress: bool) -> Training:
    given: dict[str, Any] = {field.name: getattr(run_file.train, field.name, None) for field in fields(Training)}
    return Training(**given | {"seed": run_file.seed, "progress": progress})


def _stepper(run_file: RunFile) -> MakeStepper | None:
    if not run_file.train.whole_steps:
        return None
    from hoploom.gpu.whole_steps import WholeStep  # imports Triton

    return WholeStep


def _evaluation(
    run_file: RunFile, setup: TrainingSetup, context: Context, model: nn.Module, split: str
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the model on a split."""
    loader = eval_loader(run_file, setup, context, model, split)
    return lambda: evaluate(model, loader, setup.task, context, precision=run_file.train.precision)


def _test(
    run_file: RunFile, setup: TrainingSetup, learner: Learner, checkpoint: Checkpoint, context: Context
) -> Mapping[str, float]:
    """Return the metrics of the best model on the test split, if there is one."""
    if "test" not in setup.seeds:
        return {}
    if learner.progress.best is not None and checkpoint.restore(BEST, {"model": learner.model}) is None:
        raise StoreError(
            f"{checkpoint.path(BEST)} is gone, so the best model cannot be tested; put it back and go on with "
            "--resume, or start anew in another output.folder"
        )
    return _evaluation(run_file, setup, context, learner.model, "test")()


# --- the graph -----------------------------------------------------------------------------------


def open_graph(run_file: RunFile, context: Context) -> Store:
    """Return the store of a run, which the context closes."""
    section = run_file.cluster
    options = {name: getattr(section, name) for name in CONNECT_KEYS}
    options |= {"memory": run_file.memory, "scratch": run_file.scratch}
    store = open_store(run_file.store, context=context, parts=section.parts, servers=section.servers, **options)
    if store.deployment.makes_batches and section.cache is not None:
        raise run_file.problem("cluster.cache", NO_CACHE)
    return store


def with_placement(run_file: RunFile, setup: TrainingSetup, context: Context) -> TrainingSetup:
    """Return the setup with its store placed in memory that the run's device reads. All ranks call."""
    section = run_file.placement
    if section.topology is None and section.features is None:
        return setup
    name = "placement.features" if section.topology is None else "placement.topology"
    _check_kernels_run(run_file, name, context.device)
    try:
        device, dtype = context.device, section.dtype
        store = place(setup.store, section.topology, section.features, dtype=dtype, device=device, among=context)
    except ConfigError as error:
        raise run_file.problem(name, f"the store cannot be placed: {error}; or leave [placement] out") from error
    return replace(setup, store=store)


def _check_kernels_run(run_file: RunFile, name: str, device: torch.device) -> None:
    """Raise ConfigError on a CPU, unless kernels are interpreted and no GPU is named."""
    names_gpu = "cuda" in f"{run_file.placement.topology} {run_file.placement.features}"
    with suppress(ConfigError):  # there is no Triton
        if device.type != "cpu" or (kernels_are_interpreted() and not names_gpu):
            return
    why = "its context was made so" if torch.cuda.is_available() else "there is no GPU here"
    why = 'train.device is "cpu"' if run_file.train.device == "cpu" else why
    raise run_file.problem(name, f"{name} has no effect: this run is on cpu ({why}); leave [placement] out")


def with_cache(run_file: RunFile, setup: TrainingSetup, context: Context) -> TrainingSetup:
    """Return the setup with a cache of the remote rows that this rank will need most."""
    size, store = run_file.cluster.cache, setup.store
    if size is None or all(shard.tier > Tier.REMOTE for shard in store.shards):
        return setup
    return replace(setup, store=cached(store, size, _counts(run_file, setup, context)))


def _counts(run_file: RunFile, setup: TrainingSetup, context: Context) -> Visits:
    """Count in how many of this rank's first batches each node is, by type."""
    section, schema = run_file.loader, setup.store.schema
    is_local = run_file.cluster.locality  # seeds are in the parts of this rank, else all ranks share them
    plan = Presampling(
        batch_size=section.batch_size // context.world_size,
        rank=0 if is_local else context.rank,
        world_size=1 if is_local else context.world_size,
        batches=range(NUM_BATCHES),
        seed=run_file.seed,
        num_threads=section.num_threads(context.num_cores),
        options={
            "replace": section.replace,
            "labor": section.labor,
            "weight_attr": schema.weight if section.weighted else None,
        },
    )
    counts = no_visits(setup.store)
    for node_type, ids in _seeds(run_file, setup):
        own = _own(setup.store, node_type, ids) if is_local else ids
        seeds = own if schema.homogeneous else (node_type, own)
        visits = count_visits(setup.store, per_relation(run_file, setup), seeds, plan)
        for name, found in visits.items():
            counts[name] += found
        counts.num_batches = visits.num_batches
    return counts


def _seeds(run_file: RunFile, setup: TrainingSetup) -> Iterator[tuple[str, Tensor]]:
    """Yield the training nodes by type; those of links are both ends."""
    schema, given = setup.store.schema, setup.seeds["train"]
    if run_file.task.kind != LINKS:
        yield read_seeds(setup.store, given)
        return
    (source, _, destination), ends = (schema.relations[0].key, given) if schema.homogeneous else given
    for node_type in dict.fromkeys((source, destination)):
        rows = [row for name, row in zip((source, destination), ends, strict=True) if name == node_type]
        yield node_type, torch.unique(torch.cat(rows))


def _own(store: Store, node_type: str, ids: Tensor) -> Tensor:
    """Return the ids in the parts that this process maps; all of them if none is."""
    index, own = store.schema.type_index[node_type], torch.zeros(ids.numel(), dtype=torch.bool)
    for part in store.parts:
        first = part.first_nodes[index]
        own |= (ids >= first) & (ids < first + part.num_nodes[index])
    return ids[own] if bool(own.any()) else ids


def cache_report(run_file: RunFile, setup: TrainingSetup, context: Context) -> CacheReport | None:
    """Return the use of the caches, added up over all ranks. All ranks call."""
    if run_file.cluster.cache is None:
        return None
    own = report(setup.store) or CacheReport(0, 0, 0, 0)
    found = context.sum(torch.tensor([own.num_rows, own.num_bytes, own.hits, own.misses]))
    return CacheReport(*found.tolist()) if bool(found.any()) else None


# --- the result ----------------------------------------------------------------------------------


def result_json(result: Result) -> str:
    """Return the text of result.json."""
    outcome = result.outcome
    content: dict[str, Any] = {
        "stopped": outcome.stopped,
        "epochs": outcome.epochs,
        "steps": outcome.steps,
        "monitor": result.monitor,
        "best": outcome.best,
        "best_epoch": outcome.best_epoch,
        "test": dict(result.test),
        "num_parameters": result.num_parameters,
        "seconds": round(result.seconds, 3),
    }
    if outcome.whole_steps is not None:
        content["whole_steps"] = asdict(outcome.whole_steps)
    if outcome.disk is not None:
        content["disk"] = asdict(outcome.disk)
    if result.cache is not None:
        content["cache"] = {
            "rows": result.cache.num_rows,
            "bytes": result.cache.num_bytes,
            "hits": result.cache.hits,
            "misses": result.cache.misses,
            "hit_rate": round(result.cache.hit_rate, 6),
        }
    return json.dumps(content, indent=1) + "\n"


def summary(result: Result) -> str:
    """Return a few lines for the terminal."""
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
    if outcome.disk is not None:
        lines.append(f"disk: {outcome.disk}")
    if result.cache is not None:
        lines.append(f"cache: {result.cache}")
    return "\n".join([*lines, f"written to {result.folder}"])


# --- a finished run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedRun:
    """A run as `load_run` returns it."""

    model: nn.Module  # with the weights of the checkpoint, in evaluation mode
    store: Store  # the graph of the run, without the links that it held out
    task: Task
    run_file: RunFile  # the settings in the run's run.toml
    checkpoint: Path


def load_run(
    folder: str | Path,
    context: Context | None = None,
    *,
    checkpoint: str | None = None,
    overrides: Sequence[str] = (),
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
    setup = training_setup(run_file, open_graph(run_file, context))
    with torch.random.fork_rng(devices=[]):  # a model is made from the run's seed, which is not the caller's
        model = trained_model(run_file, setup, context, path).eval()
    return LoadedRun(model, setup.store, setup.task, run_file, path)


def read_finished(folder: str | Path, overrides: Sequence[str], checkpoint: str | None) -> tuple[RunFile, Path]:
    """Return the settings of a run in its output folder, and the path of its best checkpoint or of the one named."""
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
    Checkpoint(checkpoint.parent, context).restore(checkpoint.stem, {"model": model})
    return model
