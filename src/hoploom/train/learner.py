"""What learns, how far it has come, and the checkpoints that hold both.

A checkpoint is one file, written by rank 0 and read whole by every rank; nothing is sharded.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hoploom.config.values import as_int, as_number
from hoploom.errors import ConfigError, HoploomError, StoreError
from hoploom.ranks.collectives import all_or_none
from hoploom.ranks.context import Context, unwrap
from hoploom.train import tensorfile

if TYPE_CHECKING:  # who only saves checkpoints need not import PyG, which takes seconds
    from hoploom.load.loader import Loader
    from hoploom.train.tasks import Mode, Task

FORMAT = 1  # of checkpoints
Precision = Literal["fp32", "bf16", "fp16"]
HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
Ending = Literal["done", "early", "asked"]
MARGIN = 0.1  # of what sampled batches took


@dataclass(frozen=True)
class Training:
    """How long and how training goes.

    A step takes `accumulate` batches of the loader. `patience`: epochs without a better validation before it ends.
    `checkpoint_every`: steps between checkpoints within an epoch; one is taken at every epoch's end anyway.
    `whole_steps`: sampling, gathering and learning are recorded and replayed; for stores that are placed on a device.
    `margin`: how much larger than some sampled batches their buffers are, as a share.
    """

    epochs: int
    accumulate: int = 1
    clip_norm: float | None = None
    precision: Precision = "fp32"
    seed: int = 0
    patience: int | None = None
    checkpoint_every: int | None = None
    max_steps: int | None = None
    progress: bool = True  # a bar on rank 0's stderr
    whole_steps: bool = False
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
        as_number("margin", self.margin, "give a share of what batches take, e.g. 0.1")
        check_precision(self.precision)


def check_precision(precision: str) -> None:
    """Raise ConfigError for what is no precision."""
    if precision not in ("fp32", *HALF):
        raise ConfigError(f"precision is {precision!r:.80}; give one of 'fp32', 'bf16', 'fp16'")


def mixed(precision: str, device: torch.device, **options: Any) -> AbstractContextManager[Any]:
    """Within, the model computes in this precision."""
    half = HALF.get(precision)
    return nullcontext() if half is None else torch.autocast(device.type, half, **options)


@dataclass
class Standing:
    """How far training has come."""

    epoch: int = 0  # epochs that are complete, their validation included
    steps: int = 0
    loss_sum: float = 0.0  # of the epoch that is running, over all ranks
    rows: int = 0
    best: float | None = None
    best_epoch: int | None = None
    stale: int = 0  # epochs since the best
    history: list[dict[str, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])

    def is_over(self, training: Training) -> Ending | None:
        """Why there is no next step, if there is none."""
        if training.patience is not None and self.stale >= training.patience:
            return "early"
        out_of_steps = training.max_steps is not None and self.steps >= training.max_steps
        return "done" if out_of_steps or self.epoch >= training.epochs else None

    def judge(self, value: float, mode: "Mode") -> bool:
        """Whether the monitored metric of the epoch is the best so far."""
        better = self.best is None or (value > self.best if mode == "max" else value < self.best)
        better = better and not math.isnan(value)
        if better:
            self.best, self.best_epoch, self.stale = value, self.epoch, 0
        else:
            self.stale += 1
        return better


class Stateful(Protocol):
    """What can be saved: a model, an optimizer, a scheduler, a loader, ..."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass
class Learner:
    """What learns, from what, and how far it has come. Model and loader are those of this rank.

    >>> learner = Learner(context.wrap(model), optimizer, NodeClassification(47), loader)
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: "Task"
    loader: "Loader"
    scheduler: LRScheduler | ReduceLROnPlateau | None = None
    standing: Standing = field(default_factory=Standing, init=False)
    scaler: torch.amp.GradScaler = field(init=False)  # works for fp16 only

    def __post_init__(self) -> None:
        device = next((parameter.device.type for parameter in self.model.parameters()), "cpu")
        self.scaler = torch.amp.GradScaler(device)

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint must hold for training to continue at the very next step."""
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "loader": self.loader,
            "standing": self.standing,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def plateau(self) -> ReduceLROnPlateau | None:
        """The scheduler, if it wants a metric per epoch instead of a step per step."""
        return self.scheduler if isinstance(self.scheduler, ReduceLROnPlateau) else None

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


# --- checkpoints ----------------------------------------------------------------------------


class Checkpoint:
    """The checkpoints of a run, in a folder that all ranks see.

    >>> checkpoint = Checkpoint("runs/papers", context)
    >>> checkpoint.save("last", {"model": model, "optimizer": optimizer, "loader": loader}, epoch=3)
    >>> extra = checkpoint.restore("last", {"model": model, "optimizer": optimizer, "loader": loader})
    """

    def __init__(self, folder: str | Path, context: Context) -> None:
        self.folder, self._context = Path(folder), context

    def path(self, name: str) -> Path:
        """Where a checkpoint lies or would lie."""
        if name != Path(name).name or name.startswith(".") or not name:
            raise ConfigError(f"a checkpoint cannot be called {name!r}; give a plain name, e.g. 'last'")
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, parts: Mapping[str, Stateful], **extra: Any) -> None:
        """Write the parts' state and `extra`. All ranks call; the file before it stays until the new one is whole."""
        path, random = self.path(name), _random_states(self._context)
        with all_or_none(self._context, f"writing {path}"):
            if self._context.is_main:
                states = {part: dict(_unwrapped(owner).state_dict()) for part, owner in parts.items()}
                kinds = {part: _kind(owner) for part, owner in parts.items()}
                state = {"format": FORMAT, "parts": states, "kinds": kinds, "extra": extra, "random": random}
                tensorfile.write(path, state)

    def restore(self, name: str, parts: Mapping[str, Stateful]) -> dict[str, Any] | None:
        """Put the parts back and return `extra`; None where there is no such checkpoint. All ranks call.

        The state of torch's random generators comes back too, where the number of ranks is the same.
        """
        path = self.path(name)
        num_found = int(self._context.sum(float(path.exists())))
        if num_found == 0:
            return None
        if num_found < self._context.world_size:
            raise StoreError(
                f"{path} is there for {num_found} of {self._context.world_size} ranks; "
                "put the folder on a file system that all ranks share"
            )
        with all_or_none(self._context, f"reading {path}"):
            state = _checked(path, tensorfile.read(path))
            for part in parts:
                _check_part(path, state, part, _unwrapped(parts[part]))
            for part, owner in parts.items():
                _load(path, part, _unwrapped(owner), state["parts"][part])
            _set_random_states(self._context, state["random"])
        extra: dict[str, Any] = state["extra"]
        return extra


def _unwrapped(part: Any) -> Any:
    return unwrap(part) if isinstance(part, nn.Module) else part


def _kind(part: Any) -> str:
    """What must be the same to be restored; a model is compared by its parameters."""
    return "" if isinstance(part, nn.Module) else type(part).__name__


def _checked(path: Path, state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise StoreError(f"{path} is no checkpoint; give another one")
    if state["format"] > FORMAT:
        raise StoreError(f"{path} has format {state['format']}, this Hoploom reads up to {FORMAT}; update Hoploom")
    names = ("parts", "kinds", "extra", "random")
    if not all(isinstance(state.get(name), dict) for name in names):
        raise StoreError(f"{path} is incomplete; take another checkpoint")
    return state


def _check_part(path: Path, state: dict[str, Any], part: str, owner: Any) -> None:
    if part not in state["parts"]:
        raise ConfigError(f"{path} holds no {part!r}, only {sorted(state['parts'])}; leave it out, or start anew")
    kind = state["kinds"].get(part)
    if kind != _kind(owner):
        raise ConfigError(
            f"{path} holds a {kind or 'model'} as {part!r}, this run has a {type(owner).__name__}; use the same one"
        )
    if isinstance(owner, nn.Module):
        _check_model(path, owner.state_dict(), state["parts"][part])


def _check_model(path: Path, mine: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name, value in mine.items():
        if name not in saved:
            raise ConfigError(f"{path} is of another model: it has no {name!r}; build the model as it was")
        if isinstance(value, Tensor) and value.shape != saved[name].shape:
            raise ConfigError(
                f"{path} is of another model: its {name!r} has shape {tuple(saved[name].shape)}, this one "
                f"{tuple(value.shape)}; build the model as it was"
            )
    for name in saved:
        if name not in mine:
            raise ConfigError(f"{path} is of another model: this one has no {name!r}; build the model as it was")
    for name, other in zip(mine, saved, strict=True):
        if name != other:  # an optimizer's state goes by position
            raise ConfigError(
                f"{path} lists {other!r} where this model has {name!r}; build its parts in the same order"
            )


def _load(path: Path, part: str, owner: Any, state: Any) -> None:
    try:
        owner.load_state_dict(state)
    except HoploomError:
        raise
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        message = f"{path} does not fit this run's {part}: {error}; use the same settings as when it was saved"
        raise ConfigError(message) from error


def _random_states(context: Context) -> dict[str, list[Tensor]]:
    """The state of torch's generators on every rank."""
    states = {"cpu": context.gather(torch.get_rng_state())}
    if context.device.type == "cuda":
        states["cuda"] = context.gather(torch.cuda.get_rng_state(context.device))
    return states


def _set_random_states(context: Context, states: Mapping[str, list[Tensor]]) -> None:
    if len(states.get("cpu", ())) != context.world_size:
        return
    torch.set_rng_state(states["cpu"][context.rank])
    if context.device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"][context.rank], context.device)
