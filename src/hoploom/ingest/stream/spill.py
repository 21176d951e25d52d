"""Records that wait for their turn, by bucket: in memory while they fit, then in a file for each bucket.

Gives up writing and reading them once more for never holding more than one bucket.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom import ops
from hoploom.ops import KEY_BYTES

MOST_BUCKETS = 256
SPLIT_RECORDS = 1 << 20  # read at once from a bucket that is too large


class Bucket(NamedTuple):
    """All records of some consecutive keys."""

    first: int
    num_keys: int
    records: Tensor  # [n, width] uint8; keys count from `first`


class Waiting(NamedTuple):
    """Records that came together, bucket after bucket."""

    records: NDArray[np.uint8]  # [n, width]; copied by NumPy: torch would wake its threads for every piece
    begins: Sequence[int]  # [num_buckets + 1]

    def of(self, bucket: int) -> NDArray[np.uint8]:
        return self.records[self.begins[bucket] : self.begins[bucket + 1]]


class Limits(NamedTuple):
    """What a spool may hold in memory."""

    waiting_bytes: int  # of all buckets, before they go to files
    bucket_bytes: int  # of one that is given back; one that is larger is split
    step: int = 1  # keys that stay together when it is


@dataclass(frozen=True)
class SpillBudget:
    """The memory that a step may take, and the folder for what does not fit."""

    folder: Path
    bytes: int
    chunk_rows: int = 1 << 16  # nodes that are finished at once

    def spool(self, name: str, bounds: Sequence[int], width: int, step: int = 1) -> "Spool":
        """A spool in the folder: a quarter of the memory for what waits, an eighth for a bucket."""
        return Spool(self.folder / name, bounds, width, Limits(self.bytes // 4, self.bytes // 8, step))


class Spool:
    """Takes rows in any order and gives them back bucket by bucket, those of a bucket in the order they came."""

    def __init__(self, folder: Path, bounds: Sequence[int], width: int, limits: Limits) -> None:
        self._folder, self._bounds = folder, torch.tensor(bounds, dtype=torch.int64)
        self._width, self._limits = KEY_BYTES + width, limits
        self._waiting: list[Waiting] = []
        self._waiting_bytes = 0
        self._counts = torch.zeros(len(bounds) - 1, dtype=torch.int64)
        self._in_files: set[int] = set()  # buckets; a file is open only while it is read or written

    def __enter__(self) -> "Spool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, keys: Tensor, columns: Sequence[Tensor]) -> None:
        """Add rows. Columns are bytes: [n, row bytes] uint8."""
        packed = ops.pack(keys, columns, self._bounds)
        self._counts += packed.counts
        self._waiting.append(Waiting(packed.records.numpy(), [0, *packed.counts.cumsum(0).tolist()]))
        self._waiting_bytes += packed.records.numel()
        if self._waiting_bytes > self._limits.waiting_bytes:
            self._flush()

    def buckets(self) -> Iterator[Bucket]:
        """Every bucket, in the order of the keys, empty ones too. May be called again."""
        for bucket, count in enumerate(self._counts.tolist()):
            first, end = self._bounds[bucket : bucket + 2].tolist()
            if count * self._width <= self._limits.bucket_bytes or end - first <= self._limits.step:
                yield Bucket(first, end - first, self._read(bucket, count))
            else:
                yield from self._split(bucket, first, end)

    def close(self) -> None:
        """Forget the records and remove the files."""
        self._waiting.clear()
        if self._in_files:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._in_files.clear()

    def _path(self, bucket: int) -> Path:
        return self._folder / f"{bucket:03d}"

    def _flush(self) -> None:
        """Everything that waits goes to its file: few large writes instead of many small ones."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for bucket in range(self._counts.numel()):
            pieces = [waiting.of(bucket).reshape(-1).data for waiting in self._waiting]
            if any(map(len, pieces)):
                with self._path(bucket).open("ab", buffering=0) as file:
                    _write(file, pieces)
                self._in_files.add(bucket)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _read(self, bucket: int, count: int) -> Tensor:
        records = ops.empty((count, self._width), torch.uint8)
        rows, done = records.numpy(), self._from_file(bucket, 0, records)
        for waiting in self._waiting:
            piece = waiting.of(bucket)
            rows[done : done + len(piece)] = piece
            done += len(piece)
        return records

    def _from_file(self, bucket: int, first: int, out: Tensor) -> int:
        """Fill `out` with the file's records from the first on; returns how many there were."""
        if bucket not in self._in_files or not out.numel():
            return 0
        left, done = memoryview(out.numpy().reshape(-1).data), 0
        with self._path(bucket).open("rb", buffering=0) as file:
            file.seek(first * self._width)
            while done < len(left) and (count := file.readinto(left[done:])):
                done += count
        return done // self._width

    def _split(self, bucket: int, first: int, end: int) -> Iterator[Bucket]:
        """A bucket that is too large goes through a spool of its own."""
        self._flush()
        bounds = cut(first, end, self._limits.step)
        with Spool(self._path(bucket).with_suffix(".split"), bounds, self._width - KEY_BYTES, self._limits) as smaller:
            held = min(SPLIT_RECORDS, self._limits.bucket_bytes // self._width + 1)
            records = torch.empty(held, self._width, dtype=torch.uint8)
            begin = 0
            while found := self._from_file(bucket, begin, records):
                piece = records[:found]
                keys = piece[:, :KEY_BYTES].contiguous().view(torch.uint32).view(-1).to(torch.int64) + first
                smaller.add(keys, [piece[:, KEY_BYTES:].contiguous()])
                begin += found
            yield from smaller.buckets()


def cut(first: int, end: int, step: int) -> list[int]:
    """The bounds of a range's pieces, all but the last of the same whole number of steps."""
    span = -(-(end - first) // (MOST_BUCKETS * step)) * step
    return [*range(first, end, span), end]


def _write(file: FileIO, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        left = piece
        while left:
            left = left[file.write(left) :]


def row_bytes(rows: Tensor) -> int:
    return int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.element_size()


def from_bytes(raw: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Bytes [n, row bytes] as rows of a dtype and shape."""
    if not raw.numel():
        return torch.empty((raw.shape[0], *shape), dtype=dtype)
    return raw.view(-1).view(dtype).view(raw.shape[0], *shape)
