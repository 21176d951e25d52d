"""How large the fixed buffers of a whole step are: what sampled batches took, a margin, and never more than there is.

Batches of one loader differ little in size. One that does not fit is taken as a step of its own size.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

from hoploom.batch import Sampled
from hoploom.gpu.batches.capacity import Capacity, HopPlan, first_capacity, used
from hoploom.load.maker import NodeMaker
from hoploom.load.order import Order
from hoploom.train.learner import MARGIN

PROBED, ROUNDED = 8, 64  # batches that are sampled to find sizes, and what sizes are multiples of
Running = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FixedSizes:
    """The most that a batch may have. A node's hop is the one that found it first; of blocks each is counted whole."""

    nodes: Running  # per type: within 0, 1, ... hops
    edges: Running  # per relation: up to the first, the second, ... hop; of blocks in each
    capacity: Capacity

    def holds(self, plan: HopPlan, sizes: Sequence[int]) -> bool:
        """Whether a batch fits; `sizes` are the totals of its run."""
        nodes, edges = _running(plan, sizes)
        limits = [*zip(nodes, self.nodes, strict=True), *zip(edges, self.edges, strict=True)]
        is_within = all(size <= most for own, limit in limits for size, most in zip(own, limit, strict=True))
        return is_within and self.capacity.holds(used(plan, sizes))


def probe(maker: NodeMaker, order: Order, batch_size: int, most: int = PROBED) -> list[Sampled]:
    """Some batches of full size, spread over an epoch; without their features."""
    full = [step for step in order.steps if order.step(step)[0].numel() == batch_size]
    return [maker.sample(*order.step(step)) for step in full[:: max(1, len(full) // most)][:most]]


def measure(
    plan: HopPlan,
    batches: Sequence[Sampled],
    num_seeds: Sequence[int],
    margin: float = MARGIN,
    rounded: int = ROUNDED,
) -> FixedSizes:
    """Sizes for what these batches took, and a margin; multiples of `rounded` where there is so much."""

    def enough(seen: int, most: int) -> int:
        return min(-(-int(min(seen * (1 + margin), most)) // rounded) * rounded, most)

    worst, totals = first_capacity(plan, num_seeds, sys.maxsize), [_totals(plan, batch) for batch in batches]
    seen = reduce(lambda one, other: one.joined(other, max), (used(plan, sizes) for sizes in totals))
    capacity = seen.joined(worst, enough)
    nodes, edges = _running(plan, [max(of_slot) for of_slot in zip(*totals, strict=True)])
    return FixedSizes(
        tuple(
            (seeds, *(enough(size, most) for size in own[1:]))
            for seeds, own, most in zip(num_seeds, nodes, worst.nodes, strict=True)
        ),
        tuple(tuple(enough(size, most) for size in own) for own, most in zip(edges, worst.edges, strict=True)),
        capacity,
    )


def _running(plan: HopPlan, sizes: Sequence[int]) -> tuple[Running, Running]:
    """Nodes per type within each hop, and edges per relation up to each hop, or in each block."""
    nodes = tuple(tuple(sizes[slot] for slot in slots[1:]) for slots in plan.nodes)
    return nodes, tuple(tuple(sizes[end] for _, end in hops) for hops in plan.picks)


def _totals(plan: HopPlan, batch: Sampled) -> list[int]:
    """The sizes of one batch by slot, as a device that samples it writes them."""
    names = [node_type.name for node_type in plan.schema.node_types]
    keys = [relation.key for relation in plan.schema.relations]
    if plan.is_blocks:
        inwards = batch.blocks[::-1]
        first = inwards[0].num_destinations
        nodes = [[first[name], *(block.num_sources[name] for block in inwards)] for name in names]  # type: ignore[index]
        edges = [[block.edge_index[key].shape[1] for block in inwards] for key in keys]  # type: ignore[index]
    else:
        assert batch.num_nodes is not None
        assert batch.num_edges is not None
        nodes = [list(accumulate(own)) for own in batch.num_nodes]
        edges = [list(accumulate(own)) for own in batch.num_edges]
    sizes = [0] * plan.num_slots
    for slots, own in zip(plan.nodes, nodes, strict=True):
        for slot, size in zip(slots[1:], own, strict=True):
            sizes[slot] = size
    for hops, own in zip(plan.picks, edges, strict=True):
        for (_, end), size in zip(hops, own, strict=True):
            sizes[end] = size
    return sizes
