"""The records of a run for its report: sums of seconds, memory, and events."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fit_workers import QUIET, alone, learner_of

from hoploom.train.checkpoint import Checkpoint
from hoploom.train.journal import DiskUse, Journal, Times, disk, disk_use, memory, versions
from hoploom.train.loop import fit
from hoploom.train.step import Learner, StepReport, Training


def run(folder: Path, learner: Learner, validate: Any = lambda: {"accuracy": 0.5}, **options: Any) -> None:
    with Journal(folder, alone(), loggers=[]) as journal:
        fit(learner, Training(**{"epochs": 2} | QUIET | options), alone(), validate=validate, journal=journal)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(step: int, **parts: float) -> StepReport:
    return StepReport(0, step, 0.5, 100, 50, 0.1, 0.4, 0.1, parts=parts)


def test_a_line_adds_up_about_a_second_of_steps() -> None:
    written: list[Mapping[str, Any]] = []
    made = {"sample": 1.0}
    times = Times(written.append, torch.device("cpu"))
    times.watch({"loader": lambda: dict(made)}, step=0)
    for step in range(1, 5):
        made["sample"] += 0.25
        times.add_step(report(step, forward=0.2))
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
    run(tmp_path, learner_of(), lambda: {"accuracy": 0.5})
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
        checkpoint = Checkpoint(tmp_path, alone())
        fit(
            learner_of(),
            Training(epochs=2, max_steps=7, checkpoint_every=3, **QUIET),
            alone(),
            checkpoint=checkpoint,
            journal=journal,
        )
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
