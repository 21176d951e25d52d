"""The charts of runs: loss, metrics, speed and memory over steps, all runs in each.

A curve of a million steps becomes some hundred points: steps are cut into equal spans, and a span keeps its mean, its
least and its largest value. So no spike is lost, only its position within the span.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hoploom.report.reading import Labelled

MOST = 600  # points of a curve: about one per two pixels
Values: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = Sequence[float] | Values


@dataclass(frozen=True)
class Curve:
    """A line of a chart: points, and the band of least and largest values if a point stands for several steps."""

    label: str
    run: int  # colours it
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    is_dotted: bool = False  # of few points, drawn with a mark each


@dataclass(frozen=True)
class Figure:
    """A figure with curves over steps. Its `unit` is number or bytes."""

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
    """Return x, y and, if points stand for several steps, low and high.

    Values that are not finite are left out; a span without any other is None. `weights` are those of the mean.

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
    """Return values with six digits: more are not seen, and would double the page."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def run_charts(runs: Labelled) -> list[Figure]:
    losses = [_column("training", number, runs, "loss") for number in range(len(runs))]
    losses += _validations("val_loss", "validation", runs)
    found = [Figure("loss", "Loss", losses, note=_thinning(losses))]
    names = [name for _, run in runs for line in run.epochs for name in line if "/" not in name]
    monitors = [str(run.result.get("monitor")) for _, run in runs]
    metrics = dict.fromkeys([name for name in monitors if name in names] + names)
    for name in metrics:
        if name not in ("step", "epoch", "train_loss", "val_loss"):
            found.append(Figure(f"metric {name}", f"Validation {name}", _validations(name, "", runs)))
    found.append(Figure("speed", "Seeds a second", [_speed(number, runs) for number in range(len(runs))]))
    rates = [_column("", number, runs, "learning_rate") for number in range(len(runs))]
    if any(len({value for value in curve.y if value is not None}) > 1 for curve in rates):
        found.append(Figure("rate", "Learning rate", rates))
    memory = [curve for number in range(len(runs)) for curve in _memory_curves(number, runs)]
    found.append(Figure("memory", "Private memory of a process", memory, "bytes"))
    found = [chart for chart in found if any(value is not None for curve in chart.curves for value in curve.y)]
    return [chart for at, chart in enumerate(found) if all(chart.curves != other.curves for other in found[:at])]


def _label(what: str, number: int, runs: Labelled) -> str:
    """Return the label of a curve, with the run's name if there are several runs."""
    words = [what] if len(runs) == 1 else [runs[number][0], what]
    return " ".join(filter(None, words))


def _column(what: str, number: int, runs: Labelled, column: str) -> Curve:
    run = runs[number][1]
    return _curve(what, number, runs, run.columns["step"], run.columns[column])


def _curve(what: str, number: int, runs: Labelled, x: Numbers, y: Numbers, weights: Numbers | None = None) -> Curve:
    points = thinned(x, y, weights)
    low, high = points.get("low", ()), points.get("high", ())
    return Curve(_label(what, number, runs), number, points["x"], points["y"], low, high)


def _speed(number: int, runs: Labelled) -> Curve:
    """Return the curve of seeds a second. Weighted by time: the mean of a span is its seeds by its seconds."""
    columns = runs[number][1].columns
    seconds = np.asarray(columns["seconds"])
    rates = np.asarray(columns["seeds"]) / np.where(seconds > 0, seconds, math.nan)
    return _curve("", number, runs, columns["step"], rates, seconds)


def _validations(name: str, what: str, runs: Labelled) -> list[Curve]:
    curves = []
    for number, (_, run) in enumerate(runs):
        values = [(line["step"], _number(line[name])) for line in run.epochs if name in line]
        if values:
            curves.append(replace(_curve(what, number, runs, *zip(*values, strict=True)), is_dotted=True))
    return curves


def _memory_curves(number: int, runs: Labelled) -> Iterator[Curve]:
    """Yield a curve for each kind of memory: of the rank that holds most."""
    names = {"private": "private"} | ({"gpu": "GPU"} if len(runs) == 1 else {})
    for kind, what in names.items():
        most: dict[float, float] = {}
        for line in (line for lines in runs[number][1].times.values() for line in lines):
            if kind in line.get("memory", {}):
                most[line["step"]] = max(most.get(line["step"], 0), line["memory"][kind])
        if most:
            yield _curve(what if len(names) > 1 else "", number, runs, *zip(*sorted(most.items()), strict=True))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _thinning(curves: Sequence[Curve]) -> str:
    if any(curve.low for curve in curves):
        return "A line is the mean of neighbouring steps, the band around it reaches from their least to their largest."
    return ""
