"""Pieces become the files of a store: each task writes ranges of files, at their places in them.

A large file is written by several tasks, and a task writes several small files. Where a place takes no ranges, as an
object store does not, a file is always written by one task.
"""

import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hoploom.errors import StoreError
from hoploom.ingest.spark.pieces import COPY_BYTES, Piece
from hoploom.schema import Field
from hoploom.store import format as layout
from hoploom.store.format import FileEntry
from hoploom.store.storage_path import StoragePath
from hoploom.store.write import combine

INDPTR = "csc.indptr.npy"
TASK_BYTES = 256 << 20  # that a task writes, about
ALIGNED = 1 << 20  # ranges begin at multiples of it: two hosts that write the same page may lose what one has written
SMALL = 2 << 20  # to open and flush a file takes as long as to write so many bytes
NUMBER = 8  # bytes of an int64


class PieceSlice(NamedTuple):
    """Bytes of a piece."""

    piece: str  # its name in the staging place
    begin: int
    end: int
    first_edge: int  # added to every number of an indptr

    @property
    def bytes(self) -> int:
        return self.end - self.begin


class FileRange(NamedTuple):
    """Consecutive bytes of a file: of its head, and then of pieces."""

    name: str
    size: int  # of the whole file
    begin: int
    head: str  # one character for a byte
    slices: tuple[PieceSlice, ...]

    @property
    def bytes(self) -> int:
        return len(self.head) + sum(one.bytes for one in self.slices)


@dataclass(frozen=True)
class WholeFile:
    """A file of the store, and the pieces that it consists of, in order."""

    name: str
    field: Field
    pieces: tuple[Piece, ...]
    before: tuple[int, ...] = ()  # of an indptr: the edges of its part before each piece

    @property
    def is_indptr(self) -> bool:
        return self.name.endswith(INDPTR)

    @property
    def rows(self) -> int:
        rows = sum(piece.rows for piece in self.pieces)
        return rows - max(0, len(self.pieces) - 1) if self.is_indptr else rows  # each piece begins with a 0

    @property
    def head(self) -> bytes:
        """What comes before the pieces."""
        out = io.BytesIO()
        layout.write_npy_header(out, self.field.dtype, (max(self.rows, int(self.is_indptr)), *self.field.shape))
        return out.getvalue() + bytes(NUMBER if self.is_indptr and not self.pieces else 0)

    def skipped(self, index: int) -> int:
        """The bytes at the beginning of a piece that do not go into the file: zeros."""
        return NUMBER if self.is_indptr and index else 0

    def ranges(self, most: int | None) -> Iterator[FileRange]:
        """The file in ranges of so many bytes, or in one."""
        left = [
            PieceSlice(piece.name, self.skipped(index), piece.bytes, self.before[index] if self.is_indptr else 0)
            for index, piece in enumerate(self.pieces)
        ]
        head, size = self.head.decode("latin-1"), len(self.head) + sum(one.bytes for one in left)
        left.reverse()
        for begin in range(0, size, most or size):
            end, at, taken = min(size, begin + (most or size)), max(begin, len(head)), []
            while at < end:
                one = left.pop()
                until = min(one.end, one.begin + end - at)
                taken.append(one._replace(end=until))
                if until < one.end:
                    left.append(one._replace(begin=until))
                at += until - one.begin
            yield FileRange(self.name, size, begin, head[begin:end], tuple(one for one in taken if one.bytes))


def whole_indptr(name: str, pieces: tuple[Piece, ...], edges: list[int]) -> WholeFile:
    """An indptr; `edges` are those of its pieces."""
    return WholeFile(name, Field("int64"), pieces, tuple(accumulate(edges, initial=0))[:-1])


# --- tasks -----------------------------------------------------------------------------------------

Tasks = Sequence[Sequence[FileRange]]


def task_bytes(files: Sequence[WholeFile], cores: int) -> int:
    """What a task writes, so that every core has something to do."""
    each = sum(piece.bytes for file in files for piece in file.pieces) // cores
    return min(TASK_BYTES, -(-max(1, each) // ALIGNED) * ALIGNED)


def join_tasks(files: Sequence[WholeFile], most: int, *, in_ranges: bool) -> Tasks:
    """What each task writes: about so many bytes, of one file or of several. A multiple of 8 bytes."""
    tasks: list[list[FileRange]] = []
    room = 0
    for file in files:
        for one in file.ranges(most if in_ranges else None):
            cost = max(one.bytes, SMALL)
            if cost > room:
                tasks.append([])
                room = most
            tasks[-1].append(one)
            room -= cost
    return tasks


def write_plan(staging: StoragePath, name: str, tasks: Tasks) -> None:
    """Write what each task does, where a task finds its own without reading the others'."""
    lines = [json.dumps(task).encode() for task in tasks]
    ends = np.cumsum([NUMBER * (len(lines) + 1), *map(len, lines)], dtype=np.int64)
    with staging.create(name) as file:
        file.write(ends.tobytes())
        for line in lines:
            file.write(line)


def _planned(staging: StoragePath, name: str, number: int) -> list[FileRange]:
    with staging.open(name) as file:
        file.seek(NUMBER * number)
        begin, end = np.frombuffer(file.read(2 * NUMBER), np.int64)
        file.seek(int(begin))
        task = json.loads(file.read(int(end - begin)))
    return [FileRange(*one)._replace(slices=tuple(PieceSlice(*part) for part in one[-1])) for one in task]


@dataclass(frozen=True)
class JoinTask:
    """Writes the ranges that the plan has for a task. One that runs twice writes the same bytes to the same places."""

    staging: StoragePath
    target: StoragePath
    plan: str
    in_ranges: bool

    def write(self, number: int, batches: Any) -> list[tuple[int, list[int]]]:
        """Returns the checksum of each range, and those of the bytes that were read for it, by piece."""
        return [self._write(one) for one in _planned(self.staging, self.plan, number)]

    def _write(self, one: FileRange) -> tuple[int, list[int]]:
        if self.in_ranges:
            opened = self.target.write_range(one.name, one.size, one.begin)
        else:
            opened = self.target.create(one.name)
        with opened as out:
            head = one.head.encode("latin-1")
            out.write(head)
            digest, read = zlib.crc32(head), []
            for part in one.slices:
                given, made = _copy(self.staging, part, out)
                read.append(given)
                digest = combine(digest, made, part.bytes)
        return digest, read


def _copy(staging: StoragePath, part: PieceSlice, out: BinaryIO) -> tuple[int, int]:
    """Returns the checksums of what is read, and of what is written."""
    given, made, left = 0, 0, part.bytes
    with staging.open(part.piece) as file:
        file.seek(part.begin)
        while left:
            wanted = min(left, COPY_BYTES)
            if len(block := file.read(wanted)) < wanted:
                raise StoreError(f"{staging}/{part.piece} is cut short; check the disk, and build again")
            given, left = zlib.crc32(block, given), left - wanted
            if part.first_edge:
                block = (np.frombuffer(block, np.int64) + part.first_edge).tobytes()
                made = zlib.crc32(block, made)
            out.write(block)
    return given, made if part.first_edge else given


def joined_files(
    staging: StoragePath, files: Sequence[WholeFile], tasks: Tasks, answers: Sequence[Any]
) -> Mapping[str, FileEntry]:
    """What the files have become; StoreError where a piece was not read as it was written."""
    made: dict[str, FileEntry] = {}
    read: dict[str, int] = {}
    for task, answer in zip(tasks, answers, strict=True):
        for one, (digest, given) in zip(task, answer, strict=True):
            before = made[one.name].crc32 if one.begin else 0
            made[one.name] = FileEntry(one.size, combine(before, digest, one.bytes))
            for part, of_part in zip(one.slices, given, strict=True):
                skipped = zlib.crc32(bytes(part.begin)) if part.piece not in read else read[part.piece]
                read[part.piece] = combine(skipped, of_part, part.bytes)
    for file in files:
        for index, piece in enumerate(file.pieces):
            if read.get(piece.name, zlib.crc32(bytes(file.skipped(index)))) != piece.crc32:
                raise StoreError(f"{staging}/{piece.name} is not what was written; check the disk, and build again")
    return made
