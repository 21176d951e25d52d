"""A checkpoint puts a run's parts back exactly, or says why it cannot."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fit_workers import Sage, alone, assert_same_state, learner_of, parameters_of
from torch import nn

from hoploom import ConfigError, HoploomError, StoreError
from hoploom.train.checkpoint import Checkpoint, last_good, read_state, write_state

pytestmark = pytest.mark.usefixtures("no_sync")

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), capturable=False, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "groups": lambda parameters: torch.optim.Adam([{"params": [p], "lr": 0.01 * i} for i, p in enumerate(parameters)]),
}
SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "milestones": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [3],
    ),
}


class Net(nn.Module):
    """Parameters of two dtypes, a 0-d buffer, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale


def steps(net: Net, optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def made(optimizer: str, scheduler: str | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
    parts: dict[str, Any] = {"model": net, "optimizer": OPTIMIZERS[optimizer](net.parameters())}
    return parts | ({"scheduler": SCHEDULERS[scheduler](parts["optimizer"])} if scheduler else {})


CASES = [(name, None) for name in OPTIMIZERS] + [("sgd", name) for name in SCHEDULERS]


@pytest.mark.parametrize(("optimizer", "scheduler"), CASES)
def test_restored_parts_and_randomness_continue_with_the_same_numbers(
    optimizer: str, scheduler: str | None, tmp_path: Path
) -> None:
    parts, checkpoint = made(optimizer, scheduler), Checkpoint(tmp_path, alone())
    steps(parts["model"], parts["optimizer"], parts.get("scheduler"), 3)
    checkpoint.save("last", parts, note="three steps")
    steps(parts["model"], parts["optimizer"], parts.get("scheduler"), 3)
    restored = made(optimizer, scheduler)
    torch.manual_seed(99)
    assert checkpoint.restore("last", restored) == {"note": "three steps"}
    steps(restored["model"], restored["optimizer"], restored.get("scheduler"), 3)
    assert_same_state(parts, restored)


def test_a_model_alone_can_be_restored_from_a_whole_run(tmp_path: Path) -> None:
    learner, checkpoint = learner_of(), Checkpoint(tmp_path, alone())
    checkpoint.save("best", learner.parts())
    model = Sage()
    nn.init.zeros_(next(model.parameters()))
    checkpoint.restore("best", {"model": model})
    assert all(map(torch.equal, parameters_of(learner), model.parameters()))


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path / "nowhere", alone()).restore("last", {"model": nn.Linear(1, 1)}) is None


class Other(nn.Module):
    """Net with one thing changed."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in ({"linear": nn.Linear(3, 2)} | modules).items():
            self.add_module(name, module)


def test_a_checkpoint_whose_parameters_have_another_order_is_refused(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    checkpoint = Checkpoint(tmp_path, alone())
    checkpoint.save("last", {"model": nn.ModuleDict({"a": first, "b": second})})
    with pytest.raises(
        ConfigError, match=r"lists 'a.weight' where this model has 'b.weight'; build its parts in the same order"
    ):
        checkpoint.restore("last", {"model": nn.ModuleDict({"b": second, "a": first})})


@pytest.mark.parametrize(
    ("saved", "given", "said"),
    [
        (Other(), Other(linear=nn.Linear(4, 2)), r"its 'linear.weight' has shape \(2, 3\), this one \(2, 4\)"),
        (Other(), Other(head=nn.Linear(2, 2)), "it has no 'head.weight'"),
        (Other(head=nn.Linear(2, 2)), Other(), "this one has no 'head.weight'"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_first_difference(
    saved: nn.Module, given: nn.Module, said: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(tmp_path, alone())
    checkpoint.save("last", {"model": saved})
    before = {name: value.clone() for name, value in given.state_dict().items()}
    with pytest.raises(ConfigError, match=f"is of another model: {said}; build the model as it was"):
        checkpoint.restore("last", {"model": given})
    assert all(value.equal(before[name]) for name, value in given.state_dict().items())


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    checkpoint, net = Checkpoint(tmp_path, alone()), Net()
    adam, sgd = torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters())
    fewer = torch.optim.Adam([net.scale])
    checkpoint.save("last", {"model": net, "optimizer": adam})
    for parts, said in (
        ({"optimizer": sgd}, "holds a Adam as 'optimizer', this run has a SGD"),
        ({"optimizer": fewer}, "does not fit this run's optimizer: .*parameter group"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR(sgd, 1)}, r"no 'scheduler', only \['model', 'optimizer'\]"),
    ):
        with pytest.raises(ConfigError, match=said):
            checkpoint.restore("last", parts)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ([], "holds what no checkpoint does"),
        ({"format": 2}, "has format 2, this Hoploom reads up to 1"),
        ({"format": 1, "parts": {}}, "holds what no checkpoint does"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(state: Any, said: str, tmp_path: Path) -> None:
    write_state(tmp_path / "last.safetensors", state)
    with pytest.raises(StoreError, match=said):
        Checkpoint(tmp_path, alone()).restore("last", {})


@pytest.mark.parametrize("name", ["", "a/b", "..", "/etc/x"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a plain name"):
        Checkpoint(tmp_path, alone()).path(name)


def test_a_state_that_cannot_be_saved_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"lock": object()}

        def load_state_dict(self, state: Any) -> None: ...

    checkpoint = Checkpoint(tmp_path, alone())
    checkpoint.save("last", {}, number=1)
    with pytest.raises(ConfigError, match="holds a object at 'parts/odd/lock'"):
        checkpoint.save("last", {"odd": Odd()}, number=2)
    assert checkpoint.restore("last", {}) == {"number": 1}


WRONG: list[Any] = [None, -1, 2**70, float("nan"), "x", [], {"x": 1}, torch.zeros(2)]


def places_in(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(state, dict | list) and len(path) < 3:
        for key in state if isinstance(state, dict) else range(len(state)):
            yield from places_in(state[key], (*path, key))


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    made = copy.copy(state)
    made[path[0]] = changed(made[path[0]], path[1:], value)
    return made


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:12])
def test_no_value_in_a_checkpoint_raises_anything_but_our_errors(wrong: Any, tmp_path: Path) -> None:
    """With a checksum that is right: it may come from anybody."""
    checkpoint = Checkpoint(tmp_path, alone())
    learner = learner_of()
    checkpoint.save("last", learner.parts())
    state = read_state(checkpoint.path("last"))
    refused = 0
    for path in places_in(state):
        write_state(checkpoint.path("wrong"), changed(state, path, wrong))
        try:
            checkpoint.restore("wrong", learner.parts())
        except HoploomError as error:
            refused += str(checkpoint.path("wrong")) in str(error)
        last_good(checkpoint.path("wrong"))
    assert refused > 15
