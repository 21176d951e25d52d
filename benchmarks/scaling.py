"""How does the cost of a pick grow from 1 M to 10 M nodes?

Features play no part, so these two graphs have few; degrees are those of the main graph.
"""

from collections.abc import Callable

import graph
import report
import torch
from graph import Shape
from measure import take_turns
from report import Report, Row, Target

BATCHES = 6  # per repetition


def measure(tiny: bool) -> Report:
    """The two graphs take turns."""
    torch.set_num_threads(1)
    smaller, larger = _cost(graph.SMALLER, tiny), _cost(graph.LARGER, tiny)
    spreads = take_turns({"smaller": smaller, "larger": larger})
    ratio = spreads["larger"].median / spreads["smaller"].median
    names = [f"{shape.num_nodes // 1_000_000} M nodes" for shape in (graph.LARGER, graph.SMALLER)]
    target = Target("ratio", "<", 1.5)
    row = Row(f"cost of a pick, {names[0]}", "ns/pick", spreads["larger"], names[1], spreads["smaller"], ratio, target)
    return Report([row])


def _cost(shape: Shape, tiny: bool) -> Callable[[int], float]:
    sample = graph.make_sampler(graph.open_warm(shape, tiny))

    def cost(number: int) -> float:
        seconds, num_picks = graph.timed(sample, range(number * BATCHES, (number + 1) * BATCHES))
        return seconds / num_picks * 1e9

    return cost


if __name__ == "__main__":
    report.main(measure)
