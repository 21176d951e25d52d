"""Memory for learned rows: of this process, or mapped by all ranks of this host from a file.

The file has no name once all ranks have mapped it, so nothing is left behind by a process that is killed.
"""

import errno
import math
import mmap
import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError, StoreError
from hoploom.ranks.context import Context, all_or_none

SHARED = Path("/dev/shm")


def shared_zeros(
    shape: tuple[int, int], dtype: torch.dtype, context: Context, held: Mapping[int, range], folder: Path | None = None
) -> Tensor:
    """Return zeros that all ranks of this host share, in a file in `folder` (default: in memory). All ranks call.

    `held` has the rows of each rank of this host. No memory is set aside for other rows, and no rank may touch them.
    """
    size, owner = math.prod(shape) * dtype.itemsize, min(held)
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    if folder is None and context.world_size == 1:
        return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)  # unlike torch.zeros, touches no page
    name = context.broadcast(torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8))
    path = (folder or SHARED) / f"hoploom-rows-{bytes(name.tolist()).hex()}-{owner}"
    try:
        with all_or_none(context, f"reserving {path}"):
            if context.rank == owner:
                _reserve(path, size, held.values(), shape[1] * dtype.itemsize)
        with all_or_none(context, f"mapping {path}"):
            with path.open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), size)
            if folder is not None:
                mapped.madvise(mmap.MADV_RANDOM)  # read a page that is touched, and not its neighbours
            return torch.frombuffer(mapped, dtype=dtype).view(shape)
    finally:
        if context.rank == owner:
            path.unlink(missing_ok=True)


def _reserve(path: Path, size: int, held: Collection[range], row_bytes: int) -> None:
    """Create a file of zeros; the file system sets the `held` rows aside: a full disk would be a bus error later."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(descriptor, size)
            for rows in filter(None, held):
                os.posix_fallocate(descriptor, rows.start * row_bytes, len(rows) * row_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise StoreError(f"{path} cannot be written: {error.strerror}; give another folder") from error
        way_out = "give folder= on another disk"
        if path.parent == SHARED:
            way_out = f"enlarge it (docker run --shm-size=...), or {way_out}"
        taken = f"learned rows take {as_bytes(sum(map(len, held)) * row_bytes)}"
        raise ConfigError(f"{taken}, more than is free in {path.parent}; {way_out}") from error
