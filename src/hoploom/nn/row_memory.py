"""Memory for learned rows: of this process, or mapped by all ranks of this host from a file.

The file has no name once all ranks have mapped it, so nothing is left behind by a process that is killed.
"""

import errno
import mmap
import os
import secrets
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError, StoreError
from hoploom.ranks.context import Context, all_or_none

SHARED = Path("/dev/shm")


def shared_zeros(
    shape: tuple[int, int], context: Context, ranges: Mapping[int, range], folder: Path | None = None
) -> tuple[Tensor, int]:
    """Return bytes that all ranks of this host share, zeros at first, and the file in `folder` that they are in.

    The file is a descriptor that is closed with the tensor, and -1 if they are in memory, as without `folder`. `ranges`
    has the rows of each rank of this host. No memory is set aside for others, and no rank may touch them. All ranks
    call.
    """
    size, owner, descriptor = shape[0] * shape[1], min(ranges), -1
    if size == 0:
        return torch.empty(shape, dtype=torch.uint8), descriptor
    if folder is None and context.world_size == 1:
        return torch.from_numpy(np.zeros(shape, np.uint8)), descriptor  # unlike torch.zeros, touches no page
    name = context.broadcast(torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8))
    path = (folder or SHARED) / f"hoploom-rows-{bytes(name.tolist()).hex()}-{owner}"
    try:
        with all_or_none(context, f"reserving {path}"):
            if context.rank == owner:
                _reserve(path, size, ranges.values(), shape[1])
        with all_or_none(context, f"mapping {path}"):
            with path.open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), size)
                if folder is not None:
                    descriptor = os.dup(file.fileno())
                    weakref.finalize(mapped, os.close, descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # read a page that is asked for, alone
            return torch.frombuffer(mapped, dtype=torch.uint8).view(shape), descriptor
    finally:
        if context.rank == owner:
            with suppress(OSError):  # of a path that could not be made
                path.unlink()


def _reserve(path: Path, size: int, ranges: Collection[range], row_bytes: int) -> None:
    """Create a file of zeros; the file system sets rows of `ranges` aside: a full disk would be a bus error later."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(descriptor, size)
            for rows in filter(None, ranges):
                os.posix_fallocate(descriptor, rows.start * row_bytes, len(rows) * row_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise StoreError(f"{path} cannot be written: {error.strerror}; give another folder") from error
        way_out = "give folder= on another disk"
        if path.parent == SHARED:
            way_out = f"enlarge it (docker run --shm-size=...), or {way_out}"
        taken = f"learned rows take {as_bytes(sum(map(len, ranges)) * row_bytes)}"
        raise ConfigError(f"{taken}, more than is free in {path.parent}; {way_out}") from error
