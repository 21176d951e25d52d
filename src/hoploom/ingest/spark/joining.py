"""Write pieces of a store's files, one for each range of ids, and join the pieces of each file.

A joining task writes one large file or several small ones, each from beginning to end, because object stores allow no
other way. A task that runs twice writes the same bytes to the same files.
"""

import io
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import StoreError
from hoploom.schema import DTYPES, Field
from hoploom.store import format as layout
from hoploom.store.format import FileEntry
from hoploom.store.storage_path import StoragePath
from hoploom.store.write import combine

COPY_BYTES = 8 << 20
PIECES = "pieces"  # the folder of pieces in the staging place
INDPTR = "csc.indptr.npy"
TASK_BYTES = 256 << 20  # about as much as a joining task writes, unless a file is larger
SMALL = 2 << 20  # bytes that are written in the time that opening and flushing a file takes
NUMBER = 8  # bytes of an int64


class Piece(NamedTuple):
    """A temporary file with consecutive rows of one file of the store, without a header."""

    name: str  # in the staging place
    rows: int
    bytes: int
    crc32: int


class PieceWriter:
    """Writes the pieces of one range of ids, as an ArraySink. A piece becomes visible when it is complete."""

    def __init__(self, staging: StoragePath, number: int) -> None:
        self._staging, self._number = staging, number
        self._open: dict[str, tuple[BinaryIO, ExitStack, Piece]] = {}
        self.pieces: dict[str, Piece] = {}  # finished ones, by file

    def __enter__(self) -> "PieceWriter":
        return self

    def __exit__(self, *failure: Any) -> None:
        for _, stack, _ in self._open.values():
            stack.__exit__(*failure)

    def append(self, name: str, field: Field, rows: Tensor) -> None:
        """Append rows to this range's piece of the file `name`."""
        if name not in self._open:
            stack, path = ExitStack(), f"{PIECES}/{name}/{self._number:06d}"
            self._open[name] = stack.enter_context(self._staging.create(path)), stack, Piece(path, 0, 0, 0)
        (file, stack, piece), raw = self._open[name], rows.to(DTYPES[field.dtype]).contiguous()
        values = raw.reshape(-1).view(torch.uint8).numpy().data if raw.numel() else memoryview(b"")
        for begin in range(0, len(values), COPY_BYTES):
            file.write(values[begin : begin + COPY_BYTES])
        num_rows, num_bytes = piece.rows + rows.shape[0], piece.bytes + len(values)
        self._open[name] = file, stack, Piece(piece.name, num_rows, num_bytes, zlib.crc32(values, piece.crc32))

    def finish(self, name: str, field: Field) -> int:
        """Complete what this writer adds to the file `name`; return how many rows that is (0 is possible)."""
        self.append(name, field, torch.empty((0, *field.shape), dtype=DTYPES[field.dtype]))
        _, stack, self.pieces[name] = self._open.pop(name)
        stack.close()
        return self.pieces[name].rows


class PieceSlice(NamedTuple):
    """The bytes [begin, end) of a piece."""

    piece: str  # its name in the staging place
    begin: int
    end: int
    first_edge: int  # added to every offset of an indptr; 0 for other files

    @property
    def bytes(self) -> int:
        return self.end - self.begin


class FileSlices(NamedTuple):
    """The contents of a file of the store: its first bytes (`head`), then slices of pieces."""

    name: str
    head: str  # bytes as latin-1 text, because plans are JSON
    slices: tuple[PieceSlice, ...]

    @property
    def bytes(self) -> int:
        return len(self.head) + sum(one.bytes for one in self.slices)


@dataclass(frozen=True)
class WholeFile:
    """A file of the store, and the pieces from which it is joined, in order."""

    name: str
    field: Field
    pieces: tuple[Piece, ...]
    before: tuple[int, ...] = ()  # for an indptr: the number of edges of its part before each piece

    @property
    def is_indptr(self) -> bool:
        return self.name.endswith(INDPTR)

    @property
    def rows(self) -> int:
        rows = sum(piece.rows for piece in self.pieces)
        return rows - max(0, len(self.pieces) - 1) if self.is_indptr else rows  # each piece begins with a 0

    @property
    def head(self) -> bytes:
        """The bytes before the pieces: the .npy header. If an indptr has no pieces, its only offset, 0, is here too."""
        out = io.BytesIO()
        layout.write_npy_header(out, self.field.dtype, (max(self.rows, int(self.is_indptr)), *self.field.shape))
        return out.getvalue() + bytes(NUMBER if self.is_indptr and not self.pieces else 0)

    @property
    def contents(self) -> FileSlices:
        """The head, then the pieces. Each piece of an indptr begins with a 0; all but the first lose this 0."""
        slices = [
            PieceSlice(piece.name, NUMBER if self.is_indptr and index else 0, piece.bytes, edges)
            for index, (piece, edges) in enumerate(zip(self.pieces, self.before or repeat(0), strict=False))
        ]
        return FileSlices(self.name, self.head.decode("latin-1"), tuple(one for one in slices if one.bytes))


# --- tasks -----------------------------------------------------------------------------------------

Tasks = Sequence[Sequence[FileSlices]]


def join_tasks(files: Sequence[WholeFile], cores: int) -> Tasks:
    """Divide the files among tasks so that all cores have work. A task writes one large file or several small ones."""
    total = sum(piece.bytes for file in files for piece in file.pieces)
    most = min(TASK_BYTES, -(-total // cores))
    tasks: list[list[FileSlices]] = []
    left = 0
    for file in files:
        contents = file.contents
        cost = max(contents.bytes, SMALL)
        if not tasks or cost > left:
            tasks.append([])
            left = most
        tasks[-1].append(contents)
        left -= cost
    return tasks


def write_plan(staging: StoragePath, name: str, tasks: Tasks) -> None:
    """Write to the file `name` which files each task joins: a line of JSON per task, after the offsets of the lines."""
    lines = [json.dumps(task).encode() for task in tasks]
    ends = np.cumsum([NUMBER * (len(lines) + 1), *map(len, lines)], dtype=np.int64)
    with staging.create(name) as file:
        file.write(ends.tobytes())
        for line in lines:
            file.write(line)


@dataclass(frozen=True)
class JoinTask:
    """A Spark task that joins pieces into files. The file `plan` (see `write_plan`) lists the files of each task."""

    staging: StoragePath
    target: StoragePath
    plan: str

    def write(self, number: int, batches: Any) -> list[tuple[int, list[int]]]:
        """Write the files of task `number`. For each file, return its checksum and the checksums of the slices read."""
        with self.staging.open(self.plan) as file:
            file.seek(NUMBER * number)
            begin, end = np.frombuffer(file.read(2 * NUMBER), np.int64)
            file.seek(int(begin))
            task = json.loads(file.read(int(end - begin)))
        files = [FileSlices(*one)._replace(slices=tuple(PieceSlice(*part) for part in one[-1])) for one in task]
        return [self._write(one) for one in files]

    def _write(self, one: FileSlices) -> tuple[int, list[int]]:
        with self.target.create(one.name) as out:
            head = one.head.encode("latin-1")
            out.write(head)
            digest, read = zlib.crc32(head), []
            for part in one.slices:
                given, made = _copy(self.staging, part, out)
                read.append(given)
                digest = combine(digest, made, part.bytes)
        return digest, read


def _copy(staging: StoragePath, part: PieceSlice, out: BinaryIO) -> tuple[int, int]:
    """Copy a slice to `out`; return the checksums of the slice as read and as written (offsets of an indptr change)."""
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
    """Return the manifest entry of each file. Raise StoreError if tasks did not read pieces as they were written."""
    made: dict[str, FileEntry] = {}
    written = {piece.name: piece.crc32 for file in files for piece in file.pieces}
    for task, answer in zip(tasks, answers, strict=True):
        for one, (digest, read) in zip(task, answer, strict=True):
            made[one.name] = FileEntry(one.bytes, digest)
            for part, found in zip(one.slices, read, strict=True):
                if combine(zlib.crc32(bytes(part.begin)), found, part.bytes) != written[part.piece]:
                    raise StoreError(f"{staging}/{part.piece} is not what was written; check the disk, and build again")
    return made
