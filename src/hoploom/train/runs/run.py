"""One run: run.toml becomes a store, a goal, a learner; then fit, and evaluate with the best checkpoint.

There is no training in here: the pieces are public, and a script can put them together in the same way.
"""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hoploom.config.toml import as_toml
from hoploom.errors import StoreError
from hoploom.gpu.whole_step.recordable import prepare
from hoploom.ranks.context import Context
from hoploom.store.format import write_whole
from hoploom.store.row_cache import CacheReport
from hoploom.train.evaluation import evaluate
from hoploom.train.journal import Journal
from hoploom.train.learner import Checkpoint, Learner, Training
from hoploom.train.loop import Outcome, Validate, fit
from hoploom.train.runs.factories import eval_loader, model_of, optimizer_of, scheduler_of, train_loader
from hoploom.train.runs.open_graph import as_plain, cache_report, open_graph, with_cache, with_placement
from hoploom.train.runs.problem import Goal, goal_of
from hoploom.train.runs.read_run_file import check_whole_steps, check_world, read_recipe
from hoploom.train.runs.run_file import FIELDS, RunFile, to_toml, values_of

RUN_FILE, RESULT_FILE = "run.toml", "result.json"
LAST, BEST = "last", "best"
# What may differ between a run and its continuation: how long and where, not what is learned.
MAY_CHANGE = {
    *(
        "store",
        "loader.threads",
        "loader.eval_fanouts",
        "loader.eval_batch_size",
        "output.folder",
        "output.tensorboard",
    ),
    "placement.topology",
    "placement.features",
    *(name for name in FIELDS if name.startswith("cluster.") and name != "cluster.locality"),
    *("train.epochs", "train.max_steps", "train.patience", "train.processes", "train.device", "train.checkpoint_every"),
    *("train.whole_steps", "train.margin"),
}


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
    ...     result = run(read_recipe("run.toml"), context)
    """
    began = time.perf_counter()
    check_world(run_file, context.world_size)
    check_whole_steps(run_file, context.world_size)
    check_folder(run_file, resume=resume)
    goal = with_cache(run_file, goal_of(run_file, open_graph(run_file, context)), context)
    goal = with_placement(run_file, goal, context)
    if goal.store.placed is not None and progress and context.is_main:
        print(goal.store.placed, file=sys.stderr)
    with goal.store.placed or nullcontext():
        outcome, test, num_parameters = _learn(run_file, goal, context, resume=resume, progress=progress)
    seconds = time.perf_counter() - began
    kept = cache_report(run_file, goal, context)
    result = Result(run_file.output.folder, outcome, goal.task.monitor[0], test, num_parameters, seconds, kept)
    if context.is_main and result.is_complete:
        write_whole(run_file.output.folder / RESULT_FILE, [as_json(result).encode()])
    return result


def _learn(
    run_file: RunFile, goal: Goal, context: Context, *, resume: bool, progress: bool
) -> tuple[Outcome, Mapping[str, float], int]:
    """Fit, then test: the outcome, the test's metrics, the number of parameters."""
    learner = make_learner(run_file, goal, context)
    checkpoint = Checkpoint(run_file.output.folder, context)
    if resume:
        checkpoint.restore(LAST, learner.parts())
    recorded = run_file.train.whole_steps and context.device.type == "cuda"
    if recorded or resume:  # the run before may have been the other way
        prepare(learner.optimizer, recorded=recorded)
    if context.is_main:
        write_whole(run_file.output.folder / RUN_FILE, [to_toml(run_file).encode()])
        (run_file.output.folder / RESULT_FILE).unlink(missing_ok=True)  # of the run that this one continues
    with Journal(run_file.output.folder, context, tensorboard=run_file.output.tensorboard) as journal:
        validate = _validation(run_file, goal, learner, context)
        training = _training(run_file, progress=progress)
        outcome = fit(learner, training, context, validate=validate, checkpoint=checkpoint, journal=journal)
    test = {} if outcome.stopped == "asked" else _test(run_file, goal, learner, checkpoint, context)
    return outcome, test, sum(parameter.numel() for parameter in learner.model.parameters())


def make_learner(run_file: RunFile, goal: Goal, context: Context) -> Learner:
    """Model, optimizer, schedule and this rank's loader."""
    plain = model_of(run_file, goal)
    loader = train_loader(run_file, goal, context, plain)
    own = run_file.model.factory is not None  # a user's model may leave parameters unused
    model = context.wrap(plain, find_unused_parameters=own)
    optimizer = optimizer_of(run_file, model)
    scheduler = scheduler_of(run_file, optimizer, len(loader), goal.task.monitor[1])
    return Learner(model, optimizer, goal.task, loader, scheduler)


def _training(run_file: RunFile, *, progress: bool) -> Training:
    section = run_file.train
    return Training(
        epochs=section.epochs,
        accumulate=section.accumulate,
        clip_norm=section.clip_norm,
        precision=section.precision,  # type: ignore[arg-type]
        seed=run_file.seed,
        patience=section.patience,
        checkpoint_every=section.checkpoint_every,
        max_steps=section.max_steps,
        progress=progress,
        whole_steps=section.whole_steps,
        margin=section.margin,
    )


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
    if learner.standing.best is not None:
        parts: dict[str, Any] = {"model": learner.model}
        if checkpoint.restore(BEST, parts) is None:
            raise StoreError(
                f"{checkpoint.path(BEST)} is gone, so the best model cannot be tested; put it back and go on with "
                "--resume, or start anew in another output.folder"
            )
    loader = eval_loader(run_file, goal, context, learner.model, "test")
    return evaluate(learner.model, loader, goal.task, context, precision=run_file.train.precision)


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
        _check_same(run_file, read_recipe(folder / RUN_FILE))


def _check_same(run_file: RunFile, before: RunFile) -> None:
    earlier = values_of(before)
    for key, value in values_of(run_file).items():
        if key not in MAY_CHANGE and value != earlier[key]:
            was, now = (as_toml(entry) if entry is not None else "left out" for entry in (earlier[key], value))
            message = f"{key} is {now}, but was {was} when the run in {run_file.output.folder} began"
            raise run_file.problem(key, f"{message}; leave it so, or start anew in another output.folder")


# --- what is told --------------------------------------------------------------------------------


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
    if result.cache is not None:
        content["cache"] = as_plain(result.cache)
    return json.dumps(content, indent=1) + "\n"


def summary(result: Result) -> str:
    """A few lines for the terminal."""
    outcome = result.outcome
    endings = {"done": "trained", "early": "stopped early", "asked": "interrupted"}
    lines = [
        f"{endings[outcome.stopped]} after {outcome.epochs} epochs, {outcome.steps:,} steps, "
        f"{result.seconds:.1f} s; {result.num_parameters:,} parameters"
    ]
    if outcome.best is not None and outcome.best_epoch is not None:
        lines.append(
            f"best {result.monitor} {outcome.best:.4f} on the validation split, in epoch {outcome.best_epoch + 1}"
        )
    if result.test:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in result.test.items() if "/" not in name)
        lines.append(f"test: {shown}")
    if outcome.whole_steps is not None:
        lines.append(f"whole steps: {outcome.whole_steps}")
    if result.cache is not None:
        lines.append(f"cache: {result.cache}")
    return "\n".join([*lines, f"written to {result.folder}"])
