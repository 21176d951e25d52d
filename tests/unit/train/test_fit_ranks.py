"""Training by several processes is training by one: gradients, curves, metrics, checkpoints, and what goes wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fit_workers
from support.fit_workers import QUIET, alone, assert_close, learner_of, parameters_of

from hoploom.ranks.spawn import spawn
from hoploom.train.checkpoint import Checkpoint, read_state
from hoploom.train.loop import fit
from hoploom.train.step import Training

COUNTED = ("accuracy", "f1", "confusion")  # integers summed up: equal to the last bit


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of two ranks, which start once for all tests of this file."""
    folder = tmp_path_factory.mktemp("two")
    fit(learner_of(), Training(2, max_steps=3, **QUIET), alone(), checkpoint=Checkpoint(folder / "one", alone()))
    spawn(fit_workers.two_ranks, 2, [str(folder)], device="cpu", timeout=60)
    return folder


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    spawn(fit_workers.compiled_two_ranks, 2, [str(folder)], device="cpu", timeout=100)
    return folder


@pytest.fixture(scope="module")
def found(two: Path) -> Any:
    return read_state(two / "found")


def assert_same_curve(ours: Any, theirs: Any) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert_close(ours[1], theirs[1], 2e-5)  # Adam makes much of the last bits


def assert_same_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for case, metrics in ours.items():
        assert list(metrics) == list(theirs[case])
        for name, value in metrics.items():
            if name.startswith(COUNTED):
                assert value == theirs[case][name], (case, name)
            else:
                assert value == pytest.approx(theirs[case][name], abs=1e-6), (case, name)


def test_a_journal_names_the_machines_of_all_ranks(two: Path) -> None:
    """Also one that rank 0 alone keeps."""
    start = json.loads((two / "journal" / "events.jsonl").read_text().splitlines()[0])
    assert [machine["rank"] for machine in start["machines"]] == [0, 1]


def test_a_step_of_two_ranks_has_the_gradients_of_one_process(found: Any) -> None:
    """Step 0 is full; step 3 is the tail of five seeds, two for rank 0 and three for rank 1."""
    for ours, step in zip(found["gradients"], (0, 3), strict=True):
        assert_close(ours, fit_workers.gradients_of(alone(), step))


def test_links_are_weighed_by_their_rows(found: Any) -> None:
    assert_close(found["links"], fit_workers.link_curve(alone()))


def test_links_that_a_step_leaves_out_are_those_of_all_its_ranks(found: Any) -> None:
    left_out = fit_workers.link_curve(alone(), "both")
    assert_close(found["links, left out"], left_out)
    assert not all(torch.equal(a, b) for a, b in zip(left_out, fit_workers.link_curve(alone()), strict=True))


def test_candidates_of_all_ranks_are_those_of_one_process(found: Any) -> None:
    """Losses and updates, also of a tail whose ranks have 2 and 3 links."""
    of_one = fit_workers.in_batch_curve(alone())
    for ours, tolerance in ((found["in batch"], 1e-6), (fit_workers.in_batch_curve(alone(), across=False), 1e-7)):
        assert ours[0] == pytest.approx(of_one[0], rel=1e-6)
        assert_close(ours[1], of_one[1], tolerance)
    assert found["in batch, own"][0][0] < 0.95 * of_one[0][0]  # fewer candidates are an easier choice


def test_two_ranks_score_links_with_the_features_of_one_process(found: Any) -> None:
    for name, ours in fit_workers.features_curve(alone()).items():
        for one, two in zip(ours, found["features"][name], strict=True):
            torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)


def test_two_ranks_rank_links_to_the_very_bits_of_one_process(found: Any) -> None:
    alone_found = fit_workers.all_metrics(alone())
    for where in ("ranked links", "ranked links 200"):
        for name in ("mrr", "hits@3", "mean_rank"):
            assert found["metrics"][where][name] == alone_found[where][name]


def test_the_curve_of_two_ranks_is_that_of_one_process(found: Any) -> None:
    assert_same_curve(found["curve"], fit_workers.curve(alone()))
    assert_same_curve(found["accumulated"], fit_workers.curve(alone(), accumulate=2))


def test_two_ranks_evaluate_to_the_numbers_of_one_process(found: Any) -> None:
    """At batch size 200 there is one step, and rank 1 has none."""
    assert_same_metrics(found["metrics"], fit_workers.all_metrics(alone()))


def test_another_number_of_ranks_resumes_to_the_same_numbers(two: Path) -> None:
    whole = learner_of()
    fit(whole, Training(2, **QUIET), alone())
    by_two, by_one = learner_of(), learner_of()
    Checkpoint(two / "one-by-two", alone()).restore("last", by_two.parts())
    assert by_two.progress.epoch == 2
    Checkpoint(two / "two", alone()).restore("last", by_one.parts())
    assert by_one.progress.steps == 3
    fit(by_one, Training(2, **QUIET), alone())
    for learner in (by_two, by_one):
        assert_close(parameters_of(learner), parameters_of(whole), 2e-5)
        assert [epoch["train_loss"] for epoch in learner.progress.history] == pytest.approx(
            [epoch["train_loss"] for epoch in whole.progress.history], rel=1e-5
        )


@pytest.mark.slow  # imports torch's compiler
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["around", "within"])
def test_ddp_and_a_compiler_make_the_checkpoint_of_a_plain_model(name: str, compiled: Path) -> None:
    whole, restored = learner_of(), learner_of()
    for learner in (whole, restored):
        learner.scheduler = None
    fit(whole, Training(2, accumulate=2, **QUIET), alone())
    Checkpoint(compiled / name, alone()).restore("last", restored.parts())
    assert_close(parameters_of(restored), parameters_of(whole), 2e-5)


@pytest.mark.slow  # four processes import torch
@pytest.mark.timeout(300)
def test_four_ranks_have_the_curve_and_the_metrics_of_one_process(tmp_path: Path) -> None:
    spawn(fit_workers.four_ranks, 4, [str(tmp_path)], device="cpu", timeout=100)
    found = read_state(tmp_path / "found")
    assert_same_curve(found["curve"], fit_workers.curve(alone()))
    assert_same_metrics(found["metrics"], fit_workers.all_metrics(alone()))
