"""The interfaces GraphStore and FeatureStore, the parts of a store, and iteration over all its edges or rows."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar, NamedTuple, Never, Protocol, TypeAlias

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.errors import ConfigError, StoreError
from hoploom.ops import EdgeLists, Empty, Frontier, Picks, Rule
from hoploom.schema import EDGE_ID, RelationName, Schema, TypeKey, read_ids
from hoploom.store.format import PartRange

NO_IDS = torch.empty(0, dtype=torch.int64)


class Draw(NamedTuple):
    """The sampling options of one hop, for all relations."""

    key: int  # determines all random numbers of the hop
    hop: int
    fanouts: Sequence[int]  # per relation
    replace: bool = False
    last: bool = False  # temporal sampling: the latest edges, without drawing
    labor: bool = False
    weighted: bool = False
    counts_only: bool = False  # return the number of in-edges of every node, and no picks
    window: int = -1  # temporal sampling: the greatest age of an edge at its seed's time; -1: any
    excluded: Sequence[Tensor | None] | None = None  # per relation: [n] int64 ascending positions, never picked

    def rule(self, relation: int) -> Rule:
        """Return the sampling options of one relation, given as its index in the schema."""
        word, excluded = keys.stream(self.hop, relation), None if self.excluded is None else self.excluded[relation]
        flags = self.replace, self.last, self.labor, self.weighted
        return Rule(self.key, word, self.fanouts[relation], *flags, self.window, excluded)


class Wanted(NamedTuple):
    """A request for rows of a field of `owner`. `ids` are node ids, or edge positions if `owner` is a relation."""

    owner: TypeKey
    field: str
    ids: Tensor  # [n] int64


Triple: TypeAlias = tuple[TypeKey, str, Any]  # (owner, field, ids): a Wanted, or a plain tuple from the user


def read_wanted(schema: Schema, wanted: Sequence[Triple]) -> list[Wanted]:
    """Check the fields and ids that a caller asks for; return them as Wanted, or raise ConfigError for a wrong one."""
    checked = []
    for want in wanted:
        if not isinstance(want, tuple) or len(want) != 3:
            raise ConfigError(f"{want!r:.80} is wanted; give a list of (type, field, ids)")
        owner, name, ids = want
        described = schema.described(owner)
        if name not in described.fields:
            raise ConfigError(f"{owner!r} has no field {name!r}; it has {sorted(described.fields)}")
        if not isinstance(want, Wanted):
            what = f"ids of {owner!r}.{name}"
            try:
                ids = torch.as_tensor(ids)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ConfigError(f"{what} are {ids!r:.80}; give a list of integer ids") from error
            want = Wanted(owner, name, read_ids(what, ids, described.count, ConfigError))
        checked.append(want)
    return checked


# --- lookups: which rows are in memory ------------------------------------------------------


class Tier(IntEnum):
    """The kinds of storage that can hold the rows of a shard, slowest first."""

    REMOTE = 0  # another process
    DISK = 1
    MEMORY = 2  # this process: rows in memory, or mapped


class CachedPositions(NamedTuple):
    """Rows that a cache has. For each p in `positions`, the row of the lookup's ids[p] is tables[field][rows[p]]."""

    tables: Mapping[str, Tensor]  # field -> [rows, ...]
    rows: Tensor  # [ids] int64, valid at the positions
    positions: Tensor  # [n] int64

    def copy(self, name: str, out: Tensor) -> None:
        """Write the cached rows of the field `name` to out[positions]."""
        ops.gather(self.tables[name], self.rows, out, 0, self.positions)


class RowLookup(NamedTuple):
    """The positions in `ids` of the requested rows, by storage: in memory, cached, or missing (on disk or remote)."""

    owner: TypeKey
    ids: Tensor  # [n] int64
    in_memory: tuple[Tensor, ...]  # by shard: [m] int64
    cached: tuple[CachedPositions, ...]
    missing: Tensor  # [m] int64

    def numbered(self, begins: Sequence[int]) -> Tensor:
        """Return the ids, with begins[i] + its row in place of the id of each row that cached[i] has: [n] int64."""
        numbers = ops.empty((self.ids.numel(),), torch.int64)
        numbers.numpy()[:] = self.ids.numpy()
        for begin, (_, rows, positions) in zip(begins, self.cached, strict=True):
            numbers.numpy()[positions.numpy()] = begin + rows.numpy()[positions.numpy()]
        return numbers


# --- the interfaces -------------------------------------------------------------------------


class GraphStore(Protocol):
    """Interface for sampling neighbours. Node types and relations are in the order of `schema`."""

    @property
    def schema(self) -> Schema: ...

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """Sample in-edges of `frontiers` (one per node type); return picks per relation, None without a frontier."""


class FeatureStore(Protocol):
    """Interface for reading rows of fields: features, labels, edge attributes."""

    @property
    def schema(self) -> Schema: ...

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        """Return one tensor of rows per request, in the order of its ids; `empty` allocates the tensors."""


class Shard(Protocol):
    """Interface for sampling from, and reading rows of, one range of nodes in this process or another.

    `begin_*` sends a request if the shard is remote, and returns a function that the caller must call once to finish
    the request. So all peers have their requests before the first response is read, without threads.
    """

    @property
    def tier(self) -> Tier: ...

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """Begin to sample one hop of nodes in this range; the returned function returns the picks by relation."""

    def begin_gather(
        self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Begin to write requested rows: outs[i][positions[i]] = the rows of wanted[i].ids[positions[i]]."""

    def in_memory(self, owner: TypeKey, name: str) -> bool:
        """Return whether all rows of a field are in memory or mapped."""

    def look_up(self, owner: TypeKey, ids: Tensor, positions: Tensor) -> RowLookup:
        """Return which rows of ids[positions] are in memory or cached. Used for fields that are not all in memory."""

    def split(self, node_type: str, name: str) -> Tensor:
        """Return the node ids of a split in this range, [n] int64; empty if the type has no such split."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Settings and hooks of a store on servers or on a GPU. For all other stores, this base class does nothing."""

    homes: tuple[tuple[int, ...], ...] = ()  # the parts that each rank has, if a context has gathered them
    look_ahead: int | None = None  # default number of batches whose missing rows a loader fetches together
    placed: Any = None  # hoploom.gpu.placed_store.PlacedStore, which a GPU's kernels read

    @property
    def makes_batches(self) -> bool:
        """Whether servers make the batches, so that this process needs no graph."""
        return False

    def producer(self, maker: Any, device: torch.device | None, look_ahead: int | None, deadline: float) -> Any:
        """Return the hoploom.load.maker.Maker that replaces `maker`; None if this process makes the batches."""
        return None

    def serve(self, maker: Any, share: Any, options: Hashable, reserve: Callable[[int], None]) -> Any:
        """Return a batch in host memory, for a client of this server. `maker` is a hoploom.load.maker.LocalMaker.

        Makers with equal `options` differ in their seeds only. A GPU calls `reserve` with the bytes of the batch.
        """
        return maker.make(share)

    def traffic(self) -> dict[str, float]:
        """Return the counts of requests to other processes so far."""
        return {}

    def close(self) -> None:
        """Close connections and free shared memory."""


NOWHERE = Deployment()


class InMemory:
    """Base of shards in this process, all of whose rows are in memory or mapped: nothing is cached or missing."""

    tier: ClassVar[Tier] = Tier.MEMORY

    def in_memory(self, owner: TypeKey, name: str) -> bool:
        return True

    def look_up(self, owner: TypeKey, ids: Tensor, positions: Tensor) -> RowLookup:
        return RowLookup(owner, ids, (positions,), (), positions[:0])


# --- arrays in this process, in memory or mapped ---------------------------------------------


def in_degrees_of(lists: EdgeLists, nodes: Tensor) -> Tensor:
    """Return the number of in-edges of each node in the edge lists `lists`, including self-loops: [n] int64."""
    begins, ends = (ops.empty((nodes.numel(),), torch.int64) for _ in range(2))
    for pointers, out in ((lists.indptr[:-1], begins), (lists.indptr[1:], ends)):
        ops.gather(pointers, nodes, out, lists.first_node)
    return ends - begins


@dataclass(frozen=True)
class Table:
    """The rows of one field for a contiguous range of ids."""

    rows: Tensor  # [n, ...]
    first: int = 0  # the id of the first row
    by_edge_id: bool = False  # rows are in the user's own edge order, not in CSC order
    raw: Tensor = field(init=False, repr=False, compare=False)  # [n, bytes per row] uint8, the same memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw", ops.byte_rows(self.rows))

    def gather_at(self, positions: Tensor | None, ids: Tensor, out: Tensor) -> None:
        """Write the rows of ids[positions] to out[positions]; the rows of all ids if `positions` is None."""
        ops.gather(self.raw, ids, out, self.first, positions)


@dataclass(frozen=True)
class Part(InMemory):
    """A shard in this process: a contiguous range of nodes of every type, with their in-edges, fields and splits."""

    schema: Schema
    first_nodes: tuple[int, ...]  # per node type
    num_nodes: tuple[int, ...]  # per node type
    lists: tuple[EdgeLists, ...]  # per relation
    tables: Mapping[tuple[TypeKey, str], Table]
    splits: Mapping[tuple[str, str], Tensor]  # (node type, split) -> [n] int64 node ids

    def require_whole(self) -> None:
        """Raise StoreError if a file of this part can no longer be read."""
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
        """Write the rows of each request wanted[i] to outs[i]."""
        self._gather_at(wanted, [None] * len(wanted), outs)

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        return partial(self.sample, frontiers, draw)

    def begin_gather(
        self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        return partial(self._gather_at, wanted, positions, outs)

    def split(self, node_type: str, name: str) -> Tensor:
        return self.splits.get((node_type, name), NO_IDS)

    def _gather_at(self, wanted: Sequence[Wanted], positions: Sequence[Tensor | None], outs: Sequence[Tensor]) -> None:
        edge_ids: dict[tuple[TypeKey, int, int], Tensor] = {}  # read once, for all fields in the user's edge order
        for are_edge_ids in (True, False):  # edge ids first: the other fields need them
            for (owner, name, ids), own, out in zip(wanted, positions, outs, strict=True):
                if (name == EDGE_ID) is not are_edge_ids or (own is not None and own.numel() == 0):
                    continue
                table = self.tables[owner, name]
                if are_edge_ids:
                    edge_ids[owner, id(ids), id(own)] = out
                elif table.by_edge_id:
                    key = owner, id(ids), id(own)
                    if key not in edge_ids:
                        edge_ids[key] = ops.empty((ids.numel(),), torch.int64)
                        self.tables[owner, EDGE_ID].gather_at(own, ids, edge_ids[key])
                    ids = edge_ids[key]
                table.gather_at(own, ids, out)


@dataclass(frozen=True)
class Absent(InMemory):
    """A stand-in for a part that was not opened, in a list of all parts. Requests for its nodes raise StoreError."""

    schema: Schema
    number: int
    opened: tuple[int, ...]  # the parts that are open

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        for index, relation in enumerate(self.schema.relations):
            frontier = frontiers[self.schema.destinations[index]]
            if frontier is not None and draw.fanouts[index] != 0:
                self._raise(f"reading the in-edges of node {int(frontier.nodes[0])} of {relation.destination!r}")
        return lambda: [None] * len(self.schema.relations)

    def begin_gather(
        self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        for (owner, name, ids), own in zip(wanted, positions, strict=True):
            if own.numel():
                what = "node" if isinstance(owner, str) else "edge"
                self._raise(f"reading {name!r} of {what} {int(ids[own[0]])} of {owner!r}")
        return lambda: None

    def split(self, node_type: str, name: str) -> Tensor:
        return NO_IDS

    def _raise(self, what: str) -> Never:
        opened = self.opened
        which = f"part {opened[0]} is" if len(opened) == 1 else f"parts {', '.join(map(str, opened))} are"
        way_out = f"open part {self.number} too, or all parts"
        raise StoreError(f"{what} needs part {self.number}, but only {which} open; {way_out}")


def range_of(part: Part) -> PartRange:
    """Return the id ranges and split sizes of a part, for store.json."""
    splits: dict[str, dict[str, int]] = {t.name: {} for t in part.schema.node_types}
    for (node_type, split), ids in part.splits.items():
        splits[node_type][split] = ids.numel()
    first_edges = tuple(lists.first_edge for lists in part.lists)
    num_edges = tuple(lists.num_edges for lists in part.lists)
    return PartRange(part.first_nodes, part.num_nodes, first_edges, num_edges, splits)


# --- all edges or rows, some at a time --------------------------------------------------------

EDGES = 1 << 20  # edges of one piece
NODES = 1 << 12  # nodes whose edges are sampled together
ROW_BYTES = 4 << 20  # of one piece of rows


def covers(schema: Schema, parts: Sequence[Part], node_type: str | None = None) -> bool:
    """Return whether these parts have every node of `node_type`, or of all types if it is None."""
    return all(
        sum(part.num_nodes[index] for part in parts) == of_type.num_nodes
        for index, of_type in enumerate(schema.node_types)
        if node_type in (None, of_type.name)
    )


def destinations(indptr: Tensor, first_node: int, begin: int, end: int) -> Tensor:
    """Return the destinations of edges [begin, end) as int64; `indptr` has the list offsets from `first_node` on."""
    low = int(torch.searchsorted(indptr, begin, right=True)) - 1
    high = int(torch.searchsorted(indptr, end))
    counts = indptr[low : high + 1].clamp(begin, end).diff()
    return torch.repeat_interleave(torch.arange(first_node + low, first_node + high), counts)


def scan_edges(lists: EdgeLists, key: RelationName | str, at_once: int = EDGES) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sources and destinations of `lists`, `at_once` edges at a time; raise StoreError if a read has failed."""
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
    """Yield sources and destinations of all edges of a relation, remote ones included, by sampling all in-edges."""
    num_nodes = graph.schema.node_types[graph.schema.destinations[relation]].num_nodes
    for first in range(0, num_nodes, at_once):
        nodes = torch.arange(first, min(first + at_once, num_nodes))
        picks = in_edges(graph, relation, nodes)
        yield picks.sources, torch.repeat_interleave(nodes, picks.counts)


def in_edges(
    graph: GraphStore, relation: int, nodes: Tensor, times: Tensor | None = None, *, counts_only: bool = False
) -> Picks:
    """Return all in-edges of nodes in a relation as picks, or their counts; with `times`, none later than times[i]."""
    schema = graph.schema
    frontiers: list[Frontier | None] = [None] * len(schema.node_types)
    frontiers[schema.destinations[relation]] = Frontier(nodes, times=times)
    fanouts = [-1 if other == relation else 0 for other in range(len(schema.relations))]
    picks = graph.sample(frontiers, Draw(0, 0, fanouts, counts_only=counts_only))[relation]
    if picks is None:  # no part has any of them
        return Picks(torch.zeros_like(nodes), nodes[:0], nodes[:0])
    return picks


def scan_rows(
    features: FeatureStore, owner: TypeKey, name: str, count: int, at_once: int | None = None, begin: int = 0
) -> Iterator[Tensor]:
    """Yield the rows of a field from `begin` to `count` in order, `at_once` at a time, also from remote shards."""
    step = at_once or max(1, ROW_BYTES // max(1, features.schema.described(owner).fields[name].row_bytes))
    for first in range(begin, max(begin + 1, count), step):
        end = min(first + step, count)
        for shard in getattr(features, "shards", (features,)):
            table = shard.tables.get((owner, name)) if isinstance(shard, Part) else None
            if table is not None:  # mapped: the kernel starts to read
                ops.read_soon(table.rows[max(0, first - table.first) : max(0, end - table.first)])
        yield features.gather([Wanted(owner, name, torch.arange(first, end))])[0]


class Loops(NamedTuple):
    """The nodes that have self-loops in a relation, ascending, and the number of self-loops of each."""

    nodes: Tensor  # [n] int64
    counts: Tensor  # [n] int64


def loops_of(parts: Sequence[Part], key: RelationName) -> Loops:
    """Return the self-loops of relation `key` in these parts. Reads all edges if both ends have the same node type."""
    found = [torch.empty(0, dtype=torch.int64)]
    for part in parts if key[0] == key[2] else ():
        for sources, ends in scan_edges(part.lists[part.schema.relation_index[key]], key):
            found.append(ends[sources == ends])
    return Loops(*torch.unique(torch.cat(found), return_counts=True))
