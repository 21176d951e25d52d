"""The model, its optimizer, task and loader; the settings of training; and how far training has come."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hoploom.config.values import as_int, as_number
from hoploom.errors import ConfigError
from hoploom.load.loader import Loader
from hoploom.train.checkpoint import MINUTES, Stateful
from hoploom.train.tasks import Mode, Task

Precision = Literal["fp32", "bf16", "fp16"]
HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
Ending = Literal["done", "early", "asked"]
MARGIN = 0.1  # of the largest sampled batch


@dataclass(frozen=True)
class Training:
    """The settings of training.

    `accumulate`: batches of the loader per optimizer step. `patience`: training stops after this many epochs without a
    better validation. `checkpoint_minutes`: minutes between two checkpoints, by rank 0's clock; the first is saved
    after the first step. Longer if saving takes more than 1 % of this time; 0: only at the end of every epoch.
    `checkpoint_every`: steps between two checkpoints, in addition to `checkpoint_minutes`.
    `margin`: extra buffer space of `WholeStep`, as a fraction of the largest sampled batch.
    """

    epochs: int
    accumulate: int = 1
    clip_norm: float | None = None
    precision: Precision = "fp32"
    seed: int = 0
    patience: int | None = None
    checkpoint_minutes: float = MINUTES
    checkpoint_every: int | None = None
    max_steps: int | None = None
    progress: bool = True  # a bar on rank 0's stderr
    margin: float = MARGIN

    def __post_init__(self) -> None:
        as_int("epochs", self.epochs, 0, "give how many times to go over the seeds")
        as_int("accumulate", self.accumulate, 1, "give how many batches make a step, 1 or more")
        as_int("seed", self.seed, None, "give an integer")
        for name in ("patience", "checkpoint_every", "max_steps"):
            if getattr(self, name) is not None:
                as_int(name, getattr(self, name), 1, "give at least 1, or leave it out")
        if self.clip_norm is not None and as_number("clip_norm", self.clip_norm, "give a positive number") == 0:
            raise ConfigError("clip_norm is 0, no gradient would be left; give a positive number")
        as_number("checkpoint_minutes", self.checkpoint_minutes, "give minutes, or 0")
        as_number("margin", self.margin, "give a share of what batches take, e.g. 0.1")
        check_precision(self.precision)


def check_precision(precision: str) -> None:
    """Raise ConfigError for an unknown precision."""
    if precision not in ("fp32", *HALF):
        raise ConfigError(f"precision is {precision!r:.80}; give one of 'fp32', 'bf16', 'fp16'")


def mixed(precision: str, device: torch.device, **options: Any) -> AbstractContextManager[Any]:
    """Return a context manager in which the model computes in this precision."""
    half = HALF.get(precision)
    return nullcontext() if half is None else torch.autocast(device.type, half, **options)


@dataclass
class TrainingProgress:
    """The progress of training. Checkpoints keep it as the part `standing`."""

    epoch: int = 0  # epochs that are complete, their validation included
    steps: int = 0
    loss_sum: float = 0.0  # of the current epoch, over all ranks
    rows: int = 0
    best: float | None = None
    best_epoch: int | None = None
    stale: int = 0  # epochs since the best
    history: list[dict[str, float]] = field(default_factory=list)
    first_loss: float | None = None  # of the first step; checkpoints of earlier versions do not have it

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state.get(name) if name == "first_loss" else state[name])

    def ending(self, training: Training) -> Ending | None:
        """Return why there is no next step; None if there is one."""
        if training.patience is not None and self.stale >= training.patience:
            return "early"
        out_of_steps = training.max_steps is not None and self.steps >= training.max_steps
        return "done" if out_of_steps or self.epoch >= training.epochs else None

    def update_best(self, value: float, mode: Mode) -> bool:
        """Note an epoch's value of the monitored metric, and return whether it is the best so far."""
        better = self.best is None or (value > self.best if mode == "max" else value < self.best)
        if better and not math.isnan(value):
            self.best, self.best_epoch, self.stale = value, self.epoch, 0
            return True
        self.stale += 1
        return False


@dataclass
class Learner:
    """A model, its optimizer, task and loader, and how far training has come. All belong to this rank.

    >>> learner = Learner(context.wrap(model), optimizer, NodeClassification(47), loader)
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    loader: Loader
    scheduler: LRScheduler | ReduceLROnPlateau | None = None
    progress: TrainingProgress = field(default_factory=TrainingProgress, init=False)
    scaler: torch.amp.GradScaler = field(init=False)  # works for fp16 only

    def __post_init__(self) -> None:
        device = next((parameter.device.type for parameter in self.model.parameters()), "cpu")
        self.scaler = torch.amp.GradScaler(device)

    def parts(self) -> dict[str, Stateful]:
        """Return the parts that a checkpoint must save so that training continues at the very next step."""
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "loader": self.loader,
            "standing": self.progress,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def plateau(self) -> ReduceLROnPlateau | None:
        """The scheduler, if it takes a metric after each epoch instead of a call after each step."""
        return self.scheduler if isinstance(self.scheduler, ReduceLROnPlateau) else None

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])
