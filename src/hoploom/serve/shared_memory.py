"""Memory that a server and a client on one host share: large tensors are made in it, and read without a copy.

A segment is an unnamed file in memory, sealed so that it never shrinks under its reader. Its descriptor goes to the
client once, and both map it once. When the client has no tensor in a segment any more, its next request says so, and
the server uses the segment again. Nothing is left when either side is killed: the kernel frees what nobody maps.
"""

import ctypes
import fcntl
import math
import mmap
import os
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from hoploom.closing import Closing
from hoploom.schema import DTYPE_NAMES
from hoploom.serve.memory_budget import MemoryBudget

SHARED_FROM = 1 << 16  # bytes of a tensor; smaller ones go over the socket
MOST_SEGMENTS = 64  # of one connection
STEPS = 8  # sizes between two powers of two, so that a segment fits the next batch too
SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
NUMPY_DTYPES = DTYPE_NAMES | {torch.bfloat16: "int16"}


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
FAILED = ctypes.c_void_p(-1).value


def _map(descriptor: int, size: int) -> int:
    found: int = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if found == FAILED:
        raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
    return found


def is_possible() -> bool:
    """Whether this system has such memory: Linux does."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_GET_SEALS")


class Segment:
    """A piece of shared memory that this process has mapped, without a descriptor, as Python's own maps keep one."""

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        self.number, self.size = number, size
        self.address = _map(descriptor, size)

    def __del__(self, unmap: Any = _LIBC.munmap) -> None:
        if hasattr(self, "address"):
            unmap(self.address, self.size)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, holder: object = None) -> Tensor:
        """A tensor at its beginning. The tensor keeps the segment and `holder` alive."""
        view = np.asarray(_Held(self.address, math.prod(shape) * dtype.itemsize, (self, holder)))
        tensor = torch.from_numpy(view.view(NUMPY_DTYPES[dtype]).reshape(shape))
        return tensor.view(dtype) if dtype is torch.bfloat16 else tensor


class _Held:
    """Memory in the form that NumPy wraps. It keeps `holder` alive."""

    def __init__(self, address: int, size: int, holder: object) -> None:
        self._holder = holder
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


# --- the server's side ---------------------------------------------------------------------------


class Offered(NamedTuple):
    """A new segment for a client, with its descriptor."""

    number: int
    size: int
    descriptor: int


class SharedAnswers(Closing):
    """The segments of one connection. All connections of a server share one budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._all: dict[int, Segment] = {}  # by number
        self._free: list[Segment] = []
        self._at: dict[int, int] = {}  # address -> number of those that are in use
        self._taken: list[int] = []  # for the answer that is being made
        self._next = 0
        self._offers: list[Offered] = []
        self._dropped: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Memory for a tensor of an answer; None if the tensor is small, or the budget is used up."""
        size = math.prod(shape) * dtype.itemsize
        segment = self._take(size) if size >= SHARED_FROM else None
        if segment is None:
            return None
        self._at[segment.address] = segment.number
        self._taken.append(segment.number)
        return segment.tensor(shape, dtype)

    def _take(self, size: int) -> Segment | None:
        """A segment of at least this size, but not much larger."""
        fits = [segment for segment in self._free if size <= segment.size <= 2 * size]
        if fits:
            found = min(fits, key=lambda segment: segment.size)
            self._free.remove(found)
            return found
        wanted = _rounded(size)
        if not self._make_room(wanted):
            return None
        self._next += 1
        try:
            descriptor, made = _made(self._next, wanted)
        except OSError:  # no memory, or no descriptor: what is not shared is sent
            self._budget.give(wanted)
            return None
        self._all[made.number] = made
        self._offers.append(Offered(made.number, wanted, descriptor))
        return made

    def _make_room(self, size: int) -> bool:
        """Drop free segments until the size fits; returns whether it does."""
        while True:
            if len(self._all) < MOST_SEGMENTS:
                taken = self._budget.take_some(size)
                if taken == size:
                    return True
                self._budget.give(taken)
            if not self._free:
                return False
            self._drop(self._free.pop(0))

    def _drop(self, segment: Segment) -> None:
        self._budget.give(self._all.pop(segment.number).size)
        offered = [one for one in self._offers if one.number == segment.number]
        for one in offered:  # the client has never heard of it
            self._offers.remove(one)
            os.close(one.descriptor)
        if not offered:
            self._dropped.append(segment.number)

    def number_of(self, tensor: Tensor) -> int | None:
        """The segment that begins with this tensor; None if it is in other memory."""
        return self._at.get(tensor.data_ptr())

    @property
    def has_news(self) -> bool:
        return bool(self._offers or self._dropped)

    def news(self) -> tuple[list[Offered], list[int]]:
        """What goes to the client with the next answer: new segments, whose descriptors the caller must close, and the
        numbers of those that were dropped."""
        offers, self._offers = self._offers, []
        dropped, self._dropped = self._dropped, []
        return offers, dropped

    def free(self, numbers: Iterable[int]) -> None:
        """The client does not need these segments any more."""
        in_use = {number: address for address, number in self._at.items()}
        for number in numbers:
            if number in in_use:
                del self._at[in_use.pop(number)]
                self._free.append(self._all[number])

    def keep(self, sent: set[int]) -> None:
        """These segments are in the answer. Others that were taken for it are free again."""
        taken, self._taken = self._taken, []
        self.free(number for number in taken if number not in sent)

    def close(self) -> None:
        for one in self._offers:
            os.close(one.descriptor)
        for segment in self._all.values():
            self._budget.give(segment.size)
        self._all, self._free, self._at, self._offers = {}, [], {}, []


def _rounded(size: int) -> int:
    """The size of a segment: one of eight between two powers of two, in whole pages."""
    step = max(mmap.PAGESIZE, (1 << (size - 1).bit_length()) // (2 * STEPS))
    return -(-size // step) * step


def _made(number: int, size: int) -> tuple[int, Segment]:
    """New memory, whose size never changes, and a descriptor of it."""
    descriptor = os.memfd_create("hoploom", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        return descriptor, Segment(number, descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def _seals() -> int:
    seals = 0
    for name in SEALS:
        seals |= getattr(fcntl, name)
    return seals


# --- the client's side ---------------------------------------------------------------------------


class _Lease:
    """All tensors of an answer in one segment keep this alive. When the last one is gone, the segment is free."""

    def __init__(self, number: int, freed: "Freed") -> None:
        self._number, self._freed = number, freed

    def __del__(self) -> None:
        self._freed.add(self._number)


class Freed:
    """Numbers of free segments, added by any thread that drops the last tensor."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def add(self, number: int) -> None:
        self._numbers.append(number)  # no lock: a collection may come here in the middle of anything

    def take(self) -> list[int]:
        count = len(self._numbers)
        taken = self._numbers[:count]
        del self._numbers[:count]
        return taken


class SharedMemory(Closing):
    """The client's side: the segments that it has mapped for one connection."""

    def __init__(self) -> None:
        self.freed = Freed()
        self._leases: WeakValueDictionary[int, _Lease] = WeakValueDictionary()
        self._all: dict[int, Segment] = {}

    def add(self, number: int, size: int, descriptor: int) -> None:
        """Map a segment; ValueError if it is too short, or could shrink. The descriptor is closed in any case."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size < size or size <= 0:
                raise ValueError(f"shared memory of {size} bytes that may shrink, or is shorter")
            self._all[number] = Segment(number, descriptor, size)
        finally:
            os.close(descriptor)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget these segments. Tensors that are still in them keep their memory."""
        for number in numbers:
            self._all.pop(number, None)

    def tensor(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor at the beginning of a segment."""
        segment = self._all.get(number)
        if segment is None or math.prod(shape) * dtype.itemsize > segment.size:
            raise ValueError(f"a tensor in shared memory {number!r:.20}, which is not there, or is shorter")
        lease = self._leases.get(number) or _Lease(number, self.freed)
        self._leases[number] = lease
        return segment.tensor(shape, dtype, lease)

    def close(self) -> None:
        self._all = {}
