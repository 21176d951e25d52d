"""How fast does the streaming partitioner assign nodes to parts, and how many edges does it cut?

Edges of the graph per second and core, all passes together, for 124 M edges into 4 parts. The cut is a share of the
edges, on a graph of 1 M edges with 16 planted communities (homophily 0.8), against hash and against METIS. Remote rows
are those that a batch of a part's own seeds asks of other parts: 100,000 nodes, four parts, 5 % of the
nodes are seeds, fanouts 10 and 5.
"""

import tempfile
import time
from pathlib import Path

import graph
import report
import torch
from measure import Spread, spread_of
from report import Report, Row, Target

import hoploom
from hoploom import ops
from hoploom.partition import assign, edge_cut, partition
from hoploom.store import Store

PARTS = 4
REPETITIONS = 5


def measure(tiny: bool) -> Report:
    """Speed on the main graph, cuts on a small one."""
    store = graph.open_warm(graph.MAIN, tiny)
    num_edges = store.schema.relations[0].num_edges
    rates = spread_of(_rate(store, num_edges) for _ in range(REPETITIONS))
    rows = [
        Row(
            f"stream, {num_edges / 1e6:.0f} M edges to {PARTS} parts",
            "M edges/s/core",
            rates,
            "-",
            target=Target("ours", ">=", 20),
        )
    ]
    with tempfile.TemporaryDirectory() as folder:
        small = hoploom.generate(Path(folder) / "small", num_nodes=500 if tiny else 50_000, num_features=1)
        rows += _cuts(small)
        rows += _remote_rows(Path(folder), 1_000 if tiny else 100_000)
    return Report(rows, [f"stream: threads 1, {REPETITIONS} repetitions; cuts are the same every time"])


def _rate(store: Store, num_edges: int) -> float:
    """Millions of edges per second on one core."""
    begin = time.perf_counter()
    assign(store, PARTS, "stream", seeds="train", threads=1)
    return num_edges / (time.perf_counter() - begin) / 1e6


def _cuts(store: Store) -> list[Row]:
    num_edges = store.schema.relations[0].num_edges

    def cut(method: str) -> Spread:
        share = 100 * sum(edge_cut(store, assign(store, PARTS, method, seeds="train")).values()) / num_edges
        return Spread(share, share, share, 1)

    ours = cut("stream")
    question = f"edges cut, {num_edges / 1e6:.1f} M edges"
    return [
        Row(question, "%", ours, name, other, ours.median / other.median, Target("ratio", "<", limit))
        for name, other, limit in (("hash", cut("hash"), 0.5), ("METIS", _metis_cut(store), 1.5))
    ]


def _metis_cut(store: Store) -> Spread:
    """The share of the edges that METIS cuts, with each edge both ways, once."""
    import pymetis

    lists, num_nodes = store.parts[0].lists[0], store.schema.node_types[0].num_nodes
    ends = torch.repeat_interleave(torch.arange(num_nodes), lists.indptr.diff())
    sources = lists.indices.long()
    both = torch.cat([sources * num_nodes + ends, ends * num_nodes + sources])[(sources != ends).repeat(2)].unique()
    indptr = torch.bincount(both // num_nodes, minlength=num_nodes).cumsum(0)
    adjacency = pymetis.CSRAdjacency([0, *indptr.tolist()], (both % num_nodes).int().numpy())
    parts = torch.tensor(pymetis.part_graph(PARTS, adjacency)[1], dtype=torch.int16)
    share = 100 * sum(edge_cut(store, {"node": parts}).values()) / ends.numel()
    return Spread(share, share, share, 1)


def _remote_rows(folder: Path, num_nodes: int) -> list[Row]:
    """The share of a batch's rows that lie in other parts, by method."""
    path = folder / "seeds"
    hoploom.generate(path, num_nodes=num_nodes, num_features=16)
    seeds = ops.permute(graph.SHUFFLE, num_nodes, 0, num_nodes // 20).sort().values
    shares = {}
    for method in ("hash", "stream"):
        costs = partition(path, folder / method, PARTS, method=method, seeds=seeds, fanouts=[10, 5])
        shares[method] = 100 * (costs.remote_share or 0)
    by_hash = Spread(shares["hash"], shares["hash"], shares["hash"], 1)
    return [
        Row(
            f"rows of a batch in other parts, {method}",
            "%",
            Spread(share, share, share, 1),
            "hash",
            by_hash,
            share / by_hash.median,
        )
        for method, share in shares.items()
    ]


if __name__ == "__main__":
    report.main(measure)
