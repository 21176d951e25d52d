"""Edges that message passing leaves out: those that a step predicts, and the same edges in the opposite direction.

They are looked up once, when a loader is made, and take 4 or 8 bytes per link and direction. A batch costs one sort.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hoploom.errors import StoreError
from hoploom.ops import Frontier, Picks, give_back_freed_memory
from hoploom.schema import REVERSE, Schema
from hoploom.store import Draw, GraphStore
from hoploom.store.base import in_edges

Exclude = Literal["none", "self", "reverse", "both"]
AT_ONCE = 1 << 20  # links and in-edges that are looked up together, unless one node has more
LOOKUP_BYTES = 240  # of memory per link, while its edges are looked up
MATCH_BYTES = 24  # the same if all links of a relation are matched with those of another, some at a time
LEAST_PIECE, MOST_PIECES = 1 << 17, 32  # links that are matched together; each piece costs a pass over all


class ExcludedEdges(NamedTuple):
    """The edges of one relation that each link of a loader excludes."""

    relation: int  # index in the schema
    positions: Tensor | None  # [n] in CSC order, link by link; -1: the link has no such edge; None: 0, 1, 2, ...
    indptr: Tensor | None = None  # [links + 1] int64: where each link's positions begin; None: one position per link

    def of(self, links: Tensor) -> Tensor:
        """Return the positions that these links exclude, with repetitions."""
        if self.positions is None:
            return links
        if self.indptr is None:
            found = self.positions[links].to(torch.int64)
            return found[found >= 0]
        return self.positions[runs(self.indptr[links], self.indptr[links + 1])]


@dataclass(frozen=True)
class WithoutEdges:
    """A graph whose `excluded` edges are never sampled. A fanout counts the edges that are left."""

    graph: GraphStore
    excluded: Sequence[Tensor | None]  # per relation: [n] int64 ascending positions in CSC order

    @property
    def schema(self) -> Schema:
        return self.graph.schema

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        return self.graph.sample(frontiers, draw._replace(excluded=self.excluded))


@dataclass(frozen=True)
class Exclusion:
    """The edges that the links of a loader keep out of message passing."""

    num_relations: int
    edges: tuple[ExcludedEdges, ...]
    chosen: Tensor | None = None  # [links] bool: the links that exclude their edges; None: all
    shown: str = ""  # the loader's arguments, for the comparison of ranks

    def of(self, links: Tensor) -> tuple[Tensor | None, ...]:
        """Return the edges that these links exclude: per relation, ascending positions [n] int64, or None."""
        links = links if self.chosen is None else links[self.chosen[links]]
        found: list[list[Tensor]] = [[] for _ in range(self.num_relations)]
        for edges in self.edges:
            found[edges.relation].append(edges.of(links))
        return tuple(torch.unique(torch.cat(some)) if some else None for some in found)


def has_few_links(ends: Tensor, below: int) -> Tensor:
    """Return a mask of the links [2, n] that have an end with fewer than `below` links: [n] bool."""
    return torch.stack([torch.bincount(row)[row] < below for row in ends]).any(0)


def runs(begins: Tensor, ends: Tensor) -> Tensor:
    """Return the integers of all ranges [begins[i], ends[i]), one range after the other."""
    counts = ends - begins
    first = torch.cumsum(counts, 0) - counts
    return torch.repeat_interleave(begins - first, counts) + torch.arange(int(counts.sum()))


def opposite_relations(schema: Schema, relation: int) -> list[int]:
    """Return the relations that have the reverse edges of a relation: the one named so, else all that lead back."""
    source, name, destination = schema.relations[relation].key
    for reverse in (REVERSE + name, *([name.removeprefix(REVERSE)] if name.startswith(REVERSE) else [])):
        if (destination, reverse, source) in schema.relation_index:
            return [schema.relation_index[destination, reverse, source]]
    return leading_back(schema, relation)


def leading_back(schema: Schema, relation: int) -> list[int]:
    """Return all relations from the destination type of a relation to its source type; maybe also the relation."""
    ends = schema.relations[relation].destination, schema.relations[relation].source
    return [index for index, other in enumerate(schema.relations) if (other.source, other.destination) == ends]


def find_edges(graph: GraphStore, relation: int, ends: Tensor) -> ExcludedEdges:
    """Return all edges of a relation that join the ends [2, n] of each link; parallel edges are all found."""
    order, counts, found = _looked_up(graph, relation, ends)
    sizes = torch.zeros_like(counts).index_copy_(0, order, counts)
    indptr = torch.cat([sizes.new_zeros(1), torch.cumsum(sizes, 0)])
    positions = torch.empty_like(found).index_copy_(0, runs(indptr[order], indptr[order + 1]), found)
    return ExcludedEdges(relation, positions, indptr)


def match_edges(graph: GraphStore, relation: int, sources: Tensor, destinations: Tensor) -> Tensor:
    """Return the position of one edge for each link, [n]: the second for the second of equal links; -1 for none."""
    count, is_narrow = destinations.numel(), graph.schema.relations[relation].num_edges < 1 << 31
    positions = torch.full((count,), -1, dtype=torch.int32 if is_narrow else torch.int64)
    num_pieces = min(MOST_PIECES, 1 + count // LEAST_PIECE)
    num_nodes = graph.schema.node_types[graph.schema.destinations[relation]].num_nodes
    for piece in range(num_pieces):  # equal links are in one
        first, end = (num_nodes * number // num_pieces for number in (piece, piece + 1))
        some = torch.nonzero((destinations >= first) & (destinations < end)).view(-1)
        positions[some] = _matched(graph, relation, torch.stack([sources[some], destinations[some]])).to(
            positions.dtype
        )
    give_back_freed_memory()  # a store may be read within a limit
    return positions


def _matched(graph: GraphStore, relation: int, ends: Tensor) -> Tensor:
    order, counts, found = _looked_up(graph, relation, ends)
    pairs = ends[:, order]
    is_first = torch.ones_like(order, dtype=torch.bool)
    is_first[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(0)
    places = torch.arange(order.numel())
    nth = places - torch.cummax(torch.where(is_first, places, 0), 0).values
    begins, is_found = torch.cumsum(counts, 0) - counts, nth < counts
    positions = torch.full_like(order, -1)
    positions[order[is_found]] = found[(begins + nth)[is_found]]
    return positions


def _pieces(
    graph: GraphStore, relation: int, order: Tensor, destinations: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the links of some destinations at a time, their distinct destinations, and the place of each link's."""
    nodes, place, num_links = torch.unique_consecutive(destinations, return_inverse=True, return_counts=True)
    try:
        degrees = in_edges(graph, relation, nodes, counts_only=True).counts
    except IndexError as error:  # of a damaged store: ids that a caller gives are checked
        key = graph.schema.relations[relation].key
        raise StoreError(f"links cannot be looked up in {key}: {error}; run hoploom check on the store") from error
    work, ends = torch.cumsum(num_links + degrees, 0), torch.cumsum(num_links, 0)
    first = 0
    while first < nodes.numel():
        done = int(work[first - 1]) if first else 0
        last = max(first + 1, int(torch.searchsorted(work, done + AT_ONCE, right=True)))
        links = slice(int(ends[first - 1]) if first else 0, int(ends[last - 1]))
        yield order[links], nodes[first:last], place[links] - first
        first = last


def _looked_up(graph: GraphStore, relation: int, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order of links by destination and source; in this order, their numbers of edges, and the edges."""
    stride = graph.schema.node_types[graph.schema.sources[relation]].num_nodes
    order = torch.argsort(ends[0], stable=True)
    order = order[torch.argsort(ends[1][order], stable=True)]
    counts, found = [order[:0]], [order[:0]]
    for some, nodes, place in _pieces(graph, relation, order, ends[1][order]):
        picks = in_edges(graph, relation, nodes)
        owners = torch.repeat_interleave(torch.arange(nodes.numel()), picks.counts)
        listed, by = torch.sort(owners * stride + picks.sources, stable=True)
        wanted = place * stride + ends[0][some]
        begins, stops = torch.searchsorted(listed, wanted), torch.searchsorted(listed, wanted, right=True)
        counts.append(stops - begins)
        found.append(picks.edges[by[runs(begins, stops)]])
    return order, torch.cat(counts), torch.cat(found)
