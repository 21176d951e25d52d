"""Pieces of a store's files: each task writes those of its range, then they become one file, with its checksum.

A task that runs twice writes the same pieces again, under the same names.
"""

import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import StoreError
from hoploom.schema import DTYPES, Field
from hoploom.store import format as layout
from hoploom.store.place import Place

COPY_BYTES = 8 << 20
PIECES = "pieces"
INDPTR = "csc.indptr.npy"


class Piece(NamedTuple):
    """Consecutive rows of a file, without a header."""

    name: str  # in the staging place
    rows: int
    bytes: int
    crc32: int


class _Open:
    def __init__(self, file: BinaryIO) -> None:
        self.file, self.rows, self.bytes, self.crc32 = file, 0, 0, 0


class PieceWriter:
    """Writes the pieces of one range; meets ArraySink. What is not finished never appears."""

    def __init__(self, staging: Place, number: int) -> None:
        self._staging, self._number, self._stack = staging, number, ExitStack()
        self._open: dict[str, tuple[_Open, ExitStack]] = {}
        self.made: dict[str, Piece] = {}  # by file

    def __enter__(self) -> "PieceWriter":
        return self

    def __exit__(self, *failure: Any) -> None:
        for _, stack in self._open.values():
            stack.__exit__(*failure)

    def append(self, name: str, field: Field, rows: Tensor) -> None:
        """Append rows to a file's piece."""
        if name not in self._open:
            stack = ExitStack()
            self._open[name] = _Open(stack.enter_context(self._staging.create(self._path(name)))), stack
        piece, raw = self._open[name][0], rows.to(DTYPES[field.dtype]).contiguous()
        values = raw.reshape(-1).view(torch.uint8).numpy().data if raw.numel() else memoryview(b"")
        for begin in range(0, len(values), COPY_BYTES):
            piece.file.write(values[begin : begin + COPY_BYTES])
        piece.crc32 = zlib.crc32(values, piece.crc32)
        piece.bytes += len(values)
        piece.rows += rows.shape[0]

    def finish(self, name: str, field: Field) -> int:
        """Complete a piece, empty if nothing was appended; returns its number of rows."""
        self.append(name, field, torch.empty((0, *field.shape), dtype=DTYPES[field.dtype]))
        piece, stack = self._open.pop(name)
        stack.close()
        self.made[name] = Piece(self._path(name), piece.rows, piece.bytes, piece.crc32)
        return piece.rows

    def _path(self, name: str) -> str:
        return f"{PIECES}/{name}/{self._number:06d}"


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


def whole_indptr(name: str, pieces: tuple[Piece, ...], edges: list[int]) -> WholeFile:
    """An indptr; `edges` are those of its pieces."""
    return WholeFile(name, Field("int64"), pieces, tuple(accumulate(edges, initial=0))[:-1])


def join_pieces(staging: Place, target: Place, files: tuple[WholeFile, ...], number: int, _: Any) -> list[Any]:
    """Write one of the files; returns its name, bytes and checksum."""
    file, digest, size = files[number], 0, 0
    with target.create(file.name) as out:
        with _Counted(out) as counted:
            layout.write_npy_header(counted, file.field.dtype, (max(file.rows, int(file.is_indptr)), *file.field.shape))
            if file.is_indptr and not file.pieces:
                counted.write(bytes(8))
            for index, piece in enumerate(file.pieces):
                _copy(staging, piece, counted, file.before[index] if file.is_indptr else None, is_first=index == 0)
        digest, size = counted.crc32, counted.bytes
    return [file.name, size, digest]


class _Counted:
    """A file that is written from its beginning: how many bytes, and their checksum."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self.bytes, self.crc32 = out, 0, 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *failure: Any) -> None: ...

    def write(self, values: Any) -> int:
        self._out.write(values)
        self.crc32 = zlib.crc32(values, self.crc32)
        self.bytes += memoryview(values).nbytes
        return memoryview(values).nbytes

    def tell(self) -> int:
        return self.bytes


def _copy(staging: Place, piece: Piece, out: Any, before: int | None, *, is_first: bool) -> None:
    digest = 0
    with staging.open(piece.name) as given:
        skipped = 0 if before is None or is_first else 8
        while block := given.read(COPY_BYTES):
            digest = zlib.crc32(block, digest)
            if before is not None:
                block = (np.frombuffer(block, np.int64)[skipped // 8 :] + before).tobytes()
                skipped = 0
            out.write(block)
    if digest != piece.crc32:
        raise StoreError(f"{staging}/{piece.name} is not what was written; check the disk, and build again")
