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


def resident_bytes() -> int:
    """Resident pages, those of mapped files too; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
