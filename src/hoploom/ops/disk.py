"""Rows and lists of files that are not in memory: read when they are wanted, many at once, past the page cache.

Costs a copy of every row, and the memory of the reads under way (16 MiB a call).
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    bytes_per_second: float = 1e9  # in long reads
    by_threads: bool = False  # even where io_uring is allowed
    requests: int = 0
    bytes: int = 0
    seconds: float = 0.0  # spent in reads, added up over the threads
    wanted_bytes: int = 0  # of the rows and entries asked for: what else was read lay between them, or in their blocks
    asked: int = 0  # rows and entries of tables and lists of which some are on disk
    found: int = 0  # of these, in memory
    _busy_seconds: float = field(default=0.0, init=False, repr=False)  # until the last time that no read was under way
    _num_under_way: int = field(default=0, init=False, repr=False)
    _busy_since: float = field(default=0.0, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def rows(self, wanted: Sequence[RowRequest]) -> None:
        """Read rows to their places."""
        wants = [
            (rows.file, rows.offset, rows.num_rows, rows.first, ids.numpy(), places.numpy(), byte_rows(out).numpy())
            for rows, ids, places, out in wanted
        ]
        wanted_bytes = sum(places.size * out.shape[1] for *_, places, out in wants)
        with self._under_way():
            self._count(wanted_bytes, *_core.read_rows(wants, self.gap, DEPTH, self.by_threads))

    def lists(self, columns: Sequence[ListColumn], lists: EdgeLists, nodes: Tensor) -> None:
        """Read the lists of these nodes, in every column."""
        own = nodes - lists.first_node
        num_entries = int((lists.indptr[own + 1] - lists.indptr[own]).sum())
        with self._under_way():
            read = _core.read_lists(
                list(columns), lists.indptr.numpy(), lists.first_node, nodes.numpy(), self.gap, DEPTH, self.by_threads
            )
            self._count(num_entries * sum(column.item_bytes for column in columns), *read)
        self.count_found(0, of=num_entries)

    def count_found(self, found: int, *, of: int) -> None:
        """So many rows or entries were in memory, of so many that were asked for."""
        with self._lock:
            self.found += found
            self.asked += of

    def so_far(self) -> dict[str, float]:
        """Everything that was counted; a read that is under way now adds to `busy_seconds` alone."""
        with self._lock:
            under_way = time.perf_counter() - self._busy_since if self._num_under_way else 0.0
            return {
                "requests": self.requests,
                "bytes": self.bytes,
                "wanted_bytes": self.wanted_bytes,
                "asked": self.asked,
                "found": self.found,
                "seconds": self.seconds,
                "busy_seconds": self._busy_seconds + under_way,
            }

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within: what was read is written to a disk, which is busy with that too."""
        begin = time.perf_counter()
        with self._under_way():
            yield
        with self._lock:
            self.seconds += time.perf_counter() - begin

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Within: a request is at the disk. Times at which several are count once."""
        with self._lock:
            if not self._num_under_way:
                self._busy_since = time.perf_counter()
            self._num_under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_under_way -= 1
                if not self._num_under_way:
                    self._busy_seconds += time.perf_counter() - self._busy_since

    def _count(self, wanted_bytes: int, requests: int, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self.wanted_bytes += wanted_bytes
            self.requests += requests
            self.bytes += num_bytes
            self.seconds += seconds
