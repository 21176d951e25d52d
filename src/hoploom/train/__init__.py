"""Training: the ranks and what they do together, the loop, metrics, checkpoints, and inference."""

from hoploom.dist.context import Context, init, unwrap
from hoploom.dist.spawn import spawn
from hoploom.gpu.whole_step.whole_step import WholeStep
from hoploom.inference import Inference, infer
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.evaluate import evaluate
from hoploom.train.fit import Outcome, fit
from hoploom.train.journal import Journal
from hoploom.train.learner import Learner, Training
from hoploom.train.step import StepReport
from hoploom.train.tasks import LinkPrediction, MultiLabel, NodeClassification, NodeRegression, Task

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
