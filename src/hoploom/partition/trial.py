"""Training tried out before it: the seeds that it starts from, and the nodes of its batches, in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from hoploom.load.presample import AS_TRAINED, Presampling, add_visits, distinct_seeds, no_visits, visited
from hoploom.partition.bounded_graph import BoundedStore
from hoploom.sample.options import NumNeighbors
from hoploom.schema import Schema

LEAST, MOST = 32, 256  # batches that hotness is measured by
SMALL = 1 << 30  # bytes: with less memory batches are made one at a time


@dataclass(frozen=True)
class Trial:
    """Training, for its batches' nodes."""

    opened: BoundedStore
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


USUAL_SPLIT = "train"


class Usual:
    """The default of `seeds`."""

    def __repr__(self) -> str:
        return f"<{USUAL_SPLIT!r}, where exactly one node type has members of it; else none>"


USUAL: Final = Usual()


def named_seeds(schema: Schema, seeds: Any) -> Any:
    """What `seeds` stands for: the same, but for USUAL; without the type where there is but one."""
    if isinstance(seeds, Usual):
        having = [node_type.name for node_type in schema.node_types if node_type.splits.get(USUAL_SPLIT)]
        if len(having) != 1:
            return None
        return USUAL_SPLIT if schema.homogeneous else (having[0], USUAL_SPLIT)
    is_pair = isinstance(seeds, tuple | list) and len(seeds) == 2 and isinstance(seeds[0], str)
    if schema.homogeneous and is_pair:
        schema.node_type(seeds[0])
        return seeds[1]
    return seeds
