"""Curves small enough for a page: a million steps become some hundred points, each with the extremes it stands for.

Steps are cut into equal spans. A span keeps its mean, its least and its largest value, so no spike is lost; what is
lost is where in the span it stood.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

MOST = 600  # points of a curve: about one per two pixels
Values: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = Sequence[float] | Values


@dataclass(frozen=True)
class Curve:
    """One line of a chart: points, and around them the band of what they stand for, if they stand for several."""

    label: str
    run: int  # colours it
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    is_dotted: bool = False  # of few points, drawn with a mark each


@dataclass(frozen=True)
class Figure:
    """A figure with curves over steps. `unit` says how its values are written: number, bytes."""

    key: str
    title: str
    curves: Sequence[Curve]
    unit: str = "number"
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        curves = [
            {
                "label": curve.label,
                "run": curve.run,
                "dotted": curve.is_dotted,
                "data": [curve.x, curve.y, *([curve.low, curve.high] if curve.low else [])],
            }
            for curve in self.curves
        ]
        return {"key": self.key, "title": self.title, "unit": self.unit, "curves": curves}


def thinned(x: Numbers, y: Numbers, weights: Numbers | None = None, most: int = MOST) -> Mapping[str, list[Any]]:
    """x, y and, where points stand for several, low and high. What is not finite is left out, or None where a whole
    span is. `weights`: of the mean.

    >>> thinned(range(6), [1, 9, 2, 3, 4, 5], most=2)["high"]
    [9.0, 5.0]
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    ys = np.where(np.isfinite(ys), ys, np.nan)
    if len(xs) <= most:
        return {"x": _listed(xs), "y": _listed(ys)}
    ends = np.linspace(0, len(xs), most + 1).astype(np.int64)
    begins, middles = ends[:-1], (ends[:-1] + ends[1:] - 1) // 2
    share = np.ones_like(ys) if weights is None else np.asarray(weights, dtype=np.float64)
    share = np.where(np.isfinite(ys) & np.isfinite(share), share, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.nan_to_num(ys) * share, begins) / np.add.reduceat(share, begins)
        low, high = np.fmin.reduceat(ys, begins), np.fmax.reduceat(ys, begins)
    found = {"x": xs[middles], "y": mean, "low": low, "high": high}
    return {name: _listed(values) for name, values in found.items()}


def _listed(values: Values) -> list[float | None]:
    """Six digits: more are not seen, and would double the page."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
