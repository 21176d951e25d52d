"""How much memory this process may use (the host's, or what its container or job is given of it), and holds now.

The kernel tells by files of its control groups, version 1 or 2; a group is bounded by those above it too. Where none
can be read, it is the host's.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MEMBERSHIP, MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_limit(membership: Path = MEMBERSHIP, mounted: Path = MOUNTED) -> int:
    """Bytes of memory that this process may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _limit_files(membership, mounted):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # not there (the container sees other paths), or "max"
            continue
    return min(limits)


def _limit_files(membership: Path, mounted: Path) -> Iterator[Path]:
    """Those of this process's groups, and of the groups around them."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, group = rest.partition(":")
        if not colon or (controllers and "memory" not in controllers.split(",")):
            continue
        folder, name = (mounted / "memory", "memory.limit_in_bytes") if controllers else (mounted, "memory.max")
        path = PurePosixPath(group.lstrip("/"))
        yield from (folder / one / name for one in (path, *path.parents))


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
