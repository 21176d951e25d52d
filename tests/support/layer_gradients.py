"""Everything that a layer computes, to compare it with another library's layer of the same weights."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Give both the same random weights; their state dicts load into each other."""
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    torch.manual_seed(1)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


def outputs_and_gradients(
    conv: nn.Module, given: Mapping[str, Tensor], call: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The outputs of a call, and the gradients of what is given and of the parameters, by name."""
    given = {name: rows.clone().requires_grad_() for name, rows in given.items()}
    conv.zero_grad()
    out = call(given)
    loss: Any = sum((rows * torch.arange(rows.numel()).view_as(rows).cos()).sum() for rows in out.values())
    loss.backward()
    found = {f"out {name}": rows.detach() for name, rows in out.items()}
    found |= {f"given {name}": rows.grad for name, rows in given.items() if rows.grad is not None}
    return found | {name: p.grad.clone() for name, p in conv.named_parameters() if p.grad is not None}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """To 1e-5 of the greatest value of each."""
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        scale = max(1.0, float(rows.abs().max()))
        torch.testing.assert_close(
            found[name] / scale, rows / scale, atol=1e-5, rtol=1e-5, msg=lambda words, name=name: f"{name}: {words}"
        )
