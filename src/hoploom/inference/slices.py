"""A store's nodes in slices that fit in memory, divided among ranks, with the in-edges and sources of each.

If not all nodes of a type are mapped, in-edges are sampled from the store, and the size of a slice is estimated from
the average degree.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.inference.files import Gather
from hoploom.load.packed import PackedRows, RowLists, scratch_bytes
from hoploom.ops import Frontier, InEdges, Reads
from hoploom.schema import RelationName
from hoploom.store import Draw, Part, Store
from hoploom.store.base import covers
from hoploom.store.on_disk import BLOCK, Ids, ScratchFile

WINS = 2 / 3  # packing sources takes at most this share of the time without it


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
class Slices:
    """The slices of all nodes; each node is in one slice of one rank."""

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
        """Return the bytes of all nodes of a type before this one."""
        schema, relations = self.store.schema, [self.store.schema.relation_index[key] for key in self.relations]
        num_edges = sum(self._edges_before(one, node) for one in relations if schema.destinations[one] == index)
        return num_edges * self.edge_bytes + node * self.row_bytes[schema.node_types[index].name]

    def _edges_before(self, relation: int, node: int) -> int:
        """Return the number of edges to the nodes before this one."""
        schema, parts = self.store.schema, self.store.parts
        destination = schema.destinations[relation]
        if not self._is_mapped[destination]:
            return schema.relations[relation].num_edges * node // max(1, schema.node_types[destination].num_nodes)
        owner = bisect_right(parts, node - 1, key=lambda part: part.first_nodes[destination]) - 1
        lists = parts[max(0, owner)].lists[relation]
        return lists.first_edge + int(lists.indptr[node - lists.first_node])

    @cached_property
    def _is_mapped(self) -> list[bool]:
        """Whether parts that hold all nodes of a type are mapped, by the type's index."""
        schema, parts = self.store.schema, self.store.parts
        found = []
        for index, node_type in enumerate(schema.node_types):
            ends = accumulate((part.num_nodes[index] for part in parts), initial=0)
            in_order = all(part.first_nodes[index] == end for part, end in zip(parts, ends, strict=False))
            found.append(in_order and bool(parts) and covers(schema, parts, node_type.name))
        return found


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


def degrees_without_loops(edges: InEdges) -> Tensor:
    """Return the in-degrees of a slice's nodes without self-loops: [num_destinations] int64."""
    loops = torch.bincount(edges.destinations[edges.are_loops], minlength=edges.num_destinations)
    return edges.degrees - loops


# --- sources of a slice -----------------------------------------------------------------------


@dataclass
class SourcesOnDisk:
    """The rows of a relation's sources if they do not fit in memory, read for slices in order; packed if that pays.

    The sources of a slice are all over a table, so that each slice reads a block for every row, or the whole table.
    Packing also costs looking at the edges twice. It may take `memory` bytes while no slice is worked on, and a `share`
    of the free bytes in `folder`.
    """

    key: RelationName
    gather: Gather
    mapped: Tensor  # [num_rows, width]; its values are not read
    slices: Sequence[Slice]  # of this rank
    edges: Callable[[Slice], InEdges]
    memory: int
    folder: Path
    share: float
    reads: Reads
    check: Callable[[], None]  # called often; raises to end packing

    def __post_init__(self) -> None:
        self._group = range(0)  # indices of the slices that were looked at together
        self._packed: list[PackedRows] = []  # of the group; empty if packing would not pay
        self._row_bytes = self.mapped.shape[1] * self.mapped.dtype.itemsize

    def prepare(self, some: Slice) -> None:
        """Pack the rows of a slice and of the next ones, if that is due; before anything of it is in memory."""
        index = self._index(some)
        if index in self._group:
            return
        self._packed, found = [], list[Ids]()  # the sources of each slice of the group
        memory, num_bytes = self.memory // 2, int(self.share * scratch_bytes(self.folder))
        for one in self.slices[index:]:  # as many as half of the memory holds ids of, and scratch space rows
            self.check()
            ids = self._others(one, self.edges(one)).numpy()
            ids = ids.astype(np.int32) if len(self.mapped) < 1 << 31 else ids
            memory -= ids.nbytes
            num_bytes -= len(ids) * self._row_bytes
            if found and (memory < 0 or num_bytes < 0):
                break
            found.append(ids)
        self._group, lists = range(index, index + len(found)), RowLists(found, self._row_bytes, self.memory // 2)
        # Packing pays if it takes less than two thirds of the time, counted in bytes that the disk could read.
        of_a_row, sweep, num_rows = BLOCK + self.reads.gap, self.mapped.nbytes, lists.num_rows
        direct = sum(min(len(ids) * of_a_row, sweep) for ids in found)
        requests = len(found) * -(-num_rows // lists.rows_at_once)  # a slice's rows of a piece
        if min(num_rows * of_a_row, sweep) + 2 * num_rows * self._row_bytes + requests * of_a_row < WINS * direct:
            dtype = self.mapped.dtype
            with ScratchFile(self.folder, lists.num_bytes) as file:
                self._packed = lists.copy(
                    file, self.reads, lambda ids, outs: self.gather(ids, [o.view(dtype) for o in outs]), self.check
                )

    def read(self, some: Slice, edges: InEdges) -> tuple[Tensor, InEdges]:
        """Return the rows of a slice's sources, and its edges with indices of these rows.

        The slice's own nodes come first if they are of the sources' type, then the others in order.
        """
        first, end = self._own(some)
        sources, others = edges.sources.to(torch.int64), self._others(some, edges)
        own, num_sources = torch.arange(first, end), end - first + others.numel()
        rows = ops.empty((num_sources, self.mapped.shape[1]), self.mapped.dtype)
        outs = [rows[: end - first], rows[end - first :]]
        if self._packed:
            self.gather([own], outs[:1])
            packed = self._packed[self._index(some) - self._group.start]
            packed.read(self.reads, others, torch.arange(others.numel()), outs[1])
        else:
            self.gather([own, others], outs)
        at = torch.searchsorted(others, sources) + (end - first)
        at = torch.where((sources >= first) & (sources < end), sources - first, at)
        degrees = None if edges.source_degrees is None else edges.source_degrees[torch.cat([own, others])]
        return rows, InEdges(edges.indptr, at, num_sources, None, 0, degrees)

    def _index(self, some: Slice) -> int:
        return bisect_left(self.slices, some.first, key=lambda one: one.first)

    def _own(self, some: Slice) -> tuple[int, int]:
        return (some.first, some.end) if self.key[0] == self.key[2] else (0, 0)

    def _others(self, some: Slice, edges: InEdges) -> Tensor:
        """Return the sources that are not nodes of the slice, each once, in order."""
        (first, end), sources = self._own(some), edges.sources.to(torch.int64)
        others: Tensor = torch.unique(sources[(sources < first) | (sources >= end)])
        return others
