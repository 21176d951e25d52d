"""Checkpoints: the state of a run's parts in one file, written by rank 0, read whole by every rank.

They are apart from the learner since who only saves them need not import PyG, which takes seconds.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hoploom.errors import ConfigError, HoploomError, StoreError
from hoploom.ranks.collectives import all_or_none
from hoploom.ranks.context import Context, unwrap
from hoploom.train import tensorfile
from hoploom.train.sharding import cut_as, is_sharded, whole

FORMAT = 1
MINUTES = 5.0  # between two checkpoints
MALFORMED = (ValueError, RuntimeError, LookupError, TypeError, AttributeError)  # raised for states of wrong types
COST = 0.01  # the largest share of the time that writing them may take


class Stateful(Protocol):
    """What can be saved: a model, an optimizer, a scheduler, a loader, ..."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class Checkpoint:
    """The checkpoints of a run, in a folder that all ranks can read.

    >>> checkpoint = Checkpoint("runs/papers", context)
    >>> checkpoint.save("last", {"model": model, "optimizer": optimizer, "loader": loader}, epoch=3)
    >>> extra = checkpoint.restore("last", {"model": model, "optimizer": optimizer, "loader": loader})
    """

    def __init__(self, folder: str | Path, context: Context) -> None:
        self.folder, self._context = Path(folder), context

    def path(self, name: str) -> Path:
        """The path of the checkpoint with this name; the file need not exist."""
        if name != Path(name).name or name.startswith(".") or not name:
            raise ConfigError(f"a checkpoint cannot be called {name!r}; give a plain name, e.g. 'last'")
        return self.folder / f"{name}.safetensors"

    def save(self, name: str | tuple[str, str], parts: Mapping[str, Stateful], **extra: Any) -> None:
        """Save the state of the parts, and `extra`. All ranks call. The old file stays until the new one is ready.

        Two names: the second file is written first, and a damage to one leaves the other.
        """
        path, *second = map(self.path, (name,) if isinstance(name, str) else name)
        random = _random_states(self._context)
        with all_or_none(self._context, f"writing {path}"):
            if self._context.is_main or any(is_sharded(owner) for owner in parts.values()):
                states = {part: whole(dict(_unwrapped(owner).state_dict())) for part, owner in parts.items()}
            if self._context.is_main:
                kinds = {part: _kind(owner) for part, owner in parts.items()}
                state = {"format": FORMAT, "parts": states, "kinds": kinds, "extra": extra, "random": random}
                tensorfile.write(path, state, first=second[0] if second else None)

    def restore(self, name: str, parts: Mapping[str, Stateful]) -> dict[str, Any] | None:
        """Restore the parts and return `extra`; None if there is no such checkpoint. All ranks call.

        The state of torch's random generators is restored too, if the number of ranks is the same.
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
            try:
                for part in parts:
                    _check_part(path, state, part, _unwrapped(parts[part]))
                for part, owner in parts.items():
                    _load(path, part, _unwrapped(owner), cut_as(owner, state["parts"][part]))
                _set_random_states(self._context, state["random"])
            except HoploomError:
                raise
            except MALFORMED as error:
                raise StoreError(f"{path} holds what no checkpoint does: {error}; take another checkpoint") from error
        extra: dict[str, Any] = state["extra"]
        return extra


@dataclass(frozen=True)
class SavedAt:
    """Where training stood when it was saved; both count from 1."""

    epoch: int
    step: int


def saved_place(path: Path) -> SavedAt | None:
    """Where training stood, from the header alone; None where nothing whole is there."""
    with suppress(StoreError, *MALFORMED):
        standing = tensorfile.read_tree(path)["parts"]["standing"]
        return SavedAt(int(standing["epoch"]) + (int(standing["rows"]) > 0), int(standing["steps"]))
    return None


def last_good(path: Path | None) -> str:
    """What there is to go on from, for messages."""
    place = None if path is None else saved_place(path)
    if place is None:
        return "there is no checkpoint"
    return f"the last good checkpoint is {path}, of epoch {place.epoch}, step {place.step}"


class SaveClock:
    """When a checkpoint within an epoch is due, by this process's clock: after the first step, then every few minutes.

    Less often where writing one takes more than 1 % of that time. 0 minutes: never.
    """

    def __init__(self, minutes: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause, self._clock = 60 * minutes, clock
        self._next = -math.inf if minutes else math.inf

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within: a checkpoint is written."""
        began = self._clock()
        yield
        ended = self._clock()
        if self._pause:
            self._next = ended + max(self._pause, (ended - began) / COST)


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
    except HoploomError as error:
        raise type(error)(f"{path} does not fit this run's {part}: {error}") from error
    except MALFORMED as error:
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
