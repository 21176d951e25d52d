"""How training goes: a bar by tqdm on a terminal or in a notebook, or now and then a plain line elsewhere."""

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from tqdm.auto import tqdm

from hoploom.train.learner import Learner, Training
from hoploom.train.step import StepReport

REDRAW_SECONDS = 0.1
PLAIN_SECONDS = 30.0  # between lines where there is no terminal
SMOOTHING = 0.05  # weight of the newest step in the loss that is shown


class Bar(tqdm):  # type: ignore[misc]
    """A bar of tqdm's without its thread and without its lock among processes."""

    monitor_interval = 0
    _lock = threading.RLock()


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
        *,
        shown: bool = True,
        redraw: float = REDRAW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._shown, self._clock = stream, shown and not stream.closed, clock
        steps = training.epochs * -(-len(learner.loader) // training.accumulate)
        self._num_steps = steps if training.max_steps is None else min(steps, training.max_steps)
        self._num_epochs, self._first_step = training.epochs, learner.standing.steps
        self._bar = bar(stream, self._num_steps, shown=shown, initial=self._first_step, redraw=redraw)
        self._began = self._last_shown = clock()
        self._loss = 0.0
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
        if not self._bar.disable:
            self._bar.bar_format = f"{self._place(report)}  [{{bar:20}}]  {self._figures()}  {{remaining}} left"
            self._bar.update(report.step - self._bar.n)
        elif self._clock() - self._last_shown >= PLAIN_SECONDS:
            self._last_shown = self._clock()
            left = (self._last_shown - self._began) / taken * max(0, self._num_steps - report.step)
            self._print(f"{self._place(report)}  {self._figures()}  {tqdm.format_interval(left)} left")

    def epoch(self, metrics: Mapping[str, float], *, is_best: bool, note: str = "") -> None:
        """Show an epoch's metrics, and a note if there is one, on a line that stays."""
        if self._shown:
            values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "epoch")
            line = f"epoch {int(metrics['epoch']) + 1}/{self._num_epochs}  {values}{'  (best)' * is_best}"
            self._print(f"{line}  {note}" if note else line)

    def _place(self, report: StepReport) -> str:
        return f"epoch {report.epoch + 1}/{self._num_epochs}  step {report.step}/{self._num_steps}"

    def _figures(self) -> str:
        seconds = max(self._seconds, 1e-9)
        rate = tqdm.format_sizeof(self._seeds / seconds)
        return f"loss {self._loss:.4g}  {rate} seeds/s  waiting {100 * self._wait_seconds / seconds:.1f} %"

    def _print(self, line: str) -> None:
        try:
            self._bar.write(line, file=self._stream)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone; training is not
            self._shown = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
