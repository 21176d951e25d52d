"""A store within a budget of memory: what of it is mapped, and what is read from the disk when it is wanted.

Memory takes, in this order: where each list begins, the lists, small fields, and of the other fields the first rows of
every part, which are the ones used most in a store that `partition` wrote. A share is kept for the rows of steps ahead.
"""

import errno
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from hoploom import ops
from hoploom.config.values import as_bytes, as_int, as_share, parse_bytes
from hoploom.errors import ConfigError, StoreError
from hoploom.ops import DiskFile, FileRows, Reads, RowRequest
from hoploom.schema import Owner
from hoploom.store import format as layout
from hoploom.store.base import Part
from hoploom.store.format import Manifest
from hoploom.store.on_disk import FarLists, FarRows, OnDisk

WINDOW = 0.25  # share of what the topology leaves that is kept for the rows of steps ahead
WARM = 16 << 20  # bytes that are read at once while a store gets warm
SMALL = 64  # bytes of a row: holding such a field saves as many reads as holding a wide one
NO_PARTS = (
    "memory limits what this process holds of the parts on this host, and it has none; give path and parts, or limit "
    "the servers: hoploom serve --store-memory, or server.store_memory in a cluster file"
)


@dataclass(frozen=True)
class Budget:
    """What lies in memory, of all parts that are open."""

    num_bytes: int
    lists: float  # share of the edges' sources
    small_fields: bool
    rows: float  # share of the rows of the other fields
    window: int  # bytes for the rows of steps ahead
    far_bytes: int  # that are read from the disk

    @property
    def holds_all(self) -> bool:
        return self.far_bytes == 0

    def __str__(self) -> str:
        lists = "all edges" if self.lists == 1 else f"{as_share(self.lists)} of the edges"
        small = ", small fields" if self.small_fields else ""
        rows = f"{as_share(self.rows)} of the rows" if self.rows < 1 else "all rows"
        held = f"{lists}{small} and {rows} in memory"
        return f"within {as_bytes(self.num_bytes)}: {held}, {as_bytes(self.far_bytes)} on disk"


def read_memory(memory: int | str) -> int:
    """What a user gives as a budget, in bytes."""
    if isinstance(memory, str):
        return parse_bytes("memory", memory)
    return as_int("memory", memory, 1, "give bytes such as '6GB'")


@contextmanager
def little_idle(window: int) -> Iterator[None]:
    """Within: where memory is little, what is freed is given back, but for a window's."""
    if window:
        ops.pool_keep_at_most(window)
    try:
        yield
    finally:
        if window:
            ops.pool_keep_at_most(sys.maxsize)


def read_scratch(folder: str | Path) -> Path:
    """A folder that files can be made in."""
    path = Path(folder)
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise ConfigError(f"scratch is {str(folder)!r:.200}, which is no folder that can be written; give one that is")
    return path


def warm_up(tensors: Iterable[Tensor]) -> None:
    """Read in the background, in order, what is mapped and fits: else every first use of a page costs a round trip."""
    slices = [t[i : i + n] for t in tensors for n in [_rows_of(t, WARM)] for i in range(0, len(t), n)]

    def read() -> None:
        for some in slices:
            if not threading.main_thread().is_alive():  # the program ends
                return
            ops.read_soon(some)

    threading.Thread(target=read, name="hoploom-warm-up").start()


def _rows_of(tensor: Tensor, num_bytes: int) -> int:
    return max(1, num_bytes * len(tensor) // max(1, tensor.nbytes))


def largest_file(folder: Path, manifest: Manifest) -> Path:
    """What the disk is measured on."""
    here = [name for name in manifest.files if layout.inside(folder, name).exists()]
    return layout.inside(folder, max(here, key=lambda name: manifest.files[name].bytes))


def plan_budget(parts: Sequence[Part], num_bytes: int) -> Budget:
    """How a budget is spent on the edges of some parts and the rows of some; ConfigError where it is too small."""
    begins = sum(lists.indptr.nbytes for part in parts for lists in part.lists)
    lists = sum(column.nbytes for part in parts for lists in part.lists for column in lists.columns) - begins
    small = sum(table.rows.nbytes for part in parts for table in part.tables.values() if table.raw.shape[1] <= SMALL)
    wide = sum(table.rows.nbytes for part in parts for table in part.tables.values()) - small
    return spend(num_bytes, begins, lists, small, wide)


def spend(num_bytes: int, begins: int, lists: int, small: int, wide: int) -> Budget:
    """The same from the bytes of where lists begin, of the lists, and of small and other fields."""
    everything = begins + lists + small + wide
    if everything <= num_bytes:
        return Budget(num_bytes, 1.0, True, 1.0, 0, 0)
    left = num_bytes - begins
    if left <= 0:
        least = as_bytes(begins * 5 // 4)
        raise ConfigError(
            f"memory is {as_bytes(num_bytes)}, and where the edge lists begin takes {as_bytes(begins)} of it; "
            f"give at least {least}, or leave memory out"
        )
    window = int(left * WINDOW)
    left -= window
    share_of_lists = min(1.0, left / lists) if lists else 1.0
    left -= int(share_of_lists * lists)
    holds_small = 0 < small <= left
    left -= small if holds_small else 0
    rest = wide if holds_small or not small else wide + small
    share = min(1.0, left / rest) if rest else 1.0
    far = int((1 - share_of_lists) * lists + (1 - share) * rest)
    return Budget(num_bytes, share_of_lists, holds_small, share, window, max(far, 1))


def open_on_disk(folder: Path, manifest: Manifest, number: int, part: Part, budget: Budget, reads: Reads) -> OnDisk:
    """A part within a budget."""
    return OnDisk(
        part,
        _far_tables(folder, manifest, number, part, budget),
        _far_lists(folder, manifest, number, part, budget),
        reads,
    )


def _far_tables(
    folder: Path, manifest: Manifest, number: int, part: Part, budget: Budget
) -> Mapping[tuple[Owner, str], FarRows]:
    far: dict[tuple[Owner, str], FarRows] = {}
    for (owner, name), table in part.tables.items():
        num_rows, row_bytes = table.raw.shape
        if (row_bytes <= SMALL and budget.small_fields) or budget.rows == 1 or not table.rows.nbytes:
            continue
        relation = None if isinstance(owner, str) else manifest.schema.relation(owner)
        file = (
            layout.node_file(number, str(owner), name) if relation is None else layout.edge_file(number, relation, name)
        )
        rows = _rows(folder, manifest, file, num_rows, table.rows.nbytes, table.first)
        far[owner, name] = FarRows(rows, int(budget.rows * num_rows), row_bytes)
    return far


def _far_lists(folder: Path, manifest: Manifest, number: int, part: Part, budget: Budget) -> Mapping[int, FarLists]:
    far: dict[int, FarLists] = {}
    for index, lists in enumerate(part.lists):
        if budget.lists == 1 or not lists.num_edges:
            continue
        relation = manifest.schema.relations[index]
        columns: dict[str, tuple[FileRows, torch.dtype]] = {}
        for name, file_name in (("indices", "indices"), ("weight", "weight"), ("edge_time", "time")):
            column = getattr(lists, name)
            if column is not None:
                file = layout.topology_file(number, relation, file_name)
                rows = _rows(folder, manifest, file, lists.num_edges, column.nbytes, lists.first_edge)
                columns[name] = rows, column.dtype
        indices, dtype = columns["indices"]
        far[index] = FarLists(lists, FarRows(indices, int(budget.lists * lists.num_edges), dtype.itemsize), columns)
    return far


def _rows(folder: Path, manifest: Manifest, name: str, num_rows: int, num_bytes: int, first: int) -> FileRows:
    """The values of a .npy file stand at its end."""
    try:
        file = DiskFile(str(layout.inside(folder, name)))
    except OSError as error:
        way_out = "; allow more open files: ulimit -n" if error.errno == errno.EMFILE else ""
        raise StoreError(f"{name} of {folder} cannot be opened: {error.strerror}{way_out}") from error
    return FileRows(file, manifest.files[name].bytes - num_bytes, num_rows, first)


# --- the speed of a disk -----------------------------------------------------------------------

BLOCK, LONG = 4096, 256 << 10  # bytes of a read: one block, and one of a sweep
AT_ONCE, LONG_AT_ONCE = 1024, 128  # of each in a round: the disk is never idle
SECONDS = 0.3  # for each of the two figures
LEAST = 64 << 20  # bytes of a file that is worth measuring
PATIENCE = 10.0  # seconds for another process that measures
CACHE = Path("~/.cache/hoploom/disks.json")


@dataclass(frozen=True)
class DiskFigures:
    """Of reads of which many are under way."""

    requests_per_second: float
    bytes_per_second: float

    @property
    def gap(self) -> int:
        """Bytes that are read in the time of one request."""
        return int(self.bytes_per_second / self.requests_per_second)


USUAL = DiskFigures(100_000, 1e9)  # of a small file, which is not measured


def disk_figures(path: Path, cache: Path = CACHE) -> DiskFigures:
    """The figures of the disk that a file is on. One process of a host measures, the others wait for it."""
    if path.stat().st_size < LEAST:
        return USUAL
    key = f"{path.stat().st_dev}-{os.statvfs(path).f_blocks}"
    try:
        kept = cache.expanduser()
        kept.parent.mkdir(parents=True, exist_ok=True)
        with kept.open("a+", encoding="utf-8") as file:
            _lock(file)
            file.seek(0)
            known = _read_known(file.read())
            if key in known:
                return known[key]
            found = measure_disk(path)
            file.truncate(0)
            file.write(json.dumps({of_disk: asdict(figures) for of_disk, figures in {**known, key: found}.items()}))
            return found
    except OSError:  # no home, or one that cannot be written
        return measure_disk(path)
    except ops.DiskError:  # which is raised, with a way out, where a batch wants what cannot be read
        return USUAL


def _read_known(text: str) -> dict[str, DiskFigures]:
    """What the cache has; nothing where somebody else has written to it."""
    try:
        return {key: DiskFigures(**kept) for key, kept in json.loads(text).items() if min(kept.values()) > 0}
    except (ValueError, TypeError, AttributeError):
        return {}


def _lock(file: TextIO) -> None:
    """Wait for who measures now; OSError for one that is stuck."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def measure_disk(path: Path) -> DiskFigures:
    """Read single blocks at random places, and long ones in order."""
    file = DiskFile(str(path))
    blocks = FileRows(file, 0, file.size // BLOCK)
    draw = torch.Generator().manual_seed(0)
    reads = Reads()

    def at_random() -> None:
        _read(reads, blocks, torch.randint(blocks.num_rows, (AT_ONCE,), generator=draw), BLOCK)

    def in_order() -> None:
        first = int(torch.randint(max(1, long.num_rows - LONG_AT_ONCE), (1,), generator=draw))
        _read(reads, long, torch.arange(first, min(first + LONG_AT_ONCE, long.num_rows)), LONG)

    long = FileRows(file, 0, file.size // LONG)
    requests, seconds = _repeat(at_random, lambda: reads.requests)
    num_bytes, long_seconds = _repeat(in_order, lambda: reads.bytes)
    return DiskFigures(requests / seconds, num_bytes / long_seconds)


def _read(reads: Reads, rows: FileRows, ids: torch.Tensor, row_bytes: int) -> None:
    out = ops.empty((len(ids), row_bytes), torch.uint8)
    reads.rows([RowRequest(rows, ids, torch.arange(len(ids)), out)])


def _repeat(read: Callable[[], None], count: Callable[[], int]) -> tuple[int, float]:
    """What was read in SECONDS, and how long it really took."""
    before, began = count(), time.perf_counter()
    while (seconds := time.perf_counter() - began) < SECONDS:
        read()
    return count() - before, seconds
