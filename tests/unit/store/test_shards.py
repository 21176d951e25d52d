"""Parts on other hosts: all are asked before the first answer is read, caches and parts change no batch."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import library, ring, save_in_parts
from support.refusals import assert_raises
from support.shards import elsewhere_of, spread
from support.stores import assert_same, fields_of
from torch import Tensor

import hoploom
from hoploom import ConfigError, NeighborLoader, Store, StoreError
from hoploom.load.presample import Presampling, count_visits
from hoploom.ops import Frontier, Reads
from hoploom.store import Draw, Sharded, Wanted, row_cache
from hoploom.store.base import Deployment
from hoploom.store.on_disk import DiskRows, OnDisk
from hoploom.store.row_cache import Cached, Visits, cached, report
from hoploom.store.store import topology_fits

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")


EVERY = Draw(1, 0, [-1])


@pytest.mark.parametrize("whole_topology", [False, True])
def test_hops_are_asked_for_where_the_topology_is_not_here(ring_store: Store, whole_topology: bool) -> None:
    away = spread(ring_store, 4, here=[1], whole_topology=whole_topology)
    assert len(list(NeighborLoader(away, [3, 2], batch_size=7))) == 2
    assert sum(len(shard.gathers) for shard in elsewhere_of(away)) > 0
    assert any(shard.samples for shard in elsewhere_of(away)) is not whole_topology


def test_all_shards_elsewhere_are_asked_before_one_is_awaited_and_those_here_work_meanwhile(ring_store: Store) -> None:
    store = spread(ring_store, 3, here=[1])
    here, log = store.shards[1], elsewhere_of(store)[0].log
    object.__setattr__(here, "_gather_at", lambda *asked: log.append("work here"))
    store.features.gather([Wanted("node", "x", torch.arange(12))])
    assert log == ["begin 0", "begin 2", "work here", "finish 2", "finish 0"]


def test_a_shard_of_which_nothing_is_wanted_is_not_asked(ring_store: Store) -> None:
    store = spread(ring_store, 3, here=[])
    first, second, third = elsewhere_of(store)
    store.features.gather([Wanted("node", name, torch.tensor([9, 1, 8])) for name in ("x", "y")])
    assert (len(first.gathers), len(second.gathers), len(third.gathers)) == (1, 0, 1)
    assert third.gathers[0] == {("node", "x"): [9, 8], ("node", "y"): [9, 8]}
    store.graph.sample([Frontier(torch.tensor([5]))], EVERY)
    assert (first.samples, second.samples, third.samples) == (0, 1, 0)
    assert [rows.shape for rows in store.features.gather([Wanted("node", "x", torch.empty(0, dtype=torch.int64))])]


def test_a_disk_is_read_while_peers_work(ring_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store = spread(ring_store, 2, here=[0])
    (away,) = elsewhere_of(store)
    x = DiskRows(None, 0, 4)  # type: ignore[arg-type]
    disk = OnDisk(store.parts[0], {("node", "x"): x}, {}, Reads())
    monkeypatch.setattr(OnDisk, "_gather", lambda *asked: away.log.append("disk"))
    Sharded(store.schema, [disk, away], store.ranges).gather([Wanted("node", "x", torch.arange(12))])
    assert away.log == ["begin 1", "disk", "finish 1"]


def test_an_error_of_one_shard_leaves_no_other_unread(ring_store: Store) -> None:
    store = spread(ring_store, 3, here=[0])
    _, last = elsewhere_of(store)
    last.error = StoreError("part 2 is lost")
    assert_raises(StoreError, "part 2 is lost", lambda: store.features.gather([Wanted("node", "x", torch.arange(12))]))
    assert last.log == ["begin 1", "begin 2", "finish 2", "finish 1"]


def test_a_split_is_put_together_from_all_shards(library_store: Store) -> None:
    away = spread(library_store, 4, here=[2])
    for node_type in library_store.schema.node_types:
        for name in node_type.splits:
            assert away.split(name, node_type.name).tolist() == library_store.split(name, node_type.name).tolist()


def test_a_store_tells_its_ranges_and_on_disk_its_identity(ring_store: Store, tmp_path: Path) -> None:
    saved = save_in_parts(ring_store, tmp_path / "ring", 3)
    assert [held.first_nodes for held in saved.ranges] == [(0,), (4,), (8,)]
    assert [held.num_edges for held in saved.ranges] == [(8,)] * 3
    assert [held.splits for held in ring_store.ranges] == [{"node": dict(ring_store.schema.node_types[0].splits)}]
    shutil.copytree(tmp_path / "ring", tmp_path / "copy")
    copy = hoploom.open(tmp_path / "copy", parts=[1])
    assert copy.ranges == saved.ranges
    assert copy.identity == saved.identity
    assert len(copy.identity) == 64
    assert save_in_parts(ring_store, tmp_path / "other", 2).identity != saved.identity
    assert ring_store.identity == ""


def _without_fields(folder: Path, part: int) -> None:
    for file in (folder / f"part-{part:05d}").rglob("*.npy"):
        if not file.name.startswith("csc."):
            file.unlink()


def test_with_the_topology_of_all_parts_sampling_is_whole_and_features_are_not(tmp_path: Path) -> None:
    whole = save_in_parts(hoploom.from_pyg(library(), weight_attr="weight"), tmp_path / "library", 3)
    for part in (0, 2):
        _without_fields(tmp_path / "library", part)
    store = hoploom.open(tmp_path / "library", parts=[1], topology="all")
    every = [-1] * len(whole.schema.relations)
    frontiers = [Frontier(torch.arange(t.num_nodes)) for t in whole.schema.node_types]
    for ours, theirs in zip(
        store.graph.sample(frontiers, Draw(1, 0, every)), whole.graph.sample(frontiers, Draw(1, 0, every)), strict=True
    ):
        assert all(map(torch.equal, ours, theirs))
    (paper,) = (i for i, t in enumerate(whole.schema.node_types) if t.name == "paper")
    first, count = store.ranges[1].first_nodes[paper], store.ranges[1].num_nodes[paper]
    assert store.features.gather([Wanted("paper", "x", torch.arange(first, first + count))])[0].shape[0] == count
    with pytest.raises(StoreError, match=r"reading 'x' of node .* needs part 2"):
        store.features.gather([Wanted("paper", "x", torch.tensor([first + count]))])
    assert len(store.parts) == 1
    assert len(store.topology) == 3


def test_topology_that_is_not_there_is_an_error_that_names_its_files(tmp_path: Path) -> None:
    save_in_parts(hoploom.from_pyg(ring(12)), tmp_path / "ring", 3)
    shutil.rmtree(tmp_path / "ring" / "part-00002")
    with pytest.raises(StoreError, match=r"topology='all' needs part-00002/relations/\*/csc.*topology='own'"):
        hoploom.open(tmp_path / "ring", parts=[0], topology="all")
    with pytest.raises(ConfigError, match="topology is 'some'"):
        hoploom.open(tmp_path / "ring", parts=[0], topology="some")  # type: ignore[arg-type]


def test_in_degrees_need_the_topology_alone(ring_store: Store) -> None:
    key, nodes = ring_store.schema.relations[0].key, torch.arange(12)
    away = spread(ring_store, 3, here=[0], whole_topology=True)
    assert away.in_degrees(key, nodes).tolist() == ring_store.in_degrees(key, nodes).tolist() == [2] * 12
    assert_raises(ConfigError, "not in reach", lambda: spread(ring_store, 3, here=[0]).in_degrees(key, nodes))


def test_the_histogram_of_degrees_is_that_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, 1, 2, 3, 4, 4, 5], [2, 2, 2, 5, 5, 4, 9]])  # 2 has three, 5 two, 4 (a loop) and 9 one
    store = hoploom.from_tensors({"x": torch.zeros(10, 1)}, ends)
    save_in_parts(store, tmp_path / "parts", 3)
    monkeypatch.setattr("hoploom.store.store.NODES_AT_ONCE", 2)
    whole_topology = hoploom.open(tmp_path / "parts", parts=[1], topology="all")
    for one in (store, hoploom.open(tmp_path / "parts"), whole_topology):
        assert one.degree_histogram(("node", "to", "node")).tolist() == [6, 2, 1, 1]
    with pytest.raises(ConfigError, match="not in reach"):
        hoploom.open(tmp_path / "parts", parts=[1]).degree_histogram(("node", "to", "node"))
    with pytest.raises(ConfigError, match="unknown relation"):
        store.degree_histogram(("node", "likes", "node"))


def test_topology_that_a_job_has_no_memory_for_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_in_parts(hoploom.from_pyg(ring(12)), tmp_path / "ring", 2)
    assert topology_fits(tmp_path / "ring")
    monkeypatch.setattr("hoploom.store.store.memory_limit", lambda: 100)
    assert not topology_fits(tmp_path / "ring")


def copy_of_parts(store: Path, out: Path, *parts: int) -> Path:
    """What a host is sent that serves these parts."""
    out.mkdir()
    shutil.copy(store / "store.json", out)
    for part in parts:
        shutil.copytree(store / f"part-{part:05d}", out / f"part-{part:05d}")
    return out


@pytest.fixture
def whole(tmp_path: Path) -> Store:
    """The ring of 12 nodes in 3 parts of 4, at tmp_path / "ring"."""
    return save_in_parts(hoploom.from_pyg(ring(12)), tmp_path / "ring", 3)


@pytest.fixture
def second(whole: Store, tmp_path: Path) -> Store:
    """The part with the nodes 4 to 7, opened where nothing else of the ring is."""
    return hoploom.open(copy_of_parts(tmp_path / "ring", tmp_path / "copy", 1), parts=[1])


def test_one_part_answers_for_its_nodes_by_their_ids_in_the_whole(whole: Store, second: Store) -> None:
    assert second.schema == whole.schema
    assert second.split("train").tolist() == [4, 5]
    nodes = torch.tensor([7, 4, 5])
    for store in (whole, second):
        (rows,) = store.features.gather([Wanted("node", "x", nodes)])
        assert rows[:, 0].tolist() == [7.0, 4.0, 5.0]
    (asked,), (expected,) = (store.graph.sample([Frontier(nodes)], EVERY) for store in (second, whole))
    assert all(map(torch.equal, asked, expected))
    assert asked.sources.tolist() == [8, 9, 5, 6, 6, 7]


def test_loaders_work_where_all_they_touch_is_at_hand(whole: Store, second: Store) -> None:
    seeds = torch.tensor([4, 5])
    loaders = [NeighborLoader(s, [-1], input_nodes=seeds, batch_size=1, num_workers=2) for s in (second, whole)]
    for batch, expected in zip(*loaders, strict=True):
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.edge_index, expected.edge_index)
        assert torch.equal(batch.edge_attr, expected.edge_attr)


def test_what_lies_elsewhere_is_an_error_that_names_the_part(second: Store) -> None:
    message = "reading 'x' of node 9 of 'node' needs part 2, but only part 1 is open; open part 2 too"
    assert_raises(StoreError, message, lambda: second.features.gather([Wanted("node", "x", torch.tensor([5, 9]))]))
    with pytest.raises(StoreError, match="reading the in-edges of node 3 of 'node' needs part 0"):
        second.graph.sample([Frontier(torch.tensor([3]))], EVERY)
    loader = NeighborLoader(second, [-1, -1], input_nodes=torch.tensor([6]), num_workers=1)
    assert_raises(StoreError, "part 2", lambda: next(iter(loader)))
    edge = torch.tensor([0])
    with pytest.raises(StoreError, match=r"reading 'edge_attr' of edge 0 of .* needs part 0"):
        second.features.gather([Wanted(("node", "to", "node"), "edge_attr", edge)])
    assert second.graph.sample([Frontier(torch.tensor([3]))], Draw(1, 0, [0])) == [None]  # nothing was asked for


def test_several_parts_of_a_heterogeneous_store(tmp_path: Path) -> None:
    whole = save_in_parts(hoploom.from_pyg(library(), weight_attr="weight"), tmp_path / "library", 4)
    some = hoploom.open(copy_of_parts(tmp_path / "library", tmp_path / "copy", 1, 3), parts=[3, 1])
    for part in (some.parts[0], some.parts[1]):
        for owner, name in fields_of(whole.schema):
            table = part.tables[owner, name]
            ids = torch.arange(table.first, table.first + table.rows.shape[0])
            rows, expected = (store.features.gather([Wanted(owner, name, ids)])[0] for store in (some, whole))
            assert torch.equal(rows, expected)
    with pytest.raises(StoreError, match="only parts 1, 3 are open"):
        some.features.gather([Wanted("paper", "x", torch.tensor([0]))])


def test_all_parts_are_the_whole(whole: Store, tmp_path: Path) -> None:
    assert_same(hoploom.open(tmp_path / "ring", parts=[2, 0, 1, 1]), whole)


def test_parts_that_are_not_there_are_refused(whole: Store, second: Store, tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        *(([3], r"parts are \[3\], the store has 3"), ([], "parts is empty"), ([-1], "part is -1")),
        *(([0, "a"], "part is 'a'; give numbers below 3"), ([[0]], r"part is \[0\]"), ([0, None], "part is None")),
        (0, "parts are 0, not a list; give numbers below 3"),
    ]
    for parts, message in bad:
        assert_raises(ConfigError, message, hoploom.open, tmp_path / "ring", parts=parts)
        assert_raises(ConfigError, message, hoploom.connect, "127.0.0.1:9", tmp_path / "ring", parts=parts)
    assert_raises(StoreError, r"part-00000.* is missing", hoploom.open, tmp_path / "copy")
    assert_raises(StoreError, r"part-00002.* is missing", hoploom.open, tmp_path / "copy", parts=[1, 2])


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
    assert found.num_rows == (1000 // (row_bytes + 24) if rows is None else rows)
    if rows is None:
        assert found.num_bytes <= 1000


@pytest.mark.parametrize("size", ["120%", 1.5, -1, "20 %%", "many", True, None, -0.1, float("nan"), "-3%"])
def test_sizes_that_mean_nothing_are_refused(size: Any) -> None:
    assert_raises(ConfigError, "the cache's size", lambda: cached(_ring(), size, {}))


def test_counts_that_do_not_fit_are_refused() -> None:
    for counts in (torch.zeros(39, dtype=torch.int64), torch.zeros(40), torch.full((40,), -1)):
        with pytest.raises(ConfigError, match="give 40 int64"):
            cached(_ring(), 0.2, {"node": counts})
    with pytest.raises(ConfigError, match="unknown node type"):
        cached(_ring(), 0.2, {"paper": torch.zeros(40, dtype=torch.int64)})


def test_types_share_the_bytes_by_how_often_their_rows_are_asked_for(library_store: Store) -> None:
    store = spread(library_store, 3, here=[])
    counts = {t.name: torch.full((t.num_nodes,), n) for t, n in zip(store.schema.node_types, (1, 3, 2), strict=True)}
    (shard, *_) = cached(store, 10 * (_row_bytes(store, "paper") + 24), counts).shards
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
    assert found.hits + found.misses == 0


def test_hits_and_misses_are_counted_over_all_threads() -> None:
    held = cached(_ring(), 0.5, {})  # 10 to 24
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda _: _x(held, [5, 12, 30, 24]), range(200)))
    assert all(of_call[:, 0].tolist() == [5.0, 12.0, 30.0, 24.0] for of_call in rows)
    found = report(held)
    assert (found.hits, found.misses) == (400, 200)


def test_with_look_ahead_rows_are_held_that_the_window_loses() -> None:
    counts = torch.zeros(40, dtype=torch.int64)
    counts[10], counts[20:] = 64, 1  # of 64 batches
    visits = Visits(node=counts)
    visits.num_batches = 64
    assert _asked(cached(replace(_ring(), deployment=Deployment(look_ahead=4)), 0.5, visits)) == list(range(20, 35))
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
