"""A store's nodes in slices that fit in memory, divided among ranks, with the in-edges and sources of each slice.

If not all nodes of a type are mapped, in-edges are sampled from the store, and the size of a slice is estimated from
the average degree.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from hoploom import ops
from hoploom.inference.files import Gather
from hoploom.ops import Frontier, InEdges
from hoploom.schema import RelationName
from hoploom.store import Draw, Part, Store
from hoploom.store.base import covers


@dataclass(frozen=True)
class Slice:
    """Nodes of one type with consecutive ids, all in one part if the parts are mapped."""

    node_type: str
    first: int
    end: int
    part: Part | None  # the mapped part with its edges; None: edges are sampled from the store

    @property
    def span(self) -> slice:
        return slice(self.first, self.end)

    @property
    def ids(self) -> Tensor:
        return torch.arange(self.first, self.end)

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Slices:
    """The division of all nodes into slices; each node is in one slice, and each slice belongs to one rank."""

    store: Store
    relations: Sequence[RelationName]  # whose edges count
    memory: int  # bytes of a slice
    row_bytes: Mapping[str, int]  # by node type
    edge_bytes: int

    def of(self, node_type: str, rank: int, world_size: int) -> Iterator[Slice]:
        """Yield a rank's slices of a type, in order. Ranks get equally many bytes of rows and edges."""
        index = self.store.schema.type_index[node_type]
        count, cost = self.store.schema.node_types[index].num_nodes, partial(self._cost, index)
        first, end = (bisect_left(range(count), cost(count) * n // world_size, key=cost) for n in (rank, rank + 1))
        pieces: list[tuple[int, int, Part | None]] = [(0, count, None)]
        if self._is_mapped[index]:
            pieces = [(part.first_nodes[index], part.num_nodes[index], part) for part in self.store.parts]
        for begin, size, part in pieces:
            at, last = max(first, begin), min(end, begin + size)
            while at < last:
                fits = bisect_right(range(last + 1), cost(at) + self.memory, lo=at + 1, key=cost) - 1
                some = Slice(node_type, at, max(fits, at + 1), part)
                yield some
                at = some.end

    def _cost(self, index: int, node: int) -> int:
        """Return the bytes of the rows and in-edges of all nodes before `node`; `index` is that of the node type."""
        schema, relations = self.store.schema, [self.store.schema.relation_index[key] for key in self.relations]
        num_edges = sum(self._edges_before(one, node) for one in relations if schema.destinations[one] == index)
        return num_edges * self.edge_bytes + node * self.row_bytes[schema.node_types[index].name]

    def _edges_before(self, relation: int, node: int) -> int:
        """Return a relation's number of edges to the nodes before `node`, estimated if the nodes are not mapped."""
        schema, parts = self.store.schema, self.store.parts
        destination = schema.destinations[relation]
        if not self._is_mapped[destination]:
            return schema.relations[relation].num_edges * node // max(1, schema.node_types[destination].num_nodes)
        owner = bisect_right(parts, node - 1, key=lambda part: part.first_nodes[destination]) - 1
        lists = parts[max(0, owner)].lists[relation]
        return lists.first_edge + int(lists.indptr[node - lists.first_node])

    @cached_property
    def _is_mapped(self) -> list[bool]:
        """Whether the mapped parts have all nodes of a type, by the index of the type."""
        schema, parts = self.store.schema, self.store.parts
        return [bool(parts) and covers(schema, parts, node_type.name) for node_type in schema.node_types]


# --- edges of a slice -------------------------------------------------------------------------


def edges_of(
    store: Store, some: Slice, keys: Sequence[RelationName], degrees: Mapping[RelationName, Tensor]
) -> dict[RelationName, InEdges]:
    """Return all in-edges of a slice's nodes, by relation; sources are ids of the store."""
    lists = _sampled(store, some, keys) if some.part is None else _mapped(some.part, some, keys)
    edges = {}
    for key, (indptr, sources) in lists.items():
        num_sources, first = store.schema.node_type(key[0]).num_nodes, some.first if key[0] == key[2] else 0
        edges[key] = InEdges(indptr, sources, num_sources, None, first, degrees.get(key))
    return edges


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


# --- sources of a slice -----------------------------------------------------------------------


def gather_sources(
    key: RelationName, rows: Tensor, gather: Gather, some: Slice, edges: InEdges
) -> tuple[Tensor, InEdges]:
    """Read the rows of a slice's sources with `gather`; return them, and the edges with sources as indices into them.

    This is for `rows` that exceed memory: only their shape is used. If source and destination type are equal, the
    slice's own nodes come first; then come the other sources in the order of their ids.
    """
    first, end = (some.first, some.end) if key[0] == key[2] else (0, 0)
    sources = edges.sources.to(torch.int64)
    is_own = (sources >= first) & (sources < end)
    others: Tensor = torch.unique(sources[~is_own])
    own, num_own = torch.arange(first, end), end - first
    found = ops.empty((num_own + len(others), rows.shape[1]), rows.dtype)
    gather([own, others], [found[:num_own], found[num_own:]])
    at = torch.where(is_own, sources - first, torch.searchsorted(others, sources) + num_own)
    degrees = None if edges.source_degrees is None else edges.source_degrees[torch.cat([own, others])]
    return found, InEdges(edges.indptr, at, len(found), None, 0, degrees)
