"""What of a run on a device the host knows beforehand, and what it makes of the sizes that it reads afterwards."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hoploom.sample.hops import Sampling
from hoploom.schema import Schema

ZERO, FAULT = 0, 1  # the first slots: always 0, and the worst of what went wrong
# Picks of a relation in a hop: there is capacity for so many from the first batch on, for more once they are seen.
LARGE = 1 << 20
MARGIN = 4  # a capacity that grows is a fourth more than was seen


class RelationHop(NamedTuple):
    """One relation in one hop, and the slots of its sizes."""

    relation: int
    begin: int  # of its picks
    end: int
    before: int  # of the source type's nodes, before the picks join them
    after: int


@dataclass(frozen=True)
class HopPlan:
    """Which relations each hop asks, and in which slot of the totals each size is.

    A slot is a place on the device for one size. Sizes run on from hop to hop; the picks of every block begin anew.
    """

    schema: Schema
    sampling: Sampling
    with_indptr: bool
    hops: tuple[tuple[RelationHop, ...], ...]
    # Per type, the slot of its size: [0] nothing yet, [1] seeds, [hop + 2] after hop.
    nodes: tuple[tuple[int, ...], ...]
    picks: tuple[tuple[tuple[int, int], ...], ...]  # per relation and hop: where its picks begin and end
    num_slots: int

    @property
    def is_blocks(self) -> bool:
        return self.sampling.mode == "blocks"

    @property
    def num_layers(self) -> int:
        """How many sets of edges there are: one of all hops, or a block for each."""
        return self.sampling.num_hops if self.is_blocks else 1

    def frontier(self, hop: int, node_type: int) -> tuple[int, int]:
        """The slots between which the nodes stand that a hop expands: those of the hop before; for blocks, all."""
        sizes = self.nodes[node_type]
        return ZERO if self.is_blocks else sizes[hop], sizes[hop + 1]


@dataclass(frozen=True)
class Capacity:
    """How much of everything there may be; or, of a batch, was."""

    nodes: tuple[int, ...]  # per type
    edges: tuple[int, ...]  # per relation: all hops together, or the largest block
    rows: tuple[tuple[int, ...], ...]  # per hop and type: nodes of the frontier
    picks: tuple[tuple[int, ...], ...]  # per hop and relation

    def holds(self, other: "Capacity") -> bool:
        """Whether nothing of the other one is more than here."""
        return self.joined(other, max) == self

    def joined(self, other: "Capacity", join: Callable[[int, int], int]) -> "Capacity":
        """Entry by entry."""

        def rows(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, ...]:
            return tuple(map(join, ours, theirs))

        return Capacity(
            rows(self.nodes, other.nodes),
            rows(self.edges, other.edges),
            tuple(map(rows, self.rows, other.rows)),
            tuple(map(rows, self.picks, other.picks)),
        )


def plan_hops(schema: Schema, sampling: Sampling, seed_types: Sequence[int], *, with_indptr: bool = False) -> HopPlan:
    """The run for seeds of these types."""
    is_blocks = sampling.mode == "blocks"
    slots = itertools.count(FAULT + 1)
    sizes = [next(slots) if index in seed_types else ZERO for index in range(len(schema.node_types))]
    nodes = [[ZERO, slot] for slot in sizes]
    picked = [ZERO] * len(schema.relations)
    picks: list[list[tuple[int, int]]] = [[] for _ in picked]
    hops = []
    for fanouts in sampling.fanouts:
        asks = []
        for relation, fanout in enumerate(fanouts):
            begin = ZERO if is_blocks else picked[relation]
            source, seen = schema.sources[relation], nodes[schema.destinations[relation]]
            is_empty = seen[-1] == (ZERO if is_blocks else seen[-2])
            if is_empty or (fanout == 0 and not with_indptr):
                picks[relation].append((begin, begin))
                continue
            ask = RelationHop(
                relation, begin, next(slots), sizes[source], sizes[source] if fanout == 0 else next(slots)
            )
            asks.append(ask)
            picks[relation].append((begin, ask.end))
            picked[relation], sizes[source] = ask.end, ask.after
        hops.append(tuple(asks))
        for seen, slot in zip(nodes, sizes, strict=True):
            seen.append(slot)
    return HopPlan(
        schema, sampling, with_indptr, tuple(hops), tuple(map(tuple, nodes)), tuple(map(tuple, picks)), next(slots)
    )


def first_capacity(plan: HopPlan, num_seeds: Sequence[int], large: int = LARGE) -> Capacity:
    """For all that seeds and fanouts allow, where that is not too much; batches show what they need beyond it."""
    schema, sampling = plan.schema, plan.sampling
    once = not (sampling.disjoint or sampling.replace)  # every edge is picked once, but for repeated seeds
    total, new = list(num_seeds), list(num_seeds)
    rows, picks = [], []
    for hop, asks in enumerate(plan.hops):
        frontier = total if plan.is_blocks else new
        rows.append(tuple(frontier))
        own, added = [0] * len(schema.relations), [0] * len(total)
        for relation in (ask.relation for ask in asks):
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
    join = max if plan.is_blocks else sum
    edges = tuple(join(own[relation] for own in picks) for relation in range(len(schema.relations)))
    return Capacity(tuple(total), edges, tuple(rows), tuple(picks))


def used(plan: HopPlan, sizes: Sequence[int]) -> Capacity:
    """What a batch took, or would have taken where it did not fit. `sizes` are the totals, by slot."""
    hops = range(plan.sampling.num_hops)
    rows, picks = [], []
    for hop in hops:
        spans = [plan.frontier(hop, index) for index in range(len(plan.nodes))]
        rows.append(tuple(sizes[end] - sizes[begin] for begin, end in spans))
        picks.append(tuple(sizes[own[hop][1]] - sizes[own[hop][0]] for own in plan.picks))
    join = max if plan.is_blocks else sum
    edges = tuple(join(of_hop[relation] for of_hop in picks) for relation in range(len(plan.picks)))
    return Capacity(tuple(sizes[slots[-1]] for slots in plan.nodes), edges, tuple(rows), tuple(picks))


def grown(capacity: Capacity, seen: Capacity) -> Capacity:
    """Capacity for what was seen, and a margin wherever it was too little."""
    return capacity.joined(seen, lambda have, need: have if need <= have else need + need // MARGIN + 1)
