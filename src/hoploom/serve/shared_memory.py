"""Memory that a server and a client on one host share: the server makes large tensors there, the client reads them.

A segment is an unnamed memory file, sealed so that it cannot shrink while it is read. Its descriptor is sent to the
client once, and both sides map it once. When the client holds no tensor in a segment any more, its next request says
so, and the server reuses the segment. The kernel frees everything when both sides have ended, even if they are killed.
"""

import ctypes
import fcntl
import math
import mmap
import os
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from hoploom.schema import DTYPE_NAMES
from hoploom.serve.memory_budget import MemoryBudget
from hoploom.system import Closing

SHARED_FROM = 1 << 16  # bytes of a tensor; smaller ones are sent over the socket
MAX_SEGMENTS = 64  # of one connection
STEPS = 8  # segment sizes between two powers of two, so that a segment fits the next batch too
NUMPY_DTYPES = DTYPE_NAMES | {torch.bfloat16: "int16"}

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
MAP_FAILED = ctypes.c_void_p(-1).value


def can_share() -> bool:
    """Return whether this system has sealed memory files, as Linux does."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_GET_SEALS")


class Segment:
    """A piece of shared memory that this process has mapped. Unlike Python's mmap, it needs no open file descriptor."""

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        self.number, self.descriptor, self.size = number, descriptor, size
        found = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if found == MAP_FAILED:
            raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
        self.address: int = found

    def __del__(self, unmap: Any = _LIBC.munmap) -> None:
        if hasattr(self, "address"):
            unmap(self.address, self.size)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, holder: object = None) -> Tensor:
        """Return a tensor at the beginning of the segment. The tensor keeps the segment and `holder` alive."""
        view = np.asarray(_RawMemory(self.address, math.prod(shape) * dtype.itemsize, (self, holder)))
        tensor = torch.from_numpy(view.view(NUMPY_DTYPES[dtype]).reshape(shape))
        return tensor.view(dtype) if dtype is torch.bfloat16 else tensor


class _RawMemory:
    """Memory at an address, in a form that NumPy can make an array of; keeps `holder` alive."""

    def __init__(self, address: int, size: int, holder: object) -> None:
        self._holder = holder
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class ServerSegments(Closing):
    """The server's segments for one connection. All connections of the server share one memory budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._all: dict[int, Segment] = {}  # by number
        self._free: list[Segment] = []
        self._number_at: dict[int, int] = {}  # address -> number of each segment in use
        self._taken: list[int] = []  # for the response that is being made
        self._last = 0
        self._new: list[Segment] = []  # whose descriptors were not sent yet
        self._dropped: list[int] = []  # numbers of segments that the client is to forget

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialized tensor in a segment; None if the tensor is small, or the budget is used up."""
        size = math.prod(shape) * dtype.itemsize
        segment = self._take(size) if size >= SHARED_FROM else None
        if segment is None:
            return None
        self._number_at[segment.address] = segment.number
        self._taken.append(segment.number)
        return segment.tensor(shape, dtype)

    def _take(self, size: int) -> Segment | None:
        """Return a free or new segment of `size` to 2 * `size` bytes; None if there is no memory for it."""
        fits = [segment for segment in self._free if size <= segment.size <= 2 * size]
        if fits:
            found = min(fits, key=lambda segment: segment.size)
            self._free.remove(found)
            return found
        step = max(mmap.PAGESIZE, (1 << (size - 1).bit_length()) // (2 * STEPS))
        rounded = -(-size // step) * step
        if not self._make_room(rounded):
            return None
        self._last += 1
        try:
            descriptor = os.memfd_create("hoploom", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, rounded)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
                made = Segment(self._last, descriptor, rounded)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError:  # no memory or no descriptor is left: the tensor is sent over the socket
            self._budget.give(rounded)
            return None
        self._all[made.number] = made
        self._new.append(made)
        return made

    def _make_room(self, size: int) -> bool:
        """Take `size` bytes of the budget, deleting free segments until they fit; return whether that succeeded."""
        while True:
            if len(self._all) < MAX_SEGMENTS:
                taken = self._budget.take_some(size)
                if taken == size:
                    return True
                self._budget.give(taken)
            if not self._free:
                return False
            segment = self._free.pop(0)
            self._budget.give(self._all.pop(segment.number).size)
            if segment in self._new:  # the client does not know it yet
                self._new.remove(segment)
                os.close(segment.descriptor)
            else:
                self._dropped.append(segment.number)

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of the segment that begins with this tensor; None if it is in other memory."""
        return self._number_at.get(tensor.data_ptr())

    @property
    def has_changes(self) -> bool:
        return bool(self._new or self._dropped)

    def take_changes(self) -> tuple[list[Segment], list[int]]:
        """Return the new segments, whose descriptors the caller must close, and the numbers of deleted segments."""
        changes = self._new, self._dropped
        self._new, self._dropped = [], []
        return changes

    def free(self, numbers: Iterable[int]) -> None:
        """Make segments that the client no longer needs available for other tensors."""
        in_use = {number: address for address, number in self._number_at.items()}
        for number in numbers:
            if number in in_use:
                del self._number_at[in_use.pop(number)]
                self._free.append(self._all[number])

    def keep(self, sent: set[int]) -> None:
        """End a response: free the segments that were taken for it, except those in `sent`."""
        taken, self._taken = self._taken, []
        self.free(number for number in taken if number not in sent)

    def close(self) -> None:
        for segment in self._new:
            os.close(segment.descriptor)
        for segment in self._all.values():
            self._budget.give(segment.size)
        self._all, self._free, self._number_at, self._new = {}, [], {}, []


class _Lease:
    """An object that the tensors in a segment keep alive. Its deletion adds the segment's `number` to `freed`."""

    def __init__(self, number: int, freed: list[int]) -> None:
        self._number, self._freed = number, freed

    def __del__(self) -> None:
        self._freed.append(self._number)  # without a lock: garbage collection may run this anywhere


class ClientSegments(Closing):
    """The segments that a client has mapped for one connection."""

    def __init__(self) -> None:
        self._freed: list[int] = []
        self._leases: WeakValueDictionary[int, _Lease] = WeakValueDictionary()
        self._all: dict[int, Segment] = {}

    def add(self, number: int, size: int, descriptor: int) -> None:
        """Map a segment and close its descriptor; raise ValueError if it is too short or could shrink."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size < size or size <= 0:
                raise ValueError(f"shared memory of {size} bytes that may shrink, or is shorter")
            self._all[number] = Segment(number, descriptor, size)
        finally:
            os.close(descriptor)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget segments, which the server has deleted. Tensors in them stay valid."""
        for number in numbers:
            self._all.pop(number, None)

    def tensor(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor at the beginning of a segment; raise ValueError if the segment is unknown or too short."""
        segment = self._all.get(number)
        if segment is None or math.prod(shape) * dtype.itemsize > segment.size:
            raise ValueError(f"a tensor in shared memory {number!r:.20}, which is not there, or is shorter")
        lease = self._leases.get(number) or _Lease(number, self._freed)
        self._leases[number] = lease
        return segment.tensor(shape, dtype, lease)

    def take_freed(self) -> list[int]:
        """Return the numbers of the segments that no tensor uses any more. Each is returned only once."""
        count = len(self._freed)
        taken = self._freed[:count]
        del self._freed[:count]
        return taken

    def close(self) -> None:
        self._all = {}
