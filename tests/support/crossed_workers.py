"""What ranks that disagree do in tests: every function ends in one error, or leaves it for the test in a file."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hoploom
from hoploom import ConfigError
from hoploom.ranks.context import Context
from hoploom.train import NodeClassification, evaluate
from support.fit_workers import Sage, val_loader


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
