"""How long does a batch of a graph with several types take in the steady state, beside PyG with pyg-lib?

A batch is 512 seeds with fanouts 10 and 10 in three relations and their reverses: with times, without, and of links
with as many negatives. Also: how much longer are the batches 2 to 10 of a loader than later ones?
"""

import time
from itertools import islice

import peer
import report
import typed_graph
from measure import Side, spread_of, take_turns
from report import Report, Row, Target
from torch_geometric.data import HeteroData

import hoploom
from hoploom.load.loader import Loader

KINDS = {"temporal": "with times", "typed": "without times", "links": "of links"}
WARM, COUNT = 20, 100  # batches of ours
PEER_WARM, PEER_COUNT = 4, 16
REPETITIONS = 5


def measure(tiny: bool) -> Report:
    """Every kind of loader takes turns with PyG's."""
    data = typed_graph.make_graph(tiny)
    warm, count = (12, 20) if tiny else (WARM, COUNT)
    rows, notes, absent = [], [], []
    with peer.typed_loader() as found:
        for kind, words in KINDS.items():
            loader = loader_of(kind, data, warm + count)
            sides = {"ours": our_side(loader, warm, count)}
            if found is not None:
                sides["peer"] = peer_side(found, kind, tiny)
            spreads = take_turns(sides, repetitions=1 if tiny else REPETITIONS, warmups=1)
            ours = spreads["ours"].scaled(1e3)
            theirs = spreads["peer"].scaled(1e3) if found is not None else None
            ratio = None if theirs is None else theirs.median / ours.median
            question = f"a batch of three types {words}, {typed_graph.WORKERS} workers"
            rows.append(Row(question, "ms/batch", ours, "PyG, pyg-lib", theirs, ratio, Target("ratio", ">=", 6)))
            if kind == "temporal":
                rows.append(first_batches(loader, warm, 1 if tiny else REPETITIONS))
        if found is None:
            absent.append("pyg-lib")
        else:
            notes.append(found.versions)
    return Report(rows, notes, absent)


def loader_of(kind: str, data: HeteroData, num_batches: int) -> Loader:
    store = hoploom.from_pyg(data, time_attr="time" if kind == "temporal" else None)
    options = typed_graph.options_of(kind, data, num_batches)
    return (hoploom.LinkNeighborLoader if kind == "links" else hoploom.NeighborLoader)(store, **options)


def our_side(loader: Loader, warm: int, count: int) -> Side:
    return lambda number: typed_graph.seconds_per_batch(loader, warm, count)


def peer_side(found: peer.Peer, kind: str, tiny: bool) -> Side:
    warm, count = (2, 4) if tiny else (PEER_WARM, PEER_COUNT)
    return lambda number: float(found.ask("epoch", kind=kind, tiny=tiny, warm=warm, count=count)["seconds"])


def first_batches(loader: Loader, warm: int, repetitions: int) -> Row:
    """Batches 2 to 10 beside those after the first `warm`, in the same epochs."""
    early, late = [], []
    for _ in range(repetitions):
        batches = iter(loader)
        ends = [time.perf_counter() for _ in islice(batches, len(loader))]
        early.append((ends[9] - ends[0]) / 9)
        late.append((ends[-1] - ends[warm - 1]) / (len(ends) - warm))
    ours, later = spread_of(early).scaled(1e3), spread_of(late).scaled(1e3)
    question = "batches 2 to 10 of a loader, with times"
    return Row(
        question, "ms/batch", ours, "later batches", later, ours.median / later.median, Target("ratio", "<", 1.3)
    )


if __name__ == "__main__":
    report.main(measure)
