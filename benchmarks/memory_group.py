"""A control group of the kernel, version 1 or 2, that bounds the memory of processes, their page cache included.

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
ENTER = 'echo $$ > "$0" && exec "$@"'
DEADLINE = 20.0  # seconds until a group is empty after its processes were killed


class GroupError(Exception):
    """No group can be made here."""


@dataclass(frozen=True)
class MemoryGroup:
    """A group's folder."""

    folder: Path

    def command(self, words: Sequence[str]) -> list[str]:
        """A command that enters the group and becomes another."""
        return ["sh", "-c", ENTER, str(self.folder / "cgroup.procs"), *words]


@contextmanager
def limited(num_bytes: int) -> Iterator[MemoryGroup]:
    """A group with this limit; its processes are killed and it is removed at the end."""
    name = f"hoploom-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group = _first_version(name, num_bytes) if (MOUNTED / "memory").exists() else _second_version(name, num_bytes)
    except OSError as error:
        raise GroupError(f"no memory group can be made: {error}; run as root, outside a container") from error
    try:
        yield group
    finally:
        _remove(group)


def _first_version(name: str, num_bytes: int) -> MemoryGroup:
    folder = MOUNTED / "memory" / name
    folder.mkdir()
    for file in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):  # with swap: no more than without
        if (folder / file).exists():
            (folder / file).write_text(str(num_bytes))
    return MemoryGroup(folder)


def _second_version(name: str, num_bytes: int) -> MemoryGroup:
    (MOUNTED / "cgroup.subtree_control").write_text("+memory")
    folder = MOUNTED / name
    folder.mkdir()
    (folder / "memory.max").write_text(str(num_bytes))
    if (folder / "memory.swap.max").exists():
        (folder / "memory.swap.max").write_text("0")
    return MemoryGroup(folder)


def _remove(group: MemoryGroup) -> None:
    """Workers outlive a process that was killed; a group can be removed when the last is gone."""
    until = time.monotonic() + DEADLINE
    while True:
        for pid in (group.folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            group.folder.rmdir()
        except OSError as error:
            if time.monotonic() > until:
                raise GroupError(f"{group.folder} cannot be removed: {error}; remove it with rmdir") from error
            time.sleep(0.05)
        else:
            return
