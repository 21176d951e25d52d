"""Several parts as one store: route ids to their part, ask, stitch the answers in order.

Costs one pass over the ids to route and one over the answers to stitch; a single part pays neither.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hoploom import ops
from hoploom.ops import Frontier, Picks
from hoploom.schema import Owner, Schema
from hoploom.store.base import Draw, Wanted


class Shard(Protocol):
    """Both seams, over one range of nodes."""

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]: ...

    def gather(self, wanted: Sequence[Wanted], *, pinned: bool = False) -> list[Tensor]: ...


class Routes:
    """Which part owns each id of one node type or relation: a search in a short list."""

    def __init__(self, firsts: Sequence[int]) -> None:
        self.num_parts = len(firsts)
        self._bounds = torch.tensor(list(firsts[1:]), dtype=torch.int64)

    def split(self, ids: Tensor) -> list[Tensor]:
        """Per part: the positions in `ids` that it owns."""
        owners = torch.bucketize(ids, self._bounds, right=True)
        return [torch.nonzero(owners == part).view(-1) for part in range(self.num_parts)]


class Sharded:
    """A GraphStore and FeatureStore over parts, wherever each of them lives."""

    def __init__(self, schema: Schema, shards: Sequence[Shard], routes: Mapping[Owner, Routes]) -> None:
        self.schema = schema
        self._shards = tuple(shards)
        self._routes = routes

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """One hop: every shard is asked once, for all relations."""
        places = [
            None if frontier is None else self._routes[node_type.name].split(frontier.nodes)
            for node_type, frontier in zip(self.schema.node_types, frontiers, strict=True)
        ]
        answers = [
            shard.sample(
                [select(f, None if p is None else p[index]) for f, p in zip(frontiers, places, strict=True)], draw
            )
            for index, shard in enumerate(self._shards)
        ]
        out: list[Picks | None] = []
        for relation, destination in enumerate(self.schema.destinations):
            frontier, owned = frontiers[destination], places[destination]
            picks = [answer[relation] for answer in answers]
            out.append(stitch(picks, owned, frontier) if frontier is not None and owned else None)
        return out

    def gather(self, wanted: Sequence[Wanted], *, pinned: bool = False) -> list[Tensor]:
        """Rows: every shard is asked once, for all fields."""
        places = [self._routes[want.owner].split(want.ids) for want in wanted]
        answers = [
            shard.gather([Wanted(w.owner, w.field, w.ids[p[index]]) for w, p in zip(wanted, places, strict=True)])
            for index, shard in enumerate(self._shards)
        ]
        return [
            _interleave([answer[i] for answer in answers], places[i], want.ids.numel(), pinned=pinned)
            for i, want in enumerate(wanted)
        ]


def select(frontier: Frontier | None, places: Tensor | None) -> Frontier | None:
    """A part's share of a frontier; None if it has none."""
    if frontier is None or places is None or places.numel() == 0:
        return None
    nodes, trees, times = frontier
    return Frontier(nodes[places], None if trees is None else trees[places], None if times is None else times[places])


def stitch(parts: Sequence[Picks | None], places: Sequence[Tensor], frontier: Frontier) -> Picks | None:
    asked = [(picks, place) for picks, place in zip(parts, places, strict=True) if picks is not None]
    if not asked:
        return None
    counts = torch.zeros_like(frontier.nodes)
    for picks, place in asked:
        counts[place] = picks.counts
    begins = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=begins[1:])
    sources, edges = (ops.empty((int(begins[-1]),), torch.int64) for _ in range(2))
    for picks, place in asked:
        ops.scatter_lists(picks.sources, picks.counts, place, begins, sources)
        ops.scatter_lists(picks.edges, picks.counts, place, begins, edges)
    return Picks(counts, sources, edges)


def _interleave(parts: Sequence[Tensor], places: Sequence[Tensor], count: int, *, pinned: bool) -> Tensor:
    row = parts[0].shape[1:]
    out = ops.empty((count, *row), parts[0].dtype, pinned=pinned)
    for rows, place in zip(parts, places, strict=True):
        if rows.numel():
            ops.scatter_rows(_bytes(rows), place, _bytes(out))
    return out


def _bytes(rows: Tensor) -> Tensor:
    return rows.reshape(-1).view(torch.uint8).view(rows.shape[0], -1)
