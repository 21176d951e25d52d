"""Keep records by bucket (a range of keys): in memory while they fit, then in files; large buckets are split again."""

import shutil
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom import ops
from hoploom.errors import DataError
from hoploom.ops.spool import KEY_BYTES, pack
from hoploom.schema import DTYPES, Field
from hoploom.system import Closing

MOST_BUCKETS = 256
SPLIT_RECORDS = 1 << 20  # most records read at once from a bucket that is too large


class Bucket(NamedTuple):
    """All records whose keys are first, first + 1, ..., first + num_keys - 1."""

    first: int
    num_keys: int
    records: Tensor  # [n, width] uint8; the stored keys are relative to `first`


@dataclass(frozen=True)
class SpillBudget:
    """The memory that a step may take, and the folder for records that do not fit."""

    folder: Path
    bytes: int


class Spool(Closing):
    """Takes rows in any order, returns them by bucket, each in order of arrival.

    A bucket too large for memory is split.
    """

    def __init__(self, folder: Path, bounds: Sequence[int], width: int, memory: int) -> None:
        self._folder, self._bounds = folder, torch.tensor(bounds, dtype=torch.int64)
        self._width, self._memory = KEY_BYTES + width, memory
        self._counts = torch.zeros(len(bounds) - 1, dtype=torch.int64)
        self._waiting: list[list[NDArray[np.uint8]]] = [[] for _ in range(len(bounds) - 1)]  # [n, width] each
        self._waiting_bytes = 0
        self._in_files: set[int] = set()  # buckets; a file is open only while it is read or written

    def add(self, keys: Tensor, columns: Sequence[Tensor]) -> None:
        """Add rows with these keys. Each column has the bytes of a field: [n, row bytes] uint8."""
        packed = pack(keys, columns, self._bounds)
        self._counts += packed.counts
        records = packed.records.numpy()  # copied by NumPy: torch would wake its threads for every piece
        for waiting, piece in zip(self._waiting, np.split(records, packed.counts.cumsum(0)[:-1]), strict=True):
            if len(piece):
                waiting.append(piece)
        self._waiting_bytes += records.size
        if self._waiting_bytes > self._memory // 4:
            self._flush()

    def buckets(self) -> Iterator[Bucket]:
        """Yield all buckets in the order of their keys, including empty buckets. May be called again."""
        for bucket, count in enumerate(self._counts.tolist()):
            first, end = self._bounds[bucket : bucket + 2].tolist()
            if count * self._width <= self._memory // 8 or end - first <= 1:
                yield Bucket(first, end - first, self._read(bucket, count))
            else:
                yield from self._split(bucket, first, end)

    def close(self) -> None:
        """Remove the records and their files."""
        self._waiting = [[] for _ in self._waiting]
        if self._in_files:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._in_files.clear()

    def _path(self, bucket: int) -> Path:
        return self._folder / f"{bucket:03d}"

    def _flush(self) -> None:
        """Append all records in memory to the files of their buckets: few large writes instead of many small ones."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for bucket, waiting in enumerate(self._waiting):
            if waiting:
                with self._path(bucket).open("ab") as file:
                    file.writelines(piece.reshape(-1).data for piece in waiting)
                self._in_files.add(bucket)
                waiting.clear()
        self._waiting_bytes = 0

    def _read(self, bucket: int, count: int) -> Tensor:
        records = ops.empty((count, self._width), torch.uint8)
        rows, done = records.numpy(), self._from_file(bucket, 0, records)
        for piece in self._waiting[bucket]:
            rows[done : done + len(piece)] = piece
            done += len(piece)
        return records

    def _from_file(self, bucket: int, first: int, out: Tensor) -> int:
        """Fill `out` with the records in a bucket's file, from index `first` on; return how many there were."""
        if bucket not in self._in_files or not out.numel():
            return 0
        with self._path(bucket).open("rb") as file:
            file.seek(first * self._width)
            return file.readinto(out.numpy().reshape(-1).data) // self._width

    def _split(self, bucket: int, first: int, end: int) -> Iterator[Bucket]:
        """Yield smaller buckets in place of one that is too large for memory, through a second spool."""
        self._flush()
        bounds = bucket_bounds([first, end], MOST_BUCKETS)
        folder, width = self._path(bucket).with_suffix(".split"), self._width - KEY_BYTES
        with Spool(folder, bounds, width, self._memory) as smaller:
            held = min(SPLIT_RECORDS, self._memory // 8 // self._width + 1)
            records = torch.empty(held, self._width, dtype=torch.uint8)
            begin = 0
            while found := self._from_file(bucket, begin, records):
                piece = records[:found]
                keys = piece[:, :KEY_BYTES].contiguous().view(torch.uint32).view(-1).to(torch.int64) + first
                smaller.add(keys, [piece[:, KEY_BYTES:].contiguous()])
                begin += found
            yield from smaller.buckets()


def bucket_bounds(bounds: Sequence[int], wanted: int) -> list[int]:
    """Return the bounds of about `wanted` buckets. A bucket lies in one part."""
    span = max(-(-(bounds[-1] - bounds[0]) // wanted), 1)
    cuts = {bounds[0]}
    for begin, end in pairwise(bounds):
        cuts.update(range(begin, end, span))
        cuts.add(end)
    return sorted(cuts) if len(cuts) > 1 else [bounds[0], bounds[0]]


def by_part(bounds: Sequence[int], buckets: Iterator[Bucket]) -> Iterator[tuple[int, Iterator[Bucket]]]:
    """Yield (part number, iterator of the part's buckets) for each part, also for parts that have no buckets."""
    grouped = groupby(buckets, key=lambda bucket: min(bisect_right(bounds, bucket.first), len(bounds) - 1) - 1)
    done = 0
    for part, some in grouped:
        yield from ((empty, iter(())) for empty in range(done, part))
        yield part, some
        done = part + 1
    yield from ((empty, iter(())) for empty in range(done, len(bounds) - 1))


def checked_rows(fields: Mapping[str, Field], given: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return `given`; raise DataError unless all have `count` rows, with the dtype and shape that `fields` names."""
    for name, field in fields.items():
        values = given[name]
        if values.dtype != DTYPES[field.dtype] or tuple(values.shape) != (count, *field.shape):
            raise DataError(f"field {name!r} came as {values.dtype} {tuple(values.shape)}, not {field}")
    return {name: given[name] for name in fields}


def from_bytes(raw: Tensor, field: Field) -> Tensor:
    """Return bytes [n, row bytes] uint8 as rows of a field: [n, *field.shape]."""
    dtype, shape = DTYPES[field.dtype], (raw.shape[0], *field.shape)
    return raw.view(-1).view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
