"""Records of time, memory and disk of a run: sums of about a second, written for `hoploom report`.

Threads wait for the disk while others compute, so no clock says what bounds a run. It is what is busy longest: the
disk, the loader's threads (sampling, gathering, transforms), the servers, or the model if few steps wait.
"""

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError
from hoploom.store.format import STORE_FILE

if TYPE_CHECKING:
    from hoploom.load.loader import Loader
    from hoploom.train.step import StepReport

EVENTS = "events.jsonl"
PAUSE = 1.0  # seconds of training between two lines
DIGITS = 6  # of seconds that are written
MEMORY_KINDS = {"RssAnon": "private", "RssShmem": "shared", "RssFile": "mapped"}  # the kernel's names, and ours
WAITS = 0.2  # share of a step from which waiting for batches is reported

Counts = Mapping[str, float]


def times_file(rank: int | str) -> str:
    return f"times-rank{rank}.jsonl"


def no_run(folder: Path, missing: str) -> ConfigError:
    """Return the error of a path that is not the output folder of a run."""
    what = "is a store, not a run" if (folder / STORE_FILE).is_file() else f"is no run: {missing}"
    what = what if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
    return ConfigError(f"{folder} {what}; give the output folder of `hoploom train`, e.g. run")


class Times:
    """Adds up the seconds of one rank, and writes a line about once a second.

    `loader`, `traffic`, `disk` and `reads` are counts since the run began; a line has what they grew by.
    """

    def __init__(self, write: Callable[[Mapping[str, Any]], None], gpu_bytes: Callable[[], Counts] = dict) -> None:
        self._write, self._gpu_bytes = write, gpu_bytes
        self._sources: Mapping[str, Callable[[], Counts]] = {}
        self._before: dict[str, Counts] = {}
        self._seconds: dict[str, float] = {}
        self._step, self._num_steps, self._since = 0, 0, 0.0

    def watch(self, sources: Mapping[str, Callable[[], Counts]], step: int) -> None:
        """Read these counts from now on; training is at this step."""
        self._sources, self._step = sources, step
        self._before = {name: read() for name, read in sources.items()}

    def add_step(self, report: "StepReport") -> None:
        """Add a step's seconds."""
        for name, spent in {"step": report.seconds, "wait": report.wait_seconds, **report.parts}.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + spent
        self._step, self._num_steps = report.step, self._num_steps + 1
        self._since += report.seconds
        if self._since >= PAUSE:
            self.flush()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of this block, such as a validation, whose reads belong to no step."""
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
        """Write a line, if there is anything to write."""
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
    """Return the bytes of this process by kind, as far as the system knows them. `mapped` is mostly the graph, which
    all processes of a host share."""
    found = {}
    with suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in MEMORY_KINDS:
                found[MEMORY_KINDS[name]] = 1024 * int(rest.split()[0])
    return found


def disk(io: Path = Path("/proc/self/io")) -> dict[str, float]:
    """Return the bytes that this process has read from disks, if the system knows them, and its major page faults.

    No seconds: the kernel counts them per thread, if at all, and forgets a thread that ends."""
    found: dict[str, float] = {"faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt}
    with suppress(OSError, ValueError, KeyError):
        found["read_bytes"] = int(dict(line.split(": ") for line in io.read_text().splitlines())["read_bytes"])
    return found


# --- use of the disk -----------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskUse:
    """The reads of one rank, or the mean of several."""

    bytes_per_step: float
    wanted: float  # share of these bytes
    found: float  # share of the requested rows and edges that were in memory
    busy: float  # share of the time in which a read was in flight
    bound: str  # disk, sampling, servers or model

    @property
    def texts(self) -> tuple[str, ...]:
        """Ends of a progress line, the longest first."""
        return f"  {self}", f"  {self.short}", f" ({self.bound})"

    @property
    def short(self) -> str:
        return f"disk {100 * self.busy:.0f} % busy, bound by {self.bound}"

    def __str__(self) -> str:
        shares = f"{100 * self.wanted:.0f} % wanted, {100 * self.found:.0f} % hits"
        return f"{as_bytes(self.bytes_per_step)}/batch read, {shares}, {self.short}"


def disk_use(
    num_steps: int, seconds: Counts, reads: Counts, stages: Counts, waits: float = 0.0, *, threads: int
) -> DiskUse | None:
    """Return the use of the disk from counts of some steps; None if nothing was requested from it.

    `seconds` are those of steps and their waits, `waits` those for servers; `stages` and `waits` are of all threads.
    """
    if not reads.get("asked") or not num_steps or not seconds.get("step"):
        return None
    waited, at_once = seconds.get("wait", 0.0), max(1, threads)
    busy = {
        "disk": reads["busy_seconds"],
        "servers": waits / at_once,
        "sampling": (sum(stages.values()) - reads["seconds"] - waits) / at_once,
    }
    in_turn = not threads and 2 * waited < seconds["step"]  # nothing runs beside the model
    few_wait = waited < WAITS * seconds["step"] or in_turn
    return DiskUse(
        reads["bytes"] / num_steps,
        reads["wanted_bytes"] / reads["bytes"] if reads["bytes"] else 1.0,
        reads["found"] / reads["asked"],
        min(1.0, reads["busy_seconds"] / seconds["step"]),
        "model" if few_wait else max(busy, key=lambda name: busy[name]),
    )


class DiskMeter:
    """Adds up what the steps of a loader cost the disk, if its store reads from disk."""

    def __init__(self, loader: "Loader") -> None:
        store = getattr(loader, "store", None)
        self._loader, self._num_steps = loader, 0
        self._seconds = {"step": 0.0, "wait": 0.0}
        self._sources: dict[str, Callable[[], Counts]] = {}
        if store is not None and store.reads is not None:
            self._sources = {"reads": store.reading, "stages": loader.stage_seconds, "traffic": store.traffic}
        self._last = self._read()
        self._grown: dict[str, dict[str, float]] = {name: {} for name in self._sources}

    def step(self, report: "StepReport") -> None:
        """Add what was read since the last step."""
        if not self._sources:
            return
        self._num_steps += 1
        self._seconds["step"] += report.seconds
        self._seconds["wait"] += report.wait_seconds
        now = self._read()
        for name, grown in self._grown.items():
            for key, value in now[name].items():
                grown[key] = grown.get(key, 0.0) + value - self._last[name].get(key, 0.0)
        self._last = now

    def skip(self) -> None:
        """Leave out what was read since the last step, for a validation."""
        self._last = self._read()

    def use(self) -> DiskUse | None:
        """Return the use of the disk by all steps so far; None if the store reads nothing from it."""
        if not self._sources:
            return None
        grown, threads = self._grown, self._loader.num_workers
        waits = grown["traffic"].get("wait_seconds", 0.0)
        return disk_use(self._num_steps, self._seconds, grown["reads"], grown["stages"], waits, threads=threads)

    def _read(self) -> dict[str, Counts]:
        return {name: read() for name, read in self._sources.items()}
