"""One run: run.toml becomes a store, a goal, a learner; then fit, and evaluate with the best checkpoint.

There is no training in here: the pieces are public, and a script can put them together in the same way.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoploom.config.values import as_toml
from hoploom.deploy.open import CONNECT
from hoploom.deploy.open import open as open_store
from hoploom.errors import ConfigError, StoreError
from hoploom.gpu.place import place, request
from hoploom.gpu.whole_step.recordable import prepare
from hoploom.load.presample import Presampling, count_visits, no_visits, read_seeds
from hoploom.ranks.context import Context
from hoploom.store import Store
from hoploom.store.base import Part, Tier
from hoploom.store.check import Verification
from hoploom.store.format import write_whole
from hoploom.store.on_disk import OnDisk
from hoploom.store.row_cache import CacheReport, Visits, cached, report
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.evaluation import evaluate
from hoploom.train.journal import Journal
from hoploom.train.learner import Learner, Training
from hoploom.train.loop import Outcome, Validate, fit
from hoploom.train.runs.link_splits import write_links
from hoploom.train.runs.problem import (
    Goal,
    eval_loader,
    goal_of,
    model_of,
    optimizer_of,
    per_relation,
    scheduler_of,
    train_loader,
)
from hoploom.train.runs.reading import (
    NO_CACHE,
    applies,
    check_packages,
    check_whole_steps,
    check_world,
    read_run_file,
    to_toml,
    values_of,
)
from hoploom.train.runs.run_file import FIELDS, LINKS, RunFile
from hoploom.train.step import MakeStepper

RUN_FILE, RESULT_FILE, LINKS_FOLDER = "run.toml", "result.json", "links"
LAST, BEST = "last", "best"
POLL = 5.0  # seconds between two meetings of ranks while the rest of a store is verified
NUM_BATCHES = 64  # that are sampled to find the nodes whose rows are cached
CONNECT_KEYS = tuple(name for name in CONNECT if name != "made")  # where batches are made, follows from who holds what
# What may differ between a run and its continuation: how long and where, not what is learned.
MAY_CHANGE = {"store", "verify", "loader.threads", "loader.eval_fanouts", "loader.eval_batch_size"}
MAY_CHANGE |= {name for name in FIELDS if name.startswith(("cluster.", "placement.", "output.", "train."))}
MAY_CHANGE -= {"cluster.locality", "placement.dtype"}
MAY_CHANGE -= {"train.precision", "train.accumulate", "train.clip_norm", "train.monitor"}


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    outcome: Outcome
    monitor: str  # the metric that `outcome.best` is of
    test: Mapping[str, float]  # of the best checkpoint; empty without a test split, and where training was stopped
    num_parameters: int
    seconds: float
    cache: CacheReport | None = None  # of all ranks; None: nothing was cached

    @property
    def is_complete(self) -> bool:
        return self.outcome.stopped != "asked"


def run(run_file: RunFile, context: Context, *, resume: bool = False, progress: bool = True) -> Result:
    """Train and evaluate as run.toml says. All ranks call.

    >>> with hoploom.init() as context:
    ...     result = run(read_run_file("run.toml"), context)
    """
    began = time.perf_counter()
    check_world(run_file, context.world_size)
    check_whole_steps(run_file, context.world_size)
    check_packages(run_file)
    check_folder(run_file, resume=resume)
    with _journal(run_file, context) as journal, ExitStack() as placed:
        store = open_graph(run_file, context)
        goal = with_cache(run_file, goal_of(run_file, store), context)
        goal = with_placement(run_file, goal, context)
        for note in goal.notes if progress and context.is_main else ():
            print(f"hoploom: {note}", file=sys.stderr, flush=True)
        if goal.store.placed is not None:
            placed.enter_context(goal.store.placed)
            if progress and context.is_main:
                print(goal.store.placed, file=sys.stderr)
        learner = make_learner(run_file, goal, context)
        verified = _verifying(store, context, placed) if run_file.verify else None
        check = None if verified is None else verified.check
        outcome, test = _learn(run_file, goal, learner, context, journal, check, resume=resume, progress=progress)
        if run_file.verify:
            _verify_rest(verified, context, told=not (progress and context.is_main))
        num_parameters = sum(parameter.numel() for parameter in learner.model.parameters())
        seconds, kept = time.perf_counter() - began, cache_report(run_file, goal, context)
        folder = run_file.output.folder
        result = Result(folder, outcome, goal.task.monitor[0], test, num_parameters, seconds, kept)
        if context.is_main and result.is_complete:
            write_whole(folder / RESULT_FILE, [as_json(result).encode()])
    return result


def _verifying(store: Store, context: Context, stack: ExitStack) -> Verification | None:
    """Check the files of the parts that this rank has opened, but for those that another rank of its host checks."""
    parts = {number for number, shard in enumerate(store.shards) if isinstance(shard, Part | OnDisk)}
    homes, first = store.deployment.homes, context.rank - context.local_rank
    parts -= (
        parts if not homes and context.local_rank else {part for home in homes[first : context.rank] for part in home}
    )
    return stack.enter_context(Verification(store.path, sorted(parts))) if store.path is not None and parts else None


def _verify_rest(verified: Verification | None, context: Context, *, told: bool) -> None:
    """Wait until all hosts' files are read. All ranks call; they meet now and then, so none takes another for lost."""
    while context.max(int(verified is not None and not verified.finish(POLL))):
        if not told:
            print("hoploom: training is over; verify = true: reading the rest of the store's files", file=sys.stderr)
        told = True


def _journal(run_file: RunFile, context: Context) -> Journal:
    """The journal of a run, from before its graph is opened: it keeps the warnings about the graph and the model."""
    loggers = run_file.output.loggers if run_file.output.tensorboard else ()
    values = values_of(run_file)
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in values.items() if applies(name, values)}
    return Journal(run_file.output.folder, context, loggers=loggers, settings=settings)


def _learn(
    run_file: RunFile,
    goal: Goal,
    learner: Learner,
    context: Context,
    journal: Journal,
    check: Callable[[], None] | None,
    *,
    resume: bool,
    progress: bool,
) -> tuple[Outcome, Mapping[str, float]]:
    """Fit, and test the best model; the journal says where that failed."""
    checkpoint = Checkpoint(run_file.output.folder, context)
    if resume:
        checkpoint.restore(LAST, learner.parts())
    recorded = run_file.train.whole_steps and context.device.type == "cuda"
    if recorded or resume:  # the run before may have been the other way
        prepare(learner.optimizer, recorded=recorded)
    if context.is_main:
        write_whole(run_file.output.folder / RUN_FILE, [to_toml(run_file).encode()])
        if run_file.task.kind == LINKS and run_file.task.links is None:
            write_links(run_file.output.folder / LINKS_FOLDER, goal.store, goal.seeds, keep=resume)
        (run_file.output.folder / RESULT_FILE).unlink(missing_ok=True)  # of the run that this one continues
    validate = _validation(run_file, goal, learner, context)
    given: dict[str, Any] = {field.name: getattr(run_file.train, field.name, None) for field in fields(Training)}
    training = Training(**given | {"seed": run_file.seed, "progress": progress})
    outcome = fit(
        learner,
        training,
        context,
        validate=validate,
        checkpoint=checkpoint,
        journal=journal,
        check=check,
        stepper=_stepper(run_file),
    )
    test = {} if outcome.stopped == "asked" else _test(run_file, goal, learner, checkpoint, context)
    journal.test(test, step=outcome.steps)
    return outcome, test


def _stepper(run_file: RunFile) -> MakeStepper | None:
    if not run_file.train.whole_steps:
        return None
    from hoploom.gpu.whole_step.epoch import WholeStep  # imports Triton

    return WholeStep


def make_learner(run_file: RunFile, goal: Goal, context: Context) -> Learner:
    """Model, optimizer, schedule and this rank's loader."""
    plain = model_of(run_file, goal)
    loader = train_loader(run_file, goal, context, plain)
    own = run_file.model.factory is not None  # a user's model may leave parameters unused
    model = context.wrap(plain, find_unused_parameters=own)
    optimizer = optimizer_of(run_file, model)
    scheduler = scheduler_of(run_file, optimizer, len(loader), goal.task.monitor[1])
    return Learner(model, optimizer, goal.task, loader, scheduler)


def _validation(run_file: RunFile, goal: Goal, learner: Learner, context: Context) -> Validate | None:
    if "val" not in goal.seeds:
        return None
    loader = eval_loader(run_file, goal, context, learner.model, "val")
    return lambda: evaluate(learner.model, loader, goal.task, context, precision=run_file.train.precision)


def _test(
    run_file: RunFile, goal: Goal, learner: Learner, checkpoint: Checkpoint, context: Context
) -> Mapping[str, float]:
    if "test" not in goal.seeds:
        return {}
    if learner.progress.best is not None:
        parts: dict[str, Any] = {"model": learner.model}
        if checkpoint.restore(BEST, parts) is None:
            raise StoreError(
                f"{checkpoint.path(BEST)} is gone, so the best model cannot be tested; put it back and go on with "
                "--resume, or start anew in another output.folder"
            )
    loader = eval_loader(run_file, goal, context, learner.model, "test")
    return evaluate(learner.model, loader, goal.task, context, precision=run_file.train.precision)


# --- the graph -----------------------------------------------------------------------------------


def open_graph(run_file: RunFile, context: Context) -> Store:
    """The store of a run; its context closes it."""
    section = run_file.cluster
    options = {name: getattr(section, name) for name in CONNECT_KEYS}
    options |= {"memory": run_file.memory, "scratch": run_file.scratch}
    store = open_store(run_file.store, context=context, parts=section.parts, servers=section.servers, **options)
    if store.deployment.makes_batches and section.cache is not None:
        raise run_file.problem("cluster.cache", NO_CACHE)
    return store


def with_placement(run_file: RunFile, goal: Goal, context: Context) -> Goal:
    """The goal, with its store placed where the run's device reads it. All ranks call."""
    section = run_file.placement
    if section.topology is None and section.features is None:
        return goal
    name = "placement.features" if section.topology is None else "placement.topology"
    _check_kernels_run(run_file, name, context.device)
    try:
        device, dtype = context.device, section.dtype
        store = place(goal.store, section.topology, section.features, dtype=dtype, device=device, among=context)
    except ConfigError as error:
        raise run_file.problem(name, f"the store cannot be placed: {error}; or leave [placement] out") from error
    return replace(goal, store=store)


def _check_kernels_run(run_file: RunFile, name: str, device: torch.device) -> None:
    """Raise ConfigError on a CPU, unless kernels are interpreted there and no GPU is named."""
    names_gpu = "cuda" in f"{run_file.placement.topology} {run_file.placement.features}"
    with suppress(ConfigError):  # there is no Triton
        if device.type != "cpu" or (request.kernels_are_interpreted() and not names_gpu):
            return
    why = "its context was made so" if torch.cuda.is_available() else "there is no GPU here"
    why = 'train.device is "cpu"' if run_file.train.device == "cpu" else why
    raise run_file.problem(name, f"{name} has no effect: this run is on cpu ({why}); leave [placement] out")


def with_cache(run_file: RunFile, goal: Goal, context: Context) -> Goal:
    """The goal, with a cache of the remote rows that this rank will need most."""
    size, store = run_file.cluster.cache, goal.store
    if size is None or all(shard.tier > Tier.REMOTE for shard in store.shards):
        return goal
    return replace(goal, store=cached(store, size, _counts(run_file, goal, context)))


def _counts(run_file: RunFile, goal: Goal, context: Context) -> Visits:
    """In how many of this rank's first batches each node is, by type."""
    section, schema = run_file.loader, goal.store.schema
    is_local = run_file.cluster.locality  # seeds are those near this rank, else all ranks share them
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
    counts = no_visits(goal.store)
    for node_type, ids in _seeds(run_file, goal):
        near = _own(goal.store, node_type, ids) if is_local else ids
        seeds = near if schema.homogeneous else (node_type, near)
        visits = count_visits(goal.store, per_relation(run_file, goal), seeds, plan)
        for name, found in visits.items():
            counts[name] += found
        counts.num_batches = visits.num_batches
    return counts


def _seeds(run_file: RunFile, goal: Goal) -> Iterator[tuple[str, Tensor]]:
    """The nodes that batches are made around, by type; of links both ends."""
    schema, given = goal.store.schema, goal.seeds["train"]
    if run_file.task.kind != LINKS:
        yield read_seeds(goal.store, given)
        return
    (source, _, destination), ends = (schema.relations[0].key, given) if schema.homogeneous else given
    for node_type in dict.fromkeys((source, destination)):
        rows = [row for name, row in zip((source, destination), ends, strict=True) if name == node_type]
        yield node_type, torch.unique(torch.cat(rows))


def _own(store: Store, node_type: str, ids: Tensor) -> Tensor:
    """Those in the parts that this process maps; all, where none is."""
    index, own = store.schema.type_index[node_type], torch.zeros(ids.numel(), dtype=torch.bool)
    for part in store.parts:
        first = part.first_nodes[index]
        own |= (ids >= first) & (ids < first + part.num_nodes[index])
    return ids[own] if bool(own.any()) else ids


def cache_report(run_file: RunFile, goal: Goal, context: Context) -> CacheReport | None:
    """How the caches of all ranks did. All ranks call."""
    if run_file.cluster.cache is None:
        return None
    own = report(goal.store) or CacheReport(0, 0, 0, 0)
    found = context.sum(torch.tensor([own.num_rows, own.num_bytes, own.hits, own.misses]))
    return CacheReport(*found.tolist()) if bool(found.any()) else None


# --- the output folder ---------------------------------------------------------------------------


def check_folder(run_file: RunFile, *, resume: bool) -> None:
    """Raise ConfigError if the folder holds a run that must not be overwritten, or that this one cannot continue."""
    folder = run_file.output.folder
    if not (folder / f"{LAST}.safetensors").exists():
        return
    if not resume:
        message = f"{folder} holds a run already; continue it with --resume, or name another output.folder"
        raise run_file.problem("output.folder", message)
    if (folder / RUN_FILE).exists():
        _check_same(run_file, read_run_file(folder / RUN_FILE))


def _check_same(run_file: RunFile, before: RunFile) -> None:
    earlier = values_of(before)
    for key, value in values_of(run_file).items():
        if key not in MAY_CHANGE and value != earlier[key]:
            was, now = (as_toml(entry) if entry is not None else "left out" for entry in (earlier[key], value))
            message = f"{key} is {now}, but was {was} when the run in {run_file.output.folder} began"
            raise run_file.problem(key, f"{message}; leave it so, or start anew in another output.folder")


# --- the result ----------------------------------------------------------------------------------


def as_json(result: Result) -> str:
    """result.json: what a table of runs is made from."""
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
    """A few lines for the terminal."""
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
