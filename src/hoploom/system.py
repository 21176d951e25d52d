"""Helpers for the whole process: closing objects, missing libraries, garbage collection, limits, signals.

Limits come from the host and from control groups, version 1 or 2, which are also bounded by their parents. If no group
can be read, the limits of the host apply. Signal handlers are set only in the main thread. If a process ignores SIGINT
from its start, as a shell's background jobs do, only SIGTERM stops it.
"""

import atexit
import ctypes
import gc
import os
import platform
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from types import FrameType, TracebackType
from typing import Any, Self

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError, HoploomError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
MEMBERSHIP, MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def group_files(
    controller: str, first: str, second: str, membership: Path = MEMBERSHIP, mounted: Path = MOUNTED
) -> Iterator[Path]:
    """Yield the paths of a control-group file, first in the groups of this process, then in their parents.

    The file is called `first` in control groups of version 1, `second` in version 2.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, group = rest.partition(":")
        if not colon or (controllers and controller not in controllers.split(",")):
            continue
        folder, name = (mounted / controller, first) if controllers else (mounted, second)
        path = PurePosixPath(group.lstrip("/"))
        yield from (folder / one / name for one in (path, *path.parents))


class Closing:
    """Mixin that closes the object at the end of its `with` block. An error of the block goes before one of closing."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_left = error is None or isinstance(error, GeneratorExit)  # a loop over a generator was left: no error
        with nullcontext() if is_left else suppress(HoploomError):
            self.close()


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn an ImportError in a `with` block into a ConfigError that tells how to install the libraries of an extra.

    >>> with needs("tables"):
    ...     import duckdb
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("hoploom"):
            raise
        raise ConfigError(f"{error.name} is not installed; type: pip install 'hoploom[{extra}]'") from error


def check_installed(package: str, what: str) -> None:
    """Raise ConfigError if a third-party package is not installed, without importing it."""
    if find_spec(package) is None:
        raise ConfigError(f"{what} needs {package}, which is not installed; type: pip install {package}")


def keep_imports() -> None:
    """Exclude all objects that exist now from garbage collection, which makes later collections and the exit faster."""
    gc.freeze()
    atexit.register(_thaw)


def _thaw() -> None:
    """Undo `keep_imports` if Triton 3.8 or newer is loaded, because it reports frozen objects as leaks at exit."""
    version = str(getattr(sys.modules.get("triton"), "__version__", "0.0")).split(".")
    if "triton._C.libtriton" in sys.modules and [int(number) for number in version[:2]] >= [3, 8]:
        gc.unfreeze()


def boot_id() -> str:
    """Return this host's boot id, which changes at a restart and is equal in all containers; "" if there is none."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def cpu_model() -> str:
    """Return the name of the processor, e.g. AMD EPYC 9554."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, model = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return " ".join(model.split())
    return platform.processor() or platform.machine()


def num_cores(membership: Path = MEMBERSHIP, mounted: Path = MOUNTED) -> int:
    """Return the number of cores that this process may use: its affinity, or its container's CPU quota if less."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(path) for path in group_files("cpu", "cpu.cfs_quota_us", "cpu.max", membership, mounted)]
    return max(1, int(min([bound, *(quota for quota in quotas if quota is not None)])))


def _quota(path: Path) -> float | None:
    """Return the CPU quota, in cores, that the control file `path` sets; None if it sets none or does not exist."""
    try:
        words = path.read_text().split()
        if path.name != "cpu.max":
            words += path.with_name("cpu.cfs_period_us").read_text().split()
        quota, period = map(int, words)
    except (OSError, ValueError):  # not there, or "max"
        return None
    return quota / period if quota > 0 < period else None


def memory_limit(membership: Path = MEMBERSHIP, mounted: Path = MOUNTED) -> int:
    """Return the bytes of memory that this process may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in group_files("memory", "memory.limit_in_bytes", "memory.max", membership, mounted):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # not there (the container sees other paths), or "max"
            continue
    return min(limits)


def available_memory(membership: Path = MEMBERSHIP, mounted: Path = MOUNTED) -> int:
    """Return the bytes that this process may still allocate. File pages count as free: the kernel evicts them."""
    left = [_kilobytes("/proc/meminfo", "MemAvailable:") or memory_limit(membership, mounted)]
    for path in group_files("memory", "memory.limit_in_bytes", "memory.max", membership, mounted):
        with suppress(OSError, ValueError):  # not there, or "max"
            left.append(int(path.read_text()) - _private_bytes(path.with_name("memory.stat")))
    return max(0, min(left))


def _private_bytes(path: Path) -> int:
    """Return the bytes that the kernel cannot evict, because they are in no file on disk, from a memory.stat file."""
    held = dict(line.split()[:2] for line in path.read_text().splitlines())
    names = ("total_rss", "total_shmem") if "total_rss" in held else ("anon", "shmem")  # in version 1; in version 2
    return sum(int(held.get(name, 0)) for name in names)


def require_memory(num_bytes: int, what: str, way_out: str) -> None:
    """Raise ConfigError if `num_bytes` are not available, because the kernel would then kill the process."""
    if num_bytes > (left := available_memory()):
        raise ConfigError(f"{what} {as_bytes(num_bytes)}, {as_bytes(left)} are left; {way_out}")


def allow_open_files() -> int:
    """Raise this process's limit of open files as far as it may; return the limit, of file descriptors."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, mapped files included; 0 if the system does not tell."""
    return _kilobytes("/proc/self/status", "VmRSS:")


def _kilobytes(path: str, name: str) -> int:
    """Return the value of the line `name` of a kernel file, converted to bytes; 0 if file or line is missing."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


# --- signals -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EndTimeouts:
    """The seconds that processes get to end by themselves before they are stopped or killed."""

    after_failure: float = 5.0  # after another process failed
    after_interrupt: float = 30.0  # to write a checkpoint, say; a second Ctrl-C ends them
    after_terminate: float = 3.0  # between SIGTERM and SIGKILL


def killed_by(number: int) -> str:
    """Return a phrase such as "was killed by SIGTERM" for signal `number`, with a hint for SIGKILL."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = "; the kernel does that when memory runs out: see dmesg" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def take_over(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Set `handler` for SIGTERM, and for SIGINT unless it is ignored; return the previous handlers, for `put_back`."""
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    return {number: signal.signal(number, handler) for number in numbers}


def put_back(handlers: Mapping[int, Any]) -> None:
    """Install the handlers that `take_over` returned."""
    for number, handler in handlers.items():
        if handler is not None:  # None: the handler was not set in Python, which cannot set it
            signal.signal(number, handler)


class StopRequests:
    """A context manager in which SIGINT and SIGTERM set `stop_requested`; a second SIGINT raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            self._before = take_over(self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop_requested = True

    def __exit__(self, *raised: object) -> None:
        put_back(self._before)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """A context manager in which SIGTERM raises KeyboardInterrupt, unless the script handles or ignores it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def die_with(parent: int) -> None:
    """Make Linux kill this process when its parent process `parent` dies. Other systems cannot do this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)
