"""Pre-sampling over a store that need not fit in memory: what is held is looked at after every batch, and within."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hoploom.load.presample import AS_TRAINED, Presampling, add_visits, distinct_seeds, no_visits, visited
from hoploom.partition.bounded_graph import Opened
from hoploom.sample.options import NumNeighbors

LEAST, MOST = 32, 256  # batches that hotness is measured by
SMALL = 1 << 30  # bytes: with less memory batches are made one at a time


@dataclass(frozen=True)
class Trial:
    """Training, for its batches' nodes."""

    opened: Opened
    fanouts: NumNeighbors
    seeds: Any  # as NeighborLoader takes them
    plan: Presampling = AS_TRAINED

    @property
    def epoch(self) -> int:
        """Batches of an epoch."""
        return -(-distinct_seeds(self.opened.store, self.seeds)[1].numel() // self.plan.batch_size)

    def batches(self, count: int, seed: int) -> Iterator[list[Tensor]]:
        """The nodes of so many batches, see load.visits.visited."""
        threads = 0 if self.opened.memory < SMALL else self.plan.num_threads
        plan = replace(self.plan, batches=range(count), seed=seed, num_threads=threads)
        for nodes in visited(self.opened.store, self.fanouts, self.seeds, plan):
            yield nodes
            self.opened.relieve()

    def hotness(self) -> dict[str, Tensor]:
        """Visits by node type [num_nodes] int64: over an epoch, or over as many batches as tell enough."""
        counts = no_visits(self.opened.store)
        for nodes in self.batches(max(LEAST, min(MOST, self.epoch)), self.plan.seed):
            add_visits(counts, nodes)
        return counts
