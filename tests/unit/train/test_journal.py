"""The files of a journal, the loggers beside it, W&B's own files among them, and the progress on the terminal."""

import fcntl
import io
import itertools
import json
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
from support.fit_workers import QUIET, alone, learner_of

from hoploom import ConfigError, StoreError, system
from hoploom.ingest.synthetic import generate
from hoploom.train import journal as journals
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.journal import DiskUse, Journal, Times, disk, disk_use, memory, versions
from hoploom.train.loop import Outcome, ProgressLine, fit
from hoploom.train.runs.run_file import check_run, parse_run_file
from hoploom.train.step import Learner, StepReport, Training


def run(folder: Path, learner: Learner, *, loggers: tuple[Any, ...] = (), **options: Any) -> Outcome:
    context = alone()
    with Journal(folder, context, loggers=loggers) as journal:
        training = Training(**{"epochs": 2} | QUIET | options)
        return fit(learner, training, context, validate=lambda: {"accuracy": 0.5}, journal=journal)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(step: int, **changes: Any) -> StepReport:
    fields = {"epoch": 0, "loss": 0.5, "seeds": 100, "rows": 50, "learning_rate": 0.1, "seconds": 0.5}
    return StepReport(step=step, **fields | {"wait_seconds": 0.01} | changes)


def test_every_step_and_every_epoch_has_a_line(tmp_path: Path) -> None:
    run(tmp_path / "new", learner_of())
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


def test_a_line_adds_up_about_a_second_of_steps() -> None:
    written: list[Mapping[str, Any]] = []
    made = {"sample": 1.0}
    times = Times(written.append, torch.device("cpu"))
    times.watch({"loader": lambda: dict(made)}, step=0)
    for step in range(1, 5):
        made["sample"] += 0.25
        times.add_step(report(step, seconds=0.4, wait_seconds=0.1, parts={"forward": 0.2}))
    with times.timed("checkpoint"):
        pass
    times.flush()
    times.flush()
    assert [(line["step"], line["steps"]) for line in written] == [(3, 3), (4, 1)]
    assert written[0]["seconds"] == pytest.approx({"step": 1.2, "wait": 0.3, "forward": 0.6})
    assert [line["loader"] for line in written] == [{"sample": 0.75}, {"sample": 0.25}]
    assert "checkpoint" in written[1]["seconds"]


def test_a_resumed_run_forgets_the_seconds_after_its_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, learner_of(), max_steps=6)
    learner = learner_of()
    with (tmp_path / "times-rank0.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "steps": 3, "seconds": {"step": 1.0}}) + "\n")
    learner.progress.steps = 6
    with Journal(tmp_path, alone(), loggers=[]) as journal, journal.recording(learner, []):
        assert [line["step"] for line in lines(tmp_path / "times-rank0.jsonl")] == [6]
    events = lines(tmp_path / "events.jsonl")
    assert [(event["event"], event.get("step")) for event in events] == [("start", 0), ("end", 6), ("start", 6)]


def test_what_happens_is_written_down(tmp_path: Path) -> None:
    run(tmp_path, learner_of())
    start, end = lines(tmp_path / "events.jsonl")
    assert start["machines"][0]["cores"] >= 1
    assert start["versions"]["torch"] == versions()["torch"]
    assert end["stopped"] == "done"


def test_what_the_system_does_not_say_is_left_out(tmp_path: Path) -> None:
    assert memory(tmp_path / "none") == {}
    (tmp_path / "status").write_text("Name:\tpython\nRssAnon:\t  12 kB\nRssFile:\t 3 kB\n")
    assert memory(tmp_path / "status") == {"private": 12288, "mapped": 3072}
    assert list(disk(tmp_path / "none")) == ["faults"]
    (tmp_path / "io").write_text("rchar: 9\nread_bytes: 4096\n")
    assert disk(tmp_path / "io")["read_bytes"] == 4096


def test_what_fails_after_training_is_a_failure_of_the_run(tmp_path: Path) -> None:
    def fail_the_test() -> None:
        with Journal(tmp_path, alone(), loggers=[]) as journal:
            fit(learner_of(), Training(epochs=1, **QUIET), alone(), journal=journal)
            assert [line["event"] for line in lines(tmp_path / "events.jsonl")] == ["start"]
            raise ValueError("no test today")

    with pytest.raises(ValueError, match="no test today"):
        fail_the_test()
    end = lines(tmp_path / "events.jsonl")[-1]
    assert (end["event"], end["error"], end["step"]) == ("end", "ValueError: no test today", 4)


def test_a_checkpoint_keeps_the_seconds_of_the_steps_before_it(tmp_path: Path) -> None:
    with Journal(tmp_path, alone(), loggers=[]) as journal:
        training, checkpoint = Training(2, max_steps=7, checkpoint_every=3, **QUIET), Checkpoint(tmp_path, alone())
        fit(learner_of(), training, alone(), checkpoint=checkpoint, journal=journal)
        journal.rewind(6, 1)
    written = lines(tmp_path / "times-rank0.jsonl")
    assert sum(line["steps"] for line in written) == 6
    assert not any("validation" in line["seconds"] for line in written)  # there was none


@pytest.mark.parametrize(
    ("wait", "threads", "busy", "sampling", "servers", "bound"),
    [
        (0.1, 2, 0.9, 5.0, 0.0, "model"),  # few steps wait, however busy the others are
        (0.9, 2, 0.9, 1.6, 0.0, "disk"),
        (0.9, 2, 0.7, 1.6, 0.0, "sampling"),  # by two threads: 0.8 s each
        (0.9, 2, 0.7, 1.0, 1.8, "servers"),
        (0.4, 0, 0.3, 0.1, 0.0, "model"),  # in turn with the batches, it takes more than half
        (0.6, 0, 0.4, 0.2, 0.0, "disk"),
    ],
)
def test_what_is_busy_longest_bounds_a_run_that_waits(
    wait: float, threads: int, busy: float, sampling: float, servers: float, bound: str
) -> None:
    reads = {"bytes": 8e6, "wanted_bytes": 6e6, "asked": 1000, "found": 250, "seconds": 0.5, "busy_seconds": busy}
    stages = {"sample": sampling, "fetch": 0.5, "gather": servers}
    use = disk_use(4, {"step": 1.0, "wait": wait}, reads, stages, servers, threads=threads)
    assert use == DiskUse(2e6, 0.75, 0.25, busy, bound)


@dataclass
class Remembering:
    """A logger of a user's own."""

    calls: list[Any] = field(default_factory=list)

    def begin(self, step: int) -> None:
        self.calls.append(("begin", step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append((step, dict(values)))

    def close(self, *, failed: bool) -> None:
        self.calls.append(("close", failed))


class Failing(Remembering):
    """Fails at its third step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        super().log(step, values)
        if step == 3:
            raise OSError("No space left on device")


class Hanging(Remembering):
    """Never comes back from its first step, until the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.is_over.wait(100)


class Asking(Hanging):
    """Asks for a login, and nobody answers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Event()

    def begin(self, step: int) -> None:
        self.is_asked.set()
        self.is_over.wait(100)


def test_a_logger_of_your_own_gets_what_the_journal_has(tmp_path: Path) -> None:
    own = Remembering()
    run(tmp_path, learner_of(), loggers=(own,))
    assert own.calls[0] == ("begin", 0)
    assert own.calls[-1] == ("close", False)
    steps = lines(tmp_path / "steps-rank0.jsonl")
    logged = [(step, values["step/loss"]) for step, values in own.calls[1:-1] if "step/loss" in values]
    assert logged == [(line["step"], line["loss"]) for line in steps]
    epochs = [(step, values["epoch/accuracy"]) for step, values in own.calls[1:-1] if "epoch/accuracy" in values]
    assert epochs == [(4, 0.5), (8, 0.5)]


def test_a_logger_that_fails_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    failing, other = Failing(), Remembering()
    with pytest.warns(UserWarning, match=r"Failing failed .*\(OSError: No space left on device\); training") as told:
        assert run(tmp_path, learner_of(), loggers=(failing, other)).stopped == "done"
    assert [Path(warning.filename).name for warning in told] == ["test_journal.py"]  # the line that called fit
    assert [call[0] for call in failing.calls] == ["begin", 1, 2, 3]
    assert sum("step/loss" in values for _, values in other.calls[1:-1]) == 8


def test_a_logger_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "CLOSE_SECONDS", 0.05)
    hanging = Hanging()
    with pytest.warns(UserWarning, match=r"Hanging failed .*had not taken all numbers 0.05 seconds after the last one"):
        assert run(tmp_path, learner_of(), loggers=(hanging,)).stopped == "done"
    hanging.is_over.set()
    monkeypatch.setattr(journals, "MOST_WAITING", 3)
    hanging = Hanging()
    with pytest.warns(UserWarning, match="it is 3 steps behind"):
        run(tmp_path / "full", learner_of(), loggers=(hanging,))
    hanging.is_over.set()


def test_a_logger_learns_that_training_failed(tmp_path: Path) -> None:
    own = Remembering()
    journal = Journal(tmp_path, alone(), loggers=[own])
    journal.rewind(3, 0)
    with pytest.raises(ZeroDivisionError), journal:
        raise ZeroDivisionError
    assert own.calls == [("begin", 3), ("close", True)]


def test_ctrl_c_while_a_logger_begins_does_not_wait_for_it(tmp_path: Path) -> None:
    asking, main = Asking(), threading.get_ident()
    threading.Thread(target=lambda: asking.is_asked.wait(50) and signal.pthread_kill(main, signal.SIGINT)).start()
    unready = r"\(its begin\(\) had not returned .*\); the journal in the run's folder has all numbers"
    begun = time.monotonic()
    with pytest.warns(UserWarning, match=unready), pytest.raises(KeyboardInterrupt):
        run(tmp_path, learner_of(), loggers=(asking,))
    assert time.monotonic() < begun + journals.BEGIN_SECONDS / 2
    asking.is_over.set()


@pytest.mark.parametrize("metrics", [{"accuracy": 0.5}, {}], ids=["done", "failed"])
def test_a_journal_that_was_not_entered_ends_with_fit(tmp_path: Path, metrics: dict[str, float]) -> None:
    own = Remembering()
    journal = Journal(tmp_path, alone(), loggers=[own])
    with nullcontext() if metrics else pytest.raises(ConfigError, match="validate returned no"):
        fit(learner_of(), Training(1, **QUIET), alone(), validate=lambda: metrics, journal=journal)
    assert [line["event"] for line in lines(tmp_path / "events.jsonl")] == ["start", "end"]
    assert own.calls[-1] == ("close", not metrics)


def test_only_rank_0_logs(tmp_path: Path) -> None:
    own = Remembering()
    second: Any = SimpleNamespace(is_main=False, rank=1, world_size=2, device=torch.device("cpu"), num_cores=1)
    with Journal(tmp_path, second, loggers=[own, "no such"]) as journal:
        journal.rewind(0, 0)
        journal.epoch({"epoch": 0}, step=1)
    assert own.calls == []


def test_a_missing_package_is_one_error_with_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = parse_run_file('store = "graph.store"\n[output]\nloggers = ["wandb"]\n')
    monkeypatch.setattr(system, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"^run.toml:3: the logger 'wandb' needs wandb, .*: pip install wandb, or"):
        check_run(run_file, 1, resume=False)
    check_run(parse_run_file('store = "graph.store"\n'), 1, resume=False)
    with pytest.raises(ConfigError, match=r"no logger 'wandbb'; give one of .*'wandb'"):
        Journal(tmp_path, alone(), loggers=["wandbb"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([3], r"loggers has 3, without begin\(\); give one of .*'wandb'.*, or an object with"),
        ([Remembering], r"loggers has <class .*Remembering'>, which is a class; give"),
        ([SimpleNamespace(begin=print, log=print)], r", without close\(\)"),
        ("tensorboard", r"loggers is 'tensorboard'; give a list, e.g. \['tensorboard'\]"),
        (Remembering(), r"loggers is Remembering.*; give a list"),
    ],
)
def test_what_is_no_logger_is_refused_before_training(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Journal(tmp_path, alone(), loggers=given)


@pytest.fixture
def terminal() -> Iterator[tuple[TextIO, int]]:
    """A stream that is a terminal of 100 columns, and where to read what a screen would get."""
    screen, line = pty.openpty()
    stream = os.fdopen(line, "w")
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


BLOCK, FULL, LAST = 32768, 1, 4  # of the files of W&B
LIMIT = 170  # seconds that a command may take
RUN = """
store = "graph.store"
[model]
hidden = 8
[loader]
fanouts = [3, 2]
batch_size = 128
[output]
loggers = ["tensorboard", "wandb"]
"""


def written_in(run: Path) -> dict[str, dict[int, float]]:
    """Return the numbers in the run's folder, by metric and step."""
    found: dict[str, dict[int, float]] = {}
    for file, group in (("steps-rank0", "step"), ("metrics", "epoch")):
        for line in (run / f"{file}.jsonl").read_text().splitlines():
            read = json.loads(line)
            for name in ("loss", "learning_rate") if group == "step" else read.keys() - {"step"}:
                found.setdefault(f"{group}/{name}", {})[read["step"]] = read[name]
    result = json.loads((run / "result.json").read_text())
    return found | {f"test/{name}": {result["steps"]: value} for name, value in result["test"].items()}


def records_of(path: Path) -> Iterator[bytes]:
    """Yield the records of a W&B run: LevelDB's log format, behind 7 bytes; a record may go over several blocks."""
    file, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(file):
        if BLOCK - at % BLOCK < 7:  # too short for a header: padding
            at += BLOCK - at % BLOCK
        _, size, kind = struct.unpack_from("<IHB", file, at)
        record, at = record + file[at + 7 : at + 7 + size], at + 7 + size
        if kind in (FULL, LAST):
            yield record
            record = b""


def history_of(path: Path) -> Iterator[dict[str, Any]]:
    """The history of such a run."""
    from wandb.proto import wandb_internal_pb2

    for read in records_of(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(read)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_wandb_has_one_run_with_the_numbers_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    graph = {"num_nodes": 1500, "avg_degree": 6, "num_features": 8, "num_classes": 3, "homophily": 0.8, "seed": 3}
    generate(tmp_path / "graph.store", **graph)
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-m", "hoploom", "train", "run.toml", "--quiet", "--resume", "--set"]
    offline = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    for epochs in (1, 3):  # ends after one epoch, and is continued
        subprocess.run([*command, f"train.epochs={epochs}"], cwd=tmp_path, env=offline, check=True, timeout=LIMIT)
    written, run_id = written_in(tmp_path / "run"), (tmp_path / "run" / "wandb.id").read_text().strip()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.stem for path in files] == [f"run-{run_id}"] * 2  # begun, and continued
    found: dict[str, dict[int, float]] = {}
    for row in (row for path in files for row in history_of(path)):
        for name in row.keys() & written.keys():
            found.setdefault(name, {})[row["step"]] = row[name]
    for name, values in written.items():
        if not name.startswith("test/"):  # the run that stopped after an epoch was tested, too
            assert found[name] == pytest.approx(values), name
    assert found["test/accuracy"] == pytest.approx(written["test/accuracy"] | found["test/accuracy"])
