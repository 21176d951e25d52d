"""How much memory this process may use (the host's, or what its container or job is given of it), and holds now.

The kernel tells by files of its control groups. Where none can be read, it is the host's.
"""

import os
from pathlib import Path

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


def available_memory() -> int:
    """Bytes that this process may still take: of its limit, and of what the host has left."""
    limit = memory_limit()
    return min(
        limit - _kilobytes("/proc/self/status", "RssAnon:"), _kilobytes("/proc/meminfo", "MemAvailable:") or limit
    )


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
