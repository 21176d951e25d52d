"""What a disk can do: requests and bytes per second, measured once (0.6 s) and kept in the user's cache folder.

They decide which gaps between two rows are read: a gap that takes less time than another request. So a slow disk is
swept from beginning to end, and of a fast one single blocks are read.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch

from hoploom import ops
from hoploom.ops import DiskFile, FileRows, Reads, RowRequest

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
            found = measure(path)
            file.truncate(0)
            file.write(json.dumps({of_disk: asdict(figures) for of_disk, figures in {**known, key: found}.items()}))
            return found
    except OSError:  # no home, or one that cannot be written
        return measure(path)
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


def measure(path: Path) -> DiskFigures:
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
