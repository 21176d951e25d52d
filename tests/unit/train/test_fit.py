"""Training in one process: steps, resume, stopping, and what goes wrong."""

import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fit_workers import (
    NUM_CLASSES,
    NUM_TRAIN,
    Sage,
    alone,
    assert_close,
    assert_same_run,
    given,
    kill_at,
    learner_of,
    parameters_of,
    resumed,
    run,
    spoil_at,
    train_loader,
)
from support.refusals import assert_raises
from torch import nn

import hoploom
from hoploom import ConfigError, TrainError
from hoploom.train.checkpoint import Checkpoint
from hoploom.train.loop import Outcome, evaluate
from hoploom.train.step import Learner, SideTask, Training
from hoploom.train.tasks import NodeClassification

pytestmark = pytest.mark.usefixtures("no_sync")
STEPS = 4  # of an epoch: 53 seeds in batches of 16


def test_the_loss_falls_and_the_outcome_says_what_was_done() -> None:
    outcome = run(learner_of(), 6)
    losses = [epoch["train_loss"] for epoch in outcome.history]
    assert (outcome.steps, outcome.epochs, outcome.stopped, outcome.best) == (6 * STEPS, 6, "done", None)
    assert [epoch["epoch"] for epoch in outcome.history] == list(range(1, 7))
    assert losses[-1] < 0.6 * losses[0]


def test_a_stepper_that_is_no_class_is_refused() -> None:
    with pytest.raises(hoploom.ConfigError, match=r"stepper is 'whole'; give a class such as hoploom\.WholeStep"):
        hoploom.fit(learner_of(), hoploom.Training(1), hoploom.init(), stepper="whole")  # type: ignore[arg-type]


def test_the_loss_of_an_epoch_is_the_mean_over_its_seeds() -> None:
    learner = learner_of(learning_rate=0.0)
    outcome = run(learner, 1)
    task, losses = learner.task, []
    for batch in train_loader():
        losses.append(task.losses(task.outputs(learner.model, batch), task.targets(batch)).detach())
    assert outcome.history[0]["train_loss"] == pytest.approx(float(torch.cat(losses).double().mean()), rel=1e-6)


@pytest.mark.parametrize(("batch", "accumulate"), [(8, 2), (4, 4), (25, 2), (16, 3)])
def test_accumulated_batches_make_the_step_of_one_bigger_batch(batch: int, accumulate: int) -> None:
    """The loader takes all neighbours, so a batch is the same however it is cut; an epoch's last step is shorter."""
    learners = []
    for size, count in ((batch, accumulate), (batch * accumulate, 1)):
        loader = train_loader(size)
        loader = type(loader)(loader.store, [-1, -1], "train", batch_size=size, shuffle=True)
        learner = learner_of(loader=loader)
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.1)
        learner.scheduler = None
        assert run(learner, 2, accumulate=count).steps == 2 * math.ceil(NUM_TRAIN / (batch * accumulate))
        learners.append(learner)
    assert_close(*map(parameters_of, learners))
    ours, theirs = (learner.progress.history[1]["train_loss"] for learner in learners)
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_clipping_bounds_the_length_of_a_step() -> None:
    lengths = {}
    for clip_norm in (None, 0.01, 1e6):
        learner = learner_of()
        learner.optimizer, learner.scheduler = torch.optim.SGD(learner.model.parameters(), lr=1.0), None
        before = parameters_of(learner)
        run(learner, 1, max_steps=1, clip_norm=clip_norm)
        moved = [new - old for old, new in zip(before, parameters_of(learner), strict=True)]
        lengths[clip_norm] = float(torch.cat([move.reshape(-1) for move in moved]).norm())
    assert lengths[0.01] == pytest.approx(0.01, rel=1e-3)
    assert lengths[None] == pytest.approx(lengths[1e6], rel=1e-6)
    assert lengths[None] > 0.05


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_in_full_precision_parameters(precision: str) -> None:
    learner, dtypes = learner_of(), set()
    learner.model.convs[0].lin_l.register_forward_hook(lambda module, given, found: dtypes.add(found.dtype))
    outcome = run(learner, 4, precision=precision, clip_norm=10.0)
    assert dtypes == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert {parameter.dtype for parameter in learner.model.parameters()} == {torch.float32}
    full = run(learner_of(), 4, clip_norm=10.0)
    assert outcome.history[-1]["train_loss"] < 0.8 * outcome.history[0]["train_loss"]
    assert outcome.history[-1]["train_loss"] == pytest.approx(full.history[-1]["train_loss"], rel=0.03)


def test_gradients_are_clipped_after_the_scale_of_half_precision_is_taken_off() -> None:
    learner = learner_of()
    learner.optimizer, learner.scheduler = torch.optim.SGD(learner.model.parameters(), lr=1.0), None
    before = parameters_of(learner)
    run(learner, 1, max_steps=1, clip_norm=1e4, precision="fp16")
    full = learner_of()
    full.optimizer, full.scheduler = torch.optim.SGD(full.model.parameters(), lr=1.0), None
    run(full, 1, max_steps=1)
    assert any(not old.equal(new) for old, new in zip(before, parameters_of(learner), strict=True))
    assert_close(parameters_of(learner), parameters_of(full), 1e-2)


def test_dropout_follows_from_seed_and_step_alone() -> None:
    learners, seeds = [learner_of(dropout=0.4) for _ in range(3)], []
    learners[0].model.register_forward_pre_hook(lambda *arguments: seeds.append(torch.initial_seed()))
    for learner, before, seed in zip(learners, (1, 2, 2), (0, 0, 1), strict=True):
        torch.manual_seed(before)
        run(learner, seed=seed)
    assert len(set(seeds)) == 2 * STEPS
    assert_same_run(learners[0], learners[1])
    assert any(not a.equal(b) for a, b in zip(*map(parameters_of, learners[1:]), strict=True))


def test_a_scheduler_that_judges_goes_by_the_epoch() -> None:
    learner = learner_of()
    learner.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(learner.optimizer, "max", patience=0)
    run(learner, 3, validate=given(0.5, 0.6, 0.6))
    assert learner.learning_rate == pytest.approx(0.005)


def test_resuming_after_any_step_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = learner_of(dropout=0.4)
    run(whole, validate=given(0.5, 0.4))
    for step in range(1, 2 * STEPS + 1):
        run(learner_of(dropout=0.4), folder=tmp_path / str(step), validate=given(0.5, 0.4), max_steps=step)
        learner = resumed(tmp_path / str(step), dropout=0.4)
        assert learner.progress.steps == step
        run(learner, validate=given(0.4) if step >= STEPS else given(0.5, 0.4))
        assert_same_run(learner, whole)


def test_resuming_between_accumulated_steps_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = learner_of(dropout=0.4)
    assert run(whole, accumulate=3).steps == 4
    for step in (1, 2, 3):
        run(learner_of(dropout=0.4), folder=tmp_path / str(step), max_steps=step, accumulate=3)
        learner = resumed(tmp_path / str(step), dropout=0.4)
        run(learner, accumulate=3)
        assert_same_run(learner, whole)


def test_training_on_ends_where_one_longer_training_does() -> None:
    once, twice = learner_of(dropout=0.4), learner_of(dropout=0.4)
    run(once, 3)
    run(twice, 3, max_steps=2)
    run(twice, 1)
    run(twice, 3)
    assert_same_run(once, twice)


def test_what_ended_early_stays_ended_when_resumed(tmp_path: Path) -> None:
    run(learner_of(), 9, folder=tmp_path, validate=given(0.5, 0.4, 0.4), patience=2)
    outcome = run(resumed(tmp_path), 9, validate=given(), patience=2)
    assert (outcome.stopped, outcome.epochs, outcome.best, outcome.best_epoch) == ("early", 3, 0.5, 1)


@pytest.mark.parametrize(
    ("values", "patience", "best_epoch", "epochs", "stopped"),
    [
        ((0.1, 0.3, 0.2, 0.2), 2, 2, 4, "early"),
        ((0.1, 0.3, 0.3, 0.4, 0.2), 2, 4, 5, "done"),
        ((math.nan, 0.1, math.nan, 0.2, 0.2), 3, 4, 5, "done"),
        ((math.nan, math.nan), 2, None, 2, "early"),
    ],
)
def test_patience_counts_epochs_without_a_better_value(
    values: tuple[float, ...], patience: int, best_epoch: int | None, epochs: int, stopped: str, tmp_path: Path
) -> None:
    outcome = run(learner_of(), 5, folder=tmp_path, validate=given(*values), patience=patience)
    assert (outcome.best_epoch, outcome.epochs, outcome.stopped) == (best_epoch, epochs, stopped)
    saved = learner_of()
    found = Checkpoint(tmp_path, alone()).restore("best", saved.parts())
    assert (found is None) == (best_epoch is None)
    if best_epoch is not None:
        assert (saved.progress.epoch, saved.progress.best) == (best_epoch, values[best_epoch - 1])


def test_a_metric_to_be_small_is_best_when_it_is_smallest() -> None:
    learner = learner_of()
    learner.task = NodeClassification(NUM_CLASSES, best="loss")
    losses = iter((0.3, 0.1, 0.2))
    outcome = run(learner, 3, validate=lambda: {"loss": next(losses)})
    assert (outcome.best, outcome.best_epoch) == (0.1, 2)
    assert [sorted(epoch) for epoch in outcome.history] == [["epoch", "train_loss", "val_loss"]] * 3


def test_a_validation_without_the_monitored_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"returned no 'accuracy', .* only \['f1'\]"):
        run(learner_of(), validate=lambda: {"f1": 0.5})


@pytest.fixture
def handlers() -> Iterator[None]:
    """Whatever happens, this process keeps its signal handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, 3, STEPS, 2 * STEPS])
def test_a_stop_is_answered_after_the_step_and_can_be_resumed(number: int, step: int, tmp_path: Path) -> None:
    whole, learner = learner_of(dropout=0.4), learner_of(dropout=0.4)
    run(whole, validate=given(0.5, 0.4))
    kill_at(learner.model, step, number)
    outcome = run(learner, folder=tmp_path, validate=given(0.5, 0.4))
    assert (outcome.stopped, outcome.steps) == ("asked", step)
    learner = resumed(tmp_path, dropout=0.4)
    run(learner, validate=given(0.4) if step > STEPS else given(0.5, 0.4))
    assert_same_run(learner, whole)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)], ids=["asked", "broken off"])
def test_a_stop_within_a_validation_costs_no_step(numbers: tuple[int, ...], epoch: int, tmp_path: Path) -> None:
    whole, learner = learner_of(dropout=0.4), learner_of(dropout=0.4)
    run(whole, validate=given(0.5, 0.4), max_steps=2 * STEPS)
    values, is_broken_off = iter((0.5, 0.4)), len(numbers) > 1

    def validate() -> Mapping[str, float]:
        if learner.progress.epoch == epoch:
            for number in numbers:
                signal.raise_signal(number)
        return {"accuracy": next(values)}

    with pytest.raises(KeyboardInterrupt) if is_broken_off else nullcontext():
        assert run(learner, folder=tmp_path, validate=validate, max_steps=2 * STEPS).stopped == "asked"
    learner = resumed(tmp_path, dropout=0.4)
    validated = epoch + (not is_broken_off)
    assert (learner.progress.steps, learner.progress.epoch) == ((epoch + 1) * STEPS, validated)
    assert run(learner, validate=given(*(0.5, 0.4)[validated:]), max_steps=2 * STEPS).stopped == "done"
    assert_same_run(learner, whole)


@pytest.mark.usefixtures("handlers")
def test_a_second_ctrl_c_ends_at_once() -> None:
    learner = learner_of()
    kill_at(learner.model, 2, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(learner)
    assert learner.progress.steps == 1


@pytest.mark.usefixtures("handlers")
def test_off_the_main_thread_signals_are_left_alone() -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run(learner_of())))
    thread.start()
    thread.join(timeout=60)
    assert outcomes[0].stopped == "done"


def test_a_loss_that_is_not_finite_ends_training_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    learner = learner_of()
    spoil_at(learner.model, 7)
    said = rf"the loss is nan at epoch 2 step 7 on rank 0; .* \(0.032\), .*the last good checkpoint is {tmp_path}/last"
    assert_raises(TrainError, said, run, learner, folder=tmp_path)
    assert resumed(tmp_path).progress.steps == STEPS
    assert all(parameter.isfinite().all() for parameter in learner.model.parameters())


def test_a_loss_that_grows_a_thousandfold_is_told_once_with_its_step_and_learning_rate() -> None:
    learner = learner_of()
    for group in learner.optimizer.param_groups:
        group["lr"] = 1e9
    said = r"the loss is .* at epoch 1 step 2, over 1,000 times .* lower the learning rate \(1e\+09\)"
    with pytest.warns(UserWarning, match=said) as warned:
        run(learner, 1)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(learner_of())


def test_the_first_loss_is_that_of_the_run_also_after_a_resume(tmp_path: Path) -> None:
    run(learner_of(), 1, folder=tmp_path)
    learner = resumed(tmp_path)
    first = learner.progress.first_loss
    assert first is not None
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1e6)
    with pytest.warns(UserWarning, match="over 1,000 times"):
        run(learner, 2)
    assert learner.progress.first_loss == first


def test_parameters_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    learner = learner_of()
    bias = learner.model.convs[1].lin_l.bias
    calls = iter(range(100))
    bias.register_hook(lambda gradient: gradient * math.inf if next(calls) == STEPS * 2 - 1 else None)
    with pytest.raises(TrainError, match=r"parameter 'convs.1.lin_l.bias' is not finite after step 8"):
        run(learner, folder=tmp_path)
    assert resumed(tmp_path).progress.steps == STEPS


WRONG = [("epochs", -1), ("accumulate", 0), ("clip_norm", 0), ("clip_norm", math.nan), ("precision", "half")]


@pytest.mark.parametrize(("name", "value"), [*WRONG, ("patience", 0), ("epochs", 0), ("max_steps", 1.5)])
def test_wrong_options_are_refused(name: str, value: Any) -> None:
    assert_raises(ConfigError, f"{name} is {value!r}.*; give", Training, **{"epochs": 1} | {name: value})


def test_a_loader_of_another_library_is_refused() -> None:
    theirs: Any = torch.utils.data.DataLoader([1, 2])
    said = "the loader is torch's DataLoader; give a loader of hoploom"
    assert_raises(ConfigError, said, lambda: learner_of(loader=theirs))
    assert_raises(ConfigError, said, lambda: SideTask(NodeClassification(2), theirs))
    learner = learner_of()
    assert_raises(ConfigError, said, lambda: evaluate(learner.model, theirs, learner.task, alone()))


def test_an_optimizer_of_another_model_is_refused() -> None:
    mine, other = learner_of(), learner_of()
    make = partial(Learner, mine.model, other.optimizer, mine.task, mine.loader)
    assert_raises(ConfigError, "the optimizer has no parameter of the model; make it from", make)


def test_a_validation_that_is_no_function_is_refused() -> None:
    assert_raises(ConfigError, "validate is 0.5; give a function", lambda: run(learner_of(), validate=0.5))


def test_a_loader_for_other_ranks_is_refused() -> None:
    loader = type(train_loader())(train_loader().store, [2], "train", batch_size=4, rank=1, world_size=2)
    with pytest.raises(ConfigError, match=r"is for rank 1 of 2, this is rank 0 of 1; make it after hoploom.init"):
        run(learner_of(loader=loader))


def test_a_plateau_that_cannot_be_judged_is_refused() -> None:
    learner = learner_of()
    learner.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(learner.optimizer, "min")
    assert_raises(ConfigError, "needs a metric", run, learner)
    assert_raises(ConfigError, "has mode='min', 'accuracy' wants 'max'", lambda: run(learner, validate=given(0.5)))


def test_a_batch_with_a_bad_label_names_node_and_way_out() -> None:
    learner = learner_of()
    learner.task = NodeClassification(2)
    learner.model = Sage(2)
    with pytest.raises(ValueError, match=r"node \d+ is a seed with the label y=2; classes are 0 to 1: .*leave it out"):
        run(learner)


def test_the_mode_of_the_model_is_training_even_after_a_validation_that_forgot() -> None:
    learner, modes = learner_of(), []
    learner.model.register_forward_pre_hook(lambda module, given: modes.append(module.training))

    def validate() -> dict[str, float]:
        learner.model.eval()
        return {"accuracy": 0.5}

    run(learner, validate=validate)
    assert modes == [True] * 2 * STEPS


def test_frozen_parameters_stay_as_they_are() -> None:
    learner = learner_of()
    frozen = learner.model.convs[0]
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in frozen.parameters()]
    run(learner, clip_norm=1.0, accumulate=2)
    assert all(map(torch.equal, before, frozen.parameters()))
    assert isinstance(learner.model, nn.Module)


class Wrapping(torch.optim.Optimizer):
    """Like those that look at the loss twice in a step (SAM, say): its step cannot do without a closure."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, Wrapping])
def test_an_optimizer_that_asks_for_the_loss_again_is_refused_before_training(optimizer: type[Any]) -> None:
    learner = learner_of()
    learner.optimizer = optimizer(learner.model.parameters())
    before = parameters_of(learner)
    said = rf"^{optimizer.__name__} asks for a step's loss several times, a step has it once; take AdamW, Adam or SGD"
    assert_raises(ConfigError, said + ", or train in a loop of your own$", run, learner, 1)
    assert learner.progress.steps == 0
    assert all(map(torch.equal, before, parameters_of(learner)))


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop])
def test_an_optimizer_that_may_do_without_a_closure_is_taken(optimizer: type[Any]) -> None:
    learner = learner_of()
    learner.optimizer, learner.scheduler = optimizer(learner.model.parameters(), lr=0.01), None
    assert run(learner, 1).steps == 4
