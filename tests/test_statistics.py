"""Picks have the distribution they promise: chi-square tests of the core under fixed keys.

Every list of a graph here has the same degree and its own sources, so one call is many trials.
A p-value below 1e-4 fails, and so does one above 1 - 1e-4: too even is not random either.
"""

from collections.abc import Callable, Iterator
from itertools import combinations, permutations

import pytest
import torch
from scipy import stats
from torch import Tensor

from hoploom import keys, ops

P_VALUE = 1e-4
DEGREES = [3, 10, 100, 1000, 100_000]
NUM_BINS = 100
NUM_EDGES = 2_000_000  # of one graph

degrees = pytest.mark.parametrize("degree", DEGREES)


def assert_fits(counts: Tensor, expected: Tensor, shrink: float = 1.0) -> None:
    """The counts are as far from the expected ones as chance makes them.

    `shrink` is by how much the variance is smaller than that of independent picks.
    """
    assert expected.min() > 5
    statistic = float(((counts - expected) ** 2 / expected).sum()) / shrink
    p = stats.chi2.sf(statistic, df=len(counts) - 1)
    assert P_VALUE < p < 1 - P_VALUE, f"p = {p:.2g}: {counts.tolist()} for {expected.tolist()}"


def assert_uniform(values: Tensor, num_values: int, shrink: float = 1.0) -> None:
    """Each of [0, num_values) is as likely as another: one by one, or in two ways of binning them."""
    if num_values <= 1000:
        binnings = [values]
        num_values_binned = num_values
    else:
        assert num_values % NUM_BINS == 0
        binnings = [values % NUM_BINS, values // (num_values // NUM_BINS)]
        num_values_binned = NUM_BINS
    for binned in binnings:
        counts = torch.bincount(binned, minlength=num_values_binned).double()
        assert_fits(counts, torch.full_like(counts, len(values) / num_values_binned), shrink)


def without_replacement(population: int, fanout: int) -> float:
    """The variance of inclusion without replacement, over that of independent picks."""
    return (population - fanout) / (population - 1)
