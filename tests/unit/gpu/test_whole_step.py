"""Whole steps equal the steps that are taken at their own size: losses, parameters, positions."""

import gc
import json
import math
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.whole_steps import (
    BATCH,
    NUM_TRAIN,
    assert_close,
    assert_same,
    epoch_of,
    homogeneous_learner,
    labelled,
    library_learner,
    with_sizes_of_one_batch,
)

import hoploom
from hoploom.gpu.cuda_graph import Recording
from hoploom.gpu.whole_steps import StepCounts, WholeStep
from hoploom.ranks.context import init
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.journal import Journal
from hoploom.train.loop import Outcome, fit
from hoploom.train.runs.run import run, summary
from hoploom.train.runs.run_file import check_run, parse_run_file
from hoploom.train.step import Learner, Training

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")
gpu = pytest.mark.gpu
STEPS = -(-NUM_TRAIN // BATCH)
FULL = NUM_TRAIN // BATCH


KINDS = [("sage", "blocks", 2), pytest.param("gat", "subgraph", 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("kind", "mode", "epochs"), KINDS)
def test_a_whole_step_is_the_step_at_its_own_size(kind: str, mode: str, epochs: int, device: torch.device) -> None:
    counts = assert_same(lambda *a, **o: homogeneous_learner(*a, kind=kind, mode=mode, **o), device, epochs=epochs)
    num_whole = epochs * FULL
    assert counts == StepCounts(replayed=max(0, num_whole - 4), first=min(4, num_whole), overflowed=0, shorter=epochs)


def test_degrees_in_the_whole_graph_are_told(device: torch.device) -> None:
    assert_same(lambda *a, **o: homogeneous_learner(*a, kind="gcn", mode="blocks", degrees=True, **o), device, epochs=1)


def test_several_node_types_are_no_exception(device: torch.device) -> None:
    counts = assert_same(library_learner, device, epochs=1)
    assert (counts.first, counts.overflowed, counts.shorter) == (2, 0, 1)


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.05}, pytest.param({"precision": "bf16"}, marks=pytest.mark.slow)],
    ids=["clipped", "bf16"],
)
def test_clipping_and_half_precision_are_recorded_too(options: dict[str, Any], device: torch.device) -> None:
    tolerance = 1e-5 if "clip_norm" in options else 2e-2
    assert_same(homogeneous_learner, device, tolerance, epochs=1, **options)


def test_a_batch_that_does_not_fit_is_taken_at_its_own_size(device: torch.device) -> None:
    epochs = 2 if device.type == "cuda" else 1  # nothing is replayed on the CPU
    counts = assert_same(homogeneous_learner, device, exact=True, margin=0.0, epochs=epochs)
    assert counts.overflowed > 0
    assert counts.replayed + counts.first + counts.overflowed == epochs * FULL


@pytest.mark.parametrize("optimizer", ["fused adam", *(pytest.param(o, marks=gpu) for o in ("adam", "fused sgd"))])
def test_a_schedule_s_rates_are_seen(optimizer: str, device: torch.device) -> None:
    """The optimizer is one that takes its rate from the device, also on the CPU."""
    options = {"fused": optimizer != "adam", "capturable": device.type == "cuda", "lr": 0.02}
    if optimizer == "fused sgd":
        options = {"fused": True, "lr": 0.1, "momentum": 0.9}

    def make(*arguments: Any, **more: Any) -> Learner:
        learner = homogeneous_learner(*arguments, **more)
        make_optimizer = torch.optim.SGD if optimizer == "fused sgd" else torch.optim.Adam
        learner.optimizer = make_optimizer(learner.model.parameters(), **options)
        learner.scheduler = torch.optim.lr_scheduler.LambdaLR(learner.optimizer, lambda step: 1 / (1 + step))
        return learner

    assert_same(make, device, epochs=4 if device.type == "cuda" else 1)


def fitted(
    learner: Learner,
    device: torch.device,
    folder: Path | None = None,
    stepper: type[WholeStep] | None = None,
    **options: Any,
) -> Outcome:
    context = init(device=device)
    checkpoint = None if folder is None else Checkpoint(folder, context)
    training = Training(2, progress=False, **options)
    if folder is None:
        return fit(learner, training, context, stepper=stepper)
    with Journal(folder, context, loggers=[]) as journal:
        return fit(learner, training, context, checkpoint=checkpoint, journal=journal, stepper=stepper)


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_a_run_goes_on_in_the_middle_of_an_epoch_either_way(step: int, device: torch.device, tmp_path: Path) -> None:
    whole = homogeneous_learner(device, on_host=True)
    expected = fitted(whole, device)
    begun = fitted(homogeneous_learner(device), device, tmp_path, WholeStep, max_steps=step)
    assert (begun.steps, begun.stopped) == (step, "done")
    learner = homogeneous_learner(device, on_host=step == 5)
    Checkpoint(tmp_path, init(device=device)).restore("last", learner.parts())
    outcome = fitted(learner, device, tmp_path, WholeStep if step != 5 else None)
    assert (outcome.steps, outcome.stopped) == (2 * STEPS, "done")
    for ours, theirs in zip(outcome.history, expected.history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert_close(learner, whole, 1e-4)
    lines = [json.loads(line) for line in (tmp_path / "steps-rank0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 2 * STEPS + 1))
    assert all(math.isfinite(line["loss"]) for line in lines)


def test_a_run_that_often_overflows_says_so_once(
    device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(2, margin=0.0)
    with_sizes_of_one_batch(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = fit(homogeneous_learner(device), training, init(device=device), stepper=WholeStep)
    assert outcome.whole_steps is not None
    (warning,) = (warning for warning in caught if "overflowed" in str(warning.message))
    count = outcome.whole_steps.overflowed
    assert count > 0
    assert f"  {count} of {2 * STEPS} steps overflowed\n" in capsys.readouterr().err  # after the last epoch
    assert warning.filename == __file__
    assert str(warning.message) == (
        f"{count} of {2 * STEPS} steps overflowed: their batches did not fit, so they were made twice and nothing "
        "of them was replayed; give Training a larger margin, e.g. margin=0.5"
    )


def test_few_overflows_are_no_reason_to_warn() -> None:
    assert not StepCounts(replayed=80, first=4, overflowed=10, shorter=6).overflow_often
    assert StepCounts(replayed=79, first=4, overflowed=11, shorter=6).overflow_often
    assert not StepCounts().overflow_often


def test_a_loss_that_is_not_finite_is_found_and_nothing_is_saved(device: torch.device, tmp_path: Path) -> None:
    learner, calls = homogeneous_learner(device), iter(range(1, 100))
    learner.model.register_forward_hook(lambda module, given, out: out * math.nan if next(calls) == 2 else None)
    with pytest.raises(hoploom.TrainError, match=r"the loss is nan at epoch 1 step 2 on rank 0; .*no checkpoint"):
        fitted(learner, device, tmp_path, WholeStep, checkpoint_every=3, checkpoint_minutes=0.0)
    assert not (tmp_path / "last.safetensors").exists()


class Watched(WholeStep):
    """Says what is left of it and of all that holds memory."""

    left: list[weakref.ref[Any]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        slots = list(self._slots)
        recordings = [recording for slot in slots for recording in (slot.learn, slot._fill)]
        buffers = [slot.on.nodes[0] for slot in slots]
        self.left.extend(map(weakref.ref, (self, *self.maps, *slots, *recordings, *buffers)))


@pytest.mark.parametrize(
    "end",
    ["asked to stop within an epoch", *(pytest.param(one, marks=pytest.mark.slow) for one in ("done", "an error"))],
)
def test_nothing_of_whole_steps_outlives_fit(end: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a collection: graphs and their memory are given back at once."""
    monkeypatch.setattr(Watched, "left", [], raising=False)
    learner = homogeneous_learner(device)
    if end == "an error":
        calls = iter(range(1, 100))
        learner.model.register_forward_hook(lambda module, given, out: out * math.nan if next(calls) == 2 else None)
    gc.collect()
    gc.disable()
    try:
        if end == "an error":
            with pytest.raises(hoploom.TrainError):
                fitted(learner, device, stepper=Watched)
        else:
            fitted(learner, device, stepper=Watched, max_steps=None if end == "done" else 2)
        found = [type(one()).__name__ for one in Watched.left if one() is not None]
    finally:
        gc.enable()
    assert len(Watched.left) >= 10
    assert found == []


def test_a_closed_whole_step_takes_no_more(device: torch.device) -> None:
    with WholeStep(homogeneous_learner(device), Training(1), init(device=device)) as whole:
        next(epoch_of(whole))
    with pytest.raises(hoploom.ConfigError, match="this WholeStep is closed; make another one"):
        next(epoch_of(whole))


RUN_FILE = """
store = "graph.store"
seed = 5
[model]
hidden = 8
[loader]
fanouts = [3, 2]
batch_size = 4
threads = 0
[scheduler]
name = "cosine"
[train]
epochs = 2
[placement]
topology = "host"
features = "host"
[output]
loggers = []
"""


def test_hoploom_train_takes_whole_steps(device: torch.device, tmp_path: Path) -> None:
    hoploom.from_pyg(labelled()).save(tmp_path / "graph.store")
    results = {}
    for name in ("false", "true"):
        overrides = [f"train.whole_steps={name}", f"output.folder={tmp_path / name}", "task.val=", "task.test="]
        overrides.append("train.epochs=1")
        run_file = parse_run_file(RUN_FILE, overrides, folder=tmp_path)
        results[name] = run(run_file, init(device=device), progress=False)
    for ours, theirs in zip(results["true"].outcome.history, results["false"].outcome.history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    written = json.loads((tmp_path / "true" / "result.json").read_text())
    assert written["whole_steps"] == {"replayed": 0, "first": 2, "overflowed": 0, "shorter": 1}
    assert "whole steps: 0 steps replayed, 2 before that" in summary(results["true"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.accumulate=2", "do not go with train.accumulate"),
        ("train.precision=fp16", 'take "bf16"'),
        ("loader.temporal=last", "do not go with loader.temporal"),
    ],
)
def test_a_run_file_that_whole_steps_do_not_fit_is_refused(override: str, said: str, tmp_path: Path) -> None:
    run_file = parse_run_file(RUN_FILE, ["train.whole_steps=true", override], folder=tmp_path)
    with pytest.raises(hoploom.ConfigError, match=rf"whole steps .*{said}.*leave train.whole_steps out"):
        check_run(run_file, 1, resume=False)
    run_file = parse_run_file(RUN_FILE, ["train.whole_steps=true"], folder=tmp_path)
    check_run(run_file, 2, resume=False)


def test_no_replay_reads_a_closed_store(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = homogeneous_learner(device)
    whole = WholeStep(learner, Training(2), init(device=device))
    assert len(list(epoch_of(whole))) > 0
    calls: list[Any] = []
    monkeypatch.setattr(Recording, "__call__", lambda recording: calls.append(recording))
    learner.loader.store.close()  # type: ignore[attr-defined]
    with pytest.raises(hoploom.ConfigError, match="closed"):
        list(epoch_of(whole))
    assert not calls


def test_a_whole_step_may_be_of_one_seed(device: torch.device) -> None:
    counts = assert_same(
        lambda *a, **o: homogeneous_learner(*a, batch_size=1, input_nodes=torch.arange(6), **o), device, epochs=1
    )
    assert counts.replayed > 0
