"""How fast is a mean over the neighbours, forward and backward, against PyG's scatter path?

The edges are those of a batch's second layer, the rows 256 floats wide. PyG's path is what its layers do where no
torch-sparse is installed: a row per edge (`index_select`), then `scatter`. Also in GB/s, counting every row that is
read and written once, against copying as many bytes in one piece.
"""

import time
from collections.abc import Callable

import graph
import report
import torch
from measure import Spread, take_turns
from report import Report, Row, Target
from torch import Tensor
from torch_geometric.utils import scatter

from hoploom import ops
from hoploom.ops import InEdges

WIDTH = 256
ROUNDS = 4  # per repetition

Aggregate = Callable[[Tensor], Tensor]


def measure(tiny: bool) -> Report:
    """Both paths and the copy take turns, on two threads."""
    store = graph.open_warm(graph.MAIN, tiny)
    sampled = graph.make_sampler(store)(0)
    assert sampled.num_nodes is not None
    counts = sampled.num_nodes[0]
    num_destinations, num_sources = sum(counts[:-2]), sum(counts[:-1])
    whole = InEdges.of(sampled.edge_index[0], sampled.nodes[0].numel(), num_sources)
    edges = whole.head(num_destinations, num_sources)
    edge_index = sampled.edge_index[0][:, : edges.num_edges].contiguous()
    x = torch.randn(num_sources, WIDTH)
    grad = torch.randn(num_destinations, WIDTH)

    def ours(given: Tensor) -> Tensor:
        return ops.aggregate(given, InEdges.of(edge_index, num_sources, num_destinations), "mean")

    def theirs(given: Tensor) -> Tensor:
        return scatter(given.index_select(0, edge_index[0]), edge_index[1], 0, num_destinations, "mean")

    moved = 4 * WIDTH * (2 * edges.num_edges + num_destinations + num_sources)
    there, here = (torch.empty(moved // 2, dtype=torch.uint8).fill_(1) for _ in range(2))

    def copy(_: int) -> float:
        begin = time.perf_counter()
        there.copy_(here)
        return time.perf_counter() - begin

    sides = {"ours": _side(ours, x, grad), "theirs": _side(theirs, x, grad), "copy": copy}
    torch.testing.assert_close(ours(x), theirs(x))
    spreads = take_turns(sides)
    mine, other, copied = (spreads[name] for name in ("ours", "theirs", "copy"))
    ratio = other.median / mine.median
    target = Target("ratio", ">=", 3)
    question = "mean of neighbours, forward and backward"
    rows = [
        Row(question, "ms", mine.scaled(1e3), "PyG, gather and scatter", other.scaled(1e3), ratio, target),
        Row(
            f"{question}, bytes moved",
            "GB/s",
            _rates(mine, moved),
            "a copy of as many",
            _rates(copied, moved),
            copied.median / mine.median,
        ),
    ]
    return Report(rows, [f"{edges.num_edges:,} edges, {num_sources:,} to {num_destinations:,} rows of {WIDTH} floats"])


def _side(aggregate: Aggregate, x: Tensor, grad: Tensor) -> Callable[[int], float]:
    """Seconds of one forward and backward pass."""

    def run(_: int) -> float:
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            given = x.detach().requires_grad_()
            aggregate(given).backward(grad)
        return (time.perf_counter() - begin) / ROUNDS

    return run


def _rates(seconds: Spread, moved: float) -> Spread:
    return Spread(moved / seconds.median / 1e9, moved / seconds.high / 1e9, moved / seconds.low / 1e9, seconds.count)


if __name__ == "__main__":
    report.main(measure)
