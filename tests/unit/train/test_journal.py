"""The files of a journal, and the progress on the terminal."""

import io
import itertools
import json
import math
import os
import pty
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest
from support.fit_workers import QUIET, alone, learner_of

from hoploom import StoreError
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.journal import Journal
from hoploom.train.loop import ProgressLine, fit
from hoploom.train.step import Learner, StepReport, Training


def run(folder: Path, learner: Learner, *, loggers: tuple[str, ...] = (), **options: Any) -> None:
    context = alone()
    with Journal(folder, context, loggers=loggers) as journal:
        training = Training(**{"epochs": 2} | QUIET | options)
        fit(learner, training, context, validate=lambda: {"accuracy": 0.5}, journal=journal)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(step: int, **changes: Any) -> StepReport:
    fields = {"epoch": 0, "loss": 0.5, "seeds": 100, "rows": 50, "learning_rate": 0.1, "seconds": 0.5}
    return StepReport(step=step, **fields | {"wait_seconds": 0.01} | changes)


def test_every_step_and_every_epoch_has_a_line(tmp_path: Path) -> None:
    learner = learner_of()
    run(tmp_path / "new", learner)
    steps, epochs = lines(tmp_path / "new" / "steps-rank0.jsonl"), lines(tmp_path / "new" / "metrics.jsonl")
    assert [(line["epoch"], line["step"], line["seeds"], line["rows"]) for line in steps] == [
        (epoch, 4 * epoch + step - 3, size, size) for epoch in (1, 2) for step, size in enumerate((16, 16, 16, 5))
    ]
    assert steps[0]["learning_rate"] == 0.05
    assert steps[3]["learning_rate"] == pytest.approx(0.04)
    assert all(0 < line["wait_seconds"] < line["seconds"] for line in steps)
    assert [(line["epoch"], line["step"], line["accuracy"]) for line in epochs] == [(1, 4, 0.5), (2, 8, 0.5)]
    means = [sum(line["loss"] * line["seeds"] for line in steps[i : i + 4]) / 53 for i in (0, 4)]
    assert [line["train_loss"] for line in epochs] == pytest.approx(means)


def test_a_resumed_run_takes_the_place_of_the_lines_after_its_checkpoint(tmp_path: Path) -> None:
    whole, learner = learner_of(), learner_of()
    run(tmp_path / "whole", whole)
    run(tmp_path / "halves", learner, max_steps=6)
    with (tmp_path / "halves" / "steps-rank0.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "loss": 99}) + "\n" + '{"step": 8, "lo')  # died here
    run(tmp_path / "halves", learner)
    for name in ("steps-rank0.jsonl", "metrics.jsonl"):
        ours, theirs = lines(tmp_path / "whole" / name), lines(tmp_path / "halves" / name)
        timing = ("seconds", "wait_seconds")
        assert [{k: v for k, v in line.items() if k not in timing} for line in ours] == [
            {k: v for k, v in line.items() if k not in timing} for line in theirs
        ]


class Dying(Journal):
    """Ends once it has written an epoch's line."""

    def epoch(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().epoch(metrics, step=step)
        raise ZeroDivisionError


def test_an_epoch_whose_validation_is_done_again_has_one_line(tmp_path: Path) -> None:
    learner, context = learner_of(), alone()
    checkpoint = Checkpoint(tmp_path, context)

    def validate() -> dict[str, float]:
        return {"accuracy": 0.5}

    for fault in (True, False):
        kind = Dying if fault else Journal
        with kind(tmp_path, context, loggers=[]) as journal, suppress(ZeroDivisionError):
            fit(learner, Training(2, **QUIET), context, validate=validate, checkpoint=checkpoint, journal=journal)
        learner = learner_of()
        checkpoint.restore("last", learner.parts())
        assert [line["epoch"] for line in lines(tmp_path / "metrics.jsonl")] == ([1] if fault else [1, 2])


def test_the_journals_of_ranks_that_are_no_more_are_rewound_too(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"steps-rank{rank}.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 9)))
    with Journal(tmp_path, alone(), loggers=[]) as journal:
        journal.rewind(3, 0)
    for rank in (0, 1):
        assert [line["step"] for line in lines(tmp_path / f"steps-rank{rank}.jsonl")] == [1, 2, 3]


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    with Journal(tmp_path, alone(), loggers=[]) as journal:
        journal.epoch({"epoch": 0, "r2": math.nan, "mse": math.inf}, step=1)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "epoch": 0, "r2": None, "mse": None}]


def test_a_line_is_there_as_soon_as_its_step_is_done(tmp_path: Path) -> None:
    journal = Journal(tmp_path, alone(), loggers=[])
    with journal:
        journal.step(report(1))
        assert [line["step"] for line in lines(journal.steps_file)] == [1]


def test_a_journal_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Journal(tmp_path / "file", alone(), loggers=[]) as journal, pytest.raises(StoreError, match="cannot"):
        journal.step(report(1))


def test_tensorboard_gets_steps_and_epochs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, learner_of(), loggers=("tensorboard",))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 9))
    assert [(event.step, event.value) for event in events.Scalars("epoch/accuracy")] == [(4, 0.5), (8, 0.5)]


@pytest.fixture
def terminal() -> Iterator[tuple[TextIO, int]]:
    """A stream that is a terminal of 100 columns, and where to read what a screen would get."""
    screen, line = pty.openpty()
    stream = os.fdopen(line, "w")
    import fcntl
    import struct
    import termios

    fcntl.ioctl(line, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    yield stream, screen
    os.close(screen)


def seen_on(screen: int) -> str:
    """Return the text that a terminal showed until it was closed, which its end reports as an error."""
    seen = b""
    with suppress(OSError):
        while chunk := os.read(screen, 1 << 16):
            seen += chunk
    return seen.decode()


def show(stream: TextIO, *, seconds: float = 0.5, redraw: float = 0.0) -> None:
    """Two epochs of four steps; every reading of the clock is as much later as a step takes."""
    now = itertools.count(0.0, seconds)
    with ProgressLine(stream, learner_of(), Training(2), redraw=redraw, clock=lambda: next(now)) as shown:
        for step in range(1, 9):
            shown.step(report(step, epoch=(step - 1) // 4, seconds=seconds, wait_seconds=seconds / 50))
            if step % 4 == 0:
                shown.epoch({"epoch": step // 4, "train_loss": 0.4321, "accuracy": 0.9}, is_best=step == 4)


TABLE = ["epoch  train_loss  accuracy", "  1/2      0.4321    0.9000  best", "  2/2      0.4321    0.9000"]


def test_a_terminal_has_one_bar_and_a_line_per_epoch_that_stays(terminal: tuple[TextIO, int]) -> None:
    stream, screen = terminal
    show(stream)
    stream.close()
    rows = seen_on(screen).split("\r\n")
    assert [row.split("\r")[-1] for row in rows] == [*TABLE, ""]
    drawn = [text for row in rows for text in row.split("\r")]
    bar = r"epoch 1/2  step 2/8  \[#+-+\]  loss 0\.5000    200 seeds/s  wait  2 %  00:03 left"
    assert [text for text in drawn if re.fullmatch(bar, text)]
    assert max(map(len, drawn)) <= 100
    assert any(text.startswith("waiting for the first step  [---") for text in drawn)
    assert len({text.index("[") for text in drawn if "seeds" in text}) == 1  # nothing jumps
    assert len({text.index("]") for text in drawn if "seeds" in text}) == 1


def test_elsewhere_there_are_few_and_plain_lines() -> None:
    stream = io.StringIO()
    show(stream, seconds=10)
    shown = stream.getvalue().splitlines()
    plain = [line for line in shown if "step" in line]
    assert 1 < len(plain) < 6
    assert re.fullmatch(r"epoch \d/2  step \d/8  loss 0\.5000   10\.0 seeds/s  wait  2 %  \d\d:\d\d left", plain[0])
    assert [line for line in shown if line not in plain] == [*TABLE]
    assert "\r" not in stream.getvalue()


def test_epochs_are_an_aligned_table_within_80_columns() -> None:
    """The task has the most metrics; the header is repeated once it is out of sight."""
    names = ["train_loss", "accuracy", "f1_macro", "f1_micro", "auroc", "val_loss"]
    stream = io.StringIO()
    with ProgressLine(stream, learner_of(), Training(10_000)) as shown:
        for epoch in range(1, 31):
            entry = {"epoch": epoch, "confusion/0/0": 9} | dict.fromkeys(names, 10.0 ** (epoch % 11 - 5))
            shown.epoch(entry, is_best=True)
    table = stream.getvalue().splitlines()
    assert len(table) == 32
    assert table[0] == table[26] == "      epoch  train_loss  accuracy  f1_macro  f1_micro     auroc  val_loss"
    assert {len(row) for row in table} == {len(table[0]), len(table[0]) + len("  best")}
    assert len(table[0]) + len("  best") <= 80


def test_a_rank_that_does_not_show_and_a_stream_that_is_gone_are_silent() -> None:
    stream = io.StringIO()
    with ProgressLine(stream, learner_of(), Training(2), shown=False) as shown:
        shown.step(report(1))
        shown.epoch({"epoch": 0}, is_best=False)
    assert stream.getvalue() == ""
    stream.close()
    show(stream, seconds=40)
