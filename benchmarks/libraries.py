"""How long does a batch take in each library's own loader, on the same graph, cores and fanouts?

A batch is 1024 seeds with fanouts 15, 10, 5 and its rows of 100 floats. PyG and GLT make subgraphs; DGL and GraphBolt
make blocks. Ours is measured in the same form, and takes turns with each library: A B A B.
"""

import time
from dataclasses import dataclass
from typing import Any

import graph
import peer
import report
import torch
from measure import Side, take_turns
from report import Report, Row

from hoploom import NeighborLoader
from hoploom.store import Store

WORKERS = 2
BATCHES = 16  # of an epoch, on both sides: starting and filling a pipeline weighs alike
REPETITIONS, WARMUPS = 5, 1


@dataclass(frozen=True)
class Library:
    """A library, as its row names it, and the form of its batches."""

    name: str
    title: str
    mode: str | None = None  # None: a subgraph


LIBRARIES = (
    Library("torch-sparse", "PyG, torch-sparse"),
    Library("pyg-lib", "PyG, pyg-lib"),
    Library("GLT", "GLT"),
    Library("DGL", "DGL", "blocks"),
    Library("GraphBolt", "GraphBolt", "blocks"),
)


def measure(tiny: bool) -> Report:
    """One library after the other, so that only one holds the graph."""
    store = graph.open_warm(graph.MAIN, tiny)
    size = graph.NUM_SEEDS // 100 if tiny else graph.NUM_SEEDS
    seeds = graph.seeds_at(store, 0, BATCHES * size)
    rows, notes, absent = [], [], []
    for library in LIBRARIES:
        with peer.loader_of(library.name) as found:
            if found is None:
                absent.append(library.name)
                continue
            sides = {"ours": _our_side(store, seeds, size, library.mode), "peer": _peer_side(found, store, seeds, tiny)}
            spreads = take_turns(sides, repetitions=REPETITIONS, warmups=WARMUPS)
            ours, theirs = spreads["ours"].scaled(1e3), spreads["peer"].scaled(1e3)
            question = f"a batch of {library.mode or 'subgraphs'}, {WORKERS} workers"
            rows.append(Row(question, "ms/batch", ours, library.title, theirs, theirs.median / ours.median))
            notes.append(found.versions)
    return Report(rows, notes, absent)


def _our_side(store: Store, seeds: torch.Tensor, size: int, mode: str | None) -> Side:
    options: dict[str, Any] = {} if mode is None else {"mode": mode}
    loader = NeighborLoader(store, graph.FANOUTS, seeds, batch_size=size, num_workers=WORKERS, **options)

    def run(_: int) -> float:
        begin = time.perf_counter()
        num_batches = sum(1 for _ in loader)
        return (time.perf_counter() - begin) / num_batches

    return run


def _peer_side(found: peer.Peer, store: Store, seeds: torch.Tensor, tiny: bool) -> Side:
    size = len(seeds) // BATCHES
    files = peer.files_of(graph.path_of(graph.MAIN, tiny), store)
    found.ask("make", graph=files, seeds=seeds.tolist(), batch_size=size, fanouts=graph.FANOUTS, num_workers=WORKERS)

    def run(_: int) -> float:
        answer = found.ask("epoch")
        return float(answer["seconds"]) / int(answer["batches"])

    return run


if __name__ == "__main__":
    report.main(measure)
