"""How long does a layer that reads edges take, forward and backward, and how much memory, beside PyG and DGL?

The edges are those of a batch's second layer, with 16 features each; rows are 256 floats wide, and attention has 4
heads. DGL's GATv2 reads no edge features, so it does less than the others. Also: a GraphSAGE layer with edge weights
beside itself without. Every side has two threads.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import graph
import numpy as np
import peer
import report
import torch
from layer_steps import EDGE_DIM, LAYERS, WIDTH, Step
from measure import Spread, take_turns
from report import Report, Row, Target

from hoploom import nn, ops
from hoploom.ops import InEdges

REPETITIONS = 7
LEAST = {"pyg-lib": 4, "DGL": 1.5}  # times as fast as each peer


def measure(tiny: bool) -> Report:
    """Every layer takes turns with the peers'."""
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
    with ExitStack() as running:
        peers = {name: running.enter_context(peer.layers(name)) for name in LEAST}
        found = {name: each for name, each in peers.items() if each is not None}
        folder = running.enter_context(tempfile.TemporaryDirectory())
        np.save(Path(folder, "edge_index.npy"), edge_index.numpy())
        np.save(Path(folder, "edge_attr.npy"), edge_attr.numpy())
        for each in found.values():
            each.ask("read", folder=folder, num_sources=num_sources, num_destinations=num_destinations)
            notes.append(each.versions)
        for name in LAYERS:
            rows += _beside_peers(name, ours(name), found, repetitions)
    rows.append(_weighted(num_sources, grouped, repetitions))
    return Report(rows, notes, [name for name in LEAST if name not in found])


def _beside_peers(name: str, step: Step, found: dict[str, peer.Peer], repetitions: int) -> list[Row]:
    """The time of a step beside every peer's, and the memory that it needs beside PyG's."""
    times, peaks = {"ours": lambda number: step.seconds()}, {"ours": lambda number: float(step.peak())}
    for library, each in found.items():
        each.ask("make", layer=name)
        times[library] = lambda number, each=each: float(each.ask("step")["seconds"])
        peaks[library] = lambda number, each=each: float(each.ask("peak")["bytes"])
    ops.pool_trim()
    held = take_turns(peaks, repetitions=1, warmups=0)
    taken = take_turns(times, repetitions=repetitions, warmups=1)
    return [
        *(_row(f"a step of {name}", "ms", 1e3, taken, library, least) for library, least in LEAST.items()),
        _row(f"memory of a step of {name}", "MB", 1e-6, held, "pyg-lib", 2),
    ]


def _row(question: str, unit: str, scale: float, spreads: dict[str, Spread], library: str, least: float) -> Row:
    ours, theirs = spreads["ours"].scaled(scale), spreads[library].scaled(scale) if library in spreads else None
    ratio = theirs.median / ours.median if theirs else None
    baseline = "PyG, pyg-lib" if library == "pyg-lib" else library
    return Row(question, unit, ours, baseline, theirs, ratio, Target("ratio", ">=", least))


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
