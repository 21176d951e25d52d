"""A file in scratch space: it has no name, so nothing is left behind, whatever ends the process."""

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom.config.values import as_bytes
from hoploom.errors import StoreError
from hoploom.ops import DiskFile

BLOCK = 4096  # writes past the page cache begin and end at multiples of it
SHARE = 0.5  # of what is free in scratch space
EVERY = 64  # of so many ids one tells where the pieces are cut, or of fewer where there are few

Ids = NDArray[np.int64] | NDArray[np.int32]


class RoomInFile(NamedTuple):
    """Memory for rows that will stand in a file one after the other."""

    first_row: int  # of the file
    rows: Tensor  # [num_rows, row_bytes] uint8
    blocks: mmap.mmap  # begins at a block, as writes past the page cache must


class ScratchFile:
    """A file without a name that is written past the page cache where its file system allows that."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // BLOCK) * BLOCK
        self.end = 0  # of what is written
        descriptor = -1
        try:
            descriptor = _open_without_name(folder)
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            path = f"/proc/self/fd/{descriptor}"
            self.opened = DiskFile(path)
            self._descriptor = os.open(path, os.O_WRONLY | (os.O_DIRECT if self.opened.is_direct else 0))
        except OSError as error:
            way_out = f"it needs {as_bytes(self.num_bytes)} at a time; give scratch another folder, or leave it out"
            raise StoreError(f"scratch space {folder} cannot be used: {error.strerror}; {way_out}") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def __enter__(self) -> "ScratchFile":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def room_for(self, num_rows: int, row_bytes: int) -> RoomInFile:
        """For the next rows, of a table that begins where the file does."""
        first_row = -(-self.end // row_bytes)
        lead = first_row * row_bytes - self.end
        blocks = mmap.mmap(-1, max(1, -(-(lead + num_rows * row_bytes) // BLOCK)) * BLOCK)
        flat = torch.frombuffer(blocks, dtype=torch.uint8)[lead : lead + num_rows * row_bytes]
        return RoomInFile(first_row, flat.view(num_rows, row_bytes), blocks)

    def append(self, room: RoomInFile) -> None:
        blocks = memoryview(room.blocks)
        try:
            while blocks:
                written = os.pwrite(self._descriptor, blocks, self.end)
                self.end += written
                blocks = blocks[written:]
        except OSError as error:
            raise StoreError(f"scratch space cannot be written: {error.strerror}; check its disk") from error


def cut(ids: Sequence[Ids], num_rows: int) -> NDArray[np.int64]:
    """Where lists of ascending ids are cut into pieces of about so many ids, all at the same ids: [pieces + 1, lists],
    places in each list."""
    every = min(EVERY, max(1, num_rows // max(1, len(ids))))
    some = np.sort(np.concatenate([one[::every] for one in ids] or [np.empty(0, dtype=np.int64)]))
    cuts = np.unique(some[:: max(1, num_rows // every)][1:])
    begins = np.zeros((len(cuts) + 2, len(ids)), dtype=np.int64)
    for place, one in enumerate(ids):
        begins[1:-1, place] = np.searchsorted(one, cuts)
        begins[-1, place] = len(one)
    return begins


def _open_without_name(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, path = tempfile.mkstemp(prefix="hoploom-", dir=folder)  # a file system that knows only names
    os.unlink(path)
    return descriptor
