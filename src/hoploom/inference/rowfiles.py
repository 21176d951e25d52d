"""Rows of a whole graph in a file: written slice by slice by all ranks, then mapped and read like memory.

Written by pwrite, not through a map: a full disk is then an error and no bus error. Opened anew to be read: that shows
what other hosts have written, on any disk that keeps to close-to-open consistency, as NFS does.
"""

import math
import os
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from hoploom.ops import MappedFile


class RowFile:
    """A tensor [count, width] in a file that every rank opens alike."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._path, self._shape, self._dtype = path, shape, dtype
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self.close()
            raise

    @property
    def _size(self) -> int:
        return self._shape[0] * self._row_bytes

    def write(self, first: int, rows: Tensor) -> None:
        """Put rows where row `first` begins."""
        assert self._descriptor is not None
        assert tuple(rows.shape[1:]) == self._shape[1:], f"rows of shape {tuple(rows.shape[1:])}, not {self._shape[1:]}"
        values = rows.detach().to(self._dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
        written, at = 0, first * self._row_bytes
        while written < len(values):
            written += os.pwrite(self._descriptor, values[written:], at + written)

    def finish(self, *, synced: bool) -> None:
        """No more rows of this rank. Synced, other hosts see them as soon as they open the file."""
        assert self._descriptor is not None
        if synced:
            os.fsync(self._descriptor)
        self.close()

    def read(self) -> Tensor:
        """The rows of all ranks, once all have finished: mapped, so pages are read when they are touched."""
        assert self._descriptor is None, "read before it was finished"
        if self._size == 0:
            return torch.empty(self._shape, dtype=self._dtype)
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return torch.frombuffer(MappedFile(descriptor, self._size), dtype=self._dtype).view(self._shape)
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Delete the file; its pages are gone when nobody reads them any more."""
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
