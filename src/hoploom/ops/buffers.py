"""Tensors over the core's recycled buffers. The memory returns to the pool with the last reader."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hoploom import _core

MappedFile = _core.MappedFile  # a file's pages, kept without a descriptor
any_damaged = _core.any_damaged  # whether any file that is mapped can no longer be read
pool_use = _core.pool_use  # () -> (idle bytes, live bytes)
pool_trim = _core.pool_trim
keep_freed_memory = _core.keep_freed_memory  # malloc's too, from now on: pages are faulted in once
give_back_freed_memory = _core.give_back_freed_memory  # the pool's and malloc's, to the system


def require_whole(tensors: Iterable[Tensor]) -> None:
    """StoreError if a file that one of these is a map of can no longer be read; what was read from it is zeros.

    The core asks by itself, for what it reads. This is for what others read. Cheap while all files are whole.
    """
    if _core.any_damaged():
        for tensor in tensors:
            _core.require_whole(tensor.data_ptr())


def tensor_of(buffer: _core.Buffer, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor over a buffer, no copy."""
    return torch.frombuffer(buffer, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype)


def empty(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """An uninitialised tensor: recycled, or pinned (recycled by torch's own host cache)."""
    if pinned:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    size = math.prod(shape) * dtype.itemsize
    return tensor_of(_core.Buffer(size), dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
