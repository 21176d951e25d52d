"""Rows of a relation's sources that do not fit in memory, for slices in order; packed if that spares time.

The sources of a slice are all over a table, so that each slice reads a block for every row, or the whole table. Packing
also costs looking at the edges twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import StoreError
from hoploom.inference.slices import Slice
from hoploom.load.packed import PackedRows, RowLists, read_packed, scratch_bytes
from hoploom.ops import DiskError, FileRows, Reads, RowRequest
from hoploom.store.on_disk import BLOCK, Ids, ScratchFile

WINS = 2 / 3  # of the time without packing, at most

Gather = Callable[[Sequence[Tensor], Sequence[Tensor]], None]  # (ids, outs): outs[i] = the rows of ids[i]


@dataclass(frozen=True)
class FarTable:
    """A table that does not fit in memory."""

    gather: Gather
    mapped: Tensor  # [num_rows, width], not to be touched

    @property
    def row_bytes(self) -> int:
        return self.mapped.shape[1] * self.mapped.dtype.itemsize


def gathering(rows: FileRows, reads: Reads) -> Gather:
    """Return a function that gathers rows of a file between layers."""

    def gather(ids: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        try:
            reads.rows([RowRequest(rows, one, torch.arange(len(one)), out) for one, out in zip(ids, outs, strict=True)])
        except DiskError as error:
            raise StoreError(f"rows between layers cannot be read: {error.args[2]}; check the disk") from error

    return gather


class SourceRows:
    """The rows of one relation's sources, asked for slice by slice.

    Packing may take `memory` bytes while no slice is worked on, and a `share` of what is free in `folder`.
    """

    def __init__(
        self,
        table: FarTable,
        slices: Sequence[Slice],
        others: Callable[[Slice], Tensor],
        memory: int,
        folder: Path,
        share: float,
        reads: Reads,
    ) -> None:
        self.table, self._slices, self._others = table, slices, others
        self._memory, self._folder, self._share, self._reads = memory, folder, share, reads
        self._numbers = {some.first: number for number, some in enumerate(slices)}
        self._group = range(0)  # slices that were looked at together
        self._packed: list[PackedRows] = []  # of the group; empty if packing would not pay
        self.num_packed = 0  # rows so far

    def prepare(self, some: Slice, check: Callable[[], None]) -> None:
        """Pack the rows of a slice and of the next ones, if that is due; before anything of it is in memory."""
        number = self._numbers[some.first]
        if number in self._group:
            return
        self._packed = []
        lists = RowLists(self._look_ahead(number, check), self.table.row_bytes, self._memory // 2)
        self._group = range(number, number + len(lists.ids))
        if self._pays(lists):
            dtype = self.table.mapped.dtype
            with ScratchFile(self._folder, lists.num_bytes) as file:
                self._packed = lists.copy(
                    file, self._reads, lambda ids, outs: self.table.gather(ids, [o.view(dtype) for o in outs]), check
                )
            self.num_packed += lists.num_rows

    def of(self, some: Slice, own: Tensor, others: Tensor) -> Tensor:
        """Return the rows of a slice's own nodes, or of none, then those of the other sources."""
        mapped = self.table.mapped
        out = ops.empty((own.numel() + others.numel(), mapped.shape[1]), mapped.dtype)
        outs = [out[: own.numel()], out[own.numel() :]]
        if not self._packed:
            self.table.gather([own, others], outs)
            return out
        self.table.gather([own], outs[:1])
        packed = self._packed[self._numbers[some.first] - self._group.start]
        read_packed(self._reads, [packed.request_all(outs[1])])
        return out

    def _look_ahead(self, number: int, check: Callable[[], None]) -> list[Ids]:
        """Return the sources of as many slices as half of the memory holds ids of, and scratch space rows."""
        found: list[Ids] = []
        memory, num_bytes = self._memory // 2, int(self._share * scratch_bytes(self._folder))
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

    def _pays(self, lists: RowLists) -> bool:
        """Return whether packing takes less than two thirds of the time, counted in bytes that the disk could read."""
        of_a_row, sweep, num_rows = BLOCK + self._reads.gap, self.table.mapped.nbytes, lists.num_rows
        direct = sum(min(len(one) * of_a_row, sweep) for one in lists.ids)
        requests = len(lists.ids) * -(-num_rows // lists.rows_at_once)  # a slice's rows of a piece
        packed = min(num_rows * of_a_row, sweep) + 2 * num_rows * self.table.row_bytes + requests * of_a_row
        return packed < WINS * direct
