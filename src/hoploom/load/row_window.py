"""The rows that the last two groups of a loop's steps need: each is fetched once, and stays where it is while it is
needed. A row that no step needs any more gives its place to another, so nothing is copied from group to group.
"""

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from hoploom import ops
from hoploom.ops import Empty, SlotMap
from hoploom.schema import Owner, Schema
from hoploom.store import Sharded, Wanted
from hoploom.store.base import CachedPositions, RowLookup, Triple, read_wanted
from hoploom.store.sharded import empty_rows

SPARE = 16  # a table that grows has one place in so many to spare
Field = tuple[Owner, str]
IdsKey = tuple[Owner, int, int]


def ids_key(owner: Owner, ids: Tensor) -> IdsKey:
    """Return the key of a tensor of ids: its owner, address and length."""
    return owner, ids.data_ptr(), ids.numel()


class Window:
    """The rows of one owner, for one loop. With little memory, ids are hashed."""

    def __init__(self, schema: Schema, owner: Owner, fields: Collection[str], *, little_memory: bool) -> None:
        self._schema, self._owner = schema, owner
        num_ids = schema.described(owner).count
        self._slots = SlotMap(num_ids, 0) if little_memory else SlotMap(num_ids)
        self.tables = {name: empty_rows(schema, owner, name, 0) for name in fields}

    def begin(self) -> None:
        """Begin the next group: what the group before the last one needed may go."""
        self._slots.begin()

    def find(self, lookups: Sequence[RowLookup]) -> tuple[list[CachedPositions], Tensor]:
        """Where the rows of a group's batches will be, and the places in the tables that are still to be written."""
        found = [self._slots.find(one.ids, one.missing) for one in lookups]
        fresh = [self._slots.add(one.ids, new, slots) for one, (slots, new) in zip(lookups, found, strict=True)]
        self._grow(len(self._slots))
        slots_of = zip(lookups, (slots for slots, _ in found), strict=True)
        return [CachedPositions(self.tables, slots, one.missing) for one, slots in slots_of], ops.joined(fresh)

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


class PrefetchedRows:
    """A FeatureStore over shards that uses earlier lookups: no ids of these fields are looked up again."""

    def __init__(self, features: Sharded, fields: Collection[Field], lookups: Iterable[RowLookup]) -> None:
        self._features, self._fields = features, fields  # the fields that the lookups are for
        self._lookups = {ids_key(one.owner, one.ids): one for one in lookups}

    @property
    def schema(self) -> Schema:
        return self._features.schema

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        wanted = read_wanted(self.schema, wanted)
        outs = [empty_rows(self.schema, owner, name, ids.numel(), empty) for owner, name, ids in wanted]
        others: dict[IdsKey, Sequence[Tensor]] = {}
        routed = []
        for (owner, name, ids), out in zip(wanted, outs, strict=True):
            key = ids_key(owner, ids)
            lookup = self._lookups.get(key) if (owner, name) in self._fields else None
            if lookup is not None:
                for rows in lookup.cached:
                    rows.copy(name, out)
            elif key not in others:
                others[key] = self._features.route(owner, ids)
            routed.append(others[key] if lookup is None else lookup.in_memory)
        self._features.gather_routed(wanted, routed, outs)
        return outs
