"""Training: the loop, tasks, metrics and checkpoints; and by their old home the ranks and inference."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoploom.dist.context import Context, init, unwrap
    from hoploom.dist.spawn import spawn
    from hoploom.gpu.whole_step.epoch import WholeStep
    from hoploom.inference.infer import Inference, infer
    from hoploom.train.checkpoint import Checkpoint
    from hoploom.train.evaluation import evaluate
    from hoploom.train.journal import Journal
    from hoploom.train.learner import Learner, Training
    from hoploom.train.loop import Outcome, fit
    from hoploom.train.step import StepReport
    from hoploom.train.tasks import LinkPrediction, MultiLabel, NodeClassification, NodeRegression, Task

# At first use: who only talks to other ranks need not import PyG, which takes seconds.
_HOMES = {
    "Checkpoint": "train.checkpoint",
    "Context": "dist.context",
    "Inference": "inference.infer",
    "Journal": "train.journal",
    "Learner": "train.learner",
    "LinkPrediction": "train.tasks",
    "MultiLabel": "train.tasks",
    "NodeClassification": "train.tasks",
    "NodeRegression": "train.tasks",
    "Outcome": "train.loop",
    "StepReport": "train.step",
    "Task": "train.tasks",
    "Training": "train.learner",
    "WholeStep": "gpu.whole_step.epoch",
    "evaluate": "train.evaluation",
    "fit": "train.loop",
    "infer": "inference.infer",
    "init": "dist.context",
    "spawn": "dist.spawn",
    "unwrap": "dist.context",
}

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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"hoploom.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hoploom.train' has no attribute {name!r}")
