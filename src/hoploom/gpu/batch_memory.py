"""A side stream that makes batches on a device, and a memory pool for these batches that is reused and does not grow.

Memory blocks come from a private pool and belong to the consumer's stream, which trains: a block is free once Python
drops the last tensor over it. Before the side stream reuses blocks, it waits, on the device, for the consumer's work
enqueued so far, which includes their last use. If the side stream owned blocks (record_stream), a host that runs ahead
would allocate more and more. Sizes repeat: the i-th tensor of a batch gets the largest size that it had so far, and a
margin. The first batch reserves memory for all batches alive at once. The side stream is at most one step ahead.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import is_dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import BatchError
from hoploom.load.assemble import tensors_in
from hoploom.ops.deadline import BUSY, CLOSE_DEADLINE, DEADLINE, reached
from hoploom.system import Closing

MARGIN = 16  # tensors get a sixteenth more than the largest size so far
ALIGN = 16  # offsets of tensors in a staged block are multiples of 16 bytes


class Pool(Closing):
    """A loader's side stream and memory pool on a GPU. On the CPU, where kernels are interpreted, neither exists."""

    def __init__(self, device: torch.device, deadline: float = DEADLINE) -> None:
        self.device, self.deadline = device, deadline  # seconds, of every wait for the device
        self.is_cuda = device.type == "cuda"
        self._sizes: list[int] = []  # entry i: bytes of the i-th tensor of a batch
        self._num_begun = 0  # batches that have allocated
        self._is_reserved = False
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self.consumer: Any = None  # the stream that batches go to
        if self.is_cuda:
            with torch.cuda.device(device):
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._blocks = torch.cuda.MemPool()
                self.use_current_stream()

    @contextmanager
    def side_stream(self, *, alone: bool = True) -> Iterator[None]:
        """Make the side stream current; if `alone`, for one thread at a time, so temporary memory does not add up."""
        stream = torch.cuda.stream(self._stream) if self.is_cuda else nullcontext()
        with self._turn if alone else nullcontext(), stream:
            yield

    def close(self) -> None:
        """Wait until the side stream is idle, so that its memory may be freed; raise BatchError after a timeout."""
        is_done, seconds = True, min(self.deadline, CLOSE_DEADLINE)
        if self.is_cuda:
            with suppress(RuntimeError):  # of a kernel; reading its output raises, too
                is_done = reached(self._stream.record_event(), seconds)
        if not is_done:
            raise BatchError(
                f"{self.device} has not finished within {seconds:g} s what a loop had begun that is left; {BUSY}"
            )

    def use_current_stream(self) -> None:
        """Make this thread's current stream the consumer of later batches."""
        if self.is_cuda:
            self.consumer = torch.cuda.current_stream(self.device)

    def block_size(self, number: int, size: int) -> int:
        """Return the bytes to allocate for tensor `number` of a batch: `size`, or more if an earlier batch had more."""
        with self._lock:
            self._sizes += [0] * (number + 1 - len(self._sizes))
            if size > self._sizes[number]:
                self._sizes[number] = size + size // MARGIN
            return self._sizes[number]

    def begin(self, number: int, consumer: Any) -> deque[Tensor]:
        """Return memory for a batch's tensors from `number` on: blocks as large as earlier batches needed."""
        with self._lock:
            self._num_begun += number == 0
            sizes = self._sizes[number:]
        return self.blocks(sizes, consumer)

    def reserve(self, most: int, consumer: Any) -> None:
        """Reserve memory for `most` batches, the number alive at once. Only the first call has an effect."""
        with self._lock:
            missing = 0 if self._is_reserved else most - self._num_begun
            self._is_reserved = True
            sizes = list(self._sizes)
        self.blocks(sizes * max(0, missing), consumer)  # dropped, and kept by the private pool

    def blocks(self, sizes: Sequence[int], consumer: Any) -> deque[Tensor]:
        """Return uint8 tensors of all `sizes`, which the side stream writes and `consumer` reads.

        Ask for all sizes at once: a call costs more than an allocation.
        """
        if not self.is_cuda or not sizes:
            return deque(torch.empty(size, dtype=torch.uint8) for size in sizes)
        with self._lock:
            try:
                blocks = self._taken(sizes, consumer)
            except torch.OutOfMemoryError:  # torch frees its cache of other memory only outside of a pool
                torch.cuda.empty_cache()
                blocks = self._taken(sizes, consumer)
        self._stream.wait_event(consumer.record_event())  # behind the last use of every block
        return blocks

    def _taken(self, sizes: Sequence[int], consumer: Any) -> deque[Tensor]:
        with torch.cuda.stream(consumer), torch.cuda.use_mem_pool(self._blocks, self.device):
            return deque(torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes)

    def stage(self, value: Any) -> "StagedValue":
        """Copy the host tensors in `value` to one block, pinned so that it can be copied to a GPU asynchronously."""
        tensors = list(tensors_in(value))
        sizes = [-(-tensor.numel() * tensor.itemsize // ALIGN) * ALIGN for tensor in tensors]
        block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self.is_cuda)
        staged = StagedValue(value, block, tuple(accumulate(sizes, initial=0)))
        for tensor, target in zip(tensors, tensors_in(staged.over(block)), strict=True):
            np.copyto(_bytes(target), _bytes(tensor))  # torch would start a team of threads in every thread
        return staged

    def event(self) -> Any:
        """Record an event after the work of the side stream so far; None on the CPU."""
        return self._stream.record_event() if self.is_cuda else None

    def hand_over(self, arrived: Any, batch: Any, memory: "BatchMemory") -> Any:
        """Make the current stream wait for event `arrived`, then return the batch. Call it on the consumer's thread."""
        if self.is_cuda:
            self.use_current_stream()
            stream = self.consumer
            stream.wait_event(arrived)
            own = memory.own if stream == memory.consumer else ()  # empty if the batch was made for another stream
            for tensor in tensors_in(batch):
                if tensor.is_cuda and tensor.untyped_storage().data_ptr() not in own:
                    tensor.record_stream(stream)  # allocated by a transform, or for another stream
        return batch


class BatchMemory:
    """Allocator of one batch's tensors on the device, from a loader's pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._number = pool, 0
        self.consumer = pool.consumer
        self.own: set[int] = set()  # addresses of its blocks
        self._blocks: deque[Tensor] | None = None  # blocks not used yet; `empty` allocates them if it is None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor on the device."""
        size = math.prod(shape) * dtype.itemsize
        if self._blocks is None:
            self._blocks = self._pool.begin(self._number, self.consumer)
        held = self._pool.block_size(self._number, size)
        self._number += 1
        block = self._blocks.popleft() if self._blocks else None
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self._pool.device)
        if block is None or block.numel() < size:
            (block,) = self._pool.blocks([held], self.consumer)
        self.own.add(block.untyped_storage().data_ptr())
        return block[:size].view(dtype).view(tuple(shape))

    def drop_unused(self) -> None:
        """Give up the blocks that are not used yet. The next call of `empty` allocates them again."""
        self._blocks = None

    def reserve(self, most: int) -> None:
        """Reserve memory for `most` batches of this size. Call it when this batch is complete."""
        self.drop_unused()
        self._pool.reserve(most, self.consumer)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in this batch's memory; the tensor may be a host block from `Pool.stage`."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


class StagedValue(NamedTuple):
    """A value, and one block of host memory that holds copies of its tensors."""

    value: Any
    block: Tensor  # [bytes] uint8, pinned if the device is a GPU
    begins: tuple[int, ...]  # each tensor's offset in the block, then the block's size

    def over(self, block: Tensor) -> Any:
        """Return the value with its tensors as views of `block`, which is a copy of this object's block."""
        begins = iter(self.begins)

        def view(tensor: Tensor) -> Tensor:
            begin = next(begins)
            end = begin + tensor.numel() * tensor.itemsize
            return block[begin:end].view(tensor.dtype).view(tensor.shape)

        return map_tensors(self.value, view)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `value`, which may be nested, with every tensor in it replaced by change(tensor)."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(entry, change) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: map_tensors(entry, change) for name, entry in vars(value).items()})
    return value


def _bytes(tensor: Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return tensor.reshape(-1).view(torch.uint8).numpy()
