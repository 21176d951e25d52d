"""How long does a layer take, forward and backward, beside PyG's with pyg-lib, and how much memory?

A layer runs over one sampled batch of two hops: all its edges, and all its nodes as sources and destinations, 64
channels. HGT and R-GAT have a batch of three node types and six relations. Each side is a process of its own, with two
threads, made afresh for each layer; memory is the peak of its first step beyond what it held before. Layers of one
model read only what later layers need, so they take less than this.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import graph
import peer
import report
import torch
import typed_graph
from measure import spread_of, take_turns
from opening import MB
from peers import relation_layers_peer
from report import Report, Row, Target

import hoploom
from hoploom import NeighborLoader

REPETITIONS, WARMUPS = 5, 1


def measure(tiny: bool) -> Report:
    """Every layer takes turns with PyG's."""
    rows, notes, absent = [], dict[str, None](), []
    with tempfile.TemporaryDirectory() as folder:
        paths = _saved_batches(Path(folder), tiny)
        for layer in relation_layers_peer.LAYERS:
            path = str(paths["typed" if layer in ("HGTConv", "R-GAT") else "plain"])
            with ExitStack() as running:
                sides = {"ours": running.enter_context(peer.layer_of("hoploom.nn"))}
                if (theirs := running.enter_context(peer.layer_of("torch_geometric.nn"))) is None:
                    absent = ["pyg-lib"]
                else:
                    sides["theirs"] = theirs
                    notes[theirs.versions] = None
                rows += _rows(layer, path, sides)
    return Report(rows, list(notes), absent)


def _rows(layer: str, path: str, sides: dict[str, peer.Peer]) -> list[Row]:
    """The times of a layer, and the memory of its first step."""
    held = {}
    for name, side in sides.items():
        side.ask("make", layer=layer, path=path)
        held[name] = spread_of([side.ask("step", count=1)["bytes"] / MB])
    steps = {name: lambda _, side=side: float(side.ask("step", count=1)["seconds"]) for name, side in sides.items()}
    spreads = {n: s.scaled(1e3) for n, s in take_turns(steps, repetitions=REPETITIONS, warmups=WARMUPS).items()}
    both = (
        (spreads, "ms", f"{layer}, forward and backward", Target("ratio", ">=", 4)),
        (held, "MB", f"{layer}, memory of a step", Target("ratio", ">=", 2)),
    )
    rows = []
    for found, unit, question, target in both:
        theirs = found.get("theirs")
        ratio = None if theirs is None else theirs.median / found["ours"].median
        rows.append(Row(question, unit, found["ours"], "PyG, pyg-lib", theirs, ratio, target))
    return rows


def _saved_batches(folder: Path, tiny: bool) -> dict[str, Path]:
    """A batch of one node type, and one of several, as files."""
    torch.manual_seed(0)
    store = graph.open_warm(graph.MAIN, tiny)
    seeds = graph.seeds_at(store, 0, graph.NUM_SEEDS)
    batch = next(iter(NeighborLoader(store, graph.FANOUTS[:2], seeds, batch_size=len(seeds), fields=())))
    num_edges = batch.edge_index.shape[1]
    plain = {
        "x": torch.randn(batch.num_nodes, relation_layers_peer.WIDTH),
        "edges": batch.edge_index,
        "edge_type": torch.randint(relation_layers_peer.TYPES, (num_edges,)),
        "edge_attr": torch.randn(num_edges, relation_layers_peer.EDGE_DIM),
        "deg": torch.bincount(torch.bincount(batch.edge_index[1])),
    }
    data = typed_graph.make_graph(tiny)
    typed = next(iter(hoploom.NeighborLoader(data, **typed_graph.options_of("typed", data, 1))))
    paths = {}
    for name, tensors in (("plain", plain), ("typed", {"x": typed.x_dict, "edges": typed.edge_index_dict})):
        paths[name] = folder / f"{name}.pt"
        torch.save(tensors, paths[name])
    return paths


if __name__ == "__main__":
    report.main(measure)
