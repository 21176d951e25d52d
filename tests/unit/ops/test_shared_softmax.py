"""The softmax over shared candidates has the losses and gradients of torch's cross-entropy of all scores."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hoploom import ops


def rows(count: int, num_candidates: int, width: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(n, width, generator=draw).requires_grad_() for n in (count, count, num_candidates)]


def plain(queries: Tensor, truths: Tensor, candidates: Tensor, temperature: float) -> Tensor:
    scores = torch.cat([(queries * truths).sum(1, keepdim=True), queries @ candidates.t()], dim=1) / temperature
    return functional.cross_entropy(scores, torch.zeros(len(queries), dtype=torch.int64), reduction="none")


@pytest.mark.parametrize("sizes", [(1, 1, 1), (0, 3, 2), (700, 50, 100), (1100, 129, 37)])
@pytest.mark.parametrize(
    "weigh", [torch.Tensor.mean, lambda losses: (losses * torch.linspace(0.5, 1.5, len(losses))).sum()]
)
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_losses_and_gradients_are_those_of_all_scores(
    sizes: tuple[int, int, int], weigh: Any, temperature: float
) -> None:
    found = []
    for losses_of in (ops.shared_softmax, plain):
        given = rows(*sizes)
        losses = losses_of(*given, temperature)
        weigh(losses).backward()
        found.append([losses, *(each.grad for each in given)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4 if sizes[0] else 0)


def test_gradients_of_two_passes_are_alike() -> None:
    given = rows(5, 4, 3)
    losses = ops.shared_softmax(*given)
    first, second = (torch.autograd.grad(losses.sum(), given, retain_graph=retains) for retains in (True, False))
    torch.testing.assert_close(first, second)


def test_numbers_that_are_not_finite_reach_the_loss() -> None:
    queries, truths, candidates = rows(3, 4, 2)
    with torch.no_grad():
        queries[1, 0] = torch.nan
    assert ops.shared_softmax(queries, truths, candidates).isnan().tolist() == [False, True, False]
