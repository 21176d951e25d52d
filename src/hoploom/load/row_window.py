"""The rows that the last two groups of a loop's steps need: each is fetched once, and stays where it is while it is
needed. A row that no step needs any more gives its place to another, so nothing is copied from group to group.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from hoploom import ops
from hoploom.ops import Empty, SlotMap
from hoploom.schema import Owner, Schema
from hoploom.store import Sharded, Wanted
from hoploom.store.base import HeldAt, Triple, read_wanted
from hoploom.store.sharded import empty_rows

SPARE = 16  # a table that grows has one place in so many to spare
Field = tuple[Owner, str]
Known = tuple[Owner, int, int]  # ids are known by their owner, where they lie and how many they are


class Sought(NamedTuple):
    """Ids of one owner whose rows one batch needs, and where they are."""

    owner: Owner
    ids: Tensor  # [n] int64
    near: Sequence[Tensor]  # by shard: the places that it has in memory
    held: Sequence[HeldAt]
    missing: Tensor  # [m] int64 places


def known_by(owner: Owner, ids: Tensor) -> Known:
    return owner, ids.data_ptr(), ids.numel()


class Window:
    """The rows of one owner, for one loop. With little memory, ids are hashed."""

    def __init__(self, schema: Schema, owner: Owner, fields: Collection[str], *, little_memory: bool) -> None:
        self._schema, self._owner = schema, owner
        num_ids = schema.node_type(owner).num_nodes if isinstance(owner, str) else schema.relation(owner).num_edges
        self._slots = SlotMap(num_ids, 0) if little_memory else SlotMap(num_ids)
        self.tables = {name: empty_rows(schema, owner, name, 0) for name in fields}

    def begin(self) -> None:
        """Begin the next group: what the group before the last one needed may go."""
        self._slots.begin()

    def find(self, sought: Sequence[Sought]) -> tuple[list[HeldAt], Tensor]:
        """Where the rows of a group's batches will be, and the places in the tables that are still to be written."""
        found = [self._slots.find(one.ids, one.missing) for one in sought]
        fresh = [self._slots.add(one.ids, new, slots) for one, (slots, new) in zip(sought, found, strict=True)]
        self._grow(len(self._slots))
        held = [HeldAt(self.tables, slots, one.missing) for one, (slots, _) in zip(sought, found, strict=True)]
        return held, ops.joined(fresh)

    @property
    def num_needed(self) -> int:
        """Rows that the newest group needs."""
        return self._slots.num_needed

    def wanted(self) -> list[tuple[Wanted, Tensor]]:
        """What stands in the tables, place by place, and the tables."""
        ids = self._slots.ids
        num_rows = ids.numel()
        return [(Wanted(self._owner, name, ids), table[:num_rows]) for name, table in self.tables.items()]

    def _grow(self, num_rows: int) -> None:
        """Larger tables, where there are more rows: batches that are being made go on reading the old ones."""
        grown = {}
        for name, table in self.tables.items():
            grown[name] = table
            if len(table) < num_rows:
                grown[name] = empty_rows(self._schema, self._owner, name, num_rows + len(table) // SPARE)
                ops.byte_rows(grown[name])[: len(table)].numpy()[:] = ops.byte_rows(table).numpy()
        self.tables = grown


class Located:
    """A FeatureStore over shards of which it is known where the rows of some ids are: none is looked up again."""

    def __init__(self, features: Sharded, fields: Collection[Field], sought: Iterable[Sought]) -> None:
        self._features, self._fields = features, fields  # those fields are meant
        self._sought = {known_by(one.owner, one.ids): one for one in sought}

    @property
    def schema(self) -> Schema:
        return self._features.schema

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        wanted = read_wanted(self.schema, wanted)
        outs = [empty_rows(self.schema, owner, name, ids.numel(), empty) for owner, name, ids in wanted]
        routed: dict[Known, Sequence[Tensor]] = {}
        owned = []
        for (owner, name, ids), out in zip(wanted, outs, strict=True):
            known = known_by(owner, ids)
            sought = self._sought.get(known) if (owner, name) in self._fields else None
            if sought is not None:
                for held in sought.held:
                    held.copy(name, out)
            elif known not in routed:
                routed[known] = self._features.route(owner, ids)
            owned.append(routed[known] if sought is None else sought.near)
        self._features.gather_owned(wanted, owned, outs)
        return outs
