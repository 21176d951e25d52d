"""A control group of the kernel's that bounds memory, of version 1 or 2: what is in it, the page cache too, is evicted
or killed at the limit.

Memory counts for the group that touched it first, so what a process held before it entered is not counted.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MOUNTED = Path("/sys/fs/cgroup")
ENTER = "MEMORY_GROUP"  # the variable that tells a child which group to enter: see enter


@dataclass(frozen=True)
class MemoryGroup:
    folder: Path
    peak_file: str
    limit: int

    @property
    def peak(self) -> int:
        return int((self.folder / self.peak_file).read_text())

    @property
    def num_killed(self) -> int:
        lines = [
            line.split()
            for name in ("memory.oom_control", "memory.events")
            if (self.folder / name).exists()
            for line in (self.folder / name).read_text().splitlines()
        ]
        return next((int(count) for name, count in lines if name == "oom_kill"), 0)

    def run(self, script: str, arguments: Sequence[str], seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """Run Python in a child, which says `enter()` when the limit shall hold for it."""
        environment = {**os.environ, ENTER: str(self.folder)}
        command = [sys.executable, "-c", f"from support.memory_group import enter\n{script}", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


def enter() -> None:
    (Path(os.environ[ENTER]) / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """A group of this test's own, gone afterwards; a skip where the host lets us make none."""
    version_1 = (MOUNTED / "memory").is_dir()
    folder = (MOUNTED / "memory" if version_1 else MOUNTED) / f"hoploom-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        try:
            (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
            group = MemoryGroup(folder, "memory.max_usage_in_bytes" if version_1 else "memory.peak", limit)
            assert group.peak >= 0
        except OSError as error:
            pytest.skip(f"a control group here bounds no memory: {error}")
        yield group
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Its processes have ended, and the kernel may need a moment to see it."""
    end = time.monotonic() + 10
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def forget_pages(folder: Path) -> None:
    """Nothing of these files is in the page cache, where it would count for whoever has read it."""
    for path in folder.rglob("*.npy"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
