"""What a run writes besides steps and epochs: where time and memory go, a line a second, and what happened when.

Sums of about a second, not a line per step: reading a clock costs nothing, a line does. Everything here is for
`hoploom report`; nothing reads it to train.
"""

import os
import platform
import resource
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoploom.errors import ConfigError
from hoploom.store.format import STORE_FILE
from hoploom.system import num_cores

if TYPE_CHECKING:
    from hoploom.train.step import StepReport

EVENTS = "events.jsonl"
PAUSE = 1.0  # seconds of training between two lines
DIGITS = 6  # of seconds that are written
MOST_WARNINGS = 100  # different ones that a run keeps
LIBRARIES = ("hoploom", "torch", "torch-geometric", "numpy", "triton")
MEMORY = {"RssAnon": "private", "RssShmem": "shared", "RssFile": "mapped"}  # as the kernel calls it, and we do

Write = Callable[[Mapping[str, Any]], None]
Counts = Mapping[str, float]


def times_file(rank: int | str) -> str:
    return f"times-rank{rank}.jsonl"


class Times:
    """Adds up the seconds of one rank, and writes a line about once a second.

    `loader`, `traffic`, `disk` and `reads` are counts since the run began; a line has what they grew by.
    """

    def __init__(self, write: Write, gpu_bytes: Callable[[], Counts] = dict) -> None:
        self._write, self._gpu_bytes = write, gpu_bytes
        self._sources: Mapping[str, Callable[[], Counts]] = {}
        self._before: dict[str, Counts] = {}
        self._seconds: dict[str, float] = {}
        self._step, self._num_steps, self._since = 0, 0, 0.0

    def watch(self, sources: Mapping[str, Callable[[], Counts]], step: int) -> None:
        """Which counts to read from now on, by name; training stands at this step."""
        self._sources, self._step = sources, step
        self._before = {name: read() for name, read in sources.items()}

    def add_step(self, report: "StepReport") -> None:
        """Add a step's seconds."""
        seconds = self._seconds
        seconds["step"] = seconds.get("step", 0.0) + report.seconds
        seconds["wait"] = seconds.get("wait", 0.0) + report.wait_seconds
        for name, spent in report.parts.items():
            seconds[name] = seconds.get(name, 0.0) + spent
        self._step, self._num_steps = report.step, self._num_steps + 1
        self._since += report.seconds
        if self._since >= PAUSE:
            self.flush()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Within: what is spent between two steps, on a validation, say. What a validation reads is no step's."""
        began = time.perf_counter()
        held = {source: read() for source, read in self._sources.items()} if name == "validation" else {}
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
            for source, counts in held.items():
                before, now = self._before[source], self._sources[source]()
                self._before[source] = {key: before.get(key, 0) + now[key] - counts.get(key, 0) for key in now}

    def flush(self) -> None:
        """Write what there is, if there is any."""
        if not self._seconds:
            return
        line: dict[str, Any] = {"at": round(time.time(), 3), "step": self._step, "steps": self._num_steps}
        line["seconds"] = {name: round(spent, DIGITS) for name, spent in self._seconds.items()}
        for name, read in self._sources.items():
            now, before = read(), self._before[name]
            if grown := {key: round(value - before.get(key, 0), DIGITS) for key, value in now.items()}:
                line[name] = grown
            self._before[name] = now
        line["memory"] = {**memory(), **self._gpu_bytes()}
        self._seconds, self._num_steps, self._since = {}, 0, 0.0
        self._write(line)


def memory(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """Bytes of this process by kind; nothing where the system does not say. `mapped` is mostly the graph, which all
    processes of a host share."""
    found = {}
    with suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in MEMORY:
                found[MEMORY[name]] = 1024 * int(rest.split()[0])
    return found


def disk(io: Path = Path("/proc/self/io")) -> dict[str, float]:
    """What this process has read from disks so far: bytes, where the system says, and page faults that had to read.

    No seconds: the kernel counts them per thread, if at all, and forgets a thread that ends."""
    found: dict[str, float] = {"faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt}
    with suppress(OSError, ValueError, KeyError):
        found["read_bytes"] = int(dict(line.split(": ") for line in io.read_text().splitlines())["read_bytes"])
    return found


def machine(rank: int, device: str, cores: int) -> dict[str, Any]:
    """Where a rank runs."""
    found = {"rank": rank, "host": socket.gethostname(), "cpu": cpu_model(), "cores": cores, "host_cores": num_cores()}
    with suppress(OSError, ValueError, AttributeError):
        found["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found | {"system": platform.platform(terse=True), "device": device}


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """As the kernel names it, else the kind of processor."""
    with suppress(OSError):
        for line in info.read_text().splitlines():
            name, _, model = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return " ".join(model.split())
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of what computes, where it is installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


class Warned:
    """Different warnings of a run. Any thread adds them; the thread that trains takes them and writes them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage may warn in a thread that holds it
        self._known: set[str] = set()
        self._waiting: list[str] = []
        self._num_more = 0

    def add(self, text: str) -> None:
        """Keep a warning, each once."""
        with self._lock:
            if text not in self._known and len(self._known) < MOST_WARNINGS:
                self._known.add(text)
                self._waiting.append(text)
            elif text not in self._known:
                self._num_more += 1

    def take(self) -> list[str]:
        """Those that nobody took yet."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken

    def take_rest(self) -> list[str]:
        """Those, and how many more there were; a run that begins after this keeps all texts again."""
        with self._lock:
            more = f"and {self._num_more:,} more warnings: the first {MOST_WARNINGS} different ones are kept"
            rest = self.take() + [more] * (self._num_more > 0)
            self._known, self._num_more = set(), 0
        return rest


@contextmanager
def warnings_kept(keep: Callable[[str], None]) -> Iterator[None]:
    """Within, warnings are kept too, and shown as before."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        keep(f"{category.__name__}: {message}")
        shown(message, category, *rest, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = shown


def no_run(folder: Path, missing: str) -> ConfigError:
    """Return the error of a path that is not the output folder of a run."""
    what = "is a store, not a run" if (folder / STORE_FILE).is_file() else f"is no run: {missing}"
    what = what if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
    return ConfigError(f"{folder} {what}; give the output folder of `hoploom train`, e.g. run")
