"""Processes as the kernel shows them: who started whom, and the most memory that each has held; and daemons."""

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hoploom.deploy.guard import descendants

PROC = Path("/proc")
END_DEADLINE = 10.0
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
INTERVAL = 0.05  # seconds between two looks


def children_of(pid: int) -> list[int]:
    try:
        lists = [task.read_text() for task in (PROC / str(pid) / "task").glob("*/children")]
    except OSError:  # it has ended
        return []
    return [int(child) for line in lists for child in line.split()]


def command_of(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def runs(pid: int) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has no command any more."""
    return command_of(pid) != ""


def processes_in(folder: Path) -> list[int]:
    """Processes that work in this folder, or were started for it."""
    found = []
    for pid in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        with suppress(OSError):
            here = os.readlink(PROC / str(pid) / "cwd")
            if pid != os.getpid() and (here == str(folder) or str(folder) in command_of(pid)):
                found.append(pid)
    return found


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
        return max(self.peaks.get(role, {}).values(), default=0)

    def __enter__(self) -> "PeakMemory":
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL):
            for role, pids in self.find().items():
                for pid in pids:
                    known = self.peaks.setdefault(role, {})
                    known[pid] = max(known.get(pid, 0), memory_of(pid))


@contextmanager
def daemon(words: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[int]:
    """A process that ends with this block, and all below it; with pytest, too, however that ends."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL),
        )
    try:
        yield process.pid
    finally:
        below = descendants(process.pid)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_DEADLINE)
        process.kill()
        process.wait(END_DEADLINE)
        for pid in below:
            if runs(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
