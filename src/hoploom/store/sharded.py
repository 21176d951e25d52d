"""Several shards as one store: route ids to their shard, send all requests, merge the responses in order."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from hoploom import ops
from hoploom.ops import Empty, Frontier, Picks
from hoploom.schema import DTYPES, Schema, TypeKey
from hoploom.store.base import NO_IDS, Draw, RowLookup, Shard, Tier, Triple, Wanted, read_wanted
from hoploom.store.format import PartRange

Answer = TypeVar("Answer")
Finish: TypeAlias = Callable[[], Answer]


class Sharded:
    """A GraphStore and FeatureStore over several shards, which may be in memory, on disk or remote."""

    def __init__(self, schema: Schema, shards: Sequence[Shard], ranges: Sequence[PartRange]) -> None:
        self.schema = schema
        self.shards = tuple(shards)
        self._cuts: dict[TypeKey, Tensor] = {}  # the first ids of the second part, the third and so on
        for index, node_type in enumerate(schema.node_types):
            self._cuts[node_type.name] = torch.tensor([part.first_nodes[index] for part in ranges[1:]]).long()
        for index, relation in enumerate(schema.relations):
            self._cuts[relation.key] = torch.tensor([part.first_edges[index] for part in ranges[1:]]).long()

    def over(self, shards: Sequence[Shard]) -> "Sharded":
        """Return a copy that reads from other shards, which have the same ranges of nodes."""
        other = copy.copy(self)
        other.shards = tuple(shards)
        return other

    def route(self, owner: TypeKey, ids: Tensor, positions: Tensor | None = None) -> list[Tensor]:
        """Return, by shard, the positions of its ids in `ids`. With `positions`, only these positions are searched."""
        return ops.route(ids, self._cuts[owner], positions)

    def look_up(self, owner: TypeKey, ids: Tensor) -> RowLookup:
        """Return which rows of `ids` are in memory, cached, or missing, over all shards."""
        routed = zip(self.shards, self.route(owner, ids), strict=True)
        found = [shard.look_up(owner, ids, positions) for shard, positions in routed]
        in_memory = tuple(positions for one in found for positions in one.in_memory)
        missing = ops.joined([one.missing for one in found if one.missing.numel()])
        return RowLookup(owner, ids, in_memory, tuple(rows for one in found for rows in one.cached), missing)

    def in_memory(self, owner: TypeKey, name: str) -> bool:
        """Return whether all rows of a field are in memory or mapped."""
        return all(shard.in_memory(owner, name) for shard in self.shards)

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """Sample one hop, with one request per shard for all relations."""
        positions = [
            None if frontier is None else self.route(node_type.name, frontier.nodes)
            for node_type, frontier in zip(self.schema.node_types, frontiers, strict=True)
        ]
        requests: dict[int, Callable[[], Finish[list[Picks | None]]]] = {}
        for index, shard in enumerate(self.shards):
            own = [
                select_frontier(f, None if p is None else p[index]) for f, p in zip(frontiers, positions, strict=True)
            ]
            if any(frontier is not None for frontier in own):
                requests[index] = partial(shard.begin_sample, own, draw)
        answers = self._send(requests)
        out: list[Picks | None] = []
        for relation, destination in enumerate(self.schema.destinations):
            frontier, routed = frontiers[destination], positions[destination]
            picks = [answers[index][relation] if index in answers else None for index in range(len(self.shards))]
            if frontier is None or not routed:
                out.append(None)
            else:
                out.append(merge_picks(picks, routed, frontier, counts_only=draw.counts_only))
        return out

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        """Return one tensor of rows per entry of `wanted`, with one request per shard for all fields."""
        wanted = read_wanted(self.schema, wanted)
        outs = [empty_rows(self.schema, owner, name, ids.numel(), empty) for owner, name, ids in wanted]
        self.gather_at(wanted, [None] * len(wanted), outs)
        return outs

    def gather_at(self, wanted: Sequence[Wanted], positions: Sequence[Tensor | None], outs: Sequence[Tensor]) -> None:
        """Write the rows of wanted[i] to outs[i]: the rows at positions[i], or all if positions[i] is None."""
        routed: dict[tuple[TypeKey, int, int], list[Tensor]] = {}  # once for all fields of the same ids
        keys = [(w.owner, id(w.ids), id(own)) for w, own in zip(wanted, positions, strict=True)]
        for key, want, own in zip(keys, wanted, positions, strict=True):
            if key not in routed:
                routed[key] = self.route(want.owner, want.ids, own)
        self.gather_routed(wanted, [routed[key] for key in keys], outs)

    def gather_routed(
        self, wanted: Sequence[Wanted], routed: Sequence[Sequence[Tensor]], outs: Sequence[Tensor]
    ) -> None:
        """Write rows of wanted[i] to outs[i]. Shard s gives the rows at the positions routed[i][s] of wanted[i].ids."""
        requests: dict[int, Callable[[], Finish[None]]] = {}
        for index, shard in enumerate(self.shards):
            own = [by_shard[index] for by_shard in routed]
            if any(positions.numel() for positions in own):
                requests[index] = partial(shard.begin_gather, wanted, own, outs)
        self._send(requests)

    def _send(self, requests: Mapping[int, Callable[[], Finish[Answer]]]) -> dict[int, Answer]:
        """Begin all requests, of peers first; return responses by shard. All are finished, even after an error."""
        answers: dict[int, Answer] = {}
        in_flight: list[tuple[int, Finish[Answer]]] = []
        try:
            for index in sorted(requests, key=lambda number: self.shards[number].tier):
                in_flight.append((index, requests[index]()))
            while in_flight:  # last begun, first finished
                index, finish = in_flight.pop()
                answers[index] = finish()
        finally:
            with ExitStack() as left:
                for _, finish in in_flight:
                    left.callback(finish)
        return answers


def select_frontier(frontier: Frontier | None, positions: Tensor | None) -> Frontier | None:
    """Return the part of a frontier at `positions`; None if there are no positions."""
    if frontier is None or positions is None or positions.numel() == 0:
        return None
    if _are_all(positions, frontier):
        return frontier
    columns = (None if column is None else ops.select(column, positions) for column in frontier)
    return Frontier(*columns)  # type: ignore[arg-type]


def merge_picks(
    parts: Sequence[Picks | None], positions: Sequence[Tensor], frontier: Frontier, *, counts_only: bool = False
) -> Picks | None:
    """Merge the picks of all parts in the order of the frontier; return None if no part returned picks."""
    answered = [(own, picks) for picks, own in zip(parts, positions, strict=True) if picks is not None]
    if not answered:
        return None
    if _are_all(answered[0][0], frontier):
        return answered[0][1]
    if not counts_only:
        return ops.stitch(answered, frontier.nodes.numel())
    counts = torch.zeros_like(frontier.nodes)
    for own, picks in answered:
        ops.scatter_rows(picks.counts, own, counts)
    return Picks(counts, NO_IDS, NO_IDS)


def _are_all(positions: Tensor, frontier: Frontier) -> bool:
    """Return whether `positions` are all positions of a frontier, in order."""
    return positions.numel() == frontier.nodes.numel() and ops.is_counting(positions)


def empty_rows(schema: Schema, owner: TypeKey, name: str, count: int, empty: Empty = ops.empty) -> Tensor:
    """Allocate memory for `count` rows of a field."""
    field = schema.described(owner).fields[name]
    return empty((count, *field.shape), DTYPES[field.dtype])


@dataclass(frozen=True)
class ShardWrapper:
    """Base of shards that have copies of some rows of another shard, `shard`, and ask it for everything else."""

    shard: Shard

    @property
    def tier(self) -> Tier:
        return self.shard.tier

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Finish[list[Picks | None]]:
        return self.shard.begin_sample(frontiers, draw)

    def in_memory(self, owner: TypeKey, name: str) -> bool:
        return self.shard.in_memory(owner, name)

    def look_up(self, owner: TypeKey, ids: Tensor, positions: Tensor) -> RowLookup:
        return self.shard.look_up(owner, ids, positions)

    def split(self, node_type: str, name: str) -> Tensor:
        return self.shard.split(node_type, name)

    def _copy_and_gather(
        self, copies: Sequence[Finish[None]], wanted: Sequence[Wanted], rest: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Finish[None]:
        """Request the rows at positions `rest` from `shard`; return a function that calls `copies` and gets these."""
        inner = self.shard.begin_gather(wanted, rest, outs) if any(own.numel() for own in rest) else None

        def finish() -> None:
            try:
                for copy_rows in copies:
                    copy_rows()
            finally:
                if inner is not None:
                    inner()

        return finish


@dataclass(frozen=True)
class LocalEdgeFields(ShardWrapper):
    """A remote shard whose edge `fields` are read from the shard `local`, because this host has them too."""

    local: Shard
    fields: Collection[tuple[TypeKey, str]]  # edge fields that `local` has

    def in_memory(self, owner: TypeKey, name: str) -> bool:
        return (self.local if (owner, name) in self.fields else self.shard).in_memory(owner, name)

    def begin_gather(
        self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Finish[None]:
        are_local = [(want.owner, want.field) in self.fields for want in wanted]
        own = [p if is_local else p[:0] for p, is_local in zip(positions, are_local, strict=True)]
        rest = [p[:0] if is_local else p for p, is_local in zip(positions, are_local, strict=True)]
        return self._copy_and_gather([self.local.begin_gather(wanted, own, outs)], wanted, rest, outs)


# Messages hold ids as int32, relative to the first id of their range, if the range has at most 2^31 ids: node ids and
# edge positions are relative to the part's first, sources to 0. This costs a pass over the ids on either side and saves
# half of their bytes. Received int64 ids are used unchanged.

MOST = 1 << 31  # ids of a range that fit into int32


class IdRange(NamedTuple):
    """A range of ids of one type, and how these ids are encoded in messages."""

    first: int
    size: int

    def encode(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Encode the ids, or only those at `positions`, for a message: [n] int32 or int64."""
        if self.size <= MOST:
            return ops.narrow(ids, self.first, positions)
        return ids if positions is None else ops.select(ids, positions)

    def decode(self, ids: Tensor) -> Tensor:
        """Decode received ids to int64; raise IndexError if one is out of range."""
        return ops.owned(ids, self.first, self.size)


class IdEncoding:
    """The encoding of ids in messages to and from one part."""

    def __init__(self, schema: Schema, held: PartRange) -> None:
        self.nodes = [IdRange(*of_type) for of_type in zip(held.first_nodes, held.num_nodes, strict=True)]
        edges = [IdRange(*of_relation) for of_relation in zip(held.first_edges, held.num_edges, strict=True)]
        sources = [IdRange(0, schema.node_types[index].num_nodes) for index in schema.sources]
        counts = [IdRange(0, of_relation.size) for of_relation in edges]
        self._columns = list(zip(counts, sources, edges, strict=True))  # of picks, by relation
        self.owned: dict[TypeKey, IdRange] = {t.name: own for t, own in zip(schema.node_types, self.nodes, strict=True)}
        self.owned |= {relation.key: own for relation, own in zip(schema.relations, edges, strict=True)}

    def encode_picks(self, relation: int, picks: Picks) -> list[Tensor]:
        """Encode the columns of picks (counts, sources, edges) for a message."""
        return [ids.encode(column) for ids, column in zip(self._columns[relation], picks, strict=True)]

    def decode_picks(self, relation: int, columns: Sequence[Any]) -> Picks | None:
        """Decode received picks to int64; return None if a column has a wrong dtype or shape."""
        for column in columns:
            if column.dtype not in (torch.int32, torch.int64) or column.dim() != 1:
                return None
        counts, sources, edges = columns
        return ops.widen_picks(counts, sources, edges, self._columns[relation][2].first)
