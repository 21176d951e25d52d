"""Where batches are made on a device: a side stream, and memory of their own that goes round without growing.

Blocks come from a private pool and belong to the consumer's stream: a block is free as soon as Python drops the last
tensor over it. The side stream then waits, on the device, for what the consumer has enqueued until now, its last
use included. Had the side stream owned them (with record_stream), a host that runs ahead would take fresh ones instead.
The i-th tensor of every batch has the size of the largest i-th so far and a margin, so that sizes repeat; after the
first batch there is memory for the most that are alive at once. Side work never overtakes by more than a step.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import is_dataclass, replace
from itertools import accumulate
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import BatchError
from hoploom.load.assemble import tensors_in
from hoploom.ops.deadline import BUSY, CLOSE_DEADLINE, DEADLINE, reached

MARGIN = 16  # a sixteenth more than the largest so far
ALIGN = 16  # bytes, of what is staged together


class Pool:
    """One loader's stream and memory on a device. Where kernels are interpreted, on the CPU, there is neither."""

    def __init__(self, device: torch.device, deadline: float = DEADLINE) -> None:
        self.device, self.deadline = device, deadline  # seconds, of every wait for the device
        self.is_cuda = device.type == "cuda"
        self._sizes: list[int] = []  # bytes
        self._num_begun = 0  # batches that have taken memory
        self._is_settled = False
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self.consumer: Any = None  # the stream that batches go to
        if self.is_cuda:
            with torch.cuda.device(device):
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._blocks = torch.cuda.MemPool()
                self.add_consumer()

    @contextmanager
    def working(self, *, alone: bool = True) -> Iterator[None]:
        """What is enqueued here goes to the side stream.

        `alone`: one thread at a time, so that what its kernels need meanwhile does not add up by chance.
        """
        stream = torch.cuda.stream(self._stream) if self.is_cuda else nullcontext()
        with self._turn if alone else nullcontext(), stream:
            yield

    def drain(self) -> None:
        """Wait for the side stream: memory that it writes to may be given back, even unmapped, after this."""
        is_done, seconds = True, min(self.deadline, CLOSE_DEADLINE)
        if self.is_cuda:
            with suppress(RuntimeError):  # of a kernel; who reads what it wrote is told
                is_done = reached(self._stream.record_event(), seconds)
        if not is_done:
            raise BatchError(
                f"{self.device} has not finished within {seconds:g} s what a loop had begun that is left; {BUSY}"
            )

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Drain; an error that is on its way already is the one to tell."""
        is_first = error is None or isinstance(error, GeneratorExit)
        with nullcontext() if is_first else suppress(BatchError):
            self.drain()

    def add_consumer(self) -> None:
        """From now on batches go to the stream that is current here."""
        if self.is_cuda:
            self.consumer = torch.cuda.current_stream(self.device)

    def size_for(self, number: int, size: int) -> int:
        """How many bytes the tensor of this number gets."""
        with self._lock:
            self._sizes += [0] * (number + 1 - len(self._sizes))
            if size > self._sizes[number]:
                self._sizes[number] = size + size // MARGIN
            return self._sizes[number]

    def begin(self, consumer: Any) -> deque[Tensor]:
        """Memory for the tensors of one more batch, as far as there were such in the batches before."""
        with self._lock:
            self._num_begun += 1
            sizes = list(self._sizes)
        return self.blocks(sizes, consumer)

    def settle(self, most: int, consumer: Any) -> None:
        """Once, after the first batch: have memory for the most batches that are ever alive."""
        with self._lock:
            missing = 0 if self._is_settled else most - self._num_begun
            self._is_settled = True
            sizes = list(self._sizes)
        self.blocks(sizes * max(0, missing), consumer)  # dropped, and kept by the private pool

    def blocks(self, sizes: Sequence[int], consumer: Any) -> deque[Tensor]:
        """Memory of so many bytes each, [size] uint8, that the side stream may write to from now on.

        To wait, and to go to the private pool and back, takes longer than to take a block: so it is done for many.
        """
        if not self.is_cuda or not sizes:
            return deque(torch.empty(size, dtype=torch.uint8) for size in sizes)
        with self._lock:
            try:
                blocks = self._taken(sizes, consumer)
            except torch.OutOfMemoryError:  # torch gives back what it has cached for the others only outside of a pool
                torch.cuda.empty_cache()
                blocks = self._taken(sizes, consumer)
        self._stream.wait_event(consumer.record_event())  # behind the last use of every block
        return blocks

    def _taken(self, sizes: Sequence[int], consumer: Any) -> deque[Tensor]:
        with torch.cuda.stream(consumer), torch.cuda.use_mem_pool(self._blocks, self.device):
            return deque(torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes)

    def staged(self, value: Any) -> "Staged":
        """A value with all its tensors, which lie on the host, in one block that a copy need not wait for."""
        tensors = list(tensors_in(value))
        sizes = [-(-tensor.numel() * tensor.itemsize // ALIGN) * ALIGN for tensor in tensors]
        block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self.is_cuda)
        staged = Staged(value, block, tuple(accumulate(sizes, initial=0)))
        for tensor, place in zip(tensors, tensors_in(staged.over(block)), strict=True):
            np.copyto(_bytes(place), _bytes(tensor))  # by NumPy: torch would start a team of threads in every thread
        return staged

    def reading(self, sizes: Tensor) -> "Reading":
        """Begin to read numbers from the device."""
        if not self.is_cuda:
            return Reading(sizes, None, self.deadline)
        host = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
        host.copy_(sizes, non_blocking=True)
        return Reading(host, self.event(), self.deadline)

    def event(self) -> Any:
        """An event after what the side stream has to do so far; None on the CPU."""
        return self._stream.record_event() if self.is_cuda else None

    def hand_over(self, arrived: Any, batch: Any, memory: "BatchMemory") -> Any:
        """Make the consumer's stream wait for a batch; on the consumer's thread."""
        if self.is_cuda:
            self.add_consumer()
            stream = self.consumer
            stream.wait_event(arrived)
            own = memory.own if stream == memory.consumer else ()  # made while another stream was current
            for tensor in tensors_in(batch):
                if tensor.is_cuda and tensor.untyped_storage().data_ptr() not in own:
                    tensor.record_stream(stream)  # a transform's, else
        return batch


class BatchMemory:
    """What one batch is made of."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._number = pool, 0
        self.consumer = pool.consumer
        self.own: set[int] = set()  # addresses of its blocks
        self._blocks: deque[Tensor] | None = None  # taken with the first one, and not used yet

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        size = math.prod(shape) * dtype.itemsize
        if self._blocks is None:
            self._blocks = self._pool.begin(self.consumer)
        held = self._pool.size_for(self._number, size)
        self._number += 1
        block = self._blocks.popleft() if self._blocks else None
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self._pool.device)
        if block is None or block.numel() < size:
            (block,) = self._pool.blocks([held], self.consumer)
        self.own.add(block.untyped_storage().data_ptr())
        return block[:size].view(dtype).view(tuple(shape))

    def settle(self, most: int) -> None:
        """Have memory for so many batches, now that one is made."""
        self._blocks = None
        self._pool.settle(most, self.consumer)

    def copy(self, tensor: Tensor) -> Tensor:
        """The same values in this memory; from a staged block too."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


class Reading(NamedTuple):
    """Numbers on their way from the device."""

    host: Tensor
    arrived: Any
    seconds: float

    def wait(self) -> list[Any]:
        """The numbers: the one time that the host waits for the device."""
        if self.arrived is not None and not reached(self.arrived, self.seconds):
            raise TimeoutError(f"the device has not sampled within {self.seconds:g} s; {BUSY}, or raise timeout")
        return self.host.tolist()


class Staged(NamedTuple):
    """A value whose tensors also stand in one block."""

    value: Any
    block: Tensor  # [bytes] uint8, pinned where the device is a GPU
    begins: tuple[int, ...]

    def over(self, block: Tensor) -> Any:
        """The value with its tensors over this copy of the block."""
        begins = iter(self.begins)

        def placed(tensor: Tensor) -> Tensor:
            begin = next(begins)
            end = begin + tensor.numel() * tensor.itemsize
            return block[begin:end].view(tensor.dtype).view(tensor.shape)

        return changed(self.value, placed)


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with every tensor in it changed, in the order of tensors_in."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: changed(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(changed(entry, change) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: changed(entry, change) for name, entry in vars(value).items()})
    return value


def _bytes(tensor: Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return tensor.reshape(-1).view(torch.uint8).numpy()
