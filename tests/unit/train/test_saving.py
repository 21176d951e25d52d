"""Checkpoints by time: when one is due, what a killed run goes on from, and who decides among ranks."""

from pathlib import Path
from typing import Any

import pytest
from support import fit_workers
from support.fit_workers import alone, assert_same_run, given, learner_of, resumed, run

from hoploom import ConfigError, StoreError, TrainError
from hoploom.ranks.spawn import spawn
from hoploom.train import checkpoint as checkpoints
from hoploom.train.checkpoint import Checkpoint, SaveClock, last_good
from hoploom.train.step import Training


def test_a_killed_run_goes_on_after_its_first_step_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="rank 0 was killed by SIGKILL"):
        spawn(fit_workers.killed_in_step_3, 1, [str(tmp_path)], device="cpu", timeout=60)
    learner, whole = resumed(tmp_path, dropout=0.4), learner_of(dropout=0.4)
    assert learner.progress.steps == 1
    run(learner)
    run(whole)
    assert_same_run(learner, whole)


@pytest.mark.parametrize(
    ("taken", "next_due"),
    [(0.5, 300.0), (3.0, 300.0), (12.0, 1200.0)],  # seconds that writing took; it may take 1 % of the time
)
def test_a_checkpoint_is_due_at_once_then_after_the_interval_or_a_hundred_times_its_own_cost(
    taken: float, next_due: float
) -> None:
    now = 50.0
    clock = SaveClock(5.0, clock=lambda: now)
    assert clock.is_due
    with clock.saving():
        now += taken
    began = now
    now = began + next_due - 1
    assert not clock.is_due
    now = began + next_due
    assert clock.is_due


def test_without_an_interval_epochs_alone_are_saved(tmp_path: Path) -> None:
    assert not SaveClock(0.0).is_due
    learner = learner_of()
    fuse = iter([None] * 3)
    learner.model.register_forward_pre_hook(lambda *arguments: next(fuse))
    with pytest.raises(StopIteration):
        run(learner, folder=tmp_path, checkpoint_minutes=0.0)
    assert not (tmp_path / "last.safetensors").exists()
    with pytest.raises(ConfigError, match=r"checkpoint_minutes is -1; give minutes, or 0"):
        Training(1, checkpoint_minutes=-1)


def test_where_training_stood_is_in_a_checkpoints_header(tmp_path: Path) -> None:
    path = Checkpoint(tmp_path, alone()).path("last")
    assert last_good(path) == "there is no checkpoint"
    run(learner_of(), folder=tmp_path, max_steps=3)
    assert last_good(path) == f"the last good checkpoint is {path}, of epoch 1, step 3"
    run(learner_of(), folder=tmp_path, max_steps=4)  # all of an epoch
    assert last_good(path).endswith("of epoch 1, step 4")
    path.write_bytes(path.read_bytes()[:100])
    assert last_good(path) == "there is no checkpoint"


def test_a_checkpoint_that_cannot_be_written_says_what_there_is_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, written = checkpoints.write_state, iter([True, False])

    def full_at_the_second(path: Path, state: Any, **also: Any) -> None:
        if not next(written):
            raise StoreError(f"cannot write {path}: File too large")
        whole(path, state, **also)

    monkeypatch.setattr(checkpoints, "write_state", full_at_the_second)
    said = (
        r"after step 2: cannot write .*another folder.*last good checkpoint is .*last.safetensors, of epoch 1, step 1"
    )
    with pytest.raises(StoreError, match=said):
        run(learner_of(), folder=tmp_path, checkpoint_every=1)


def test_the_best_and_the_last_state_are_two_files_also_when_they_are_the_same(tmp_path: Path) -> None:
    best, last = (Checkpoint(tmp_path, alone()).path(name) for name in ("best", "last"))
    for values, is_same in (((0.1, 0.2), True), ((0.3, 0.2), False)):
        run(learner_of(), 2, folder=tmp_path, validate=given(*values))
        assert not best.samefile(last)
        assert last_good(last).endswith("of epoch 2, step 8")
        assert last_good(best).endswith("of epoch 2, step 8" if is_same else "of epoch 1, step 4")
