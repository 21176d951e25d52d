"""How training goes: what a run writes down, and what it shows.

Written: a JSON line per step and rank, one per validation, what `records.py` adds and what loggers get; a power cut may
lose the newest lines. Shown: a bar by tqdm on a terminal or in a notebook, else a plain line at times.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm.auto import tqdm

from hoploom.errors import StoreError
from hoploom.ranks.context import Context
from hoploom.train.disk_use import DiskMeter
from hoploom.train.learner import Learner, Training
from hoploom.train.loggers import Logger, make_loggers
from hoploom.train.records import EVENTS, Times, Warned, disk, machine, times_file, versions, warnings_kept
from hoploom.train.step import StepReport

EPOCHS = "metrics.jsonl"
WRITTEN = ("epoch", "step", "loss", "seeds", "rows", "learning_rate", "seconds", "wait_seconds")  # of a step
REDRAW_SECONDS = 0.1
PLAIN_SECONDS = 30.0  # between lines where there is no terminal
WIDEST, WITH_DISK = 100, 180  # columns of what is shown
BAR = 1  # columns that are left to the bar at least
FIGURE = 8  # characters of a metric
HEADER_EVERY = 25  # lines of epochs
LOGGED = ("loss", "learning_rate", "seconds", "wait_seconds")  # of a step
SMOOTHING = 0.05  # weight of the newest step in the loss that is shown


class Journal:
    """The journal of one rank: steps-rank0.jsonl and so on; rank 0 also writes metrics.jsonl and feeds the loggers.

    >>> with Journal("runs/papers", context, loggers=["tensorboard", "wandb", MyLogger()]) as journal:
    ...     fit(learner, training, context, journal=journal)

    `with` lets the journal tell of what follows `fit`, too; without it, the run ends for the journal where `fit` does.
    `loggers` are names, or objects with the three methods of `Logger`; None: TensorBoard, where it is installed.
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
        self._times = Times(self._write_times, partial(_gpu_bytes, context.device))
        self._files: dict[str, TextIO] = {}
        self._warned = Warned()
        self._outcome: dict[str, Any] | None = None  # of training; its event follows when the journal is closed
        self._listening, self._is_entered = ExitStack(), False
        self._loggers = make_loggers(loggers if context.is_main else [], self._folder, settings or {})

    @property
    def steps_file(self) -> Path:
        return self._folder / f"steps-rank{self._context.rank}.jsonl"

    @property
    def epochs_file(self) -> Path:
        return self._folder / EPOCHS

    @contextmanager
    def recording(self, learner: Learner, machines: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Inside this block, the learner trains from where it is. Lines of steps after that point are removed first.

        `machines` are those of all ranks, as `machine_of` describes each.
        """
        standing, loader = learner.standing, learner.loader
        self.rewind(standing.steps, standing.epoch)
        if standing.steps == 0 and self._context.is_main:
            (self._folder / EVENTS).unlink(missing_ok=True)
        store = getattr(loader, "store", None)
        sources: dict[str, Callable[[], Mapping[str, float]]] = {"loader": loader.stage_seconds, "disk": disk}
        if store is not None and store.deployment.traffic():
            sources["traffic"] = store.deployment.traffic
        if store is not None and store.reading():
            sources["reads"] = store.reading
        self._times.watch(sources, standing.steps)
        threads = {"threads": loader.num_workers, "steps_per_epoch": len(loader)}
        monitor = list(learner.task.monitor)
        self.event(
            "start", step=standing.steps, machines=list(machines), versions=versions(), monitor=monitor, **threads
        )
        self._outcome = {}
        try:
            with nullcontext() if self._is_entered else warnings_kept(self._warned.add):
                yield
        except BaseException as error:
            with suppress(StoreError):  # the first error is the one to tell
                self._times.flush()
                self._outcome["step"] = standing.steps
                self._end(error)
                self._leave(failed=True)
            raise
        self._times.flush()
        self._leave()

    def _leave(self, *, failed: bool = False) -> None:
        """Close a journal that no `with` will close."""
        if not self._is_entered:
            self.close(failed=failed)

    def ended(self, ending: str, *, step: int) -> None:
        """Training has ended. The event is written when the journal is closed, because a test may follow and fail."""
        self._outcome = {"stopped": ending, "step": step}

    def checkpoint(self) -> None:
        """A checkpoint was saved: a run that is resumed from it keeps what was measured so far."""
        self._times.flush()

    def _end(self, error: BaseException | None = None) -> None:
        """Write how a run ended that began and has no end yet."""
        outcome, self._outcome = self._outcome, None
        if outcome is None or (error is None and "stopped" not in outcome):
            return
        self._write_warnings(self._warned.take_rest())
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
        """The time of this block counts as spent between two steps, such as on a validation."""
        return self._times.timed(name)

    def _write_times(self, line: Mapping[str, Any]) -> None:
        self._append(self._folder / times_file(self._context.rank), line)

    def rewind(self, steps: int, epochs: int) -> None:
        """Remove what was written after this many steps and whole epochs, because they will run again."""
        self.close()
        for path in (self.steps_file, self._folder / times_file(self._context.rank)):
            _shorten(path, "step", steps)
        if self._context.is_main:
            for name in ("steps-rank{}.jsonl", times_file("{}")):
                present = {self._folder / name.format(rank) for rank in range(self._context.world_size)}
                for path in set(self._folder.glob(name.format("*"))) - present:
                    _shorten(path, "step", steps)
            _shorten(self.epochs_file, None, epochs)
        for logger in self._loggers:
            logger.begin(steps)

    def step(self, report: StepReport) -> None:
        """Write the line of a step."""
        line = {name: getattr(report, name) for name in WRITTEN}
        line["epoch"] += 1
        self._append(self.steps_file, line)
        self._times.add_step(report)
        self._write_warnings(self._warned.take())
        if self._loggers:
            self._log(report.step, "step", {name: line[name] for name in LOGGED})

    def epoch(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write the metrics of an epoch. Only those of rank 0 are written."""
        if not self._context.is_main:
            return
        self._append(self.epochs_file, {"step": step, **metrics})
        self._log(step, "epoch", metrics)

    def test(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Tell the loggers how the best model did on the test split."""
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
        self._listening.enter_context(warnings_kept(self._warned.add))
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        self._listening.close()
        self._is_entered = False
        if error is not None:
            with suppress(StoreError):  # the first error is the one to tell
                self._end(error)
        self.close(failed=error is not None)


def machine_of(context: Context) -> dict[str, Any]:
    """Where this rank runs."""
    device = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
    return machine(context.rank, device, context.num_cores)


def _gpu_bytes(device: torch.device) -> dict[str, int]:
    return {} if device.type != "cuda" else {"gpu": torch.cuda.max_memory_allocated(device)}


def _shorten(path: Path, counted: str | None, last: int) -> None:
    """Keep the whole lines up to this step, or so many of them; a line that a crash cut short goes too."""
    try:
        with path.open("rb+") as file:
            kept = 0
            for number, line in enumerate(file, 1):
                if not _is_kept(line, counted, number, last):
                    break
                kept += len(line)
            file.truncate(kept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot shorten the journal {path}: {error}; move it away") from error


def _is_kept(line: bytes, counted: str | None, number: int, last: int) -> bool:
    try:
        content = json.loads(line)
        return line.endswith(b"\n") and (number if counted is None else int(content[counted])) <= last
    except (ValueError, KeyError, TypeError):
        return False


# --- what is shown --------------------------------------------------------------------------


class Bar(tqdm):  # type: ignore[misc]
    """A bar of tqdm's without its thread and without its lock among processes."""

    monitor_interval = 0
    widest = WIDEST
    _lock = threading.RLock()

    @property
    def format_dict(self) -> dict[str, Any]:
        """No wider than a line that people read."""
        found: dict[str, Any] = super().format_dict
        return found | {"ncols": min(found["ncols"] or self.widest, self.widest)}


def bar(stream: TextIO, total: int, *, shown: bool, initial: int = 0, redraw: float = REDRAW_SECONDS) -> Bar:
    """A bar, drawn where the stream is a terminal or this is a notebook; `bar_format` says how."""
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


class Progress:
    """Shows steps and epochs on a stream. One rank shows, the others are silent."""

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
        self._num_epochs, self._first_step = training.epochs, learner.standing.steps
        self._bar = bar(stream, self._num_steps, shown=shown, initial=self._first_step, redraw=0.0)
        self._pause = PLAIN_SECONDS if self._bar.disable else redraw
        self._began = self._last_shown = clock()
        self._loss, self._num_lines, self._meter = 0.0, 0, meter
        self._columns: tuple[str, ...] = ()  # of the header that stands above
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
            room = self._bar.format_dict["ncols"] - len(f"{place}  []  {figures}  {left}") - BAR
            figures += next((text for text in use.texts if len(text) <= room), "")
        self._bar.bar_format = f"{place}  [{{bar}}]  {figures}  {left}"
        self._bar.update(report.step - self._bar.n)

    def doing(self, what: str) -> None:
        """Show what takes time between two steps; a stream that is no terminal does without."""
        if not self._bar.disable:
            self._bar.bar_format = f"{what}  [{{bar:20}}]"
            self._bar.refresh()

    def epoch(self, metrics: Mapping[str, float], *, is_best: bool, note: str = "") -> None:
        """Show an epoch's metrics, and a note if there is one, as a row of a table that stays."""
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
        except (OSError, ValueError):  # the terminal is gone; training is not
            self._shown = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def _of(number: int, total: int) -> str:
    """3 of 10, as wide as 10 of 10."""
    return f"{number:>{len(str(total))}}/{total}"


def _figure(value: float) -> str:
    """A metric in FIGURE characters."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.2e}"
