"""How much memory this process may use (the host's, or what its container or job is given of it), and holds now.

The kernel tells by files of its control groups. Where none can be read, it is the host's.
"""

import os
from contextlib import suppress
from pathlib import Path

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError
from hoploom.system import MEMBERSHIP, MOUNTED, group_files


def memory_limit(membership: Path = MEMBERSHIP, mounted: Path = MOUNTED) -> int:
    """Bytes of memory that this process may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in group_files("memory", "memory.limit_in_bytes", "memory.max", membership, mounted):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # not there (the container sees other paths), or "max"
            continue
    return min(limits)


def available_memory(membership: Path = MEMBERSHIP, mounted: Path = MOUNTED) -> int:
    """Bytes that this process may still take: of its limits, and of what the host has left. Pages of files count as
    free: they are evicted for it."""
    left = [_kilobytes("/proc/meminfo", "MemAvailable:") or memory_limit(membership, mounted)]
    for path in group_files("memory", "memory.limit_in_bytes", "memory.max", membership, mounted):
        with suppress(OSError, ValueError):  # not there, or "max"
            left.append(int(path.read_text()) - _private_bytes(path.with_name("memory.stat")))
    return max(0, min(left))


def _private_bytes(path: Path) -> int:
    """What all processes of a group hold that is in no file of a disk."""
    held = dict(line.split()[:2] for line in path.read_text().splitlines())
    names = ("total_rss", "total_shmem") if "total_rss" in held else ("anon", "shmem")  # in version 1; in version 2
    return sum(int(held.get(name, 0)) for name in names)


def require_memory(num_bytes: int, what: str, way_out: str) -> None:
    """ConfigError for what would not fit, before it is taken: the kernel ends a process that takes too much."""
    if num_bytes > (left := available_memory()):
        raise ConfigError(f"{what} {as_bytes(num_bytes)}, {as_bytes(left)} are left; {way_out}")


def resident_bytes() -> int:
    """Resident pages, those of mapped files too; 0 where the system does not tell."""
    return _kilobytes("/proc/self/status", "VmRSS:")


def _kilobytes(path: str, name: str) -> int:
    """A line of the kernel's, in bytes; 0 where there is none."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
