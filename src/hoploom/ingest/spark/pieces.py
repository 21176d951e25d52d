"""Pieces of a store's files: each task writes those of its range of ids. They are joined later.

A task that runs twice writes the same pieces again, under the same names.
"""

import zlib
from contextlib import ExitStack
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from hoploom.schema import DTYPES, Field
from hoploom.store.storage_path import StoragePath

COPY_BYTES = 8 << 20
PIECES = "pieces"


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

    def __init__(self, staging: StoragePath, number: int) -> None:
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
