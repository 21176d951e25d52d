"""Rows of sources that are on the disk, for slices in order: packed, each slice's together, where that spares time.

The sources of a slice are all over a table: each slice reads a block for every row, or the whole table. So the rows of
many slices are read once, in order, and written to scratch space slice by slice. Costs a write and a read of every row,
and looking at the edges twice.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import StoreError
from hoploom.inference.slices import Slice
from hoploom.ops import DiskError, FileRows, Reads, RowRequest
from hoploom.store.on_disk import BLOCK, SHARE, Ids, ScratchFile, cut

WINS = 2 / 3  # of the time without packing, at most
OF_A_ROW = 48  # bytes that a row takes besides its own while it is read


Gather = Callable[[Sequence[Tensor], Sequence[Tensor]], None]  # (ids, outs): outs[i] = the rows of ids[i]


@dataclass(frozen=True)
class FarTable:
    """A table that does not fit in memory."""

    gather: Gather
    mapped: Tensor  # [num_rows, width], not to be touched

    @property
    def row_bytes(self) -> int:
        return self.mapped.shape[1] * self.mapped.dtype.itemsize

    def empty(self, num_rows: int) -> Tensor:
        return ops.empty((num_rows, self.mapped.shape[1]), self.mapped.dtype)


@dataclass(frozen=True)
class Room:
    """What packing may take while no slice is worked on."""

    memory: int  # bytes
    folder: Path
    share: float  # of what is free in the folder

    def piece(self, table: FarTable) -> int:
        """Rows that are read and then written at once: half of the memory. The other half is for ids."""
        return max(1, self.memory // 2 // (table.row_bytes + OF_A_ROW))

    @property
    def num_bytes(self) -> int:
        """In the folder."""
        try:
            return int(self.share * SHARE * shutil.disk_usage(self.folder).free)
        except OSError as error:
            raise StoreError(f"scratch space {self.folder} cannot be used: {error.strerror}") from error


def gathering(rows: FileRows, reads: Reads) -> Gather:
    """From a file of rows between layers."""

    def gather(ids: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        try:
            reads.rows([RowRequest(rows, one, torch.arange(len(one)), out) for one, out in zip(ids, outs, strict=True)])
        except DiskError as error:
            raise StoreError(f"rows between layers cannot be read: {error.args[2]}; check the disk") from error

    return gather


class SourceRows:
    """The rows of one relation's sources, asked for slice by slice."""

    def __init__(
        self, table: FarTable, slices: Sequence[Slice], others: Callable[[Slice], Tensor], room: Room, reads: Reads
    ) -> None:
        self.table, self._slices, self._others = table, slices, others
        self._room, self._reads = room, reads
        self._numbers = {some.first: number for number, some in enumerate(slices)}
        self._group = range(0)  # slices that were looked at together
        self._packed: _Packed | None = None
        self.num_packed = 0  # rows so far

    def prepare(self, some: Slice, check: Callable[[], None]) -> None:
        """Before anything of a slice is in memory: pack its rows and those of the next slices, if that is due."""
        number = self._numbers[some.first]
        if number in self._group:
            return
        self._packed = None
        ids = self._look_ahead(number, check)
        self._group = range(number, number + len(ids))
        if self._pays(ids):
            self._packed = _Packed(self.table, ids, self._room, self._reads, check)
            self.num_packed += sum(map(len, ids))

    def of(self, some: Slice, own: Tensor, others: Tensor) -> Tensor:
        """The rows of a slice's own nodes, or of none, then those of the other sources."""
        out = self.table.empty(own.numel() + others.numel())
        outs = [out[: own.numel()], out[own.numel() :]]
        if self._packed is None:
            self.table.gather([own, others], outs)
        else:
            self.table.gather([own], outs[:1])
            self._packed.read(self._numbers[some.first] - self._group.start, outs[1])
        return out

    def _look_ahead(self, number: int, check: Callable[[], None]) -> list[Ids]:
        """The sources of as many slices as half of the memory holds ids of, and scratch space rows."""
        found: list[Ids] = []
        memory, num_bytes = self._room.memory // 2, self._room.num_bytes
        for some in self._slices[number:]:
            check()
            ids = self._others(some).numpy()
            ids = ids.astype(np.int32) if len(self.table.mapped) < 1 << 31 else ids
            memory -= ids.nbytes
            num_bytes -= len(ids) * self.table.row_bytes
            if found and (memory < 0 or num_bytes < 0):
                break
            found.append(ids)
        return found

    def _pays(self, ids: Sequence[Ids]) -> bool:
        """Whether packing takes less than two thirds of the time, in bytes that the disk could read meanwhile."""
        of_a_row, sweep = BLOCK + self._reads.gap, self.table.mapped.nbytes
        direct = sum(min(len(one) * of_a_row, sweep) for one in ids)
        num_rows = sum(map(len, ids))
        requests = len(ids) * -(-num_rows // self._room.piece(self.table))  # a slice's rows of a piece
        packed = min(num_rows * of_a_row, sweep) + 2 * num_rows * self.table.row_bytes + requests * of_a_row
        return packed < WINS * direct


class _Packed:
    """The rows of some lists of ids, in a file without a name: those of a list are in a few pieces."""

    def __init__(
        self, table: FarTable, ids: Sequence[Ids], room: Room, reads: Reads, check: Callable[[], None]
    ) -> None:
        self._reads, self._row_bytes = reads, table.row_bytes
        self._begins = cut(ids, room.piece(table))
        num_pieces = len(self._begins) - 1
        num_bytes = sum(map(len, ids)) * table.row_bytes + num_pieces * (table.row_bytes + BLOCK)
        self._first_rows = np.zeros((num_pieces, len(ids)), dtype=np.int64)  # by piece, of each list in the file
        with ScratchFile(room.folder, num_bytes) as self._file:
            for piece in range(num_pieces):
                check()
                self._first_rows[piece] = self._copy(table, ids, piece)

    def _copy(self, table: FarTable, ids: Sequence[Ids], piece: int) -> Ids:
        """Write one piece of every list: the row of the file where each begins."""
        begins, ends = self._begins[piece], self._begins[piece + 1]
        places = np.concatenate([[0], np.cumsum(ends - begins)])
        room = self._file.room_for(int(places[-1]), self._row_bytes)
        wanted = [torch.from_numpy(one[b:e].astype(np.int64)) for one, b, e in zip(ids, begins, ends, strict=True)]
        rows = room.rows.view(table.mapped.dtype)
        table.gather(wanted, [rows[b:e] for b, e in pairwise(places)])
        with self._reads.writing():
            self._file.append(room)
        return np.asarray(room.first_row + places[:-1])

    def read(self, number: int, out: Tensor) -> None:
        """The rows of a list, in order."""
        counts = np.diff(self._begins[:, number])
        starts = self._first_rows[:, number] - self._begins[:-1, number]
        at = torch.from_numpy(np.repeat(starts, counts) + np.arange(len(out)))
        rows = FileRows(self._file.opened, 0, self._file.num_bytes // self._row_bytes)
        try:
            self._reads.rows([RowRequest(rows, at, torch.arange(len(out)), out)])
        except DiskError as error:
            raise StoreError(f"rows in scratch space cannot be read: {error.args[2]}; check its disk") from error
