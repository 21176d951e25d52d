"""Sizes of batches that are sampled on a device: which sizes the device counts, and how large its buffers are.

A loader's buffers grow with the batches seen. Steps that are CUDA graphs need buffers of fixed sizes: the sizes that a
loader needed for some batches plus a margin, at most the largest possible. The rare batch that does not fit is trained
on without fixed buffers. The device's array of sizes is called `totals`, and the index of a size in it is a slot.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hoploom.sample.hops import Sampling
from hoploom.schema import Schema

ZERO, FAULT = 0, 1  # the first two slots: one that is always 0, and the highest fault code
# Limit of the first capacity for a relation's picks in a hop; it grows once batches need more.
LARGE = 1 << 20
MARGIN = 4  # a size that grows becomes a fourth larger than the size seen
PROBED, ROUNDED = 8, 64  # for fixed sizes: the number of batches sampled to find them; sizes are multiples of 64
Running = tuple[tuple[int, ...], ...]


class RelationHop(NamedTuple):
    """A relation that one hop samples, and the indices of its sizes in `totals`, the device's array of sizes."""

    relation: int
    begin: int  # slot of the first pick's index
    end: int
    before: int  # slot of the number of source nodes before the picks are added
    after: int


@dataclass(frozen=True)
class HopPlan:
    """The relations of each hop, and each size's index in `totals`.

    Sizes add up from hop to hop; in blocks, picks are counted anew for each hop.
    """

    schema: Schema
    sampling: Sampling
    with_indptr: bool
    hops: tuple[tuple[RelationHop, ...], ...]
    # Per type, the slots of its number of nodes: [0] ZERO, [1] of the seeds, [hop + 2] after each hop.
    nodes: tuple[tuple[int, ...], ...]
    picks: tuple[tuple[tuple[int, int], ...], ...]  # per relation and hop: the slots of its picks' begin and end
    num_slots: int

    @property
    def is_blocks(self) -> bool:
        return self.sampling.mode == "blocks"

    def frontier(self, hop: int, node_type: int) -> tuple[int, int]:
        """Return the slots of the begin and end of a hop's frontier: of all nodes with blocks, else of the new ones."""
        sizes = self.nodes[node_type]
        return ZERO if self.is_blocks else sizes[hop], sizes[hop + 1]


class Capacity(NamedTuple):
    """Numbers of nodes and edges, by hop, that buffers hold or a batch needs. A node counts in its first hop."""

    nodes: Running  # per type: nodes within 0, 1, ... hops of the seeds
    edges: Running  # per relation: edges up to the first, the second, ... hop; with blocks, edges of each hop
    rows: Running  # per hop and type: nodes of the frontier
    picks: Running  # per hop and relation: sampled edges

    def holds(self, other: "Capacity") -> bool:
        """Return whether a batch of the sizes `other` fits: no size is larger than that of this capacity."""
        return self.combine(other, max) == self

    def combine(self, other: "Capacity", function: Callable[[int, int], int]) -> "Capacity":
        """Return the capacity whose sizes are function(size in this capacity, size in `other`)."""
        return Capacity(
            *(
                tuple(tuple(map(function, *rows)) for rows in zip(*sizes, strict=True))
                for sizes in zip(self, other, strict=True)
            )
        )


def plan_hops(schema: Schema, sampling: Sampling, seed_types: Sequence[int], *, with_indptr: bool = False) -> HopPlan:
    """Return the plan of all hops from seeds of these types. `with_indptr`: also store offsets of each node's picks."""
    is_blocks = sampling.mode == "blocks"
    slots = itertools.count(FAULT + 1)
    sizes = [next(slots) if index in seed_types else ZERO for index in range(len(schema.node_types))]
    nodes = [[ZERO, slot] for slot in sizes]
    picked = [ZERO] * len(schema.relations)
    picks: list[list[tuple[int, int]]] = [[] for _ in picked]
    hops = []
    for fanouts in sampling.fanouts:
        own = []
        for relation, fanout in enumerate(fanouts):
            begin = ZERO if is_blocks else picked[relation]
            source, seen = schema.sources[relation], nodes[schema.destinations[relation]]
            is_empty = seen[-1] == (ZERO if is_blocks else seen[-2])
            if is_empty or (fanout == 0 and not with_indptr):
                picks[relation].append((begin, begin))
                continue
            end, before = next(slots), sizes[source]
            own.append(RelationHop(relation, begin, end, before, before if fanout == 0 else next(slots)))
            picks[relation].append((begin, end))
            picked[relation], sizes[source] = end, own[-1].after
        hops.append(tuple(own))
        for seen, slot in zip(nodes, sizes, strict=True):
            seen.append(slot)
    return HopPlan(
        schema, sampling, with_indptr, tuple(hops), tuple(map(tuple, nodes)), tuple(map(tuple, picks)), next(slots)
    )


def first_capacity(plan: HopPlan, num_seeds: Sequence[int], large: int = LARGE) -> Capacity:
    """Return the largest sizes that seeds and fanouts allow, with at most `large` picks per relation and hop."""
    schema, sampling = plan.schema, plan.sampling
    once = not (sampling.disjoint or sampling.replace)  # no edge is picked twice, except for repeated seeds
    total, new = list(num_seeds), list(num_seeds)
    totals, rows, picks = [list(num_seeds)], [], []
    for hop, relations in enumerate(plan.hops):
        frontier = total if plan.is_blocks else new
        rows.append(tuple(frontier))
        own, added = [0] * len(schema.relations), [0] * len(total)
        for relation in (one.relation for one in relations):
            fanout, count = sampling.fanouts[hop][relation], frontier[schema.destinations[relation]]
            num_edges = schema.relations[relation].num_edges
            most = num_edges if fanout < 0 else count * fanout
            own[relation] = max(1, min(most, large, num_edges if once else most))
            added[schema.sources[relation]] += own[relation]
        picks.append(tuple(own))
        limits = [num if sampling.disjoint else t.num_nodes for t, num in zip(schema.node_types, added, strict=True)]
        new = [min(pair) for pair in zip(added, limits, strict=True)]
        total = [sum(pair) for pair in zip(total, new, strict=True)]
        if not sampling.disjoint:
            total = [min(t, n.num_nodes + s) for t, n, s in zip(total, schema.node_types, num_seeds, strict=True)]
        totals.append(total)
    edges = [own if plan.is_blocks else itertools.accumulate(own) for own in zip(*picks, strict=True)]
    return Capacity(tuple(zip(*totals, strict=True)), tuple(map(tuple, edges)), tuple(rows), tuple(picks))


def used_capacity(plan: HopPlan, sizes: Sequence[int]) -> Capacity:
    """Return the capacity that a batch needs, even if it did not fit. `sizes` are the values of `totals`."""
    rows, picks = [], []
    for hop in range(plan.sampling.num_hops):
        spans = [plan.frontier(hop, index) for index in range(len(plan.nodes))]
        rows.append(tuple(sizes[end] - sizes[begin] for begin, end in spans))
        picks.append(tuple(sizes[own[hop][1]] - sizes[own[hop][0]] for own in plan.picks))
    nodes = tuple(tuple(sizes[slot] for slot in slots[1:]) for slots in plan.nodes)
    edges = tuple(tuple(sizes[end] for _, end in hops) for hops in plan.picks)
    return Capacity(nodes, edges, tuple(rows), tuple(picks))


def grow_capacity(capacity: Capacity, seen: Capacity) -> Capacity:
    """Return a capacity that holds `seen`: each size that is too small becomes the size seen plus a margin."""
    return capacity.combine(seen, lambda have, need: have if need <= have else need + need // MARGIN + 1)


def fixed_capacity(plan: HopPlan, seen: Capacity, num_seeds: Sequence[int], margin: float, rounded: int) -> Capacity:
    """Return the sizes seen plus a margin, in multiples of `rounded`, up to the largest possible."""

    def enough(size: int, most: int) -> int:
        return min(-(-int(min(size * (1 + margin), most)) // rounded) * rounded, most)

    found = seen.combine(first_capacity(plan, num_seeds, sys.maxsize), enough)
    return found._replace(nodes=tuple((count, *own[1:]) for count, own in zip(num_seeds, found.nodes, strict=True)))
