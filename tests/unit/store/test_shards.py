"""Parts elsewhere: all are asked before the first answer is read, and a batch is the same wherever its parts lie. A
part's folder with store.json is enough to serve that part.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import assert_same_batches
from support.graphs import library, ring, save_in_parts
from support.shards import elsewhere_of, spread
from support.stores import assert_same, fields_of

import hoploom
from hoploom import ConfigError, NeighborLoader, Store, StoreError
from hoploom.ops import Frontier, Reads
from hoploom.store import Draw, Sharded, Wanted
from hoploom.store.on_disk import DiskRows, OnDisk
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
    features = Sharded(store.schema, [disk, away], store.ranges)
    features.gather([Wanted("node", "x", torch.arange(12))])
    assert away.log == ["begin 1", "disk", "finish 1"]


def test_an_error_of_one_shard_leaves_no_other_unread(ring_store: Store) -> None:
    store = spread(ring_store, 3, here=[0])
    _, last = elsewhere_of(store)
    last.error = StoreError("part 2 is lost")
    with pytest.raises(StoreError, match="part 2 is lost"):
        store.features.gather([Wanted("node", "x", torch.arange(12))])
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
        assert ours is not None
        assert theirs is not None
        assert all(map(torch.equal, ours, theirs))
    (paper,) = (i for i, t in enumerate(whole.schema.node_types) if t.name == "paper")
    first, count = store.ranges[1].first_nodes[paper], store.ranges[1].num_nodes[paper]
    own = torch.arange(first, first + count)
    assert store.features.gather([Wanted("paper", "x", own)])[0].shape[0] == count
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
    with pytest.raises(ConfigError, match="not in reach"):
        spread(ring_store, 3, here=[0]).in_degrees(key, nodes)


@pytest.mark.parametrize("whole_topology", [False, True])
def test_all_links_of_parts_elsewhere_are_found(ring_store: Store, whole_topology: bool) -> None:
    away = spread(ring_store, 3, here=[0], whole_topology=whole_topology)
    loaders = [hoploom.LinkNeighborLoader(s, [2], batch_size=5) for s in (ring_store, away)]
    assert_same_batches(*loaders)


def test_topology_that_a_job_has_no_memory_for_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_in_parts(hoploom.from_pyg(ring(12)), tmp_path / "ring", 2)
    assert topology_fits(tmp_path / "ring")
    monkeypatch.setattr("hoploom.store.store.memory_limit", lambda: 100)
    assert not topology_fits(tmp_path / "ring")


# --- some parts are enough ---------------------------------------------------------------------


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
    assert asked is not None
    assert expected is not None
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
    with pytest.raises(StoreError, match=message):
        second.features.gather([Wanted("node", "x", torch.tensor([5, 9]))])
    with pytest.raises(StoreError, match="reading the in-edges of node 3 of 'node' needs part 0"):
        second.graph.sample([Frontier(torch.tensor([3]))], EVERY)
    loader = NeighborLoader(second, [-1, -1], input_nodes=torch.tensor([6]), num_workers=1)
    with pytest.raises(StoreError, match="part 2"):
        next(iter(loader))
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
        with pytest.raises(ConfigError, match=message):
            hoploom.open(tmp_path / "ring", parts=parts)
        with pytest.raises(ConfigError, match=message):
            hoploom.connect("127.0.0.1:9", tmp_path / "ring", parts=parts)
    with pytest.raises(StoreError, match=r"part-00000.* is missing"):
        hoploom.open(tmp_path / "copy")
    with pytest.raises(StoreError, match=r"part-00002.* is missing"):
        hoploom.open(tmp_path / "copy", parts=[1, 2])
