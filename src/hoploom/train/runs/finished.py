"""A finished run, loaded again: what run.toml says, the graph, and the model with the weights of a checkpoint."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hoploom.errors import ConfigError
from hoploom.ranks.context import DEADLINE, Context
from hoploom.ranks.environment import RankPlace
from hoploom.store import Store
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.records import no_run
from hoploom.train.runs.problem import Goal, goal_of, model_of
from hoploom.train.runs.reading import read_run_file
from hoploom.train.runs.run import BEST, LAST, RUN_FILE, open_graph
from hoploom.train.runs.run_file import RunFile
from hoploom.train.tasks import Task


@dataclass(frozen=True)
class LoadedRun:
    """A run as `load_run` gives it."""

    model: nn.Module  # with the weights of the checkpoint, in evaluation mode
    store: Store  # the graph of the run, without the links that it held out
    task: Task
    run_file: RunFile  # what the run's run.toml says
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
    run_file, name = read_finished(folder, overrides, checkpoint)
    context = context or Context(RankPlace(), torch.device("cpu"), "gloo", DEADLINE)
    goal = goal_of(run_file, open_graph(run_file, context))
    with torch.random.fork_rng(devices=[]):  # a model is made from the run's seed, which is not the caller's
        model = trained_model(run_file, goal, context, name).eval()
    return LoadedRun(model, goal.store, goal.task, run_file, _path(run_file, name))


def read_finished(folder: str | Path, overrides: Sequence[str], checkpoint: str | None) -> tuple[RunFile, str]:
    """What a run was, and the name of the checkpoint to take."""
    folder = Path(folder)
    path = folder / RUN_FILE
    if not path.exists():
        raise no_run(folder, f"it has no {RUN_FILE}")
    run_file = read_run_file(path, [f"output.folder={json.dumps(str(folder.absolute()))}", *overrides])
    names = [checkpoint] if checkpoint else [BEST, LAST]
    if not {*names} <= {BEST, LAST}:
        raise ConfigError(f"checkpoint is {checkpoint!r}; give {BEST!r} or {LAST!r}")
    found = next((name for name in names if _path(run_file, name).exists()), None)
    if found is None:
        raise ConfigError(f"{folder} has no {names[0]}.safetensors; train first: hoploom train {path} --resume")
    return run_file, found


def trained_model(run_file: RunFile, goal: Goal, context: Context, checkpoint: str) -> nn.Module:
    """The model as it was saved."""
    model = model_of(run_file, goal).to(context.device)
    Checkpoint(run_file.output.folder, context).restore(checkpoint, {"model": model})
    return model


def _path(run_file: RunFile, checkpoint: str) -> Path:
    return run_file.output.folder / f"{checkpoint}.safetensors"
