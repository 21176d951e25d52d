"""How long does a layer that reads edges take, forward and backward, and how much memory, beside PyG with pyg-lib?

The edges are those of a batch's second layer, with 16 features each; rows are 256 floats wide, and attention has 4
heads. Also: a GraphSAGE layer with edge weights beside itself without. Both sides have two threads.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import graph
import numpy as np
import peer
import report
import torch
from layer_steps import EDGE_DIM, LAYERS, WIDTH, Step
from measure import take_turns
from report import Report, Row, Target

from hoploom import nn, ops
from hoploom.ops import InEdges

REPETITIONS = 7


def measure(tiny: bool) -> Report:
    """Every layer takes turns with PyG's."""
    store = graph.open_warm(graph.MAIN, tiny)
    sampled = graph.make_sampler(store)(0)
    assert sampled.num_nodes is not None
    counts = sampled.num_nodes[0]
    num_destinations, num_sources = sum(counts[:-2]), sum(counts[:-1])
    edge_index = sampled.edge_index[0]
    edge_index = edge_index[:, edge_index[1] < num_destinations].contiguous()
    edge_attr = torch.randn(edge_index.shape[1], EDGE_DIM)
    repetitions = 1 if tiny else REPETITIONS

    def ours(name: str) -> Step:
        conv = LAYERS[name](nn)
        return Step(lambda x: conv(x, grouped().with_features(edge_attr)), num_sources)

    def grouped() -> InEdges:
        return InEdges.of(edge_index, num_sources, num_destinations)

    rows, notes = [], [f"{edge_index.shape[1]:,} edges, {num_sources:,} to {num_destinations:,} rows of {WIDTH} floats"]
    with peer.layers() as found, tempfile.TemporaryDirectory() as folder:
        if found is not None:
            np.save(Path(folder, "edge_index.npy"), edge_index.numpy())
            np.save(Path(folder, "edge_attr.npy"), edge_attr.numpy())
            found.ask("read", folder=folder, num_sources=num_sources, num_destinations=num_destinations)
            notes.append(found.versions)
        for name in LAYERS:
            rows += _beside_pyg(name, ours(name), found, repetitions)
    rows.append(_weighted(num_sources, grouped, repetitions))
    return Report(rows, notes, [] if found else ["pyg-lib"])


def _beside_pyg(name: str, step: Step, found: peer.Peer | None, repetitions: int) -> list[Row]:
    """Two rows: the time of a step, and the memory that it needs."""
    sides = {"ours": lambda number: step.seconds()}
    peaks = {"ours": lambda number: float(step.peak())}
    if found is not None:
        found.ask("make", layer=name)
        sides["peer"] = lambda number: float(found.ask("step")["seconds"])
        peaks["peer"] = lambda number: float(found.ask("peak")["bytes"])
    ops.pool_trim()
    held = take_turns(peaks, repetitions=1, warmups=0)
    taken = take_turns(sides, repetitions=repetitions, warmups=1)
    rows = []
    for spreads, what, unit, scale, least in (
        (taken, "a step", "ms", 1e3, 4),
        (held, "memory of a step", "MB", 1e-6, 2),
    ):
        mine, theirs = spreads["ours"].scaled(scale), spreads["peer"].scaled(scale) if found else None
        ratio = theirs.median / mine.median if theirs else None
        rows.append(Row(f"{what} of {name}", unit, mine, "PyG, pyg-lib", theirs, ratio, Target("ratio", ">=", least)))
    return rows


def _weighted(num_sources: int, grouped: Callable[[], InEdges], repetitions: int) -> Row:
    conv, weights = nn.SAGEConv(WIDTH, WIDTH), torch.rand(grouped().num_edges)
    steps = {
        "with": Step(lambda x: conv(x, grouped().weighted(weights)), num_sources),
        "without": Step(lambda x: conv(x, grouped()), num_sources),
    }
    sides = {name: lambda number, step=step: step.seconds() for name, step in steps.items()}
    spreads = take_turns(sides, repetitions=repetitions, warmups=1)
    ours, plain = (spreads[name].scaled(1e3) for name in ("with", "without"))
    ratio = ours.median / plain.median
    return Row("a step of SAGE with weights", "ms", ours, "without weights", plain, ratio, Target("ratio", "<", 1.2))


if __name__ == "__main__":
    report.main(measure)
