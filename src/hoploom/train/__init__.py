"""Training: the ranks and what they do together, the loop, metrics, checkpoints, and inference."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hoploom.dist.context import Context, init, unwrap
from hoploom.dist.spawn import spawn
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.evaluate import evaluate
from hoploom.train.fit import Outcome, fit
from hoploom.train.journal import Journal
from hoploom.train.learner import Learner, Training
from hoploom.train.step import StepReport
from hoploom.train.tasks import LinkPrediction, MultiLabel, NodeClassification, NodeRegression, Task

if TYPE_CHECKING:
    from hoploom.gpu.whole_step.whole_step import WholeStep
    from hoploom.inference.infer import Inference, infer

__all__ = [
    "Checkpoint",
    "Context",
    "Inference",
    "Journal",
    "Learner",
    "LinkPrediction",
    "MultiLabel",
    "NodeClassification",
    "NodeRegression",
    "Outcome",
    "StepReport",
    "Task",
    "Training",
    "WholeStep",
    "evaluate",
    "fit",
    "infer",
    "init",
    "spawn",
    "unwrap",
]

# Public names of packages that import this one.
_BELOW = {"Inference": "inference.infer", "WholeStep": "gpu.whole_step.whole_step", "infer": "inference.infer"}


def __getattr__(name: str) -> Any:
    if name in _BELOW:
        return getattr(import_module(f"hoploom.{_BELOW[name]}"), name)
    raise AttributeError(f"module 'hoploom.train' has no attribute {name!r}")
