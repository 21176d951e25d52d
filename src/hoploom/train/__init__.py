"""Training: tasks, the training loop, metrics, checkpoints, the journal; also names of hoploom.ranks."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from hoploom.errors import ConfigError

if TYPE_CHECKING:
    from hoploom.ranks.context import Context, init, unwrap
    from hoploom.ranks.spawn import spawn
    from hoploom.train.checkpoint import Checkpoint
    from hoploom.train.journal import Journal, Logger
    from hoploom.train.loop import Outcome, evaluate, fit
    from hoploom.train.step import Learner, StepReport, Training
    from hoploom.train.tasks import LinkPrediction, MultiLabel, NodeClassification, NodeRegression, Task

# Imported at first use: a program that only talks to other ranks need not import PyG, which takes seconds.
_HOMES = {
    "ranks.context": ("Context", "init", "unwrap"),
    "ranks.spawn": ("spawn",),
    "train.journal": ("Journal", "Logger"),
    "train.checkpoint": ("Checkpoint",),
    "train.loop": ("Outcome", "evaluate", "fit"),
    "train.step": ("Learner", "StepReport", "Training"),
    "train.tasks": ("LinkPrediction", "MultiLabel", "NodeClassification", "NodeRegression", "Task"),
}

__all__ = [
    "Checkpoint",
    "Context",
    "Journal",
    "Learner",
    "LinkPrediction",
    "Logger",
    "MultiLabel",
    "NodeClassification",
    "NodeRegression",
    "Outcome",
    "StepReport",
    "Task",
    "Training",
    "evaluate",
    "fit",
    "init",
    "spawn",
    "unwrap",
]
__dir__ = __all__.copy


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"hoploom.{home}"), name)
    raise AttributeError(f"module 'hoploom.train' has no attribute {name!r}")


class _NotCallable(ModuleType):
    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            "hoploom.train is a package and cannot be called; hoploom.fit trains a model of yours, and "
            "`hoploom train run.toml` in a shell trains from a file"
        )


sys.modules[__name__].__class__ = _NotCallable
