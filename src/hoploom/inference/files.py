"""The files that inference writes: rows between layers, and the folder that all ranks share.

Rows are written by pwrite, not through a memory map, so that a full disk is an error and not a bus error. Files are
opened again to be read: that shows what other hosts have written, on any disk with close-to-open consistency, such as
NFS. A rank that fails makes a marker file in the folder; the other ranks check for it between two slices.
"""

import errno
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hoploom.errors import HoploomError, StoreError
from hoploom.ops import DiskError, DiskFile, FileRows, MappedFile, Reads, RowRequest
from hoploom.ranks.context import Context, all_or_none
from hoploom.store.format import sync_folder
from hoploom.system import Closing

Gather = Callable[[Sequence[Tensor], Sequence[Tensor]], None]  # (ids, outs): writes the rows of ids[i] to outs[i]
RESULT = "result"


class RowFile(Closing):
    """A file with a tensor, [count] or [count, width], that all ranks open and write to.

    With a `header`, the file is a result, which stays.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype, header: bytes = b"") -> None:
        self.path, self._shape, self._dtype, self.header = path, shape, dtype, header
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._size = shape[0] * self._row_bytes
        path.touch(0o600)  # other ranks may have made it, and written to it
        os.truncate(path, len(header) + self._size)
        self._file = path.open("r+b", buffering=0)
        self._file.write(header)  # the same bytes by all ranks

    def write(self, first: int, rows: Tensor) -> None:
        """Write `rows` to the file, from row number `first` on."""
        assert tuple(rows.shape[1:]) == self._shape[1:], f"rows of shape {tuple(rows.shape[1:])}, not {self._shape[1:]}"
        values = rows.detach().to(self._dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
        written, at = 0, len(self.header) + first * self._row_bytes
        while written < len(values):
            written += os.pwrite(self._file.fileno(), values[written:], at + written)

    def sync(self) -> None:
        """Sync the file to the disk, so that other hosts see this rank's rows when they open the file."""
        os.fsync(self._file.fileno())

    def read(self) -> Tensor:
        """Return the whole tensor, memory-mapped. Call this after all ranks have written their rows."""
        if self._size == 0:
            return torch.empty(self._shape, dtype=self._dtype)
        with self.path.open("rb") as file:
            mapped = MappedFile(file.fileno(), len(self.header) + self._size)
        return torch.frombuffer(mapped, dtype=self._dtype, offset=len(self.header)).view(self._shape)

    def gatherer(self, reads: Reads) -> Gather:
        """Return a function that reads rows past the page cache. Call this after all ranks have written their rows."""
        rows = FileRows(DiskFile(str(self.path)), len(self.header), self._shape[0])

        def gather(ids: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
            try:
                reads.rows([RowRequest(rows, i, torch.arange(len(i)), out) for i, out in zip(ids, outs, strict=True)])
            except DiskError as error:
                raise StoreError(f"rows between layers cannot be read: {error.args[2]}; check the disk") from error

        return gather

    def close(self) -> None:
        self._file.close()


class _PeerFailedError(Exception):
    """Another rank has failed, so this rank leaves the block of `together`."""


@dataclass(frozen=True)
class SharedFolder:
    """A temporary folder that all ranks share, and a scratch folder (perhaps the same) for rows between layers."""

    target: Path  # where the result goes
    path: Path
    scratch: Path
    context: Context

    def rows_of_all(self, name: str, first: int, rows: Tensor, count: int) -> Tensor:
        """Return `count` rows of all ranks; this rank gives those from number `first` on. They are in a file `name`."""
        shape = count, *rows.shape[1:]
        with self.together(f"writing {name}"), RowFile(self.scratch / f"{name}.rows", shape, rows.dtype) as file:
            file.write(first, rows)
            file.sync()
        return file.read()

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run this block on all ranks and wait until all have finished it; raise one rank's error on all of them."""
        with all_or_none(self.context, doing, stops=True):
            try:
                yield
            except _PeerFailedError:
                pass  # the rank that failed raises its error on all
            except BaseException as error:
                if self.context.world_size > 1:
                    with suppress(OSError):
                        self._note(self.context.rank).touch()
                if not isinstance(error, OSError) or isinstance(error, HoploomError):
                    raise
                if error.errno == errno.ENOSPC:
                    text = f"the disk is full writing {self.target} and nothing was kept; free some space"
                    raise StoreError(text) from error
                raise StoreError(f"cannot write {self.target}: {error}") from error

    def check_peers(self) -> None:
        """If another rank has failed, raise an error that ends this rank's block of `together`."""
        if any(self._note(rank).exists() for rank in range(self.context.world_size) if rank != self.context.rank):
            raise _PeerFailedError

    def publish(self) -> None:
        """Rename the folder RESULT to `target`, which is never half-written therefore. All ranks call."""
        with self.together(f"naming {self.target}"):
            if self.context.is_main:
                result = self.path / RESULT
                for inner in (result, *(path for path in result.rglob("*") if path.is_dir())):
                    sync_folder(inner)
                refuse_existing(self.target)  # os.rename would replace an empty directory
                os.rename(result, self.target)
                sync_folder(self.target.absolute().parent)

    def _note(self, rank: int) -> Path:
        return self.path / f"failed-{rank}"


def refuse_existing(target: Path) -> None:
    """Raise StoreError if there is a file or a folder at `target`."""
    if os.path.lexists(target):
        raise StoreError(f"{target} exists; give another path, or remove it first")


@contextmanager
def shared_folder(target: Path, scratch: Path | None, context: Context) -> Iterator[SharedFolder]:
    """Make temporary folders beside `target` and in `scratch`, if given; delete them at the end of the block."""
    token = int(context.broadcast(torch.tensor([secrets.randbits(62)])))
    path = target.absolute().with_name(f".{target.name}.partial-{token:016x}")
    folder = SharedFolder(target, path, path if scratch is None else scratch.absolute() / path.name, context)
    paths = {path, folder.scratch}
    try:
        with folder.together("making a folder"):
            for one in paths if context.is_main else ():
                one.mkdir(parents=True)
        with folder.together("opening the folder"):
            for one in paths:
                if not one.exists():
                    raise StoreError(f"{one} is not to be seen here; give a path on a disk that all hosts share")
        yield folder
    finally:
        for one in paths:
            shutil.rmtree(one, ignore_errors=True)
