"""Losses of true links against candidates. Each returns one loss per true link, from float32 scores.

`scores` are [n, 1 + candidates], with the true link's score first in each row. A candidate with the score -infinity
does not count; this is how accidental hits are left out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hoploom.errors import ConfigError


def binary_loss(scores: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """Return the mean binary cross-entropy of each true link (label 1; times its weight, [n, 1]) and its candidates."""
    true, others = functional.softplus(-scores[:, :1]), functional.softplus(scores[:, 1:])
    return _mean(scores, torch.cat([true * weights, others], dim=1))


def focal_loss(scores: Tensor, gamma: float = 2.0) -> Tensor:
    """Return the mean focal loss (Lin et al. 2017): binary cross-entropy, times the error's probability ^ gamma."""
    errors = torch.cat([-scores[:, :1], scores[:, 1:]], dim=1)
    return _mean(scores, errors.sigmoid() ** gamma * functional.softplus(errors))


def bpr_loss(scores: Tensor) -> Tensor:
    """Return the mean Bayesian personalised ranking loss: -log sigmoid(true score - candidate's score)."""
    return _mean(scores[:, 1:], functional.softplus(scores[:, 1:] - scores[:, :1]))


def margin_loss(scores: Tensor, margin: float = 1.0) -> Tensor:
    """Return the mean of max(0, margin - true score + candidate's score)."""
    return _mean(scores[:, 1:], functional.relu(margin - scores[:, :1] + scores[:, 1:]))


def softmax_loss(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the cross-entropy of choosing the true link among all: InfoNCE, or sampled, in-batch or full softmax."""
    true = scores.new_zeros(scores.shape[0], dtype=torch.int64)
    return functional.cross_entropy(scores if temperature == 1 else scores / temperature, true, reduction="none")


def _mean(scores: Tensor, losses: Tensor) -> Tensor:
    """Return the mean loss of each row, without candidates that do not count; 0 for a row that has none."""
    counts = scores > -torch.inf
    return torch.where(counts, losses, 0).sum(1) / counts.sum(1).clamp(min=1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "binary": binary_loss,
    "focal": focal_loss,
    "bpr": bpr_loss,
    "margin": margin_loss,
    "softmax": softmax_loss,
}
OPTIONS = {"gamma": "focal", "margin": "margin", "temperature": "softmax"}  # each belongs to one loss


def read_loss(name: str, options: dict[str, float | None]) -> Callable[[Tensor], Tensor]:
    """Return the loss `name` with its options; raise ConfigError for an unknown name, or an option of another loss."""
    if name not in LOSSES:
        raise ConfigError(f"loss is {name!r:.80}; choose one of {list(LOSSES)}")
    given: dict[str, Any] = {option: value for option, value in options.items() if value is not None}
    for option, value in given.items():
        if OPTIONS[option] != name:
            raise ConfigError(f"{option} belongs to loss={OPTIONS[option]!r}, and loss is {name!r}; leave it out")
        if not value > 0:
            raise ConfigError(f"{option} is {value!r}; give a number above 0")
    return lambda scores: LOSSES[name](scores, **given)


def in_batch(scores: Tensor, sources: Tensor, destinations: Tensor, log_q: Tensor | None = None) -> Tensor:
    """Return scores of true links first, then those of all other destinations of the batch as candidates.

    `scores` are [n, m]: of n sources and all m >= n destinations of the links, those of the own links first. A
    destination that is an accidental hit, because it is the true one or that of another link of the same source, gets
    -infinity. `log_q` [m] is the logarithm of the probability that a destination is in a batch; it is subtracted
    (Yi et al. 2019), so that frequent destinations are not punished for being frequent.

    `sources` and `destinations` are the node ids of all m links.
    """
    count = scores.shape[0]
    corrected = scores if log_q is None else scores - log_q
    is_hit = (destinations == destinations[:count, None]) | (sources == sources[:count, None])
    true = corrected.diagonal()[:, None]
    return torch.cat([true, corrected.masked_fill(is_hit, -torch.inf)], dim=1)
