"""Ranks that disagree about what they do together are told so on every rank, within seconds."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fit_workers import Sage, val_loader
from support.ports import free_ports
from support.rank_processes import run_ranks
from torch import nn

import hoploom
from hoploom import ConfigError, TrainError
from hoploom.ranks.context import Context
from hoploom.ranks.spawn import spawn
from hoploom.train import NodeClassification, evaluate


def _refused(folder: str, context: Context, name: str, *calls: Any) -> None:
    """Call the own one of these; what is raised goes to a file of this rank."""
    with pytest.raises(ConfigError) as raised:
        calls[context.rank]()
    Path(folder, f"{name}-{context.rank}").write_text(str(raised.value))


def cross(context: Context, folder: str) -> None:
    """Calls that do not belong together, one pair after the other; the last one ends the ranks."""
    losses = torch.ones(64, requires_grad=True)
    _refused(folder, context, "sum", lambda: context.sum(301), lambda: context.mean_loss(losses))
    _refused(folder, context, "kind", lambda: context.max(2.5), context.barrier)
    _refused(folder, context, "shape", lambda: context.sum(torch.ones(2)), lambda: context.sum(torch.ones(30)))
    assert context.sum(context.rank) == 1  # they still understand each other
    model, other = context.wrap(Sage()), context.wrap(Sage())
    val = val_loader(rank=context.rank, world_size=2, batch_size=16)
    _refused(folder, context, "loader", lambda: list(val), lambda: _step(other))
    began = time.monotonic()
    _refused(folder, context, "evaluate", lambda: _evaluate(model, context), lambda: _step(model))
    Path(folder, f"seconds-{context.rank}").write_text(str(time.monotonic() - began))
    raise hoploom.TrainError("all of them were refused")


def _evaluate(model: nn.Module, context: Context) -> None:
    evaluate(model, val_loader(), NodeClassification(3), context)


def _step(model: nn.Module) -> None:
    model(next(iter(val_loader(rank=0, world_size=1)))).sum().backward()


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crossed")
    with pytest.raises(TrainError, match="all of them were refused"):
        spawn(cross, 2, [str(folder)], device="cpu")
    return folder


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("sum", ["rank 0 was summing over all ranks: a number (sum at test_crossed.py:", "call 1), but rank 1 was"]),
        ("sum", ["but rank 1 was summing over all ranks: a number (mean_loss at test_crossed.py:"]),
        ("kind", ["rank 0 was finding the maximum over all ranks", "rank 1 was waiting at a barrier"]),
        (
            "shape",
            [
                "rank 0 was summing over all ranks: a torch.float64 tensor of shape [2], ",
                "but rank 1 has a torch.float64 tensor of shape [30]; give all ranks the same",
            ],
        ),
        ("evaluate", ["rank 0 was ", " (evaluate at test_crossed.py:", "waits for the other"]),
        (
            "loader",
            [
                "rank 0 was waiting for the other ranks to read their shares of a loader",
                "rank 1 was averaging gradients",
            ],
        ),
        ("evaluate", ["rank 1 was averaging gradients (backward at test_crossed.py:", "if context.is_main"]),
    ],
)
def test_crossed_calls_are_one_error_on_every_rank(refused: Path, name: str, parts: list[str]) -> None:
    told = [(refused / f"{name}-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    for part in parts:
        assert part in told[0]


def test_ranks_that_wait_for_each_other_learn_it_long_before_the_deadline(refused: Path) -> None:
    assert max(float((refused / f"seconds-{rank}").read_text()) for rank in range(2)) < 30


SCRIPT = """
import hoploom
context = hoploom.init(device="cpu", timeout=60)
for step in range(3 - context.rank):
    context.sum(1.0)
if context.rank == 1:
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "code", "farewell"),
    [
        ("raise SystemExit(3)", 3, "ended without closing its context: it exited, or made fewer steps or calls"),
        ("raise KeyError('year')", 1, "ended with KeyError: 'year'"),
    ],
)
def test_a_script_that_ends_early_is_named_though_it_closes_no_context(ending: str, code: int, farewell: str) -> None:
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    meeting |= {"MASTER_PORT": str(free_ports(1)[0])}
    ranks = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ended = run_ranks(["-c", SCRIPT.format(ending=ending)], ranks)
    assert [exit_code for exit_code, _ in ended] == [1, code]
    assert f"summing over all ranks (sum at <string>:5), and rank 1 {farewell}" in ended[0][1]
