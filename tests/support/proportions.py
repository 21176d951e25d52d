"""What chance gives: whether values came up in proportion to weights, and how well links of random tastes rank."""

from math import comb

import torch
from scipy.stats import chi2
from torch import Tensor

P_VALUE = 1e-4  # below it a test fails, and above 1 - P_VALUE: what is too even is not random either
NUM_BINS = 100  # of a population too large to be counted one by one


def assert_in_proportion(values: Tensor, weights: Tensor, shrink: float = 1.0) -> None:
    """Value v came up in proportion to weights[v], as exactly as chance makes it, and no more.

    `shrink` is the variance of the counts over that of independent draws.
    """
    for bin_of_value in _binnings(len(weights)):
        expected = torch.bincount(bin_of_value, weights.double()) * (len(values) / weights.double().sum())
        counts = torch.bincount(bin_of_value[values], minlength=len(expected))
        possible = expected > 0
        assert counts[~possible].sum() == 0
        assert expected[possible].min() > 5, "too few trials for a chi-square test"
        terms = (counts - expected)[possible] ** 2 / expected[possible]
        p = float(chi2.sf(float(terms.sum()) / shrink, df=int(possible.sum()) - 1))
        assert P_VALUE < p < 1 - P_VALUE, f"p = {p:.2g}: {counts.tolist()} for {expected.tolist()}"


def assert_uniform(values: Tensor, num_values: int, shrink: float = 1.0) -> None:
    assert_in_proportion(values, torch.ones(num_values), shrink)


def _binnings(num_values: int) -> list[Tensor]:
    """The bin of each value: its own, or by remainder and by range."""
    values = torch.arange(num_values)
    if num_values <= 1000:
        return [values]
    return [values % NUM_BINS, values * NUM_BINS // num_values]


def mrr_of_tastes(tastes: int, candidates: int, items: int) -> float:
    """The MRR of who knows all tastes: candidates of a link's own taste are as good as the link itself.

    Their number is binomial, and the link is anywhere among them. A candidate that is the link's own item is no rival.
    """
    share, found = 1 / tastes - 1 / items, 0.0
    for rivals in range(candidates + 1):
        chance = comb(candidates, rivals) * share**rivals * (1 - share) ** (candidates - rivals)
        found += chance * sum(1 / rank for rank in range(1, rivals + 2)) / (rivals + 1)
    return found
