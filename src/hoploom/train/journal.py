"""The journal of a run: files about its steps, epochs and machines, and the loggers that get a copy of the metrics.

The files have a JSON line per step of each rank, one per epoch, and about one per second with the time and memory
used. A power cut may lose the newest lines. Each logger runs in a thread of its own, so that a slow network delays no
step. A logger that fails is dropped for the rest of the run, with one warning.
"""

import json
import math
import os
import platform
import queue
import resource
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import torch

from hoploom.errors import ConfigError, StoreError
from hoploom.store.format import STORE_FILE
from hoploom.system import check_installed, cpu_model, num_cores

if TYPE_CHECKING:
    from hoploom.ranks.context import Context
    from hoploom.train.step import Learner, StepReport

EPOCHS = "metrics.jsonl"
WRITTEN = ("epoch", "step", "loss", "seeds", "rows", "learning_rate", "seconds", "wait_seconds")  # of a step
LOGGED = ("loss", "learning_rate", "seconds", "wait_seconds")  # of a step
LIBRARIES = ("hoploom", "torch", "torch-geometric", "numpy", "triton")


class Journal:
    """The journal of one rank: steps-rank0.jsonl and so on; rank 0 also writes metrics.jsonl and feeds the loggers.

    >>> with Journal("runs/papers", context, loggers=["tensorboard", "wandb", MyLogger()]) as journal:
    ...     fit(learner, training, context, journal=journal)

    In a `with` block, the journal also records a test or an error after `fit`. Otherwise, it closes when `fit` ends.
    `loggers` are names, or objects with the three methods of `Logger`. None means TensorBoard, if it is installed.
    `settings` are the run's settings that W&B shows, such as `{"optimizer.lr": 0.01}`.
    """

    def __init__(
        self,
        folder: str | Path,
        context: "Context",
        *,
        loggers: "Sequence[str | Logger] | None" = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._context = Path(folder), context
        self.steps_file, self.epochs_file = self._folder / f"steps-rank{context.rank}.jsonl", self._folder / EPOCHS
        self._times_file = self._folder / times_file(context.rank)
        self.times = Times(lambda line: self._append(self._times_file, line), context.device)
        self._files: dict[str, TextIO] = {}
        self._outcome: dict[str, Any] | None = None  # of training; written as an event when the journal is closed
        self._is_entered = False
        self._loggers = make_loggers(loggers if context.is_main else [], self._folder, settings or {})

    @contextmanager
    def recording(self, learner: "Learner", machines: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Record the training of `learner` in this block. First remove lines of steps and epochs beyond its progress.

        `machines` has the result of `machine_of` for each rank.
        """
        progress, loader = learner.progress, learner.loader
        self.rewind(progress.steps, progress.epoch)
        if progress.steps == 0 and self._context.is_main:
            (self._folder / EVENTS).unlink(missing_ok=True)
        store = getattr(loader, "store", None)
        sources: dict[str, Callable[[], Mapping[str, float]]] = {"loader": loader.stage_seconds, "disk": disk}
        if store is not None and store.deployment.traffic():
            sources["traffic"] = store.deployment.traffic
        if store is not None and store.reading():
            sources["reads"] = store.reading
        self.times.watch(sources, progress.steps)
        self.event(
            "start",
            step=progress.steps,
            machines=list(machines),
            versions=versions(),
            monitor=list(learner.task.monitor),
            threads=loader.num_workers,
            steps_per_epoch=len(loader),
        )
        self._outcome = {}
        try:
            yield
        except BaseException as error:
            with suppress(StoreError):  # the first error is the one to raise
                self.times.flush()
                self._outcome["step"] = progress.steps
                self._end(error)
                if not self._is_entered:
                    self.close(failed=True)
            raise
        self.times.flush()
        if not self._is_entered:
            self.close()

    def ended(self, ending: str, *, step: int) -> None:
        """Store how training ended. `close` writes it as an event, because a test that follows may still fail."""
        self._outcome = {"stopped": ending, "step": step}

    def _end(self, error: BaseException | None = None) -> None:
        """Write an event that says how training ended, at most once. `error` is the exception that ended it, if any."""
        outcome, self._outcome = self._outcome, None
        if outcome is None or (error is None and "stopped" not in outcome):
            return
        if error is not None:
            outcome = {"error": f"{type(error).__name__}: {error}", "step": outcome.get("step", 0)}
        self.event("end", **outcome)

    def event(self, kind: str, **content: Any) -> None:
        """Write an event to events.jsonl; ranks other than 0 write nothing."""
        if self._context.is_main:
            self._append(self._folder / EVENTS, {"event": kind, "at": round(time.time(), 3), **content})

    def rewind(self, steps: int, epochs: int) -> None:
        """Remove lines of steps after `steps` and epochs after `epochs`, and let the loggers go on from there."""
        self.close()
        paths = {self.steps_file, self._times_file}
        if self._context.is_main:  # also files of ranks that no longer exist
            for name in ("steps-rank{}.jsonl", times_file("{}")):
                others = {self._folder / name.format(rank) for rank in range(1, self._context.world_size)}
                paths |= set(self._folder.glob(name.format("*"))) - others
            _shorten(self.epochs_file, None, epochs)
        for path in paths:
            _shorten(path, "step", steps)
        for logger in self._loggers:
            logger.begin(steps)

    def step(self, report: "StepReport") -> None:
        """Write a step's line to this rank's file, and send its loss, learning rate and seconds to the loggers."""
        line = {name: getattr(report, name) for name in WRITTEN}
        line["epoch"] += 1
        self._append(self.steps_file, line)
        self.times.add_step(report)
        self._log(report.step, "step", {name: line[name] for name in LOGGED})

    def epoch(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write an epoch's metrics to metrics.jsonl and the loggers; ranks other than 0 write nothing."""
        if self._context.is_main:
            self._append(self.epochs_file, {"step": step, **metrics})
            self._log(step, "epoch", metrics)

    def test(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Send the metrics of the test split to the loggers."""
        if metrics:
            self._log(step, "test", metrics)

    def _log(self, step: int, group: str, values: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.log(step, {f"{group}/{name}": value for name, value in values.items()})

    def _append(self, path: Path, line: Mapping[str, Any]) -> None:
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in line.items()}
        try:
            if path.name not in self._files:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[path.name] = path.open("a", encoding="utf-8", buffering=1)
            self._files[path.name].write(json.dumps(finite, allow_nan=False) + "\n")
        except OSError as error:
            raise StoreError(f"cannot write the journal {path}: {error}; free some space, or leave it out") from error

    def close(self, *, failed: bool = False) -> None:
        """Close files and loggers; first write how training ended, unless `failed`. A later line reopens the files."""
        if not failed:
            self._end()
        for file in self._files.values():
            file.close()
        self._files.clear()
        for logger in self._loggers:
            logger.close(failed=failed)

    def __enter__(self) -> "Journal":
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        self._is_entered = False
        if error is not None:
            with suppress(StoreError):  # the first error is the one to raise
                self._end(error)
        self.close(failed=error is not None)


def machine_of(context: "Context") -> dict[str, Any]:
    """Return a description of the machine that this rank runs on."""
    found = {
        "rank": context.rank,
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": context.num_cores,
        "host_cores": num_cores(),
    }
    with suppress(OSError, ValueError, AttributeError):
        found["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
    return found | {"system": platform.platform(terse=True), "device": device}


def versions() -> dict[str, str]:
    """Return the versions of Python, Hoploom, PyTorch, PyG, NumPy and Triton, without those not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _shorten(path: Path, counted: str | None, last: int) -> None:
    """Keep a file's first complete JSON lines, while field `counted` (None: the line's number) is at most `last`."""
    try:
        with path.open("rb+") as file:
            kept = 0
            for number, line in enumerate(file, 1):
                try:
                    content = json.loads(line)
                    at = number if counted is None else int(content[counted])
                except (ValueError, KeyError, TypeError):
                    break
                if at > last or not line.endswith(b"\n"):
                    break
                kept += len(line)
            file.truncate(kept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot shorten the journal {path}: {error}; move it away") from error


# --- time, memory and disk -------------------------------------------------------------------------

EVENTS = "events.jsonl"
PAUSE = 1.0  # seconds of training between two lines
DIGITS = 6  # decimals of the seconds that are written
MEMORY_KINDS = {"RssAnon": "private", "RssShmem": "shared", "RssFile": "mapped"}  # the kernel's names, and ours
WAITS = 0.2  # share of a step; with shorter waits for batches, the model is the bottleneck

Counts = Mapping[str, float]


def times_file(rank: int | str) -> str:
    return f"times-rank{rank}.jsonl"


def no_run(folder: Path, missing: str) -> ConfigError:
    """Return the error for a `folder` that is not the output folder of a run; `missing` says what it lacks."""
    what = "is a store, not a run" if (folder / STORE_FILE).is_file() else f"is no run: {missing}"
    what = what if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
    return ConfigError(f"{folder} {what}; give the output folder of `hoploom train`, e.g. run")


class Times:
    """A clock that adds up the seconds of one rank by activity, and writes a line about once a second.

    A line also has the growth of counts, such as bytes read from the disk, since the line before (see `watch`).
    """

    def __init__(self, write: Callable[[Mapping[str, Any]], None], device: torch.device) -> None:
        self._write, self._device = write, device
        self._sources: Mapping[str, Callable[[], Counts]] = {}
        self._before: dict[str, Counts] = {}
        self._seconds: dict[str, float] = {}
        self._step, self._num_steps, self._since = 0, 0, 0.0

    def watch(self, sources: Mapping[str, Callable[[], Counts]], step: int) -> None:
        """From now on, write in each line how much the counts of `sources` grew. `step`: the number of steps so far."""
        self._sources, self._step = sources, step
        self._before = {name: read() for name, read in sources.items()}

    def add_step(self, report: "StepReport") -> None:
        """Add the seconds of a step; write a line once the steps since the last line add up to a second."""
        for name, spent in {"step": report.seconds, "wait": report.wait_seconds, **report.parts}.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + spent
        self._step, self._num_steps = report.step, self._num_steps + 1
        self._since += report.seconds
        if self._since >= PAUSE:
            self.flush()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of this block to activity `name`. The growth of counts during "validation" is left out."""
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
        """Write a line with the seconds and counts since the last line, if anything was timed."""
        if not self._seconds:
            return
        line: dict[str, Any] = {"at": round(time.time(), 3), "step": self._step, "steps": self._num_steps}
        line["seconds"] = {name: round(spent, DIGITS) for name, spent in self._seconds.items()}
        for name, read in self._sources.items():
            now, before = read(), self._before[name]
            if grown := {key: round(value - before.get(key, 0), DIGITS) for key, value in now.items()}:
                line[name] = grown
            self._before[name] = now
        line["memory"] = memory()
        if self._device.type == "cuda":
            line["memory"]["gpu"] = torch.cuda.max_memory_allocated(self._device)
        self._seconds, self._num_steps, self._since = {}, 0, 0.0
        self._write(line)


def memory(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """Return this process's resident bytes: `private`, `shared`, and `mapped` (of mapped files); empty if unknown."""
    found = {}
    with suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in MEMORY_KINDS:
                found[MEMORY_KINDS[name]] = 1024 * int(rest.split()[0])
    return found


def disk(io: Path = Path("/proc/self/io")) -> dict[str, float]:
    """Return the bytes that this process read from disks (`read_bytes`, if known), and its major page `faults`."""
    found: dict[str, float] = {"faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt}
    with suppress(OSError, ValueError, KeyError):
        found["read_bytes"] = int(dict(line.split(": ") for line in io.read_text().splitlines())["read_bytes"])
    return found


# --- use of the disk -----------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskUse:
    """Measures of the disk reads of one rank, or their means over several ranks."""

    bytes_per_step: float
    wanted: float  # share of these bytes that batches needed
    found: float  # share of the requested rows and edges that were in memory
    busy: float  # share of the time in which a read was in flight
    bound: str  # the bottleneck: disk, sampling, servers or model

    @property
    def short(self) -> str:
        return f"disk {100 * self.busy:.0f} % busy, bound by {self.bound}"


def disk_use(
    num_steps: int, seconds: Counts, reads: Counts, stages: Counts, waits: float = 0.0, *, threads: int
) -> DiskUse | None:
    """Return how busy the disk was and what limited the steps; None if no step requested anything from the disk.

    `seconds` has the total time of the steps (`step`) and of their waits for batches (`wait`). `stages` has the time of
    each loading stage, and `waits` is the time spent waiting for servers; both are summed over `threads`.
    """
    if not reads.get("asked") or not num_steps or not seconds.get("step"):
        return None
    waited, at_once = seconds.get("wait", 0.0), max(1, threads)
    busy = {
        "disk": reads["busy_seconds"],
        "servers": waits / at_once,
        "sampling": (sum(stages.values()) - reads["seconds"] - waits) / at_once,
    }
    in_turn = not threads and 2 * waited < seconds["step"]  # batches are made between steps
    few_wait = waited < WAITS * seconds["step"] or in_turn
    return DiskUse(
        reads["bytes"] / num_steps,
        reads["wanted_bytes"] / reads["bytes"] if reads["bytes"] else 1.0,
        reads["found"] / reads["asked"],
        min(1.0, reads["busy_seconds"] / seconds["step"]),
        "model" if few_wait else max(busy, key=lambda name: busy[name]),
    )


# --- loggers ---------------------------------------------------------------------------------------

NAMES = ("tensorboard", "wandb")  # also the names of their packages
MOST_WAITING = 100_000  # entries that a slow logger may be behind
BEGIN_SECONDS, POLL_SECONDS = 60.0, 0.5  # the longest wait for a logger to begin, and between checks for Ctrl-C
CLOSE_SECONDS, FAILED_SECONDS = 60.0, 10.0  # the longest wait for a logger to end, and if training failed
METHODS = ("begin", "log", "close")

Values = Mapping[str, float]


class Logger(Protocol):
    """A receiver of metrics. Rank 0 calls its methods one after the other, in a thread for this logger alone."""

    def begin(self, step: int) -> None:
        """Prepare to receive the metrics of a run that has taken `step` steps so far."""

    def log(self, step: int, values: Values) -> None:
        """Receive values by name, such as `step/loss`, `epoch/accuracy` or `test/accuracy`, after `step` steps."""

    def close(self, *, failed: bool) -> None:
        """Stop receiving metrics: training has ended or, if `failed`, raised an error. `begin` may be called again."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError for a logger that is unknown, or whose package is not installed."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"there is no logger {name!r}; give one of {list(NAMES)}, or an object of your own")
        check_installed(name, f"the logger {name!r}")


def make_loggers(
    loggers: Sequence[str | Logger] | None, folder: Path, settings: Mapping[str, Any]
) -> list["LoggerThread"]:
    """Return a thread for each logger, given by name or as an object. None means TensorBoard, if it is installed."""
    if loggers is None:
        loggers = ["tensorboard"] if find_spec("tensorboard") is not None else []
    if isinstance(loggers, str) or not isinstance(loggers, Sequence):
        raise ConfigError(f"loggers is {loggers!r}; give a list, e.g. ['tensorboard'] or [MyLogger()]")
    check_loggers([entry for entry in loggers if isinstance(entry, str)])
    for entry in loggers:
        missing = [name for name in METHODS if not callable(getattr(entry, name, None))]
        if isinstance(entry, type) or (missing and not isinstance(entry, str)):
            why = f"without {missing[0]}()" if missing else "which is a class"
            raise ConfigError(
                f"loggers has {entry!r}, {why}; give one of {list(NAMES)}, or an object with begin(), log() and close()"
            )
    kinds: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: TensorBoardLogger(folder),
        "wandb": lambda: WandbLogger(folder, settings),
    }
    return [LoggerThread(kinds[entry]() if isinstance(entry, str) else entry) for entry in loggers]


class LoggerThread:
    """A thread that runs one logger, so that a slow or failing logger neither delays nor ends training."""

    def __init__(self, logger: Logger) -> None:
        self._logger, self._name = logger, type(logger).__name__
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._thread: Thread | None = None
        self._ready = Event()
        self._failure: str | None = None
        self._has_warned = False

    def begin(self, step: int) -> None:
        """Start the thread, and wait at most BEGIN_SECONDS until the logger is ready: it may ask for a login."""
        if self._failure is not None:
            return
        self._calls, self._ready = queue.Queue(MOST_WAITING), Event()
        self._thread = Thread(target=self._run, args=(self._calls, self._ready), name=self._name, daemon=True)
        self._thread.start()
        self._put(lambda: self._logger.begin(step))
        deadline = time.monotonic() + BEGIN_SECONDS
        while not self._ready.wait(POLL_SECONDS) and time.monotonic() < deadline:
            pass  # a Ctrl-C just before a wait does not end it, but is seen after it
        self._warn()

    def log(self, step: int, values: Values) -> None:
        """Queue the values of a step for the logger, without waiting."""
        if self._thread is not None:
            self._put(lambda: self._logger.log(step, values))
            self._warn()

    def close(self, *, failed: bool = False) -> None:
        """Close the logger once it has taken all values; wait CLOSE_SECONDS at most, not at all if it never began."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._put(lambda: self._logger.close(failed=failed))
        self._put(None)
        seconds = FAILED_SECONDS if failed else CLOSE_SECONDS
        if self._ready.is_set():
            thread.join(seconds)
        elif self._failure is None:
            self._failure = "its begin() had not returned when training ended"
        if thread.is_alive() and self._failure is None:
            self._failure = f"it had not taken all numbers {seconds:g} seconds after the last one"
        self._warn(goes_on=False)

    def _put(self, call: Callable[[], None] | None) -> None:
        if self._failure is not None:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failure = f"it is {MOST_WAITING:,} steps behind"

    def _run(self, calls: "queue.Queue[Callable[[], None] | None]", ready: Event) -> None:
        try:
            while self._failure is None and (call := calls.get()) is not None:
                call()
                ready.set()
        except Exception as error:  # whatever a logger raises, training goes on: _warn reports it in the main thread
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            ready.set()

    def _warn(self, *, goes_on: bool = True) -> None:
        if self._failure is None or self._has_warned:
            return
        self._has_warned, self._thread = True, None
        message = f"{self._name} failed and gets nothing more of this run ({self._failure:.500})"
        way_on = "training goes on, and the" if goes_on else "the"
        level, frame = 1, sys._getframe()  # of the user's line
        while frame.f_back and frame.f_globals.get("__name__", "").startswith(("hoploom.", "contextlib")):
            level, frame = level + 1, frame.f_back
        warnings.warn(f"{message}; {way_on} journal in the run's folder has all numbers", stacklevel=level)


# --- loggers by name -----------------------------------------------------------------------------


class TensorBoardLogger:
    """A logger that writes TensorBoard's event files into the subfolder `tensorboard` of `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def begin(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1, flush_secs=10)

    def log(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WandbLogger:
    """A logger to a run of W&B, configured by W&B's own environment variables: WANDB_PROJECT, WANDB_MODE, ..."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._id_file, self._settings = folder / "wandb.id", settings
        self._run: Any = None

    def begin(self, step: int) -> None:
        import wandb

        options: dict[str, Any] = {}
        if step and self._id_file.exists():
            options = {"id": self._id_file.read_text().strip(), "resume": "allow"}
        self._run = wandb.init(config=dict(self._settings), reinit="create_new", **options)
        self._run.define_metric("*", step_metric="step")  # W&B's own step cannot go back to a checkpoint
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        self._id_file.write_text(f"{self._run.id}\n")

    def log(self, step: int, values: Values) -> None:
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
