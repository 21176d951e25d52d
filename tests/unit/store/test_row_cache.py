"""A cache holds the rows that are asked for most, costs no more than it was given, and changes no batch."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.graphs import ring
from support.shards import elsewhere_of, spread
from torch import Tensor

import hoploom
from hoploom import ConfigError, Store
from hoploom.load.presample import Presampling, count_visits
from hoploom.store import Wanted, row_cache
from hoploom.store.base import Deployment
from hoploom.store.row_cache import Cached, Visits, cached, report

pytestmark = pytest.mark.usefixtures("one_thread")


def _ring(num_nodes: int = 40) -> Store:
    """Four parts of ten, the first here; node v's row is v."""
    return spread(hoploom.from_pyg(ring(num_nodes)), 4, here=[0])


def _x(store: Store, ids: list[int]) -> Tensor:
    return store.features.gather([Wanted("node", "x", torch.tensor(ids))])[0]


def _asked(store: Store) -> list[int]:
    """The ids of rows that went over the wire, ascending, and forgotten."""
    shards = [s.shard if isinstance(s, Cached) else s for s in store.shards]
    found = sorted(one for shard in shards if hasattr(shard, "rows_of") for one in shard.rows_of("node", "x"))
    for shard in shards:
        if hasattr(shard, "gathers"):
            shard.gathers.clear()
    return found


def test_the_rows_asked_for_most_are_held_each_fetched_once() -> None:
    counts = torch.arange(40).flip(0)  # of the remote nodes, 10 is the hottest
    store = _ring()
    held = cached(store, 0.2, {"node": counts})
    assert _asked(held) == [10, 11, 12, 13, 14, 15]  # a fifth of thirty
    assert _x(held, [15, 3, 16, 39, 15, 10])[:, 0].tolist() == [15.0, 3.0, 16.0, 39.0, 15.0, 10.0]
    assert _asked(held) == [16, 39]
    found = report(held)
    assert found is not None
    assert (found.num_rows, found.hits, found.misses, found.hit_rate) == (6, 3, 2, 0.6)
    assert str(found).startswith("6 rows held in ")
    assert report(store) is None


def test_of_equal_counts_the_lowest_ids_are_held() -> None:
    counts = torch.zeros(40, dtype=torch.int64)
    counts[[12, 25, 33, 38]] = 7
    counts[[11, 39]] = 1 << 60  # any number is taken
    assert _asked(cached(_ring(), 4 / 30, {"node": counts})) == [11, 12, 25, 39]
    assert _asked(cached(_ring(), 0.1, {})) == [10, 11, 12]


@pytest.mark.parametrize(("size", "rows"), [("20%", 6), (0.2, 6), ("1kB", None), (1000, None), (0, 0), ("100%", 30)])
def test_sizes_are_shares_or_bytes(size: Any, rows: int | None) -> None:
    held = cached(_ring(), size, {})
    found, row_bytes = report(held), sum(f.row_bytes for f in held.schema.node_types[0].fields.values())
    assert found is not None
    assert found.num_rows == (1000 // (row_bytes + 24) if rows is None else rows)
    if rows is None:
        assert found.num_bytes <= 1000


@pytest.mark.parametrize("size", ["120%", 1.5, -1, "20 %%", "many", True, None, -0.1, float("nan"), "-3%"])
def test_sizes_that_mean_nothing_are_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="the cache's size"):
        cached(_ring(), size, {})


def test_counts_that_do_not_fit_are_refused() -> None:
    for counts in (torch.zeros(39, dtype=torch.int64), torch.zeros(40), torch.full((40,), -1)):
        with pytest.raises(ConfigError, match="give 40 int64"):
            cached(_ring(), 0.2, {"node": counts})
    with pytest.raises(ConfigError, match="unknown node type"):
        cached(_ring(), 0.2, {"paper": torch.zeros(40, dtype=torch.int64)})


def test_types_share_the_bytes_by_how_often_their_rows_are_asked_for(library_store: Store) -> None:
    store = spread(library_store, 3, here=[])
    counts = {t.name: torch.full((t.num_nodes,), n) for t, n in zip(store.schema.node_types, (1, 3, 2), strict=True)}
    held = cached(store, 10 * (_row_bytes(store, "paper") + 24), counts)
    (shard, *_) = held.shards
    assert isinstance(shard, Cached)
    assert {name: ids.ids.tolist() for name, ids in shard.cache.ids.items()} == {"paper": list(range(10))}


def _row_bytes(store: Store, name: str) -> int:
    return sum(of_field.row_bytes for of_field in store.schema.node_type(name).fields.values())


def test_a_cache_is_filled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _ring()
    monkeypatch.setattr(row_cache, "BYTES_AT_ONCE", 4 * _row_bytes(store, "node"))
    held = cached(store, 1.0, {})
    sizes = [len(asked["node", "x"]) for shard in elsewhere_of(store) for asked in shard.gathers]
    assert max(sizes) == 4
    assert sum(sizes) == 30
    assert _x(held, list(range(40)))[:, 0].tolist() == list(range(40))


def test_rows_of_edges_pass_by_the_cache(ring_store: Store) -> None:
    held = cached(spread(ring_store, 3, here=[]), 1.0, {})
    key, edges = ring_store.schema.relations[0].key, torch.arange(24)
    ours, theirs = (s.features.gather([Wanted(key, "edge_attr", edges)])[0] for s in (held, ring_store))
    assert torch.equal(ours, theirs)
    found = report(held)
    assert found is not None
    assert found.hits + found.misses == 0


def test_hits_and_misses_are_counted_over_all_threads() -> None:
    held = cached(_ring(), 0.5, {})  # 10 to 24
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda _: _x(held, [5, 12, 30, 24]), range(200)))
    assert all(of_call[:, 0].tolist() == [5.0, 12.0, 30.0, 24.0] for of_call in rows)
    found = report(held)
    assert found is not None
    assert (found.hits, found.misses) == (400, 200)


def test_with_look_ahead_rows_are_held_that_the_window_loses() -> None:
    counts = torch.zeros(40, dtype=torch.int64)
    counts[10], counts[20:] = 64, 1  # of 64 batches
    visits = Visits(node=counts)
    visits.num_batches = 64
    store = replace(_ring(), deployment=Deployment(look_ahead=4))
    assert _asked(cached(store, 0.5, visits)) == list(range(20, 35))
    assert _asked(cached(_ring(), 0.5, visits)) == [10, *range(20, 34)]


def test_presampling_counts_the_batches_of_one_rank() -> None:
    seeds, options = torch.arange(40), {"batch_size": 5, "shuffle": True, "seed": 3, "world_size": 2}
    for rank in range(2):
        visits = count_visits(_ring(), [2], seeds, Presampling(batch_size=5, seed=3, rank=rank, world_size=2))
        expected = torch.zeros(40, dtype=torch.int64)
        for batch in hoploom.NeighborLoader(_ring(), [2], seeds, rank=rank, **options):
            expected[batch.n_id] += 1
        assert torch.equal(visits["node"], expected)
        assert visits.num_batches == 4


def test_a_store_that_is_all_here_needs_no_cache(ring_store: Store) -> None:
    assert cached(ring_store, "20%", {}) is ring_store
