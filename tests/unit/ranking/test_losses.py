"""Losses of true links against candidates are the formulas of torch, and what does not count changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hoploom import ConfigError
from hoploom.ranking.losses import LOSSES, in_batch, read_loss

NO_OPTIONS: dict[str, float | None] = {"gamma": None, "margin": None, "temperature": None}


def scored(rows: int = 6, candidates: int = 5) -> Tensor:
    return torch.randn(rows, 1 + candidates, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3


def labels(scores: Tensor) -> Tensor:
    return (torch.arange(scores.shape[1]) == 0).to(scores.dtype).expand_as(scores)


def by_focal(scores: Tensor) -> Tensor:
    p = scores.sigmoid()
    true, others = -((1 - p[:, :1]) ** 2) * p[:, :1].log(), -(p[:, 1:] ** 2) * (1 - p[:, 1:]).log()
    return torch.cat([true, others], dim=1).mean(1)


def by_margin(scores: Tensor) -> Tensor:
    true = scores[:, :1].expand(-1, scores.shape[1] - 1)
    kinds: dict[str, Any] = {"margin": 1.0, "reduction": "none"}
    return functional.margin_ranking_loss(true, scores[:, 1:], torch.ones_like(true), **kinds).mean(1)


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "binary": lambda s: functional.binary_cross_entropy_with_logits(s, labels(s), reduction="none").mean(1),
    "focal": by_focal,
    "bpr": lambda s: -functional.logsigmoid(s[:, :1] - s[:, 1:]).mean(1),
    "margin": by_margin,
    "softmax": lambda s: functional.cross_entropy(s, torch.zeros(len(s), dtype=torch.int64), reduction="none"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_formula_of_torch_with_its_gradient(name: str) -> None:
    ours, theirs = (scored().requires_grad_() for _ in range(2))
    loss = read_loss(name, NO_OPTIONS)(ours)
    assert loss.shape == (6,)
    torch.testing.assert_close(loss, FORMULAS[name](theirs))
    loss.sum().backward()
    FORMULAS[name](theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", LOSSES)
def test_a_candidate_that_does_not_count_changes_no_loss_and_no_gradient(name: str) -> None:
    scores = scored()
    more = torch.cat([scores, torch.full((6, 3), -torch.inf, dtype=torch.float64)], dim=1)[
        :, [0, 7, 1, 2, 6, 3, 4, 5, 8]
    ]
    few, many = scores.requires_grad_(), more.requires_grad_()
    loss = read_loss(name, NO_OPTIONS)
    torch.testing.assert_close(loss(many), loss(few))
    loss(few).sum().backward()
    loss(many).sum().backward()
    assert many.grad is not None
    assert many.grad.isfinite().all()
    torch.testing.assert_close(many.grad[:, [0, 2, 3, 5, 6, 7]], few.grad)


@pytest.mark.parametrize("name", ["focal", "bpr", "margin"])
def test_a_link_whose_candidates_all_do_not_count_has_a_finite_loss(name: str) -> None:
    scores = torch.tensor([[1.0, -torch.inf]], requires_grad=True)
    loss = read_loss(name, NO_OPTIONS)(scores)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_options_belong_to_one_loss() -> None:
    scores = scored()
    torch.testing.assert_close(
        read_loss("softmax", NO_OPTIONS | {"temperature": 0.5})(scores), read_loss("softmax", NO_OPTIONS)(scores * 2)
    )
    torch.testing.assert_close(
        read_loss("margin", NO_OPTIONS | {"margin": 3.0})(scores),
        (3 - scores[:, :1] + scores[:, 1:]).clamp(min=0).mean(1),
    )
    torch.testing.assert_close(
        read_loss("focal", NO_OPTIONS | {"gamma": 1e-9})(scores), read_loss("binary", NO_OPTIONS)(scores)
    )
    for name, options, message in (
        ("hinge", {}, r"loss is 'hinge'; choose one of \['binary', 'focal', 'bpr', 'margin', 'softmax'\]"),
        ("bpr", {"margin": 1.0}, "margin belongs to loss='margin', and loss is 'bpr'; leave it out"),
        ("softmax", {"temperature": 0.0}, "temperature is 0.0; give a number above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_loss(name, NO_OPTIONS | options)


def test_all_destinations_of_a_batch_are_candidates_but_for_accidental_hits() -> None:
    """Links 0 and 3 have one source, links 1 and 2 one destination."""
    sources, destinations = torch.tensor([7, 8, 9, 7]), torch.tensor([4, 5, 5, 6])
    scores = torch.arange(16.0).view(4, 4)
    rows = in_batch(scores, sources, destinations)
    none = -torch.inf
    assert rows.tolist() == [
        [0, none, 1, 2, none],
        [5, 4, none, none, 7],
        [10, 8, none, none, 11],
        [15, none, 13, 14, none],
    ]


def test_log_q_corrects_all_scores_of_a_destination() -> None:
    sources, destinations, log_q = torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([-1.0, -3.0])
    rows = in_batch(torch.zeros(2, 2), sources, destinations, log_q)
    assert rows.tolist() == [[1, -torch.inf, 3], [3, 1, -torch.inf]]
