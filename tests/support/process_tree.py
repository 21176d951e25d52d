"""Processes as the kernel shows them: who started whom, what they are, and the most memory that each has held."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")
INTERVAL = 0.05  # seconds between two looks


def children_of(pid: int) -> list[int]:
    """The processes that one has started and that run, of all its threads."""
    try:
        lists = [task.read_text() for task in (PROC / str(pid) / "task").glob("*/children")]
    except OSError:  # it has ended
        return []
    return [int(child) for line in lists for child in line.split()]


def descendants_of(pid: int) -> list[int]:
    """All processes below one."""
    below = [pid]
    for parent in below:
        below += children_of(parent)
    return below[1:]


def command_of(pid: int) -> str:
    """Its command line; empty once it has ended."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Whether it is there and no zombie."""
    return command_of(pid) != ""


def is_java(pid: int) -> bool:
    return os.path.basename(command_of(pid).split(" ")[0]) == "java"


def memory_of(pid: int, key: str = "VmHWM") -> int:
    """Bytes by a key of the kernel's; VmHWM is the most that has been resident. 0 once it has ended."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


@dataclass
class PeakMemory:
    """While this is entered, the most memory that each process held, by the role that `find` gives it.

    The kernel keeps a process's peak, so only what it takes on in its last moments before it ends is missed.
    """

    find: Callable[[], Mapping[str, Iterable[int]]]  # role -> processes
    peaks: dict[str, dict[int, int]] = field(default_factory=dict)  # role -> pid -> bytes

    def of(self, role: str) -> int:
        """The most that one process of a role has held; 0 if there was none."""
        return max(self.peaks.get(role, {}).values(), default=0)

    def __enter__(self) -> "PeakMemory":
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL):
            for role, pids in self.find().items():
                for pid in pids:
                    known = self.peaks.setdefault(role, {})
                    known[pid] = max(known.get(pid, 0), memory_of(pid))
