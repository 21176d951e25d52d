"""Read rows and edge lists from files on demand: many at once, without the page cache.

Costs a copy of every row, and memory for the reads in flight (16 MiB per call).
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

DiskFile = _core.DiskFile  # a file opened for reads that bypass the page cache
DiskError = _core.DiskError  # (path, byte, message)
SparseArray = _core.SparseArray  # an array whose unwritten pages take no memory
has_read_queue = _core.has_read_queue  # () -> whether the kernel and the container allow io_uring

DEPTH = 128  # reads in flight: more are no faster on the disks we measured


class FileRows(NamedTuple):
    """Rows of a table that are stored in a file."""

    file: DiskFile
    offset: int  # the byte of the first value
    num_rows: int
    first: int = 0  # the id of the first row


class RowRequest(NamedTuple):
    """A request to read the rows with the ids ids[places] from a file into out[places]."""

    rows: FileRows
    ids: Tensor  # [n] int64
    places: Tensor  # [m] int64
    out: Tensor  # [n, ...]


class ListColumn(NamedTuple):
    """A column of edge lists (sources, weights or times) in a file, and the array in memory that gets the lists."""

    file: DiskFile
    offset: int
    item_bytes: int
    array: SparseArray


@dataclass
class Reads:
    """Options for reads from a disk, and counts of the reads of all threads."""

    gap: int = 0  # rows with at most this many bytes between them are read by one request, which is faster than two
    bytes_per_second: float = 1e9  # that the disk delivers in long reads
    by_threads: bool = False  # read with threads even if io_uring is allowed
    requests: int = 0
    bytes: int = 0
    seconds: float = 0.0  # spent in reads, summed over threads
    wanted_bytes: int = 0  # of the requested rows and entries; other bytes are gaps and the ends of disk blocks
    asked: int = 0  # requested rows and entries of tables and lists that are partly on disk
    found: int = 0  # rows and entries counted in `asked` that were in memory
    _busy_seconds: float = field(default=0.0, init=False, repr=False)  # of periods with reads in flight that have ended
    _num_in_flight: int = field(default=0, init=False, repr=False)
    _busy_since: float = field(default=0.0, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def rows(self, wanted: Sequence[RowRequest]) -> None:
        """Read the requested rows into the output tensors of the requests."""
        wants = [
            (rows.file, rows.offset, rows.num_rows, rows.first, ids.numpy(), places.numpy(), byte_rows(out).numpy())
            for rows, ids, places, out in wanted
        ]
        wanted_bytes = sum(places.size * out.shape[1] for *_, places, out in wants)
        with self._in_flight():
            self._count(wanted_bytes, *_core.read_rows(wants, self.gap, DEPTH, self.by_threads))

    def lists(self, columns: Sequence[ListColumn], lists: EdgeLists, nodes: Tensor) -> None:
        """Read the edge lists of `nodes` from files into the arrays of `columns`, at the same index as in the file."""
        own = nodes - lists.first_node
        num_entries = int((lists.indptr[own + 1] - lists.indptr[own]).sum())
        with self._in_flight():
            read = _core.read_lists(
                list(columns), lists.indptr.numpy(), lists.first_node, nodes.numpy(), self.gap, DEPTH, self.by_threads
            )
            self._count(num_entries * sum(column.item_bytes for column in columns), *read)
        self.count_found(0, of=num_entries)

    def count_found(self, found: int, *, of: int) -> None:
        """Count that `found` of the `of` requested rows or entries were already in memory."""
        with self._lock:
            self.found += found
            self.asked += of

    def so_far(self) -> dict[str, float]:
        """Return all counts so far, by name. Of reads still in flight, only the time is counted (`busy_seconds`)."""
        with self._lock:
            current = time.perf_counter() - self._busy_since if self._num_in_flight else 0.0
            return {
                "requests": self.requests,
                "bytes": self.bytes,
                "wanted_bytes": self.wanted_bytes,
                "asked": self.asked,
                "found": self.found,
                "seconds": self.seconds,
                "busy_seconds": self._busy_seconds + current,
            }

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count the time in this `with` block, which writes rows to the disk, as busy time of the disk."""
        begin = time.perf_counter()
        with self._in_flight():
            yield
        with self._lock:
            self.seconds += time.perf_counter() - begin

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        """Count this `with` block as a request in flight; time in which requests overlap counts once as busy time."""
        with self._lock:
            if not self._num_in_flight:
                self._busy_since = time.perf_counter()
            self._num_in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_in_flight -= 1
                if not self._num_in_flight:
                    self._busy_seconds += time.perf_counter() - self._busy_since

    def _count(self, wanted_bytes: int, requests: int, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self.wanted_bytes += wanted_bytes
            self.requests += requests
            self.bytes += num_bytes
            self.seconds += seconds
