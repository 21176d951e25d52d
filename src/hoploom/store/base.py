"""The two seams that hide where topology and features live, and what lies in this process: a part of a store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Never, Protocol, TypeAlias

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.errors import ConfigError, StoreError
from hoploom.ops import EdgeLists, Empty, Frontier, Picks, Rule
from hoploom.schema import EDGE_ID, Owner, Schema, read_ids
from hoploom.store.format import PartRange


class Draw(NamedTuple):
    """How one hop is drawn, for all relations at once."""

    key: int
    hop: int
    fanouts: Sequence[int]  # per relation
    replace: bool = False
    last: bool = False
    labor: bool = False
    weighted: bool = False
    counts_only: bool = False  # how many in-edges every node has; no picks

    def rule(self, relation: int) -> Rule:
        """The part of it that concerns one relation."""
        word = keys.stream(self.hop, relation)
        return Rule(self.key, word, self.fanouts[relation], self.replace, self.last, self.labor, self.weighted)


class Wanted(NamedTuple):
    """Rows of one field: of a node type by node id, of a relation by edge position."""

    owner: Owner
    field: str
    ids: Tensor  # [n] int64


Triple: TypeAlias = tuple[Owner, str, Any]  # what users may write for a Wanted, which is one itself


def read_wanted(schema: Schema, wanted: Sequence[Triple]) -> list[Wanted]:
    """What is wanted, by name; ConfigError for what the graph does not have. Every `gather` of a store begins so."""
    for want in wanted:
        if not isinstance(want, tuple) or len(want) != 3:
            raise ConfigError(f"{want!r:.80} is wanted; give a list of (type, field, ids)")
        owner, name, _ = want
        fields = (schema.node_type(owner) if isinstance(owner, str) else schema.relation(owner)).fields
        if name not in fields:
            raise ConfigError(f"{owner!r} has no field {name!r}; it has {sorted(fields)}")
    return [want if isinstance(want, Wanted) else _read(schema, *want) for want in wanted]


def _read(schema: Schema, owner: Owner, name: str, ids: Any) -> Wanted:
    """What a user wants; ConfigError for ids that are no list of integers in range."""
    what = f"ids of {owner!r}.{name}"
    try:
        given = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{what} are {ids!r:.80}; give a list of integer ids") from error
    limit = schema.node_type(owner).num_nodes if isinstance(owner, str) else schema.relation(owner).num_edges
    return Wanted(owner, name, read_ids(what, given, limit, ConfigError))


class HeldAt(NamedTuple):
    """Rows that are held, and for which places: what a look-up has found."""

    tables: Mapping[str, Tensor]  # field -> [rows, ...]
    slots: Tensor  # [ids] int64: at the places, which row
    places: Tensor  # [n] int64

    def copy(self, name: str, out: Tensor) -> None:
        """Write the rows of a field to their places."""
        ops.gather(self.tables[name], self.slots, out, 0, self.places)


class Location(NamedTuple):
    """Where a shard's rows of some ids are, by place."""

    near: Tensor  # [n] int64: the shard has these in memory
    held: tuple[HeldAt, ...]
    missing: Tensor  # [n] int64: these cost a wait


class GraphStore(Protocol):
    """Topology. Frontiers are listed by node type, picks by relation."""

    @property
    def schema(self) -> Schema: ...

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """Pick in-edges; None for a relation whose destination type has no frontier."""


class FeatureStore(Protocol):
    """Rows of named fields."""

    @property
    def schema(self) -> Schema: ...

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        """The wanted rows, in order, in fresh memory: recycled, or what is given."""


class Shard(Protocol):
    """Both seams over one range of nodes, in this process or another.

    To begin is to send the request, if there is one; the call returned finishes it and must be made, once. So all peers
    have their requests before the first answer is read, without threads.
    """

    @property
    def is_here(self) -> bool:
        """Whether this process answers by itself, from memory; another shard costs a wait, for a peer or a disk."""

    @property
    def is_remote(self) -> bool:
        """Whether another process answers."""

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """Begin one hop of this range's nodes: as GraphStore.sample."""

    def begin_gather(
        self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Begin to write rows where they belong: outs[i][places[i]] = the rows of wanted[i].ids[places[i]].

        places[i] are [n] int64; outs[i] has the field's dtype and a row for every one of wanted[i].ids.
        """

    def lies_here(self, owner: Owner, name: str) -> bool:
        """Whether all rows of a field are in memory or mapped."""

    def locate(self, owner: Owner, ids: Tensor, places: Tensor) -> Location:
        """Where the rows are of the ids at these places: those of fields that do not all lie here."""

    def split(self, node_type: str, name: str) -> Tensor:
        """The members of a split in this range, [n] int64; none where the type has no such split."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What a store has to do with other processes and devices: this one, nothing. The others are made by
    hoploom.connect and hoploom.place."""

    homes: tuple[tuple[int, ...], ...] = ()  # the parts of every rank, where a context has found out
    look_ahead: int | None = None  # batches whose missing rows loaders fetch together, unless they say otherwise
    placed: Any = None  # what a GPU's kernels read: hoploom.gpu.place.placed_store.PlacedStore

    @property
    def makes_batches(self) -> bool:
        """Whether servers make the batches: this process needs no graph then."""
        return False

    def producer(self, maker: Any, device: torch.device | None, look_ahead: int | None, deadline: float) -> Any:
        """Return the hoploom.load.maker.Maker of a loader's batches; None if this process makes them."""
        return None

    def traffic(self) -> dict[str, float]:
        """Requests to other processes so far."""
        return {}

    def close(self, *, wait: bool) -> None:
        """Leave them. `wait=False` is for leaving after an error: other ranks are not waited for."""


NOWHERE = Deployment()


# --- arrays in reach of this process, in memory or mapped ---------------------------------------

NO_IDS = torch.empty(0, dtype=torch.int64)


def in_degrees_of(lists: EdgeLists, nodes: Tensor) -> Tensor:
    """How many edges lead to each of these nodes, loops counted: [n] int64."""
    begins, ends = (ops.empty((nodes.numel(),), torch.int64) for _ in range(2))
    for pointers, out in ((lists.indptr[:-1], begins), (lists.indptr[1:], ends)):
        ops.gather(pointers, nodes, out, lists.first_node)
    return ends - begins


@dataclass(frozen=True)
class Table:
    """The rows of one field."""

    rows: Tensor  # [n, ...]
    first: int = 0  # the id of the first row
    by_edge_id: bool = False  # rows stand in the user's own edge order, not in CSC order
    raw: Tensor = field(init=False, repr=False, compare=False)  # [n, bytes per row] uint8, the same memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw", ops.byte_rows(self.rows))

    def gather_at(self, places: Tensor | None, ids: Tensor, out: Tensor) -> None:
        """out[places] = the rows of ids[places]; for all ids where there are no places."""
        ops.gather(self.raw, ids, out, self.first, places)


@dataclass(frozen=True)
class Part:
    """A contiguous range of nodes of every type, with their in-edges and fields."""

    schema: Schema
    first_nodes: tuple[int, ...]  # per node type
    num_nodes: tuple[int, ...]  # per node type
    lists: tuple[EdgeLists, ...]  # per relation
    tables: Mapping[tuple[Owner, str], Table]
    splits: Mapping[tuple[str, str], Tensor]  # (node type, split) -> [n] int64 node ids

    @property
    def is_here(self) -> bool:
        return True

    @property
    def is_remote(self) -> bool:
        return False

    def require_whole(self) -> None:
        """StoreError if a file of this part can no longer be read."""
        ops.require_whole(tensor for lists in self.lists for tensor in lists.columns)
        ops.require_whole(table.rows for table in self.tables.values())
        ops.require_whole(self.splits.values())

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        out: list[Picks | None] = []
        for index, lists in enumerate(self.lists):
            frontier = frontiers[self.schema.destinations[index]]
            if frontier is None or draw.fanouts[index] == 0:
                out.append(None)
            elif draw.counts_only:
                out.append(Picks(in_degrees_of(lists, frontier.nodes), NO_IDS, NO_IDS))
            else:
                out.append(ops.sample(lists, frontier, draw.rule(index)))
        return out

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        wanted, outs = read_wanted(self.schema, wanted), []
        for owner, name, ids in wanted:
            rows = self.tables[owner, name].rows
            outs.append(empty((ids.numel(), *rows.shape[1:]), rows.dtype))
        self.gather_into(wanted, outs)
        return outs

    def gather_into(self, wanted: Sequence[Wanted], outs: Sequence[Tensor]) -> None:
        """The wanted rows, to memory that is there."""
        self._gather_at(wanted, [None] * len(wanted), outs)

    # Nothing has to be sent: all is done by the calls returned.

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        return partial(self.sample, frontiers, draw)

    def begin_gather(
        self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        return partial(self._gather_at, wanted, places, outs)

    def lies_here(self, owner: Owner, name: str) -> bool:
        return True

    def locate(self, owner: Owner, ids: Tensor, places: Tensor) -> Location:
        return Location(places, (), places[:0])

    def split(self, node_type: str, name: str) -> Tensor:
        return self.splits.get((node_type, name), torch.empty(0, dtype=torch.int64))

    def _gather_at(self, wanted: Sequence[Wanted], places: Sequence[Tensor | None], outs: Sequence[Tensor]) -> None:
        edge_ids: dict[tuple[Owner, int, int], Tensor] = {}  # read once, however many fields stand in the user's order
        for are_edge_ids in (True, False):  # these first
            for (owner, name, ids), place, out in zip(wanted, places, outs, strict=True):
                if (name == EDGE_ID) is not are_edge_ids or (place is not None and place.numel() == 0):
                    continue
                table = self.tables[owner, name]
                if are_edge_ids:
                    edge_ids[owner, id(ids), id(place)] = out
                elif table.by_edge_id:
                    key = owner, id(ids), id(place)
                    if key not in edge_ids:
                        edge_ids[key] = ops.empty((ids.numel(),), torch.int64)
                        self.tables[owner, EDGE_ID].gather_at(place, ids, edge_ids[key])
                    ids = edge_ids[key]
                table.gather_at(place, ids, out)


@dataclass(frozen=True)
class Absent:
    """A part that was not opened: any request for it is an error. With it in place all parts route ids alike."""

    schema: Schema
    number: int
    held: tuple[int, ...]  # the parts that are at hand

    @property
    def is_here(self) -> bool:
        return True  # it answers by itself, if only with an error

    @property
    def is_remote(self) -> bool:
        return False

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        for index, relation in enumerate(self.schema.relations):
            frontier = frontiers[self.schema.destinations[index]]
            if frontier is not None and draw.fanouts[index] != 0:
                self._refuse(f"reading the in-edges of node {int(frontier.nodes[0])} of {relation.destination!r}")
        return lambda: [None] * len(self.schema.relations)

    def begin_gather(
        self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        for (owner, name, ids), place in zip(wanted, places, strict=True):
            if place.numel():
                what = "node" if isinstance(owner, str) else "edge"
                self._refuse(f"reading {name!r} of {what} {int(ids[place[0]])} of {owner!r}")
        return lambda: None

    def lies_here(self, owner: Owner, name: str) -> bool:
        return True

    def locate(self, owner: Owner, ids: Tensor, places: Tensor) -> Location:
        return Location(places, (), places[:0])

    def split(self, node_type: str, name: str) -> Tensor:
        return torch.empty(0, dtype=torch.int64)

    def _refuse(self, what: str) -> Never:
        held = f"part {self.held[0]} is" if len(self.held) == 1 else f"parts {', '.join(map(str, self.held))} are"
        way_out = f"open part {self.number} too, or all parts"
        raise StoreError(f"{what} needs part {self.number}, but only {held} open; {way_out}")


def range_of(part: Part) -> PartRange:
    """What store.json says of a part."""
    splits: dict[str, dict[str, int]] = {t.name: {} for t in part.schema.node_types}
    for (node_type, split), ids in part.splits.items():
        splits[node_type][split] = ids.numel()
    first_edges = tuple(lists.first_edge for lists in part.lists)
    num_edges = tuple(lists.num_edges for lists in part.lists)
    return PartRange(part.first_nodes, part.num_nodes, first_edges, num_edges, splits)
