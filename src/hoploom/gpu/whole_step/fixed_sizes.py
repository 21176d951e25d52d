"""How large the fixed buffers of a whole step are: what sampled batches took, a margin, and never more than there is.

Batches of one loader differ little in size. One that does not fit is taken as a step of its own size.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hoploom.batch import Sampled
from hoploom.gpu.batches.capacity import Capacity, HopPlan, first_capacity, used
from hoploom.load.loader import Walk
from hoploom.load.maker import NodeMaker
from hoploom.train.learner import MARGIN

Running = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Probing:
    """How sizes are found: from so many sampled batches, and rounded up to multiples."""

    batches: int = 8
    rounded: int = 64


PROBING = Probing()


@dataclass(frozen=True)
class FixedSizes:
    """The most that a batch may have. A node's hop is the one that found it first; of blocks each is counted whole."""

    nodes: Running  # per type: within 0, 1, ... hops
    edges: Running  # per relation: up to the first, the second, ... hop; of blocks in each
    capacity: Capacity

    def holds(self, plan: HopPlan, sizes: Sequence[int]) -> bool:
        """Whether a batch fits; `sizes` are the totals of its run."""
        nodes = ((sizes[slot] for slot in slots[1:]) for slots in plan.nodes)
        edges = ((sizes[end] for _, end in hops) for hops in plan.picks)
        return (
            self.capacity.holds(used(plan, sizes))
            and all(_within(own, most) for own, most in zip(nodes, self.nodes, strict=True))
            and all(_within(own, most) for own, most in zip(edges, self.edges, strict=True))
        )

    def __str__(self) -> str:
        nodes, edges = sum(most[-1] for most in self.nodes), sum(self.capacity.edges)
        return f"room for {nodes:,} nodes and {edges:,} edges"


def _within(own: object, most: Sequence[int]) -> bool:
    return all(size <= limit for size, limit in zip(own, most, strict=True))  # type: ignore[call-overload]


def probe(maker: NodeMaker, walk: Walk, batch_size: int, most: int = PROBING.batches) -> list[Sampled]:
    """Some batches of full size, spread over an epoch; without their features."""
    full = [step for step in walk.steps if walk.place(step)[0].numel() == batch_size]
    return [maker.draw(*walk.place(step)).sampled for step in full[:: max(1, len(full) // most)][:most]]


def measure(
    plan: HopPlan,
    batches: Sequence[Sampled],
    num_seeds: Sequence[int],
    margin: float = MARGIN,
    rounded: int = PROBING.rounded,
) -> FixedSizes:
    """Sizes for what these batches took, and a margin; multiples of `rounded` where there is so much."""
    worst = first_capacity(plan, num_seeds, sys.maxsize)
    hops, types, relations = range(plan.sampling.num_hops), range(len(plan.nodes)), range(len(plan.picks))
    seen_nodes, seen_edges = zip(*(_running(plan, batch) for batch in batches), strict=True)

    def enough(seen: Iterable[int], most: int) -> int:
        return min(-(-int(min(max(seen) * (1 + margin), most)) // rounded) * rounded, most)

    nodes = tuple(
        (num_seeds[kind], *(enough((own[kind][hop + 1] for own in seen_nodes), worst.nodes[kind]) for hop in hops))
        for kind in types
    )
    edges = tuple(
        tuple(enough((own[kind][hop] for own in seen_edges), worst.edges[kind]) for hop in hops) for kind in relations
    )
    rows, picks = (
        tuple(
            tuple(enough((_of_hop(plan, own[kind], hop) for own in seen), most) for kind, most in enumerate(of_hop))
            for hop, of_hop in enumerate(worst_by_hop)
        )
        for seen, worst_by_hop in ((seen_nodes, worst.rows), (seen_edges, worst.picks))
    )
    capacity = Capacity(tuple(most[-1] for most in nodes), tuple(max(most) for most in edges), rows, picks)
    return FixedSizes(nodes, edges, capacity)


def _running(plan: HopPlan, batch: Sampled) -> tuple[Running, Running]:
    """The sizes of one batch: nodes per type within each hop, edges per relation up to each hop, or in each block."""
    if not plan.is_blocks:
        assert batch.num_nodes is not None
        assert batch.num_edges is not None
        return tuple(tuple(accumulate(own)) for own in batch.num_nodes), tuple(
            tuple(accumulate(own)) for own in batch.num_edges
        )
    inwards = batch.blocks[::-1]
    names = [node_type.name for node_type in plan.schema.node_types]
    keys = [relation.key for relation in plan.schema.relations]
    nodes = tuple(
        (inwards[0].num_destinations[name], *(block.num_sources[name] for block in inwards))  # type: ignore[index]
        for name in names
    )
    edges = tuple(tuple(block.edge_index[key].shape[1] for block in inwards) for key in keys)  # type: ignore[index]
    return nodes, edges


def _of_hop(plan: HopPlan, running: Sequence[int], hop: int) -> int:
    """What a hop expands or picks by itself."""
    return running[hop] - (0 if plan.is_blocks or hop == 0 else running[hop - 1])
