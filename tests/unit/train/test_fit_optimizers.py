"""Optimizers that fit cannot drive are refused before the first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fit_workers import learner_of, parameters_of, run

from hoploom import ConfigError


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
    with pytest.raises(ConfigError, match=said + ", or train in a loop of your own$"):
        run(learner, 1)
    assert learner.progress.steps == 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(before, parameters_of(learner), strict=True))


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop])
def test_an_optimizer_that_may_do_without_a_closure_is_taken(optimizer: type[Any]) -> None:
    learner = learner_of()
    learner.optimizer, learner.scheduler = optimizer(learner.model.parameters(), lr=0.01), None
    assert run(learner, 1).steps == 4
