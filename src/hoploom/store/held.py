"""Rows held here by id, out of tables that lie elsewhere, and a shard that answers with them first.

A cache holds the rows that are asked for most, look-ahead those that the next batches need. Costs a look-up, by hash,
for every row that is asked of a shard elsewhere; what is held is never more than what was put in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from torch import Tensor

from hoploom import ops
from hoploom.ops import Found, Frontier, IdMap, Picks
from hoploom.schema import DTYPES, Owner, Schema
from hoploom.store.base import Draw, Shard, Wanted
from hoploom.store.part import Part

Finish = Callable[[], None]


@dataclass(frozen=True)
class HeldRows:
    """Rows of one node type or relation, by id."""

    ids: IdMap
    tables: Mapping[str, Tensor]  # field -> [len(ids), ...], in the order of the ids

    @property
    def num_bytes(self) -> int:
        return self.ids.num_bytes + sum(table.nbytes for table in self.tables.values())

    def copy(self, name: str, found: Found, out: Tensor) -> None:
        """Write the rows found to their places."""
        ops.gather(ops.as_bytes(self.tables[name]), found.slots, ops.as_bytes(out), 0, found.hits)


@dataclass
class Tally:
    """How many rows were found and how many were not, over all threads."""

    hits: int = 0
    misses: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, hits: int, misses: int) -> None:
        with self._lock:
            self.hits += hits
            self.misses += misses


@dataclass(frozen=True)
class Cached:
    """A shard of which some rows are held here: those are copied while the shard is asked for the others."""

    shard: Shard
    held: Mapping[Owner, HeldRows]
    tally: Tally = field(default_factory=Tally)

    @property
    def is_here(self) -> bool:
        return self.shard.is_here

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """What the shard answers."""
        return self.shard.begin_sample(frontiers, draw)

    def begin_gather(self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]) -> Finish:
        """Ask for the rows that are not held."""
        looked_up: dict[tuple[Owner, int, int], Found] = {}
        copies: list[Finish] = []
        rest = list(places)
        for index, ((owner, name, ids), place, out) in enumerate(zip(wanted, places, outs, strict=True)):
            rows = self.held.get(owner)
            if rows is None or name not in rows.tables or place.numel() == 0:
                continue
            key = owner, id(ids), id(place)
            if key not in looked_up:
                looked_up[key] = rows.ids.find(ids, place)
                self.tally.add(looked_up[key].hits.numel(), looked_up[key].misses.numel())
            rest[index] = looked_up[key].misses
            copies.append(partial(rows.copy, name, looked_up[key], out))
        asked = any(place.numel() for place in rest)
        return partial(_finish, copies, self.shard.begin_gather(wanted, rest, outs) if asked else None)

    def split(self, node_type: str, name: str) -> Tensor:
        """What the shard answers."""
        return self.shard.split(node_type, name)


@dataclass(frozen=True)
class Nearer:
    """A shard elsewhere of which some fields lie here: those of edges, which come with the topology."""

    shard: Shard
    near: Part

    @property
    def is_here(self) -> bool:
        return False

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """What the shard answers."""
        return self.shard.begin_sample(frontiers, draw)

    def begin_gather(self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]) -> Finish:
        """Ask for the fields that are not here, and read those that are."""
        here = [(want.owner, want.field) in self.near.tables for want in wanted]
        none = [place[:0] for place in places]
        own = [place if is_here else nothing for place, nothing, is_here in zip(places, none, here, strict=True)]
        rest = [nothing if is_here else place for place, nothing, is_here in zip(places, none, here, strict=True)]
        asked = any(place.numel() for place in rest)
        copies = [self.near.begin_gather(wanted, own, outs)] if any(here) else []
        return partial(_finish, copies, self.shard.begin_gather(wanted, rest, outs) if asked else None)

    def split(self, node_type: str, name: str) -> Tensor:
        """What the shard answers."""
        return self.shard.split(node_type, name)


def lies_here(shard: Shard, owner: Owner, name: str) -> bool:
    """Whether all of a field is read in this process."""
    if isinstance(shard, Cached):
        return lies_here(shard.shard, owner, name)
    return shard.is_here or (isinstance(shard, Nearer) and (owner, name) in shard.near.tables)


def _finish(copies: Sequence[Finish], rest: Finish | None) -> None:
    try:
        for copy in copies:
            copy()
    finally:
        if rest is not None:
            rest()


def missing(shard: Shard, owner: Owner, ids: Tensor, places: Tensor) -> Tensor:
    """Of these places, those whose rows would have to come from elsewhere."""
    if isinstance(shard, Cached):
        rows = shard.held.get(owner)
        return missing(shard.shard, owner, ids, places if rows is None else rows.ids.find(ids, places).misses)
    return places[:0] if shard.is_here else places


def empty_rows(schema: Schema, owner: Owner, name: str, count: int, *, pinned: bool = False) -> Tensor:
    """Room for rows of a field."""
    described = schema.node_type(owner) if isinstance(owner, str) else schema.relation(owner)
    of_field = described.fields[name]
    return ops.empty((count, *of_field.shape), DTYPES[of_field.dtype], pinned=pinned)
