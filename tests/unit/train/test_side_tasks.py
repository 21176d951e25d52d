"""One model learns nodes and links: a batch of each in every step, weighted losses, one optimizer."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fit_workers import (
    NUM_CLASSES,
    QUIET,
    Sage,
    alone,
    assert_close,
    assert_same_run,
    link_loader,
    parameters_of,
    run,
    train_loader,
    val_loader,
)
from support.refusals import assert_raises
from support.side_tasks import ANOTHER_EPOCH, both_curve, learner_of_both, two_ranks

from hoploom import ConfigError, LinkPrediction
from hoploom.ranks.spawn import spawn
from hoploom.train.checkpoint import Checkpoint, read_state
from hoploom.train.loop import evaluate, fit
from hoploom.train.step import SideTask, Training
from hoploom.train.tasks import NodeClassification, NodeRegression, SeveralTasks

pytestmark = pytest.mark.usefixtures("no_sync")


def test_a_step_adds_the_weighted_mean_losses_of_a_batch_of_each_task() -> None:
    learner = learner_of_both(weight=0.3, lr=1.0)
    model, nodes, links = learner.model, learner.task, learner.also["links"].task
    before = parameters_of(learner)
    batch, linked = next(iter(train_loader())), next(iter(link_loader()))
    of_nodes = nodes.losses(nodes.outputs(model, batch), nodes.targets(batch))
    of_links = links.losses(links.outputs(model, linked), links.targets(linked))
    assert (len(of_nodes), len(of_links)) == (16, 32)  # as many negatives as links
    wanted = of_nodes.mean() + 0.3 * of_links.mean()
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    outcome = fit(learner, Training(1, max_steps=1, **QUIET), alone())
    assert learner.progress.first_loss == pytest.approx(wanted.item())
    assert outcome.steps == 1
    assert_close([old - new for old, new in zip(before, parameters_of(learner), strict=True)], list(gradients))


def test_the_side_loader_goes_round_while_the_first_one_makes_the_epochs() -> None:
    learner = learner_of_both(batch=23)  # 3 steps of links, 4 of nodes
    run(learner, 2)
    assert learner.loader.epoch == 2
    assert {name: learner.also["links"].loader.state_dict()[name] for name in ("epoch", "step")} == ANOTHER_EPOCH


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_resuming_after_any_step_ends_with_the_same_bits(accumulate: int, tmp_path: Path) -> None:
    whole = learner_of_both(batch=23)
    steps = run(whole, accumulate=accumulate).steps
    for step in range(1, steps + 1):
        run(learner_of_both(batch=23), folder=tmp_path / str(step), max_steps=step, accumulate=accumulate)
        learner = learner_of_both(batch=23)
        Checkpoint(tmp_path / str(step), alone()).restore("last", learner.parts())
        run(learner, accumulate=accumulate)
        assert_same_run(learner, whole)


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    """Also after a resume of one process's run, in the middle of an epoch of both loaders."""
    one = learner_of_both(batch=20)
    fit(one, Training(3, max_steps=5, **QUIET), alone(), checkpoint=Checkpoint(tmp_path / "one", alone()))
    spawn(two_ranks, 2, [str(tmp_path)], device="cpu", timeout=60)
    found, (losses, parameters) = read_state(tmp_path / "found"), both_curve(alone())
    for name in ("curve", "resumed"):
        assert found[name][0] == pytest.approx(losses, rel=1e-5), name
        assert_close(found[name][1], parameters, 1e-5)


def test_tasks_side_by_side_have_columns_of_their_own() -> None:
    """A node task has the first columns of what a model returns, links have the others."""
    model, batch, linked = Sage(NUM_CLASSES + 4), next(iter(train_loader())), next(iter(link_loader()))
    task, rows = NodeClassification(NUM_CLASSES, is_first=True), model(batch)
    assert torch.equal(task.outputs(model, batch), rows[:16, :NUM_CLASSES])
    assert torch.equal(task.predictions(rows), rows[:, :NUM_CLASSES].argmax(dim=1))
    z, ends = model(linked)[:, NUM_CLASSES:], linked.edge_label_index
    scores = (z[ends[0]] * z[ends[1]]).sum(dim=1)
    torch.testing.assert_close(LinkPrediction(first_column=NUM_CLASSES).outputs(model, linked), scores)
    several = SeveralTasks({"y": NodeClassification(2), "a": NodeRegression(label="amount")}, is_first=True)
    assert torch.equal(several.predictions(rows)["y"], rows[:, :2].argmax(dim=1))
    assert torch.equal(several.predictions(rows)["a"], rows[:, 2])


@pytest.mark.slow
def test_both_tasks_are_learned() -> None:
    learner = learner_of_both(weight=1.0)
    links = learner.also["links"].task

    def validate() -> dict[str, float]:
        found = evaluate(learner.model, val_loader(), learner.task, alone())
        others = evaluate(learner.model, link_loader(shuffle=False), links, alone())
        return found | {f"links_{name}": value for name, value in others.items()}

    history = run(learner, 12, validate=validate).history
    assert history[-1]["accuracy"] > history[0]["accuracy"]
    assert history[-1]["links_auroc"] > history[0]["links_auroc"]


def _sides_of_one_loader() -> dict[str, SideTask]:
    side = SideTask(LinkPrediction(), link_loader())
    return {"links": side, "others": side}


def _as_main_and_side() -> None:
    learner = learner_of_both()
    replace(learner, also={"again": SideTask(learner.task, learner.loader)})


def _without_steps() -> SideTask:
    return SideTask(LinkPrediction(), link_loader(batch_size=100, drop_last=True))


def _main_without_steps() -> None:
    run(replace(learner_of_both(), loader=train_loader(batch=1000, drop_last=True)))


def _other_ranks() -> SideTask:
    two: Any = SimpleNamespace(rank=0, world_size=2)
    return SideTask(LinkPrediction(), link_loader(two))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SideTask(LinkPrediction(), link_loader(), -1.0), r"weight is -1\.0; give a number of at least 0"),
        (lambda: run(learner_of_both(also={"links": _other_ranks()})), "the loader is for rank 0 of 2, this is rank 0"),
        (lambda: learner_of_both(also=_sides_of_one_loader()), "two tasks have the same loader"),
        (_as_main_and_side, "two tasks have the same loader"),
        (
            lambda: run(learner_of_both(also={"links": _without_steps()})),
            "no step: .* batch_size=100 .* drop_last=True",
        ),
        (_main_without_steps, "no step: .* batch_size=1000 .* drop_last=True"),
    ],
)
def test_side_tasks_that_cannot_be_are_refused(make: Any, message: str) -> None:
    assert_raises(ConfigError, message, make)
