"""Batches onto a CUDA device: pinned buffers, a side stream, copies that overlap compute."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.load.assemble import Batch


class Copying(NamedTuple):
    """A batch whose copies run on the side stream until `arrived`."""

    batch: Batch
    arrived: Any  # torch.cuda.Event
    host: Batch  # keeps the pinned memory until the copies are done


class MadeThere(NamedTuple):
    """A batch that was made on the device; on the consumer's thread `receive` gives it to the consumer's stream."""

    receive: Callable[[], Any]


Sent: TypeAlias = Batch | Copying | MadeThere


def is_there(device: torch.device | None, placed: torch.device) -> bool:
    """Whether batches for `device` are to be made where a store is placed; they are where nobody says otherwise."""
    if device is None or device == placed:
        return True
    return device.type == placed.type == "cuda" and device.index is None and torch.cuda.current_device() == placed.index


class Mover:
    """Moves batches; one side stream for all of them."""

    def __init__(self, device: torch.device | str | None) -> None:
        self.device = _device(device)
        if self.device is not None and self.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device is {self.device}; batches go to the CPU or to a CUDA device")
        if self.device is not None and self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device is {self.device}, but torch sees no CUDA device; leave device out")
        self.is_cuda = self.device is not None and self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self.is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, batch: Batch | MadeThere) -> Sent:
        """Start the copies, on the thread that made the batch."""
        if self._stream is None or isinstance(batch, MadeThere):
            return batch
        with torch.cuda.stream(self._stream):
            moved = batch.to(self.device, non_blocking=True)
            return Copying(moved, self._stream.record_event(), batch)

    def receive(self, sent: Sent) -> Batch:
        """Make the consumer's stream wait for the copies, on the consumer's thread."""
        if isinstance(sent, MadeThere):
            return sent.receive()
        if not isinstance(sent, Copying):
            return sent
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(sent.arrived)
        sent.batch.apply(lambda value: _recorded(value, stream))
        for block in sent.batch.to_dict().get("blocks", ()):  # PyG's apply passes over them
            block.apply(lambda value: _recorded(value, stream))
        return sent.batch


def _device(device: Any) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {device!r:.80}; give 'cpu', 'cuda', or 'cuda:0' and so on") from error


def _recorded(value: Tensor, stream: Any) -> Tensor:
    value.record_stream(stream)
    return value
