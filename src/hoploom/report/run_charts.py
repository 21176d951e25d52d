"""The charts of runs: loss, metrics, speed and memory over steps, all runs in each."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hoploom.report.curves import Curve, Figure, thinned
from hoploom.report.reading import Labelled, RunReader


def run_charts(runs: Labelled) -> list[Figure]:
    losses = [_thinned("training", number, run, "loss", runs) for number, (_, run) in enumerate(runs)]
    losses += _validations("val_loss", "validation", runs)
    found = [Figure("loss", "Loss", losses, note=_thinning(losses))]
    names = [name for _, run in runs for line in run.epochs for name in line if "/" not in name]
    monitors = [str(run.result.get("monitor")) for _, run in runs]
    metrics = dict.fromkeys([name for name in monitors if name in names] + names)
    for name in metrics:
        if name not in ("step", "epoch", "train_loss", "val_loss"):
            found.append(Figure(f"metric {name}", f"Validation {name}", _validations(name, "", runs)))
    speeds = [_speed(number, run, runs) for number, (_, run) in enumerate(runs)]
    found.append(Figure("speed", "Seeds a second", speeds))
    rates = [_thinned("", number, run, "learning_rate", runs) for number, (_, run) in enumerate(runs)]
    if any(len({value for value in curve.y if value is not None}) > 1 for curve in rates):
        found.append(Figure("rate", "Learning rate", rates))
    memory = [curve for number, (_, run) in enumerate(runs) for curve in _memory_curves(number, run, runs)]
    found.append(Figure("memory", "Private memory of a process", memory, "bytes"))
    found = [chart for chart in found if any(value is not None for curve in chart.curves for value in curve.y)]
    return [chart for at, chart in enumerate(found) if all(chart.curves != other.curves for other in found[:at])]


def _label(what: str, number: int, runs: Labelled) -> str:
    """A run's name tells curves of several runs apart, and is left out where there is just one."""
    words = [what] if len(runs) == 1 else [runs[number][0], what]
    return " ".join(filter(None, words))


def _thinned(what: str, number: int, run: RunReader, column: str, runs: Labelled) -> Curve:
    points = thinned(run.columns["step"], run.columns[column])
    empty: list[Any] = []
    label = _label(what, number, runs)
    return Curve(label, number, points["x"], points["y"], points.get("low", empty), points.get("high", empty))


def _speed(number: int, run: RunReader, runs: Labelled) -> Curve:
    """Weighted by time: the mean of a span is its seeds by its seconds."""
    seconds = np.asarray(run.columns["seconds"])
    rates = np.asarray(run.columns["seeds"]) / np.where(seconds > 0, seconds, math.nan)
    points = thinned(run.columns["step"], rates, seconds)
    return Curve(
        _label("", number, runs), number, points["x"], points["y"], points.get("low", ()), points.get("high", ())
    )


def _validations(name: str, what: str, runs: Labelled) -> list[Curve]:
    curves = []
    for number, (_, run) in enumerate(runs):
        values = [(line["step"], line[name]) for line in run.epochs if name in line]
        if values:
            points = thinned([step for step, _ in values], [_number(value) for _, value in values])
            curves.append(Curve(_label(what, number, runs), number, points["x"], points["y"], is_dotted=True))
    return curves


def _memory_curves(number: int, run: RunReader, runs: Labelled) -> Iterator[Curve]:
    """The rank that holds most, of each kind of memory."""
    names = {"private": "private"} | ({"gpu": "GPU"} if len(runs) == 1 else {})
    for kind, what in names.items():
        most: dict[float, float] = {}
        for lines in run.times.values():
            for line in lines:
                if kind in line.get("memory", {}):
                    most[line["step"]] = max(most.get(line["step"], 0), line["memory"][kind])
        steps = sorted(most)
        if steps:
            points = thinned(steps, [most[step] for step in steps])
            yield Curve(_label(what if len(names) > 1 else "", number, runs), number, points["x"], points["y"])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _thinning(curves: Sequence[Curve]) -> str:
    if any(curve.low for curve in curves):
        return "A line is the mean of neighbouring steps, the band around it reaches from their least to their largest."
    return ""
