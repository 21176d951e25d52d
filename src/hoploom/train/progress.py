"""How training goes, on the terminal: one line that is drawn over again, or now and then a plain line elsewhere."""

import math
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from hoploom.train.learner import Learner, Training
from hoploom.train.step import StepReport

REDRAW_SECONDS = 0.1
PLAIN_SECONDS = 30.0  # between lines where there is no terminal
BAR_CELLS = 20
SMOOTHING = 0.05  # weight of the newest step in what is shown
LINE_WIDTH = 160  # where the terminal does not tell its own
TERMINAL_START, TERMINAL_END = "\r", "\x1b[K"  # to the line's beginning; clear the rest of it


class Progress:
    """Shows steps and epochs on a stream. One rank shows, the others are silent."""

    def __init__(self, stream: TextIO, *, shown: bool = True) -> None:
        self._stream, self._shown = stream, shown and not stream.closed
        self._draws = self._shown and stream.isatty()
        self._steps_expected = 0
        self._epochs_expected = 0
        self._began = self._last_shown = time.monotonic()
        self._first_step: int | None = None
        self._loss = 0.0
        self._seeds = self._seconds = self._wait_seconds = 0.0
        self._line_is_open = False

    def expect(self, learner: Learner, training: Training) -> None:
        """How long training will be, at most."""
        per_epoch = -(-len(learner.loader) // training.accumulate)
        self._steps_expected = training.epochs * per_epoch
        if training.max_steps is not None:
            self._steps_expected = min(self._steps_expected, training.max_steps)
        self._epochs_expected = training.epochs

    def step(self, report: StepReport) -> None:
        """Show a step, if it is time to."""
        if not self._shown:
            return
        first = self._first_step is None
        if self._first_step is None:
            self._first_step = report.step - 1
        weight = max(SMOOTHING, 1 / (report.step - self._first_step))  # at first the plain mean
        self._loss += weight * (report.loss - self._loss)
        self._seeds += report.seeds
        self._seconds += report.seconds
        self._wait_seconds += report.wait_seconds
        now = time.monotonic()
        if now - self._last_shown >= (REDRAW_SECONDS if self._draws else PLAIN_SECONDS) or (first and self._draws):
            self._last_shown = now
            self._show(self._line(report))

    def epoch(self, metrics: Mapping[str, float], *, is_best: bool, note: str = "") -> None:
        """Show an epoch's metrics, and a note if there is one, on a line that stays."""
        if self._shown:
            values = "  ".join(f"{name} {_number(value)}" for name, value in metrics.items() if name != "epoch")
            line = f"epoch {int(metrics['epoch']) + 1}/{self._epochs_expected}  {values}{'  (best)' * is_best}"
            self._show(f"{line}  {note}" if note else line)
            self._end_line()

    def _line(self, report: StepReport) -> str:
        share = min(1.0, report.step / max(1, self._steps_expected))
        filled = int(share * BAR_CELLS)
        parts = [
            f"epoch {report.epoch + 1}/{self._epochs_expected}",
            f"step {report.step}/{self._steps_expected}",
            f"[{'#' * filled}{'-' * (BAR_CELLS - filled)}]",
            f"loss {_number(self._loss)}",
            f"{_count(self._seeds / max(self._seconds, 1e-9))} seeds/s",
            f"waiting {100 * self._wait_seconds / max(self._seconds, 1e-9):.1f} %",
            f"{self._remaining(report.step)} left",
        ]
        return "  ".join(parts)

    def _remaining(self, step: int) -> str:
        taken = step - (self._first_step or 0)
        seconds = (time.monotonic() - self._began) / taken * max(0, self._steps_expected - step)
        minutes, seconds = divmod(math.ceil(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

    def _show(self, line: str) -> None:
        if self._draws:
            self._write(f"{TERMINAL_START}{line[: self._width() - 1]}{TERMINAL_END}")
            self._line_is_open = True
        else:
            self._write(f"{line}\n")

    def _end_line(self) -> None:
        if self._line_is_open:
            self._write("\n")
            self._line_is_open = False

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or LINE_WIDTH
        except (OSError, ValueError):
            return LINE_WIDTH

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone; training is not
            self._shown = self._draws = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()


def _number(value: float) -> str:
    return f"{value:.4g}"


def _count(value: float) -> str:
    """1234567 as 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"
