"""The journal of a run, and the progress it shows.

Written: a JSON line per step and rank, one per validation, the lines of `records.py`, and what loggers get; a power cut
may lose the newest lines. Shown: a bar by tqdm on a terminal or in a notebook, else a plain line now and then.
"""

import json
import math
import os
import platform
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm.auto import tqdm

from hoploom.errors import StoreError
from hoploom.ranks.context import Context
from hoploom.system import num_cores
from hoploom.train.learner import Learner, Training
from hoploom.train.loggers import Logger, make_loggers
from hoploom.train.records import EVENTS, DiskMeter, Times, disk, times_file
from hoploom.train.step import StepReport

EPOCHS = "metrics.jsonl"
WRITTEN = ("epoch", "step", "loss", "seeds", "rows", "learning_rate", "seconds", "wait_seconds")  # of a step
LOGGED = ("loss", "learning_rate", "seconds", "wait_seconds")  # of a step
MOST_WARNINGS = 100  # different ones that a run keeps
LIBRARIES = ("hoploom", "torch", "torch-geometric", "numpy", "triton")
REDRAW_SECONDS = 0.1
PLAIN_SECONDS = 30.0  # between lines if there is no terminal
WIDEST, WITH_DISK = 100, 180  # columns of what is shown
BAR = 1  # columns that are left to the bar at least
FIGURE = 8  # characters of a metric
HEADER_EVERY = 25  # lines of epochs
SMOOTHING = 0.05  # weight of the newest step in the loss that is shown


class Journal:
    """The journal of one rank: steps-rank0.jsonl and so on; rank 0 also writes metrics.jsonl and feeds the loggers.

    >>> with Journal("runs/papers", context, loggers=["tensorboard", "wandb", MyLogger()]) as journal:
    ...     fit(learner, training, context, journal=journal)

    A `with` block also records what follows `fit`; without it, the run ends for the journal when `fit` does.
    `loggers` are names, or objects with the three methods of `Logger`; None: TensorBoard, if it is installed.
    `settings` is what W&B and MLflow show of the run, such as `{"optimizer.lr": 0.01}`.
    """

    def __init__(
        self,
        folder: str | Path,
        context: Context,
        *,
        loggers: Sequence[str | Logger] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._context = Path(folder), context
        self.steps_file, self.epochs_file = self._folder / f"steps-rank{context.rank}.jsonl", self._folder / EPOCHS
        self._times_file = self._folder / times_file(context.rank)
        self._times = Times(lambda line: self._append(self._times_file, line), self._gpu_bytes)
        self._files: dict[str, TextIO] = {}
        self._warnings = _WarningLog()
        self._outcome: dict[str, Any] | None = None  # of training; its event follows when the journal is closed
        self._block, self._is_entered = ExitStack(), False
        self._loggers = make_loggers(loggers if context.is_main else [], self._folder, settings or {})

    def _gpu_bytes(self) -> dict[str, int]:
        device = self._context.device
        return {} if device.type != "cuda" else {"gpu": torch.cuda.max_memory_allocated(device)}

    @contextmanager
    def recording(self, learner: Learner, machines: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Record the training of a learner in this block. Lines of steps after its progress are removed first.

        `machines` are those of all ranks, as `machine_of` describes each.
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
        self._times.watch(sources, progress.steps)
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
            with nullcontext() if self._is_entered else self._warnings.kept():
                yield
        except BaseException as error:
            with suppress(StoreError):  # the first error is the one to raise
                self._times.flush()
                self._outcome["step"] = progress.steps
                self._end(error)
                if not self._is_entered:
                    self.close(failed=True)
            raise
        self._times.flush()
        if not self._is_entered:
            self.close()

    def ended(self, ending: str, *, step: int) -> None:
        """Note the end of training. The event is written when the journal is closed: a test may follow, and fail."""
        self._outcome = {"stopped": ending, "step": step}

    def checkpoint(self) -> None:
        """Write the measurements so far, which a run keeps that is resumed from the checkpoint just saved."""
        self._times.flush()

    def _end(self, error: BaseException | None = None) -> None:
        """Write how training ended, if it has begun and its end is not written."""
        outcome, self._outcome = self._outcome, None
        if outcome is None or (error is None and "stopped" not in outcome):
            return
        self._write_warnings(self._warnings.take_rest())
        if error is not None:
            outcome = {"error": f"{type(error).__name__}: {error}", "step": outcome.get("step", 0)}
        self.event("end", **outcome)

    def _write_warnings(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.event("warning", text=text)

    def event(self, kind: str, **content: Any) -> None:
        """Write an event. Only those of rank 0 are written."""
        if self._context.is_main:
            self._append(self._folder / EVENTS, {"event": kind, "at": round(time.time(), 3), **content})

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Count the time of this block as spent between two steps, such as on a validation."""
        return self._times.timed(name)

    def rewind(self, steps: int, epochs: int) -> None:
        """Remove what was written after this many steps and whole epochs, because they will run again."""
        self.close()
        paths = {self.steps_file, self._times_file}
        if self._context.is_main:  # also those of ranks that exist no more
            for name in ("steps-rank{}.jsonl", times_file("{}")):
                others = {self._folder / name.format(rank) for rank in range(1, self._context.world_size)}
                paths |= set(self._folder.glob(name.format("*"))) - others
            _shorten(self.epochs_file, None, epochs)
        for path in paths:
            _shorten(path, "step", steps)
        for logger in self._loggers:
            logger.begin(steps)

    def step(self, report: StepReport) -> None:
        """Write the line of a step."""
        line = {name: getattr(report, name) for name in WRITTEN}
        line["epoch"] += 1
        self._append(self.steps_file, line)
        self._times.add_step(report)
        self._write_warnings(self._warnings.take())
        self._log(report.step, "step", {name: line[name] for name in LOGGED})

    def epoch(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write the metrics of an epoch. Only those of rank 0 are written."""
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
        """Write how the run ended, and close the files and the loggers; the next line opens the files again."""
        if not failed:
            self._end()
        for file in self._files.values():
            file.close()
        self._files.clear()
        for logger in self._loggers:
            logger.close(failed=failed)

    def __enter__(self) -> "Journal":
        self._block.enter_context(self._warnings.kept())
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        self._block.close()
        self._is_entered = False
        if error is not None:
            with suppress(StoreError):  # the first error is the one to raise
                self._end(error)
        self.close(failed=error is not None)


class _WarningLog:
    """Different warnings of a run. Any thread adds them; the training thread takes them and writes them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection may warn in a thread that holds it
        self._known: set[str] = set()
        self._waiting: list[str] = []
        self._num_more = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep each different warning of this block, and show it as before."""
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            self._add(f"{category.__name__}: {message}")
            shown(message, category, *rest, **more)

        warnings.showwarning = show
        try:
            yield
        finally:
            if warnings.showwarning is show:
                warnings.showwarning = shown

    def _add(self, text: str) -> None:
        with self._lock:
            if text not in self._known and len(self._known) < MOST_WARNINGS:
                self._known.add(text)
                self._waiting.append(text)
            elif text not in self._known:
                self._num_more += 1

    def take(self) -> list[str]:
        """Return the warnings since the last call."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken

    def take_rest(self) -> list[str]:
        """Return the warnings since the last call, with the number of those left out, and forget all."""
        with self._lock:
            more = f"and {self._num_more:,} more warnings: the first {MOST_WARNINGS} different ones are kept"
            rest = self.take() + [more] * (self._num_more > 0)
            self._known, self._num_more = set(), 0
        return rest


def machine_of(context: Context) -> dict[str, Any]:
    """Return a description of the machine that this rank runs on."""
    found = {
        "rank": context.rank,
        "host": socket.gethostname(),
        "cpu": _cpu_model(),
        "cores": context.num_cores,
        "host_cores": num_cores(),
    }
    with suppress(OSError, ValueError, AttributeError):
        found["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
    return found | {"system": platform.platform(terse=True), "device": device}


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, model = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return " ".join(model.split())
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that compute."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _shorten(path: Path, counted: str | None, last: int) -> None:
    """Keep the whole lines up to this step, or this many; remove the rest, and a line that a crash cut short."""
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


# --- what is shown --------------------------------------------------------------------------


class Bar(tqdm):  # type: ignore[misc]
    """A bar of tqdm's without its thread and without its lock among processes."""

    monitor_interval = 0
    widest = WIDEST
    _lock = threading.RLock()

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values of a line, which is no wider than people read."""
        found: dict[str, Any] = super().format_dict
        return found | {"ncols": min(found["ncols"] or self.widest, self.widest)}


def progress_bar(stream: TextIO, total: int, *, shown: bool, initial: int = 0, redraw: float = REDRAW_SECONDS) -> Bar:
    """Return a bar that is drawn if the stream is a terminal or this is a notebook; set its `bar_format`."""
    in_notebook = any(kind.__name__ == "tqdm_notebook" for kind in tqdm.__mro__)
    drawn = shown and not stream.closed and (in_notebook or stream.isatty())
    return Bar(
        total=total,
        initial=initial,
        file=stream,
        bar_format="[{bar:20}]",
        ascii="-#",
        dynamic_ncols=True,
        leave=False,
        mininterval=redraw,
        miniters=1,
        disable=not drawn,
    )


class ProgressLine:
    """Shows steps and epochs on a stream, if `shown`: one rank shows, the others are silent."""

    def __init__(
        self,
        stream: TextIO,
        learner: Learner,
        training: Training,
        meter: DiskMeter | None = None,
        *,
        shown: bool = True,
        redraw: float = REDRAW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._shown, self._clock = stream, shown and not stream.closed, clock
        steps = training.epochs * -(-len(learner.loader) // training.accumulate)
        self._num_steps = steps if training.max_steps is None else min(steps, training.max_steps)
        self._num_epochs, self._first_step = training.epochs, learner.progress.steps
        self._bar = progress_bar(stream, self._num_steps, shown=shown, initial=self._first_step, redraw=0.0)
        self._pause = PLAIN_SECONDS if self._bar.disable else redraw
        self._began = self._last_shown = clock()
        self._loss, self._num_lines, self._meter = 0.0, 0, meter
        self._columns: tuple[str, ...] = ()  # of the header above
        self.doing("waiting for the first step")
        self._seeds = self._seconds = self._wait_seconds = 0.0

    def step(self, report: StepReport) -> None:
        """Show a step, if it is time to."""
        if not self._shown:
            return
        taken = report.step - self._first_step
        self._loss += max(SMOOTHING, 1 / taken) * (report.loss - self._loss)  # at first the plain mean
        self._seeds += report.seeds
        self._seconds += report.seconds
        self._wait_seconds += report.wait_seconds
        now = self._clock()
        if now - self._last_shown < self._pause:
            return
        self._last_shown, seconds = now, max(self._seconds, 1e-9)
        place = f"epoch {_of(report.epoch + 1, self._num_epochs)}  step {_of(report.step, self._num_steps)}"
        rate, waited = tqdm.format_sizeof(self._seeds / seconds), 100 * self._wait_seconds / seconds
        figures = f"loss {_figure(self._loss)}  {rate:>5} seeds/s  wait {waited:2.0f} %"
        use = None if self._meter is None else self._meter.use()
        left = tqdm.format_interval((now - self._began) / taken * max(0, self._num_steps - report.step)) + " left"
        if self._bar.disable:
            self._print("  ".join([place, figures, *([] if use is None else [str(use)]), left]))
            return
        if use is not None:
            self._bar.widest = WITH_DISK
            num_free = self._bar.format_dict["ncols"] - len(f"{place}  []  {figures}  {left}") - BAR
            figures += next((text for text in use.texts if len(text) <= num_free), "")
        self._bar.bar_format = f"{place}  [{{bar}}]  {figures}  {left}"
        self._bar.update(report.step - self._bar.n)

    def doing(self, what: str) -> None:
        """Show on a terminal what takes time between two steps."""
        if not self._bar.disable:
            self._bar.bar_format = f"{what}  [{{bar:20}}]"
            self._bar.refresh()

    def epoch(self, metrics: Mapping[str, float], *, is_best: bool, note: str = "") -> None:
        """Show an epoch's metrics and a note as a row of a table that stays."""
        if not self._shown:
            return
        columns = tuple(name for name in metrics if name != "epoch" and "/" not in name)  # no entries of a matrix
        place = _of(int(metrics["epoch"]), self._num_epochs)
        if columns != self._columns or self._num_lines % HEADER_EVERY == 0:
            self._columns, self._num_lines = columns, 0
            self._print("  ".join([f"{'epoch':>{len(place)}}", *(f"{name:>{FIGURE}}" for name in columns)]))
        self._num_lines += 1
        values = (f"{_figure(metrics[name]):>{max(FIGURE, len(name))}}" for name in columns)
        self._print("  ".join([f"{place:>5}", *values, *["best"] * is_best, *[note] * bool(note)]))

    def _print(self, line: str) -> None:
        try:
            self._bar.write(line, file=self._stream)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone; training continues
            self._shown = False

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def _of(number: int, total: int) -> str:
    """Return 3/10, as wide as 10/10."""
    return f"{number:>{len(str(total))}}/{total}"


def _figure(value: float) -> str:
    """Return a metric in FIGURE characters."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.2e}"
