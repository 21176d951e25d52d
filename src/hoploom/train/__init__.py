"""Training: tasks, the loop, metrics, checkpoints, the journal. Re-exports init, spawn, ... of hoploom.ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # isort: off
    from hoploom.ranks.context import Context as Context, init as init, unwrap as unwrap
    from hoploom.ranks.spawn import spawn as spawn
    from hoploom.train.checkpoint import Checkpoint as Checkpoint
    from hoploom.train.journal import Journal as Journal, Logger as Logger
    from hoploom.train.link_prediction import LinkPrediction as LinkPrediction
    from hoploom.train.loop import Outcome as Outcome, evaluate as evaluate, fit as fit
    from hoploom.train.step import (
        Learner as Learner,
        SideTask as SideTask,
        StepReport as StepReport,
        Training as Training,
    )
    from hoploom.train.tasks import MultiLabel as MultiLabel, NodeClassification as NodeClassification
    from hoploom.train.tasks import NodeRegression as NodeRegression, SeveralTasks as SeveralTasks, Task as Task
    # isort: on

# Imported at first use: a program that only talks to other ranks need not import PyG, which takes seconds.
_NAMES = {
    "ranks.context": "Context init unwrap",
    "ranks.spawn": "spawn",
    "train.checkpoint": "Checkpoint",
    "train.journal": "Journal Logger",
    "train.link_prediction": "LinkPrediction",
    "train.loop": "Outcome evaluate fit",
    "train.step": "Learner SideTask StepReport Training",
    "train.tasks": "MultiLabel NodeClassification NodeRegression SeveralTasks Task",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)
__dir__ = __all__.copy


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"hoploom.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hoploom.train' has no attribute {name!r}")
