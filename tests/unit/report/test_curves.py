"""Curves are thinned without losing an extreme."""

import math
import random

from hoploom.report.runs import MOST, thinned


def test_few_points_stay_as_they_are() -> None:
    assert thinned([1, 2, 3], [0.5, math.nan, 2.0]) == {"x": [1.0, 2.0, 3.0], "y": [0.5, None, 2.0]}


def test_every_extreme_of_many_points_is_kept() -> None:
    values = [random.Random(step).random() for step in range(20_011)]
    values[777], values[15_000], values[20_010] = 55.0, -44.0, 33.0
    curve = thinned(range(20_011), values)
    assert len(curve["x"]) == len(curve["y"]) == MOST
    assert (max(curve["high"]), min(curve["low"]), curve["high"][-1]) == (55.0, -44.0, 33.0)
    assert all(low <= mean <= high for low, mean, high in zip(curve["low"], curve["y"], curve["high"], strict=True))


def test_the_mean_of_a_span_is_weighted() -> None:
    assert thinned(range(4), [1.0, 3.0, 5.0, 5.0], [3.0, 1.0, 1.0, 1.0], most=2)["y"] == [1.5, 5.0]


def test_a_span_without_any_number_is_a_gap() -> None:
    curve = thinned(range(6), [math.nan, math.inf, 1.0, math.nan, 2.0, 4.0], most=3)
    assert (curve["y"], curve["low"], curve["high"]) == ([None, 1.0, 3.0], [None, 1.0, 2.0], [None, 1.0, 4.0])
