"""The charts of runs: loss, metrics, speed and memory over steps, all runs in each."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hoploom.report.curves import Curve, Figure, Numbers, thinned
from hoploom.report.reading import Labelled


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
    """A run's name tells curves of several runs apart, and is left out where there is just one."""
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
