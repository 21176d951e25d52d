"""How fast do edges become CSC, against PyG's own conversion?

The input is what a user has: edge_index [2, num_edges] int64, in random order of edges, with ends by a power law or
uniformly random. PyG's conversion is what its samplers do with such a Data: a radix sort of the destinations, then
`row[perm]`. Both give where the lists begin, the sources, and the permutation; before every repetition ours gives back
what memory it kept, so that both pay for the pages of their results.
"""

import time
from collections.abc import Callable

import graph
import report
import torch
from measure import Side, take_turns
from report import Report, Row, Target
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler.utils import to_csc

from hoploom import ops

SKEW = 3  # rank = num_nodes * uniform ** SKEW: a thousandth of the nodes has a tenth of the ends
REPETITIONS, WARMUPS = 5, 1  # PyG takes seconds for each


def measure(tiny: bool) -> Report:
    """Both sides take turns, on two threads, for each way that ends are spread."""
    num_nodes = graph.MAIN.num_nodes // (100 if tiny else 1)
    num_edges = int(num_nodes * graph.MAIN.avg_degree)
    rows = [
        _compare(name, spread(num_nodes, num_edges), num_nodes)
        for name, spread in {"power law": _by_power_law, "uniform": _uniform}.items()
    ]
    return Report(rows, [f"{num_edges:,} edges, {num_nodes:,} nodes"])


def _compare(name: str, edge_index: Tensor, num_nodes: int) -> Row:
    given = Data(edge_index=edge_index, num_nodes=num_nodes)
    _check_equal(edge_index, given)
    sides = {
        "ours": _side(lambda: ops.build_csc(edge_index, num_nodes, num_nodes)),
        "theirs": _side(lambda: to_csc(given)),
    }
    spreads = take_turns(sides, repetitions=REPETITIONS, warmups=WARMUPS)
    ours, theirs = spreads["ours"], spreads["theirs"]
    ratio = theirs.median / ours.median
    return Row(f"COO to CSC, {name}", "s", ours, "PyG, to_csc", theirs, ratio, Target("ratio", ">=", 5))


def _check_equal(edge_index: Tensor, given: Data) -> None:
    assert given.num_nodes is not None
    ours = ops.build_csc(edge_index, given.num_nodes, given.num_nodes)
    indptr, sources, permutation = to_csc(given)
    assert ours.permutation is not None
    assert permutation is not None
    assert torch.equal(ours.indptr, indptr)
    assert torch.equal(ours.permutation, permutation)
    assert torch.equal(ours.indices, sources.to(torch.int32))


def _side(convert: Callable[[], object]) -> Side:
    def run(_: int) -> float:
        ops.pool_trim()
        begin = time.perf_counter()
        convert()
        return time.perf_counter() - begin

    return run


def _uniform(num_nodes: int, num_edges: int) -> Tensor:
    return torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(1))


def _by_power_law(num_nodes: int, num_edges: int) -> Tensor:
    """Hubs lie anywhere among the ids."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randperm(num_nodes, generator=generator)
    edge_index = torch.empty(2, num_edges, dtype=torch.int64)
    for end in edge_index:
        ranks = torch.rand(num_edges, generator=generator).pow_(SKEW).mul_(num_nodes).long()
        torch.index_select(ids, 0, ranks.clamp_(max=num_nodes - 1), out=end)
    return edge_index


if __name__ == "__main__":
    report.main(measure)
