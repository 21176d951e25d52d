"""Rows and lists of files that are not in memory: read when they are wanted, many at once, past the page cache.

Costs a copy of every row, and the memory of the reads under way (16 MiB a call).
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from hoploom import _core
from hoploom.ops.rows import byte_rows
from hoploom.ops.sample import EdgeLists

DiskFile = _core.DiskFile  # opened for reads past the page cache
DiskError = _core.DiskError  # (path, byte, what went wrong)
SparseArray = _core.SparseArray  # an array of which only what is written takes memory
has_read_queue = _core.has_read_queue  # whether the kernel and the container allow io_uring

DEPTH = 128  # reads under way: more are no faster on the disks we know


class FileRows(NamedTuple):
    """A table in a file."""

    file: DiskFile
    offset: int  # the byte where its values begin
    num_rows: int
    first: int = 0  # the id of the first row


class RowRequest(NamedTuple):
    """out[places] = the rows of ids[places]."""

    rows: FileRows
    ids: Tensor  # [n] int64
    places: Tensor  # [m] int64
    out: Tensor  # [n, ...]


class ListColumn(NamedTuple):
    """A column of edge lists in a file, and the array that takes those which are read, each at its own place."""

    file: DiskFile
    offset: int
    item_bytes: int
    array: SparseArray


@dataclass
class Reads:
    """How a disk is read, and what was read so far, over all threads."""

    gap: int = 0  # bytes between two rows that cost less to read than another request
    by_threads: bool = False  # even where io_uring is allowed
    requests: int = 0
    bytes: int = 0
    seconds: float = 0.0  # spent in reads, added up over the threads
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def rows(self, wanted: Sequence[RowRequest]) -> None:
        """Read rows to their places."""
        wants = [
            (rows.file, rows.offset, rows.num_rows, rows.first, ids.numpy(), places.numpy(), byte_rows(out).numpy())
            for rows, ids, places, out in wanted
        ]
        self._count(*_core.read_rows(wants, self.gap, DEPTH, self.by_threads))

    def lists(self, columns: Sequence[ListColumn], lists: EdgeLists, nodes: Tensor) -> None:
        """Read the lists of these nodes, in every column."""
        read = _core.read_lists(
            list(columns), lists.indptr.numpy(), lists.first_node, nodes.numpy(), self.gap, DEPTH, self.by_threads
        )
        self._count(*read)

    def _count(self, requests: int, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self.requests += requests
            self.bytes += num_bytes
            self.seconds += seconds
