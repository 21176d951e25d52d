"""Loggers get what the journal has, and one that fails or hangs ends no training."""

import json
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fit_workers import QUIET, alone, learner_of

from hoploom import ConfigError, system
from hoploom.train import journal as journals
from hoploom.train.journal import Journal
from hoploom.train.loop import Outcome, fit
from hoploom.train.runs.run_file import check_run, parse_run_file
from hoploom.train.step import Training


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


class Asking(Remembering):
    """Asks for a login, and nobody answers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.is_over = threading.Event(), threading.Event()

    def begin(self, step: int) -> None:
        self.is_asked.set()
        self.is_over.wait(100)


def train(folder: Path, *taking: Any) -> Outcome:
    with Journal(folder, alone(), loggers=taking) as journal:
        return fit(learner_of(), Training(2, **QUIET), alone(), validate=lambda: {"accuracy": 0.5}, journal=journal)


def test_a_logger_of_your_own_gets_what_the_journal_has(tmp_path: Path) -> None:
    own = Remembering()
    train(tmp_path, own)
    assert own.calls[0] == ("begin", 0)
    assert own.calls[-1] == ("close", False)
    steps = [json.loads(line) for line in (tmp_path / "steps-rank0.jsonl").read_text().splitlines()]
    logged = [(step, values["step/loss"]) for step, values in own.calls[1:-1] if "step/loss" in values]
    assert logged == [(line["step"], line["loss"]) for line in steps]
    epochs = [(step, values["epoch/accuracy"]) for step, values in own.calls[1:-1] if "epoch/accuracy" in values]
    assert epochs == [(4, 0.5), (8, 0.5)]


def test_a_logger_that_fails_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    failing, other = Failing(), Remembering()
    with pytest.warns(UserWarning, match=r"Failing failed .*\(OSError: No space left on device\); training") as told:
        assert train(tmp_path, failing, other).stopped == "done"
    assert [Path(warning.filename).name for warning in told] == ["test_loggers.py"]  # the line that called fit
    assert [call[0] for call in failing.calls] == ["begin", 1, 2, 3]
    assert sum("step/loss" in values for _, values in other.calls[1:-1]) == 8


def test_a_logger_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "CLOSE_SECONDS", 0.05)
    hanging = Hanging()
    with pytest.warns(UserWarning, match=r"Hanging failed .*had not taken all numbers 0.05 seconds after the last one"):
        assert train(tmp_path, hanging).stopped == "done"
    hanging.is_over.set()
    monkeypatch.setattr(journals, "MOST_WAITING", 3)
    hanging = Hanging()
    with pytest.warns(UserWarning, match="it is 3 steps behind"):
        train(tmp_path / "full", hanging)
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
        train(tmp_path, asking)
    assert time.monotonic() < begun + journals.BEGIN_SECONDS / 2
    asking.is_over.set()


@pytest.mark.parametrize("metrics", [{"accuracy": 0.5}, {}], ids=["done", "failed"])
def test_a_journal_that_was_not_entered_ends_with_fit(tmp_path: Path, metrics: dict[str, float]) -> None:
    own = Remembering()
    journal = Journal(tmp_path, alone(), loggers=[own])
    with nullcontext() if metrics else pytest.raises(ConfigError, match="validate returned no"):
        fit(learner_of(), Training(1, **QUIET), alone(), validate=lambda: metrics, journal=journal)
    events = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events == ["start", "end"]
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
