"""Rows of many id lists, packed in scratch space: each list's rows together, so that they are read in a few long reads.

The rows of all lists are read once, in file order, and written list by list. Costs a write and a read of every row;
saves a sweep over the table, or a read per row, for every list. Loaders pack the rows of coming steps.
Nothing is left behind, whatever ends the process: the files have no name.
"""

import shutil
from collections.abc import Callable, Sequence
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

    def read(self, reads: Reads, ids: Tensor, positions: Tensor, out: Tensor) -> None:
        """Write the rows of ids[positions], which are among the list's, to out[positions]."""
        at = np.searchsorted(self.ids, ids[positions].numpy().astype(self.ids.dtype, copy=False))
        rows = torch.zeros_like(ids)
        rows[positions] = torch.from_numpy(at + self.shifts[np.searchsorted(self.cuts, at, side="right")])
        try:
            reads.rows([RowRequest(self.rows, rows, positions, out)])
        except DiskError as error:
            raise StoreError(f"rows in scratch space cannot be read: {error.args[2]}; check its disk") from error


class RowLists:
    """Lists of ascending ids of one table, to be packed a piece of all lists at a time."""

    def __init__(self, ids: Sequence[Ids], row_bytes: int, piece_bytes: int) -> None:
        """Take the lists, the bytes of a row, and the memory that reading a piece may take."""
        self.ids, self.row_bytes = ids, row_bytes
        self.rows_at_once = max(1, piece_bytes // (row_bytes + OF_A_ROW))
        self.begins = cut(ids, self.rows_at_once)  # index at which each piece begins in each list: [pieces + 1, lists]
        self.num_rows = sum(map(len, ids))
        # In the file, every piece may lose a row and a block.
        of_pieces = (len(self.begins) - 1) * (row_bytes + BLOCK)
        self.num_bytes = self.num_rows * row_bytes + of_pieces if self.num_rows else 0

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
