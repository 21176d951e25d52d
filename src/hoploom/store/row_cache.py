"""A cache of the remote rows that batches need most. It is filled once and then only read.

Rows are chosen by the number of batches that need them, not by degree; hoploom.load.presample samples batches to count
this number. Only rows of nodes are cached: an edge is rarely in two batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from hoploom.config.values import as_bytes, as_count, as_share, parse_share_or_bytes
from hoploom.errors import ConfigError
from hoploom.ops import IdMap, IdRanks
from hoploom.schema import DTYPES, TypeKey
from hoploom.store.base import CachedPositions, RowLookup, Tier, Wanted
from hoploom.store.sharded import Finish, Sharded, ShardWrapper
from hoploom.store.store import Store

BYTES_AT_ONCE = 64 << 20  # of the rows of one fetch, when the cache is filled
BYTES_PER_ID = 24  # at most, of the map from ids to rows
LEVELS = 1 << 20  # distinct counts; larger ones are capped
USUAL_GROUP = 4  # assumed number of batches per fetch of look-ahead, if the memory budget decides it later
WAY_OUT = "give a share of the remote rows such as 0.2 or '20%', or bytes such as '4GB'"


@dataclass(frozen=True)
class CacheReport:
    """The size of a cache, and its hits and misses so far."""

    num_rows: int
    num_bytes: int
    hits: int  # remote rows that batches needed and the cache had
    misses: int

    @property
    def hit_rate(self) -> float:
        """The share of remote rows that were cached; 0 before any was needed."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        held = f"{as_count(self.num_rows)} rows held in {as_bytes(self.num_bytes)}"
        return f"{held}; {as_share(self.hit_rate)} of {as_count(self.hits + self.misses)} found"


class RowCache:
    """Cached rows of nodes by id, and the hits and misses of all threads."""

    def __init__(self, ids: Mapping[TypeKey, IdMap | IdRanks], tables: Mapping[TypeKey, Mapping[str, Tensor]]) -> None:
        self.ids, self.tables = ids, tables  # table rows are in the order of the ids
        self._hits = self._misses = 0
        self._lock = Lock()

    def find(self, owner: TypeKey, ids: Tensor, positions: Tensor) -> tuple[CachedPositions, Tensor]:
        """Return the cache hits among ids[positions], and the positions of the misses."""
        rows, hits, misses = self.ids[owner].find(ids, positions)
        with self._lock:
            self._hits += hits.numel()
            self._misses += misses.numel()
        return CachedPositions(self.tables[owner], rows, hits), misses

    def report(self) -> CacheReport:
        """Return the size of the cache, and its hits and misses so far."""
        num_bytes = sum(ids.num_bytes for ids in self.ids.values())
        num_bytes += sum(rows.nbytes for tables in self.tables.values() for rows in tables.values())
        return CacheReport(sum(map(len, self.ids.values())), num_bytes, self._hits, self._misses)


@dataclass(frozen=True)
class Cached(ShardWrapper):
    """A shard with a cache of its rows: cached rows are copied while the others are fetched."""

    cache: RowCache

    def look_up(self, owner: TypeKey, ids: Tensor, positions: Tensor) -> RowLookup:
        if owner not in self.cache.ids:
            return self.shard.look_up(owner, ids, positions)
        hits, misses = self.cache.find(owner, ids, positions)
        found = self.shard.look_up(owner, ids, misses)
        return found._replace(cached=(hits, *found.cached))

    def begin_gather(
        self, wanted: Sequence[Wanted], positions: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Finish[None]:
        looked_up: dict[tuple[TypeKey, int, int], tuple[CachedPositions, Tensor]] = {}
        copies: list[Finish[None]] = []
        rest = list(positions)
        for index, ((owner, name, ids), own, out) in enumerate(zip(wanted, positions, outs, strict=True)):
            if name not in self.cache.tables.get(owner, ()) or own.numel() == 0:
                continue
            key = owner, id(ids), id(own)
            if key not in looked_up:
                looked_up[key] = self.cache.find(owner, ids, own)
            hits, rest[index] = looked_up[key]
            copies.append(partial(hits.copy, name, out))
        return self._copy_and_gather(copies, wanted, rest, outs)


class Visits(dict[str, Tensor]):
    """The number of counted batches that need each node, by node type: [num_nodes] int64."""

    num_batches = 0  # counted


def cached(store: Store, size: float | str, counts: Mapping[str, Tensor]) -> Store:
    """Return the store with a cache of the remote rows that are needed most.

    `size` is a share of the remote rows (0.2 or "20%") or bytes ("4GB", or an int); `counts` has, by node type, the
    number of batches that need each node: [num_nodes] int64. Batches stay the same. A store without remote rows is
    returned unchanged. With counts from `count_visits`, rows that look-ahead would keep anyway are cached last.

    >>> counts = count_visits(store, [15, 10, 5], "train")
    >>> store = cached(store, "20%", counts)
    >>> print(report(store))
    """
    remote, features = _remote_types(store, counts), store.features
    if remote and store.placed is not None:
        raise ConfigError("the store is placed already; make the cache first, then place the store with its rows")
    budget = read_size(size)
    if isinstance(budget, float):
        budget = round(budget * sum(of.num_rows * of.row_bytes for of in remote))
    if not remote or not isinstance(features, Sharded):
        return store
    has_window = store.budget is not None and store.budget.window > 0
    spared = _spared(counts, store.deployment.look_ahead or (USUAL_GROUP if has_window else 1))
    ranks = torch.arange(LEVELS) if spared is None else spared.argsort(stable=True).argsort()
    chosen = _choose(remote, budget, ranks)
    numbered: dict[TypeKey, IdMap | IdRanks] = {name: _numbered(ids) for name, ids in chosen.items()}
    cache = RowCache(numbered, {name: _fetch(features, name, ids) for name, ids in chosen.items()})
    shards = tuple(Cached(shard, cache) if shard.tier is Tier.REMOTE else shard for shard in features.shards)
    return replace(store, features=features.over(shards), shards=shards)


def report(store: Store) -> CacheReport | None:
    """Return the size, hits and misses of a store's cache; None if it has none."""
    cache = cache_of(store)
    return None if cache is None else cache.report()


def cache_of(store: Store) -> RowCache | None:
    return next((shard.cache for shard in store.shards if isinstance(shard, Cached)), None)


def read_size(size: float | str) -> float | int:
    """Return a cache's size: a share as a float, bytes as an int; raise ConfigError otherwise."""
    return parse_share_or_bytes("the cache's size", size, WAY_OUT)


# --- the rows that are needed most ----------------------------------------------------------


@dataclass(frozen=True)
class RemoteType:
    """The remote nodes of one type."""

    name: str
    row_bytes: int  # of all fields, and of the entry in the id map
    spans: tuple[tuple[int, int], ...]  # ranges of ids: (first, end)
    counts: Tensor | None  # [num_nodes] int64: visits; None: no batch needs any

    @property
    def num_rows(self) -> int:
        return sum(end - first for first, end in self.spans)

    def levels(self, most: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each range of remote ids: its first id, and each node's visits, limited to `most`: [n] int64."""
        for first, end in self.spans:
            counts = torch.zeros(end - first).long() if self.counts is None else self.counts[first:end]
            yield first, counts.clamp(max=most)


def _remote_types(store: Store, counts: Mapping[str, Tensor]) -> list[RemoteType]:
    for name, of_type in counts.items():
        num_nodes = store.schema.node_type(name).num_nodes
        if of_type.shape != (num_nodes,) or of_type.dtype != torch.int64 or bool((of_type < 0).any()):
            raise ConfigError(
                f"the counts of {name!r} are {of_type.dtype} {tuple(of_type.shape)}; give {num_nodes} int64 >= 0"
            )
    found = []
    remote = [part for part, shard in zip(store.ranges, store.shards, strict=False) if shard.tier is Tier.REMOTE]
    for index, node_type in enumerate(store.schema.node_types):
        spans = tuple((p.first_nodes[index], p.first_nodes[index] + p.num_nodes[index]) for p in remote)
        row_bytes = sum(of_field.row_bytes for of_field in node_type.fields.values())
        if row_bytes and spans:
            found.append(RemoteType(node_type.name, row_bytes + BYTES_PER_ID, spans, counts.get(node_type.name)))
    return found


def _spared(counts: Mapping[str, Tensor], look_ahead: int) -> Tensor | None:
    """Return a table [num_batches + 1]. Entry n: how many fetches a cached row saves per batch if n batches need it.

    Return None if `counts` has no number of batches. With look-ahead, caching saves less: a row is fetched at most once
    for a group of batches, and not at all if the previous group has fetched it.
    """
    num_batches = getattr(counts, "num_batches", 0)
    if not num_batches:
        return None
    needed = torch.arange(num_batches + 1, dtype=torch.float64) / num_batches
    if look_ahead == 1:
        return needed
    by_group = 1 - (1 - needed) ** look_ahead
    return by_group * (1 - by_group) / look_ahead


def _choose(remote: Sequence[RemoteType], budget: int, ranks: Tensor) -> dict[str, Tensor]:
    """Return, by node type, the ids to cache in `budget` bytes.

    A row with n visits has the priority ranks[n]; the highest come first, and at equal priority low ids.
    """
    num_levels = len(ranks)
    costs = torch.zeros(num_levels, dtype=torch.int64)  # bytes, by rank
    for of_type in remote:
        for _, levels in of_type.levels(num_levels - 1):
            costs += torch.bincount(ranks[levels], minlength=num_levels) * of_type.row_bytes
    above = costs.sum() - costs.cumsum(0)  # bytes of all rows of higher ranks
    last = int((above <= budget).nonzero()[0])  # the lowest rank of which some rows fit
    left = budget - int(above[last])
    chosen = {}
    for of_type in remote:
        pieces = []
        for first, levels in of_type.levels(num_levels - 1):
            ranked = ranks[levels]
            partly = (ranked == last).nonzero().view(-1)[: left // of_type.row_bytes]
            left -= partly.numel() * of_type.row_bytes
            all_fit = (ranked > last).nonzero().view(-1)
            pieces.append(torch.cat([all_fit, partly]).sort().values + first)
        chosen[of_type.name] = torch.cat(pieces)
    return {name: ids for name, ids in chosen.items() if ids.numel()}


def _fetch(features: Sharded, name: str, ids: Tensor) -> dict[str, Tensor]:
    """Return the rows of these nodes by field, fetched at most BYTES_AT_ONCE at a time."""
    fields = features.schema.node_type(name).fields
    tables = {field: torch.empty((ids.numel(), *of.shape), dtype=DTYPES[of.dtype]) for field, of in fields.items()}
    at_once = max(1, BYTES_AT_ONCE // sum(of.row_bytes for of in fields.values()))
    for begin in range(0, ids.numel(), at_once):
        some = ids[begin : begin + at_once]
        wanted = [Wanted(name, field, some) for field in tables]
        features.gather_at(wanted, [None] * len(wanted), [rows[begin : begin + at_once] for rows in tables.values()])
    return tables


def _numbered(ids: Tensor) -> IdMap | IdRanks:
    """Return a map from the ascending `ids` to 0, 1, 2 ..., with at most BYTES_PER_ID bytes of memory per id."""
    if IdRanks.bytes_of(ids) <= ids.numel() * BYTES_PER_ID:
        return IdRanks(ids)
    numbered = IdMap(ids.numel())
    numbered.add(ids)
    return numbered
