"""A cache of the remote rows that batches need most, filled once and then only read: no lock, but it does not learn.

The rows are chosen by how often batches had them (hoploom.load.presample counts by sampling), not by degree. Rows of
nodes alone: an edge is rarely in two batches.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from hoploom.config.values import as_bytes, as_count, as_share, parse_share_or_bytes
from hoploom.errors import ConfigError
from hoploom.ops import IdMap, IdRanks
from hoploom.schema import DTYPES, NodeType, Owner
from hoploom.store.base import CachedPositions, RowLookup, Tier, Wanted
from hoploom.store.sharded import Finish, Sharded, ShardWrapper
from hoploom.store.store import Store


@dataclass(frozen=True)
class CachedRows:
    """Rows of one node type or relation, by id."""

    ids: IdMap | IdRanks
    tables: Mapping[str, Tensor]  # field -> [len(ids), ...], in the order of the ids

    @property
    def num_bytes(self) -> int:
        return self.ids.num_bytes + sum(table.nbytes for table in self.tables.values())


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
class Cached(ShardWrapper):
    """A shard of which some rows are cached here: those are copied while the others are fetched."""

    cached: Mapping[Owner, CachedRows]
    tally: Tally = field(default_factory=Tally)

    def look_up(self, owner: Owner, ids: Tensor, positions: Tensor) -> RowLookup:
        if owner not in self.cached:
            return self.shard.look_up(owner, ids, positions)
        hits, misses = self._find(owner, ids, positions)
        found = self.shard.look_up(owner, ids, misses)
        return found._replace(cached=(hits, *found.cached))

    def begin_gather(
        self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Finish[None]:
        looked_up: dict[tuple[Owner, int, int], tuple[CachedPositions, Tensor]] = {}
        copies: list[Finish[None]] = []
        rest = list(positions)
        for index, ((owner, name, ids), own, out) in enumerate(zip(wanted, positions, outs, strict=True)):
            if owner not in self.cached or name not in self.cached[owner].tables or own.numel() == 0:
                continue
            key = owner, id(ids), id(own)
            if key not in looked_up:
                looked_up[key] = self._find(owner, ids, own)
            hits, rest[index] = looked_up[key]
            copies.append(partial(hits.copy, name, out))
        return self._copy_and_gather(copies, wanted, rest, outs)

    def _find(self, owner: Owner, ids: Tensor, positions: Tensor) -> tuple[CachedPositions, Tensor]:
        """Return the cached positions and the others, and count both."""
        rows = self.cached[owner]
        slots, hits, misses = rows.ids.find(ids, positions)
        self.tally.add(hits.numel(), misses.numel())
        return CachedPositions(rows.tables, slots, hits), misses


# --- the rows that are needed most --------------------------------------------------------

BYTES_AT_ONCE = 64 << 20  # that are fetched together
BYTES_PER_ID = 24  # of the map from ids to rows, at most
LEVELS = 1 << 20  # counts that are distinguished
# What a row costs that is fetched, and one that is looked up: measured over loopback, and no network is faster.
SECONDS_PER_FETCH, SECONDS_PER_BYTE, SECONDS_PER_LOOK_UP = 1e-7, 1e-9, 6e-9
MANY = 4  # batches that are taken to be fetched for together where a budget decides
WAY_OUT = "give a share of the remote rows such as 0.2 or '20%', or bytes such as '4GB'"


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds, and how often that was enough."""

    num_rows: int
    num_bytes: int
    hits: int  # rows that batches needed and that were held
    misses: int  # those that were not

    @property
    def hit_rate(self) -> float:
        """The share of remote rows that were held; 0 before any was needed."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        held = f"{as_count(self.num_rows)} rows held in {as_bytes(self.num_bytes)}"
        return f"{held}; {as_share(self.hit_rate)} of {as_count(self.hits + self.misses)} found"


class Visits(dict[str, Tensor]):
    """How many batches need each node, by node type: [num_nodes] int64; and of how many batches that is known."""

    num_batches = 0


def cached(
    store: Store, size: float | str, counts: Mapping[str, Tensor], *, bytes_at_once: int = BYTES_AT_ONCE
) -> Store:
    """The store with the remote rows held that are needed most.

    `size` is a share of the remote rows (0.2 or "20%") or bytes ("4GB", or an int); `counts` say how often each node
    was asked for, by type. Batches stay the same. A store without remote rows is returned as it is.
    The rows are fetched at most `bytes_at_once` at a time. Counts of `count_visits` also tell what the cache spares a
    batch: where that is less than it costs, a warning says so, and the store is returned as it is. With look-ahead,
    rows that almost every batch needs are in memory anyway, and others are held.

    >>> counts = count_visits(store, [15, 10, 5], "train")
    >>> store = cached(store, "20%", counts)
    >>> print(report(store))
    """
    remote, features = _remote(store), store.features
    budget = read_size(size)
    if isinstance(budget, float):
        budget = round(budget * sum((end - first) * of.row_bytes for of in remote for first, end in of.spans))
    _check_counts(store, counts)
    if not remote or not isinstance(features, Sharded):
        return store
    has_window = store.budget is not None and store.budget.window > 0  # for as many batches as fit
    spared = _spared(counts, store.deployment.look_ahead or (MANY if has_window else 1))
    ranks = torch.arange(LEVELS) if spared is None else spared.argsort(stable=True).argsort()
    chosen = _choose(remote, budget, counts, ranks)
    if spared is not None and (why := _does_not_pay(remote, chosen, counts, spared)):
        warnings.warn(f"the cache of {size} stays off: {why}", stacklevel=2)
        return store
    held: dict[Owner, CachedRows] = {name: _fill(features, name, ids, bytes_at_once) for name, ids in chosen.items()}
    tally = Tally()
    shards = tuple(Cached(shard, held, tally) if shard.tier is Tier.REMOTE else shard for shard in features.shards)
    return replace(store, features=features.over(shards), shards=shards)


def report(store: Store) -> CacheReport | None:
    """What the cache of a store holds and how often that was enough; None where it has none."""
    for shard in store.shards:
        if isinstance(shard, Cached):
            rows = shard.cached.values()
            num_bytes = sum(of_type.num_bytes for of_type in rows)
            return CacheReport(sum(len(r.ids) for r in rows), num_bytes, shard.tally.hits, shard.tally.misses)
    return None


@dataclass(frozen=True)
class Remote:
    """The remote nodes of a type."""

    name: str
    row_bytes: int  # of all fields, and of finding the row
    spans: tuple[tuple[int, int], ...]  # first and end


def _remote(store: Store) -> list[Remote]:
    found = []
    away = [held for held, shard in zip(store.ranges, store.shards, strict=False) if shard.tier is Tier.REMOTE]
    for index, node_type in enumerate(store.schema.node_types):
        spans = tuple((h.first_nodes[index], h.first_nodes[index] + h.num_nodes[index]) for h in away)
        row_bytes = _row_bytes(node_type)
        if row_bytes and spans:
            found.append(Remote(node_type.name, row_bytes + BYTES_PER_ID, spans))
    return found


def _row_bytes(node_type: NodeType) -> int:
    return sum(of_field.row_bytes for of_field in node_type.fields.values())


def read_size(size: float | str) -> float | int:
    """A cache's size: a share as a float, bytes as an int; ConfigError for what is neither."""
    return parse_share_or_bytes("the cache's size", size, WAY_OUT)


def _check_counts(store: Store, counts: Mapping[str, Tensor]) -> None:
    for name, of_type in counts.items():
        num_nodes = store.schema.node_type(name).num_nodes
        if of_type.shape != (num_nodes,) or of_type.dtype != torch.int64 or bool((of_type < 0).any()):
            raise ConfigError(
                f"the counts of {name!r} are {of_type.dtype} {tuple(of_type.shape)}; give {num_nodes} int64 >= 0"
            )


def _spared(counts: Mapping[str, Tensor], look_ahead: int) -> Tensor | None:
    """The rows that a held row spares a batch to fetch, by the batches that needed it; None where these are not known.

    Look-ahead fetches for a group of batches, and keeps what the group before it has needed.
    """
    num_batches = getattr(counts, "num_batches", 0)
    if not num_batches:
        return None
    needed = torch.arange(num_batches + 1, dtype=torch.float64) / num_batches
    if look_ahead == 1:
        return needed
    by_group = 1 - (1 - needed) ** look_ahead
    return by_group * (1 - by_group) / look_ahead


def _does_not_pay(
    remote: Sequence[Remote], chosen: Mapping[str, Tensor], counts: Mapping[str, Tensor], spared: Tensor
) -> str:
    """Why a cache would cost more than it spares; nothing where it would not."""
    most = len(spared) - 1
    num_needed = num_spared = num_fetched = saved = 0.0
    for of_type in remote:
        for _, levels in _levels(of_type, counts, most):
            num_needed += float(levels.sum()) / most
            num_fetched += float(spared[levels].sum())
        if of_type.name in chosen and of_type.name in counts:
            own = float(spared[counts[of_type.name][chosen[of_type.name]].clamp(max=most)].sum())
            num_spared += own
            saved += own * (SECONDS_PER_FETCH + (of_type.row_bytes - BYTES_PER_ID) * SECONDS_PER_BYTE)
    if saved > num_needed * SECONDS_PER_LOOK_UP:
        return ""
    num_rows = sum(end - first for of_type in remote for first, end in of_type.spans)
    return (
        f"a batch needs {as_count(round(num_needed))} of {as_count(num_rows)} remote rows, and of the "
        f"{as_count(round(num_fetched))} that it has to fetch, the cache would hold {as_count(round(num_spared))}; to "
        "look all of them up takes longer than that; leave the cache out, or use smaller batches or fanouts"
    )


def _choose(remote: Sequence[Remote], budget: int, counts: Mapping[str, Tensor], ranks: Tensor) -> dict[str, Tensor]:
    """Per node type the ids to hold, ascending: the highest counts first as `ranks` orders them, and of equal ones the
    lowest ids."""
    num_levels = len(ranks)
    costs = torch.zeros(num_levels, dtype=torch.int64)  # bytes, by rank
    for of_type in remote:
        for _, levels in _levels(of_type, counts, num_levels - 1):
            costs += torch.bincount(ranks[levels], minlength=num_levels) * of_type.row_bytes
    above = costs.sum() - costs.cumsum(0)  # bytes of all rows of higher ranks
    last = int((above <= budget).nonzero()[0])  # the lowest rank of which some rows fit
    left = budget - int(above[last])
    chosen = {}
    for of_type in remote:
        pieces = []
        for first, levels in _levels(of_type, counts, num_levels - 1):
            ranked = ranks[levels]
            partly = (ranked == last).nonzero().view(-1)[: left // of_type.row_bytes]
            left -= partly.numel() * of_type.row_bytes
            all_fit = (ranked > last).nonzero().view(-1)
            pieces.append(torch.cat([all_fit, partly]).sort().values + first)
        chosen[of_type.name] = torch.cat(pieces)
    return {name: ids for name, ids in chosen.items() if ids.numel()}


def _levels(of_type: Remote, counts: Mapping[str, Tensor], most: int) -> Iterator[tuple[int, Tensor]]:
    """How often the nodes of each span were needed; very high counts are taken as one."""
    for first, end in of_type.spans:
        of_span = counts[of_type.name][first:end] if of_type.name in counts else torch.zeros(end - first).long()
        yield first, of_span.clamp(max=most)


def _fill(features: Sharded, name: str, ids: Tensor, num_bytes: int) -> CachedRows:
    """Fetch rows, at most so many bytes at a time."""
    of_type = features.schema.node_type(name)
    fields = of_type.fields.items()
    tables = {field: torch.empty((ids.numel(), *kind.shape), dtype=DTYPES[kind.dtype]) for field, kind in fields}
    at_once = max(1, num_bytes // _row_bytes(of_type))
    for begin in range(0, ids.numel(), at_once):
        some = ids[begin : begin + at_once]
        wanted = [Wanted(name, field, some) for field in tables]
        features.gather_at(wanted, [None] * len(wanted), [rows[begin : begin + at_once] for rows in tables.values()])
    return CachedRows(_numbered(ids), tables)


def _numbered(ids: Tensor) -> IdMap | IdRanks:
    """Ascending ids to numbers, within the bytes that are reckoned with."""
    if IdRanks.bytes_of(ids) <= ids.numel() * BYTES_PER_ID:
        return IdRanks(ids)
    numbered = IdMap(ids.numel())
    numbered.add(ids)
    return numbered
