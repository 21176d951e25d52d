"""Control groups of the kernel, version 1 or 2, that bound the memory of processes, their page cache included, and what
they read and write of a disk.

Needs root. A process enters the group before it imports anything, so nothing of it is outside.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
ENTER = 'for group in $0; do echo $$ > "$group/cgroup.procs" || exit 1; done; exec "$@"'
DEADLINE = 20.0  # seconds until a group is empty after its processes were killed


class GroupError(Exception):
    """No group can be made here."""


@dataclass(frozen=True)
class Disk:
    """What a group may ask of the disk that a file is on, reads and writes each."""

    path: Path
    requests_per_second: int
    bytes_per_second: int

    @property
    def number(self) -> str:
        """MAJOR:MINOR of the disk itself, not of a partition."""
        device = self.path.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        of_partition = Path(f"/sys/dev/block/{number}").resolve()
        return (of_partition.parent / "dev").read_text().strip() if (of_partition / "partition").exists() else number


@dataclass(frozen=True)
class MemoryGroup:
    """The folders of a group: version 1 has one for each thing that is bounded."""

    folders: tuple[Path, ...]

    def command(self, words: Sequence[str]) -> list[str]:
        """A command that enters the group and becomes another."""
        return ["sh", "-c", ENTER, " ".join(map(str, self.folders)), *words]


@contextmanager
def limited(num_bytes: int | None, disk: Disk | None = None) -> Iterator[MemoryGroup]:
    """A group with these limits; its processes are killed and it is removed at the end."""
    name = f"hoploom-{os.getpid()}-{time.monotonic_ns()}"
    make = _first_version if (MOUNTED / "memory").exists() else _second_version
    try:
        group = make(name, num_bytes, disk)
    except OSError as error:
        raise GroupError(f"no memory group can be made: {error}; run as root, outside a container") from error
    try:
        yield group
    finally:
        for folder in group.folders:
            _remove(folder)


def _first_version(name: str, num_bytes: int | None, disk: Disk | None) -> MemoryGroup:
    folder = MOUNTED / "memory" / name
    folder.mkdir()
    for file in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):  # with swap: no more than without
        if num_bytes is not None and (folder / file).exists():
            (folder / file).write_text(str(num_bytes))
    if disk is None:
        return MemoryGroup((folder,))
    block = MOUNTED / "blkio" / name
    block.mkdir()
    for way in ("read", "write"):
        (block / f"blkio.throttle.{way}_iops_device").write_text(f"{disk.number} {disk.requests_per_second}")
        (block / f"blkio.throttle.{way}_bps_device").write_text(f"{disk.number} {disk.bytes_per_second}")
    return MemoryGroup((folder, block))


def _second_version(name: str, num_bytes: int | None, disk: Disk | None) -> MemoryGroup:
    (MOUNTED / "cgroup.subtree_control").write_text("+memory" if disk is None else "+memory +io")
    folder = MOUNTED / name
    folder.mkdir()
    if num_bytes is not None:
        (folder / "memory.max").write_text(str(num_bytes))
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
    if disk is not None:
        rates = f"riops={disk.requests_per_second} wiops={disk.requests_per_second}"
        bytes_of = f"rbps={disk.bytes_per_second} wbps={disk.bytes_per_second}"
        (folder / "io.max").write_text(f"{disk.number} {rates} {bytes_of}")
    return MemoryGroup((folder,))


def _remove(folder: Path) -> None:
    """Workers outlive a process that was killed; a group can be removed when the last is gone."""
    until = time.monotonic() + DEADLINE
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError as error:
            if time.monotonic() > until:
                raise GroupError(f"{folder} cannot be removed: {error}; remove it with rmdir") from error
            time.sleep(0.05)
        else:
            return
