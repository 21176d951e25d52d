"""Our loader against PyG's, epoch by epoch.

A repetition is one epoch, first batch to last, so that no side works ahead while the other is measured.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import graph
import peer
from measure import Side, Spread, take_turns
from torch import Tensor

from hoploom import NeighborLoader
from hoploom.store import Store


@dataclass(frozen=True)
class Epoch:
    """What both loaders run."""

    fanouts: Sequence[int]
    batch_size: int
    num_workers: int
    num_batches: int
    num_peer_batches: int  # fewer, because they are slow


@dataclass(frozen=True)
class Timings:
    """Seconds a batch takes."""

    ours: Spread
    theirs: Spread | None
    notes: list[str]
    absent: list[str]

    @property
    def ratio(self) -> float | None:
        """How many times faster ours is."""
        return None if self.theirs is None else self.theirs.median / self.ours.median

    def scaled(self, factor: float) -> tuple[Spread, Spread | None]:
        """Both in another unit."""
        return self.ours.scaled(factor), None if self.theirs is None else self.theirs.scaled(factor)


def compare_epochs(epoch: Epoch, tiny: bool) -> Timings:
    """Both loaders over the main graph, taking turns."""
    store = graph.open_warm(graph.MAIN, tiny)
    seeds = graph.seeds_at(store, 0, epoch.num_batches * epoch.batch_size)
    sides = {"ours": _our_side(store, seeds, epoch)}
    with peer.pyg() as found:
        if found is not None:
            found.read(graph.path_of(graph.MAIN, tiny), store)
            sides["peer"] = _peer_side(found, seeds, epoch)
        spreads = take_turns(sides)
        notes = [found.versions] if found else []
        return Timings(spreads["ours"], spreads.get("peer"), notes, peer.absent(found))


def _our_side(store: Store, seeds: Tensor, epoch: Epoch) -> Side:
    loader = NeighborLoader(
        store, epoch.fanouts, input_nodes=seeds, batch_size=epoch.batch_size, num_workers=epoch.num_workers
    )

    def run(_: int) -> float:
        begin = time.perf_counter()
        num_batches = sum(1 for _ in loader)
        return (time.perf_counter() - begin) / num_batches

    return run


def _peer_side(found: peer.Peer, seeds: Tensor, epoch: Epoch) -> Side:
    some = seeds[: epoch.num_peer_batches * epoch.batch_size].tolist()
    options = {"batch_size": epoch.batch_size, "num_workers": epoch.num_workers}
    found.ask("make_loader", seeds=some, fanouts=list(epoch.fanouts), **options)

    def run(_: int) -> float:
        answer = found.ask("run_epoch")
        return float(answer["seconds"]) / int(answer["batches"])

    return run
