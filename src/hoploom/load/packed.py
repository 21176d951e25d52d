"""Rows of many id lists, packed in scratch space: each list's rows together, so that they are read in a few long reads.

The rows of all lists are read once, in file order, and written list by list. Costs a write and a read of every row;
saves a sweep over the table, or a read per row, for every list. Loaders pack the rows of coming steps, inference those
of coming slices. Nothing is left behind, whatever ends the process: the files have no name.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import StoreError
from hoploom.ops import DiskError, FileRows, Reads, RowRequest
from hoploom.store.on_disk import BLOCK, SHARE, Ids, ScratchFile, cut

OF_A_ROW = 48  # bytes that a row takes besides its own while it is read


class PackedRows(NamedTuple):
    """The rows of one id list in a scratch file: in the order of the ids, cut into pieces."""

    rows: FileRows
    ids: Ids  # ascending
    cuts: Ids  # where in `ids` the second piece begins, the third and so on
    shifts: Ids  # by piece: index of a row in the file, less its index in `ids`

    def find(self, ids: Ids) -> Ids:
        """Return the rows of the file that hold these ids, which must be among the list's."""
        return self._in_file(np.searchsorted(self.ids, ids.astype(self.ids.dtype, copy=False)))

    def _in_file(self, at: Ids) -> Ids:
        return np.asarray(at + self.shifts[np.searchsorted(self.cuts, at, side="right")])

    def request_all(self, out: Tensor) -> RowRequest:
        """Return a request for all rows, in the order of their ids."""
        at = torch.from_numpy(self._in_file(np.arange(len(self.ids))))
        return RowRequest(self.rows, at, torch.arange(len(self.ids)), out)


def read_packed(reads: Reads, requests: Sequence[RowRequest]) -> None:
    """Read rows from scratch files; raise StoreError for a disk that fails."""
    try:
        reads.rows(requests)
    except DiskError as error:
        raise StoreError(f"rows in scratch space cannot be read: {error.args[2]}; check its disk") from error


@dataclass(frozen=True)
class RowLists:
    """Lists of ascending ids of one table, to be packed a piece of all lists at a time."""

    ids: Sequence[Ids]
    row_bytes: int
    piece_bytes: int  # memory that reading a piece may take

    @cached_property
    def begins(self) -> Ids:
        """Index at which each piece begins in each list: [pieces + 1, lists]."""
        return cut(self.ids, self.rows_at_once)

    @property
    def rows_at_once(self) -> int:
        return max(1, self.piece_bytes // (self.row_bytes + OF_A_ROW))

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.ids))

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, including the row and the block that every piece may lose."""
        num_pieces = len(self.begins) - 1
        return self.num_rows * self.row_bytes + num_pieces * (self.row_bytes + BLOCK) if self.num_rows else 0

    def copy(
        self,
        file: ScratchFile,
        reads: Reads,
        read: Callable[[list[Tensor], list[Tensor]], None],
        check: Callable[[], None],
    ) -> list[PackedRows]:
        """Copy the rows to a file and return where those of each list are.

        `read(ids, outs)` reads rows as bytes, [n, row_bytes] uint8; `check()` is called before each piece.
        """
        shifts = np.zeros((len(self.begins) - 1, len(self.ids)), dtype=np.int64)
        for piece, (begins, ends) in enumerate(pairwise(self.begins)):
            check()
            room = file.room_for(int((ends - begins).sum()), self.row_bytes)
            bounds = np.concatenate([[0], np.cumsum(ends - begins)])
            own = [
                torch.from_numpy(ids[b:e].astype(np.int64)) for ids, b, e in zip(self.ids, begins, ends, strict=True)
            ]
            if bounds[-1]:
                read(own, [room.rows[b:e] for b, e in pairwise(bounds)])
                with reads.writing():
                    file.append(room)
            shifts[piece] = room.first_row + bounds[:-1] - begins
        rows = FileRows(file.opened, 0, file.num_bytes // self.row_bytes)
        return [
            PackedRows(rows, ids, self.begins[1:-1, number], shifts[:, number]) for number, ids in enumerate(self.ids)
        ]


def scratch_bytes(folder: Path) -> int:
    """Return how many bytes of scratch space may be used; raise StoreError if the folder cannot be used."""
    try:
        return int(SHARE * shutil.disk_usage(folder).free)
    except OSError as error:
        raise StoreError(f"scratch space {folder} cannot be used: {error.strerror}") from error
