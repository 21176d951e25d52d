"""What a run reads from disk for its batches, where the store is larger than its budget, and what bounds the run.

Threads wait for the disk while others compute, so no clock says what bounds a run. Here it is what is busy longest:
the disk, the loader's threads (sampling, gathering, transforms), the servers, or the model where few steps wait.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoploom.config.values import as_bytes
from hoploom.load.loader import Loader

if TYPE_CHECKING:
    from hoploom.train.step import StepReport

WAITS = 0.2  # share of a step from which waiting for batches is worth a word

Counts = Mapping[str, float]


@dataclass(frozen=True)
class DiskUse:
    """The reads of one rank, or the mean of several."""

    bytes_per_step: float
    wanted: float  # share of these bytes
    found: float  # share of the rows and edges asked for that were in memory
    busy: float  # share of the time in which a read was under way
    bound: str  # disk, sampling, servers or model

    @property
    def short(self) -> str:
        return f"disk {_percent(self.busy)} busy, bound by {self.bound}"

    @property
    def texts(self) -> tuple[str, ...]:
        """What a line ends with that says how long steps wait: the first one for which there is room."""
        return f"  {self}", f"  {self.short}", f" ({self.bound})"

    def __str__(self) -> str:
        shares = f"{_percent(self.wanted)} wanted, {_percent(self.found)} hits"
        return f"{as_bytes(self.bytes_per_step)}/batch read, {shares}, {self.short}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def disk_use(
    num_steps: int, seconds: Counts, reads: Counts, stages: Counts, waits: float = 0.0, *, threads: int
) -> DiskUse | None:
    """From counts of some steps: `seconds` of steps and their waits, `waits` for servers; None if nothing was asked.

    `stages` and `waits` are those of all threads.
    """
    if not reads.get("asked") or not num_steps or not seconds.get("step"):
        return None
    return DiskUse(
        reads["bytes"] / num_steps,
        reads["wanted_bytes"] / reads["bytes"] if reads["bytes"] else 1.0,
        reads["found"] / reads["asked"],
        min(1.0, reads["busy_seconds"] / seconds["step"]),
        _bound(seconds, reads, sum(stages.values()), waits, threads),
    )


def _bound(seconds: Counts, reads: Counts, making: float, waits: float, threads: int) -> str:
    waited = seconds.get("wait", 0.0)
    in_turn = not threads and 2 * waited < seconds["step"]  # nothing runs beside the model
    if waited < WAITS * seconds["step"] or in_turn:
        return "model"
    at_once = max(1, threads)
    busy = {
        "disk": reads["busy_seconds"],
        "servers": waits / at_once,
        "sampling": (making - reads["seconds"] - waits) / at_once,
    }
    return max(busy, key=lambda name: busy[name])


class DiskMeter:
    """Adds up what the steps of a loader cost the disk. Costs nothing where its store reads nothing."""

    def __init__(self, loader: Loader) -> None:
        store = getattr(loader, "store", None)
        self._is_off = store is None or store.reads is None
        self._loader, self._num_steps = loader, 0
        self._seconds = {"step": 0.0, "wait": 0.0}
        self._sources: dict[str, Callable[[], Counts]] = {}
        if store is not None and not self._is_off:
            self._sources = {"reads": store.reading, "stages": loader.stage_seconds, "traffic": store.traffic}
        self._last = self._read()
        self._grown: dict[str, dict[str, float]] = {name: {} for name in self._sources}

    def step(self, report: "StepReport") -> None:
        """A step has ended."""
        if self._is_off:
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
        """What was read since the last step was not for steps: a validation has ended."""
        self._last = self._read()

    def use(self) -> DiskUse | None:
        """Of all steps so far; None where the store reads nothing."""
        if self._is_off:
            return None
        grown, threads = self._grown, self._loader.num_workers
        waits = grown["traffic"].get("wait_seconds", 0.0)
        return disk_use(self._num_steps, self._seconds, grown["reads"], grown["stages"], waits, threads=threads)

    def _read(self) -> dict[str, Counts]:
        return {name: read() for name, read in self._sources.items()}
