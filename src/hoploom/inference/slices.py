"""A store's nodes in slices that fit a memory budget, divided among ranks, with the in-edges of each.

If not all nodes of a type are mapped, in-edges are sampled from the store, and the size of a slice is estimated from
the average degree.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hoploom import ops
from hoploom.load.assemble import FEATURES
from hoploom.ops import Frontier, InEdges
from hoploom.schema import RelationName
from hoploom.store import Draw, Part, Sharded, Store, Wanted
from hoploom.store.scan import covers


@dataclass(frozen=True)
class Slice:
    """Nodes of one type with consecutive ids, all of one part."""

    node_type: str
    first: int
    end: int
    part: Part | None  # that has its lists; None: they are sampled from the store

    @property
    def span(self) -> slice:
        return slice(self.first, self.end)

    @property
    def ids(self) -> Tensor:
        return torch.arange(self.first, self.end)

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Costs:
    """The memory that a slice takes while it is computed."""

    budget: int  # bytes
    row_bytes: Mapping[str, int]  # by node type
    edge_bytes: int


class Slices:
    """The slices of all nodes; each node is in one slice of one rank."""

    def __init__(self, store: Store, relations: Sequence[RelationName], costs: Costs) -> None:
        self.store, self._costs = store, costs
        self._relations = [store.schema.relation_index[key] for key in relations]
        self._is_mapped = [_is_mapped(store, index) for index in range(len(store.schema.node_types))]

    def of(self, node_type: str, rank: int, world_size: int) -> Iterator[Slice]:
        """Yield a rank's slices of a type, in order. Ranks get equally many bytes of rows and edges."""
        index = self.store.schema.type_index[node_type]
        first, end = (self._bound(index, number, world_size) for number in (rank, rank + 1))
        for piece in self._pieces(index):
            yield from self._slices(index, piece, first, end)

    def _bound(self, index: int, rank: int, world_size: int) -> int:
        """Return the first node of a rank's share of a type."""
        count = self.store.schema.node_types[index].num_nodes
        target = self._cost(index, count) * rank // world_size
        return count if rank == world_size else bisect_left(range(count), target, key=partial(self._cost, index))

    def _pieces(self, index: int) -> list[Slice]:
        """Return a piece for each mapped part of a type; one without a part if they do not hold all nodes."""
        node_type = self.store.schema.node_types[index]
        if not self._is_mapped[index]:
            return [Slice(node_type.name, 0, node_type.num_nodes, None)]
        return [
            Slice(node_type.name, part.first_nodes[index], part.first_nodes[index] + part.num_nodes[index], part)
            for part in self.store.parts
        ]

    def _slices(self, index: int, piece: Slice, first: int, end: int) -> Iterator[Slice]:
        first, end = max(first, piece.first), min(end, piece.end)
        while first < end:
            most = self._cost(index, first) + self._costs.budget
            fits = bisect_right(range(end + 1), most, lo=first + 1, key=partial(self._cost, index)) - 1
            yield Slice(piece.node_type, first, last := max(fits, first + 1), piece.part)
            first = last

    def _cost(self, index: int, node: int) -> int:
        """Return the bytes of all nodes of a type before this one."""
        schema = self.store.schema
        num_edges = sum(
            self._edges_before(relation, node) for relation in self._relations if schema.destinations[relation] == index
        )
        return num_edges * self._costs.edge_bytes + node * self._costs.row_bytes[schema.node_types[index].name]

    def _edges_before(self, relation: int, node: int) -> int:
        """Return the number of edges to the nodes before this one."""
        schema, parts = self.store.schema, self.store.parts
        destination = schema.destinations[relation]
        if not self._is_mapped[destination]:
            return schema.relations[relation].num_edges * node // max(1, schema.node_types[destination].num_nodes)
        owner = bisect_right(parts, node - 1, key=lambda part: part.first_nodes[destination]) - 1
        lists = parts[max(0, owner)].lists[relation]
        return lists.first_edge + int(lists.indptr[node - lists.first_node])

    def edges(
        self, some: Slice, keys: Sequence[RelationName], degrees: Mapping[RelationName, Tensor]
    ) -> dict[RelationName, InEdges]:
        """Return all in-edges of a slice's nodes, by relation; sources are ids of the store."""
        schema = self.store.schema
        lists = _sampled(self.store, some, keys) if some.part is None else _mapped(some.part, some, keys)
        edges = {}
        for key, (indptr, sources) in lists.items():
            num_sources, first = schema.node_type(key[0]).num_nodes, some.first if key[0] == key[2] else 0
            edges[key] = InEdges(indptr, sources, num_sources, None, first, degrees.get(key))
        return edges

    @property
    def memory(self) -> int:
        """The bytes that a slice may take."""
        return self._costs.budget

    def exceed_memory(self, num_bytes: int) -> bool:
        """Return whether rows between layers take more than the budget leaves beside the topology."""
        budget = self.store.budget
        if budget is None or self.store.reads is None:
            return False
        lists = [lists for part in self.store.parts for lists in part.lists]
        begins = sum(one.indptr.nbytes for one in lists)
        others = sum(column.nbytes for one in lists for column in one.columns) - begins
        return num_bytes > budget.num_bytes - begins - budget.lists * others

    def are_far(self, node_type: str) -> bool:
        """Return whether some features of a type are on disk because they exceed the memory budget."""
        return self.store.reads is not None and not all(
            shard.in_memory(node_type, FEATURES) for shard in self.store.shards
        )

    def gather_features(self, node_type: str, ids: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Read the features of ids[i] into outs[i], all together."""
        assert isinstance(self.store.features, Sharded), "features within a budget are"
        wanted = [Wanted(node_type, FEATURES, one) for one in ids]
        self.store.features.gather_at(wanted, [None] * len(wanted), outs)

    def gather(self, node_type: str, ids: Tensor) -> Tensor:
        """Return features."""
        return self.store.features.gather([Wanted(node_type, FEATURES, ids)])[0]


class Sources(NamedTuple):
    """The sources of a slice's edges, each once, and the edges with indices of these sources."""

    own: Tensor  # the slice's nodes where sources are of their type, else none; they stand first
    others: Tensor  # ascending
    edges: InEdges


def sources_of(some: Slice, key: RelationName, edges: InEdges) -> Sources:
    first, end = (some.first, some.end) if key[0] == key[2] else (0, 0)
    own, sources = torch.arange(first, end), edges.sources.to(torch.int64)
    are_own = (sources >= first) & (sources < end)
    others = torch.unique(sources[~are_own])
    places = torch.where(are_own, sources - first, torch.searchsorted(others, sources) + (end - first))
    degrees = None if edges.source_degrees is None else edges.source_degrees[torch.cat([own, others])]
    return Sources(own, others, InEdges(edges.indptr, places, own.numel() + others.numel(), None, 0, degrees))


def degrees_without_loops(edges: InEdges) -> Tensor:
    """Return the in-degrees of a slice's nodes without self-loops: [num_destinations] int64."""
    loops = torch.bincount(edges.destinations[edges.are_loops], minlength=edges.num_destinations)
    return edges.degrees - loops


def _is_mapped(store: Store, index: int) -> bool:
    ends = accumulate((part.num_nodes[index] for part in store.parts), initial=0)
    in_order = all(part.first_nodes[index] == end for part, end in zip(store.parts, ends, strict=False))
    return in_order and bool(store.parts) and covers(store.schema, store.parts, store.schema.node_types[index].name)


def _mapped(part: Part, some: Slice, keys: Sequence[RelationName]) -> dict[RelationName, tuple[Tensor, Tensor]]:
    found = {}
    for key in keys:
        lists = part.lists[part.schema.relation_index[key]]
        indptr = lists.indptr[some.first - lists.first_node : some.end - lists.first_node + 1]
        begin, end = int(indptr[0]), int(indptr[-1])
        ops.read_soon(lists.indices[begin:end])
        found[key] = indptr - begin, lists.indices[begin:end]
        ops.require_whole([lists.indptr])
    return found


def _sampled(store: Store, some: Slice, keys: Sequence[RelationName]) -> dict[RelationName, tuple[Tensor, Tensor]]:
    schema = store.schema
    frontiers = [Frontier(some.ids) if name == some.node_type else None for name in schema.type_index]
    fanouts = [-1 if relation.key in keys else 0 for relation in schema.relations]
    picks = store.graph.sample(frontiers, Draw(key=0, hop=0, fanouts=fanouts))
    found = {}
    for key in keys:
        picked = picks[schema.relation_index[key]]
        assert picked is not None
        indptr = torch.zeros(len(some) + 1, dtype=torch.int64)
        torch.cumsum(picked.counts, 0, out=indptr[1:])
        found[key] = indptr, picked.sources
    return found
