"""A budget of memory for a store: which rows and edge lists are mapped, and which are read from the disk when needed.

The offsets of edge lists take their bytes first, and a quarter of the rest is kept for rows fetched ahead. What is left
goes to the lists, fields with small rows, and the first rows of other fields (`partition` puts the most used first).
The speed of the disk is measured (0.6 s): a gap between two rows is read too if that is faster than one more request.
Thus a slow disk is read in long runs, and a fast one in single blocks.
"""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hoploom import ops
from hoploom.config.values import as_bytes, as_int, as_share, parse_bytes
from hoploom.errors import ConfigError, StoreError
from hoploom.ops import DiskFile, FileRows, Reads, RowRequest
from hoploom.schema import TypeKey
from hoploom.store import format as layout
from hoploom.store.base import Part
from hoploom.store.format import Manifest
from hoploom.store.on_disk import DiskLists, DiskRows, OnDisk

WINDOW = 0.25  # the share for rows of coming steps, after the offsets are deducted
WARM = 16 << 20  # bytes per read of `warm_up`
SMALL = 64  # bytes of a row: reading a small row costs as much as a wide one, but keeping it in memory is cheap
NO_PARTS = (
    "memory limits what this process holds of the parts on this host, and it has none; give path and parts, or limit "
    "the servers: hoploom serve --store-memory, or server.store_memory in a cluster file"
)


@dataclass(frozen=True)
class Budget:
    """The amount of a store's edge lists and fields that is kept in memory, over all open parts together."""

    num_bytes: int
    lists: float  # share of the source ids in edge lists
    small_fields: bool
    rows: float  # share of the rows of the other fields
    window: int  # bytes for the rows of coming steps
    disk_bytes: int  # that stay on the disk

    @property
    def holds_all(self) -> bool:
        return self.disk_bytes == 0

    def __str__(self) -> str:
        lists = "all edges" if self.lists == 1 else f"{as_share(self.lists)} of the edges"
        small = ", small fields" if self.small_fields else ""
        rows = f"{as_share(self.rows)} of the rows" if self.rows < 1 else "all rows"
        held = f"{lists}{small} and {rows} in memory"
        return f"within {as_bytes(self.num_bytes)}: {held}, {as_bytes(self.disk_bytes)} on disk"


def read_memory(memory: int | str) -> int:
    """Return the bytes of the user's `memory`, such as '6GB' or 6_000_000_000; raise ConfigError if it is invalid."""
    if isinstance(memory, str):
        return parse_bytes("memory", memory)
    return as_int("memory", memory, 1, "give bytes such as '6GB'")


def read_scratch(folder: str | Path) -> Path:
    """Return the path of the scratch folder; raise ConfigError if no files can be created in it."""
    path = Path(folder)
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise ConfigError(f"scratch is {str(folder)!r:.200}, which is no folder that can be written; give one that is")
    return path


@contextmanager
def little_idle(window: int) -> Iterator[None]:
    """Keep at most `window` bytes of freed tensor memory for reuse during a `with` block; 0 means no limit."""
    if window:
        ops.pool_keep_at_most(window)
    try:
        yield
    finally:
        if window:
            ops.pool_keep_at_most(sys.maxsize)


def warm_up(tensors: Iterable[Tensor]) -> None:
    """Start a thread that reads mapped tensors into the page cache, so that batches do not wait for the disk."""

    def read() -> None:
        for tensor in tensors:
            rows = max(1, WARM * len(tensor) // max(1, tensor.nbytes))
            for begin in range(0, len(tensor), rows):
                if not threading.main_thread().is_alive():  # the program ends
                    return
                ops.read_soon(tensor[begin : begin + rows])

    threading.Thread(target=read, name="hoploom-warm-up").start()


def plan_budget(parts: Sequence[Part], num_bytes: int) -> Budget:
    """Return how much of these parts fits into `num_bytes`; raise ConfigError if the offsets of edge lists do not."""
    offsets = sum(lists.indptr.nbytes for part in parts for lists in part.lists)
    lists = sum(column.nbytes for part in parts for lists in part.lists for column in lists.columns) - offsets
    small = sum(table.rows.nbytes for part in parts for table in part.tables.values() if table.raw.shape[1] <= SMALL)
    wide = sum(table.rows.nbytes for part in parts for table in part.tables.values()) - small
    if offsets + lists + small + wide <= num_bytes:
        return Budget(num_bytes, 1.0, True, 1.0, 0, 0)
    left = num_bytes - offsets
    if left <= 0:
        raise ConfigError(
            f"memory of {as_bytes(num_bytes)} for the store is too small: where lists begin takes {as_bytes(offsets)}; "
            f"give at least {as_bytes(offsets * 5 // 4)}, or no limit"
        )
    window = int(left * WINDOW)
    left -= window
    share_of_lists = min(1.0, left / lists) if lists else 1.0
    left -= int(share_of_lists * lists)
    holds_small = 0 < small <= left
    left -= small if holds_small else 0
    rest = wide if holds_small else wide + small
    share = min(1.0, left / rest) if rest else 1.0
    far = int((1 - share_of_lists) * lists + (1 - share) * rest)
    return Budget(num_bytes, share_of_lists, holds_small, share, window, max(far, 1))


def open_on_disk(folder: Path, manifest: Manifest, number: int, part: Part, budget: Budget, reads: Reads) -> OnDisk:
    """Return a shard over `part`. Rows and edge lists for which `budget` has no memory are read from the disk."""

    def rows_of_file(name: str, num_rows: int, num_bytes: int, first: int) -> FileRows:
        try:
            file = DiskFile(str(layout.inside(folder, name)))
        except OSError as error:
            way_out = "; allow more open files: ulimit -n" if error.errno == errno.EMFILE else ""
            raise StoreError(f"{name} of {folder} cannot be opened: {error.strerror}{way_out}") from error
        return FileRows(file, manifest.files[name].bytes - num_bytes, num_rows, first)  # values end a .npy file

    tables: dict[tuple[TypeKey, str], DiskRows] = {}
    for (owner, name), table in part.tables.items():
        num_rows, row_bytes = table.raw.shape
        if (row_bytes <= SMALL and budget.small_fields) or budget.rows == 1 or not table.rows.nbytes:
            continue
        if isinstance(owner, str):
            file = layout.node_file(number, owner, name)
        else:
            file = layout.edge_file(number, manifest.schema.relation(owner), name)
        rows = rows_of_file(file, num_rows, table.rows.nbytes, table.first)
        tables[owner, name] = DiskRows(rows, int(budget.rows * num_rows), row_bytes)
    lists_on_disk: dict[int, DiskLists] = {}
    for index, lists in enumerate(part.lists):
        if budget.lists == 1 or not lists.num_edges:
            continue
        columns: dict[str, tuple[FileRows, torch.dtype]] = {}
        for attribute, name in (("indices", "indices"), ("weight", "weight"), ("edge_time", "time")):
            column = getattr(lists, attribute)
            if column is not None:
                file = layout.topology_file(number, manifest.schema.relations[index], name)
                rows = rows_of_file(file, lists.num_edges, column.nbytes, lists.first_edge)
                columns[attribute] = rows, column.dtype
        indices, dtype = columns["indices"]
        in_memory = int(budget.lists * lists.num_edges)
        lists_on_disk[index] = DiskLists(lists, DiskRows(indices, in_memory, dtype.itemsize), columns)
    return OnDisk(part, tables, lists_on_disk, reads)


# --- the speed of a disk --------------------------------------------------------------------

BLOCK, LONG = 4096, 256 << 10  # bytes of a random and of a sequential read
AT_ONCE, LONG_AT_ONCE = 1024, 128  # reads in flight, so that the disk is never idle
SECONDS = 0.3  # per measurement (random, sequential)
LEAST = 64 << 20  # bytes: smaller files are not measured


@dataclass(frozen=True)
class DiskFigures:
    """The speed of a disk with many reads in flight."""

    requests_per_second: float
    bytes_per_second: float

    @property
    def gap(self) -> int:
        """The bytes that the disk can read in the time that one more request takes."""
        return int(self.bytes_per_second / self.requests_per_second)


USUAL = DiskFigures(100_000, 1e9)  # for a small file, which is not measured


def measure_disk(path: Path) -> DiskFigures:
    """Return the speed of the disk of `path`, for random and for long reads.

    Ranks that measure at the same time each get their share.
    """
    if path.stat().st_size < LEAST:
        return USUAL
    file, reads, draw = DiskFile(str(path)), Reads(), torch.Generator().manual_seed(0)
    blocks, runs = FileRows(file, 0, file.size // BLOCK), FileRows(file, 0, file.size // LONG)

    def read(rows: FileRows, ids: Tensor, row_bytes: int) -> None:
        out = ops.empty((len(ids), row_bytes), torch.uint8)
        reads.rows([RowRequest(rows, ids, torch.arange(len(ids)), out)])

    def at_random() -> None:
        read(blocks, torch.randint(blocks.num_rows, (AT_ONCE,), generator=draw), BLOCK)

    def in_order() -> None:
        first = int(torch.randint(max(1, runs.num_rows - LONG_AT_ONCE), (1,), generator=draw))
        read(runs, torch.arange(first, min(first + LONG_AT_ONCE, runs.num_rows)), LONG)

    try:
        return DiskFigures(_rate(at_random, lambda: reads.requests), _rate(in_order, lambda: reads.bytes))
    except ops.DiskError:  # a batch that needs this file raises it, with a hint
        return USUAL
    finally:
        ops.pool_trim()  # the buffers of sequential reads may take as much as the budget


def _rate(read: Callable[[], None], count: Callable[[], int]) -> float:
    """Call `read` repeatedly for SECONDS; return by how much `count()` grew per second."""
    before, began = count(), time.perf_counter()
    while (seconds := time.perf_counter() - began) < SECONDS:
        read()
    return (count() - before) / seconds
