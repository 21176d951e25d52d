"""Iterate over the edges and rows of a store, some at a time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import StoreError
from hoploom.ops import EdgeLists, Frontier, Picks
from hoploom.schema import Owner, RelationName, Schema
from hoploom.store.base import Draw, FeatureStore, GraphStore, Part, Wanted

EDGES = 1 << 20  # edges of one piece
NODES = 1 << 12  # nodes whose edges are sampled together
ROW_BYTES = 4 << 20  # of one piece of rows


def covers(schema: Schema, parts: Sequence[Part], node_type: str | None = None) -> bool:
    """Return whether every node of a type, or of all types, is in these parts."""
    return all(
        sum(part.num_nodes[index] for part in parts) == of_type.num_nodes
        for index, of_type in enumerate(schema.node_types)
        if node_type in (None, of_type.name)
    )


def destinations(indptr: Tensor, first_node: int, begin: int, end: int) -> Tensor:
    """Return the destinations of the edges at positions [begin, end): [end - begin] int64.

    `indptr` are the offsets of the nodes from `first_node` on, which have these edges.
    """
    low = int(torch.searchsorted(indptr, begin, right=True)) - 1
    high = int(torch.searchsorted(indptr, end))
    counts = indptr[low : high + 1].clamp(begin, end).diff()
    return torch.repeat_interleave(torch.arange(first_node + low, first_node + high), counts)


def scan_edges(lists: EdgeLists, key: RelationName | str, at_once: int = EDGES) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a part's edges of a relation in order: sources [n], in their own dtype, and destinations [n].

    Raise StoreError at the end if the files could not be read.
    """
    try:
        if (lists.indptr[1:] < lists.indptr[:-1]).any():  # compared, not subtracted: damage may overflow
            raise StoreError(f"the indptr of {key} decreases; run hoploom check, and copy the store again")
        for begin in range(0, lists.indices.numel(), at_once):
            end = min(begin + at_once, lists.indices.numel())
            ops.read_soon(lists.indices[end : end + at_once])
            yield lists.indices[begin:end], destinations(lists.indptr, lists.first_node, begin, end)
    finally:  # unreadable pages are zeros, which may have led to another error
        ops.require_whole((lists.indptr, lists.indices))


def sampled_edges(graph: GraphStore, relation: int, at_once: int = NODES) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the edges of all parts, also of remote ones: sources and destinations, by sampling all neighbours."""
    num_nodes = graph.schema.node_types[graph.schema.destinations[relation]].num_nodes
    for first in range(0, num_nodes, at_once):
        nodes = torch.arange(first, min(first + at_once, num_nodes))
        picks = in_edges(graph, relation, nodes)
        yield picks.sources, torch.repeat_interleave(nodes, picks.counts)


def in_edges(graph: GraphStore, relation: int, nodes: Tensor) -> Picks:
    """Return all in-edges of these nodes in one relation."""
    schema = graph.schema
    frontiers: list[Frontier | None] = [None] * len(schema.node_types)
    frontiers[schema.destinations[relation]] = Frontier(nodes)
    fanouts = [-1 if other == relation else 0 for other in range(len(schema.relations))]
    picks = graph.sample(frontiers, Draw(0, 0, fanouts))[relation]
    if picks is None:  # no part has any of them
        return Picks(torch.zeros_like(nodes), nodes[:0], nodes[:0])
    return picks


def scan_rows(
    features: FeatureStore, owner: Owner, name: str, count: int, at_once: int | None = None
) -> Iterator[Tensor]:
    """Yield all `count` rows of a field, `at_once` at a time, from any shard."""
    step = at_once or max(1, ROW_BYTES // max(1, features.schema.described(owner).fields[name].row_bytes))
    for first in range(0, max(1, count), step):
        end = min(first + step, count)
        for shard in getattr(features, "shards", (features,)):
            table = shard.tables.get((owner, name)) if isinstance(shard, Part) else None
            if table is not None:  # mapped: the kernel starts to read
                ops.read_soon(table.rows[max(0, first - table.first) : max(0, end - table.first)])
        yield features.gather([Wanted(owner, name, torch.arange(first, end))])[0]


class Loops(NamedTuple):
    """The nodes of a relation with self-loops, ascending, and the number of loops of each."""

    nodes: Tensor  # [n] int64
    counts: Tensor  # [n] int64


def loops_of(parts: Sequence[Part], key: RelationName) -> Loops:
    """Return the self-loops of a relation in these parts; read all its edges if both ends have one type."""
    found = [torch.empty(0, dtype=torch.int64)]
    for part in parts if key[0] == key[2] else ():
        for sources, ends in scan_edges(part.lists[part.schema.relation_index[key]], key):
            found.append(ends[sources == ends])
    return Loops(*torch.unique(torch.cat(found), return_counts=True))
