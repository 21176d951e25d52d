"""What a store with a budget says about its reads, held against what its batches need."""

import time
from pathlib import Path

import pytest
import torch
from support.batches import assert_same_batches

import hoploom
from hoploom import NeighborLoader, Store
from hoploom.ops import Reads
from hoploom.store.on_disk import OnDisk

NUM_NODES, WIDTH, HEADER, BLOCK = 6000, 64, 128, 4096
ROW = 4 * WIDTH
STEPS = 9


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reading") / "graph.store"
    hoploom.generate(folder, num_nodes=NUM_NODES, avg_degree=10, num_features=WIDTH, num_classes=4)
    return folder


def opened(path: Path, share_of_rows: float = 0.0, **options: bool) -> Store:
    """With all edges and labels in memory and so many rows of x, or with neither; single blocks are read."""
    (part,) = hoploom.open(path).parts
    rows, labels = (part.tables["node", name].rows.nbytes for name in ("x", "y"))
    begins = part.lists[0].indptr.nbytes
    lists = part.lists[0].indices.nbytes + labels
    held = lists + int(share_of_rows * rows) if share_of_rows else 6000
    store = hoploom.open(path, memory=begins + int(held / 0.75) + 8)
    assert store.reads is not None
    store.reads.gap, store.reads.by_threads = 0, options.get("by_threads", False)
    return store


def loaded(store: Store, **options: object) -> list[hoploom.NeighborLoader]:
    given = {"batch_size": 100, "shuffle": True, "seed": 3} | options
    return list(NeighborLoader(store, [5, 3], torch.arange(0, NUM_NODES, 7), **given))  # type: ignore[arg-type]


def shard_of(store: Store) -> OnDisk:
    (shard,) = store.shards
    assert isinstance(shard, OnDisk)
    return shard


def blocks_of(store: Store, rows: torch.Tensor) -> int:
    """Bytes of the blocks that these rows lie in, each once."""
    file = shard_of(store).tables["node", "x"].rows.file
    block = BLOCK if file.is_direct else 1
    first, last = (HEADER + ROW * rows) // block, (HEADER + ROW * rows + ROW - 1) // block
    touched = {at for begin, end in zip(first.tolist(), last.tolist(), strict=True) for at in range(begin, end + 1)}
    return sum(min(block, file.size - at * block) for at in touched)


@pytest.mark.parametrize("by_threads", [False, True])
@pytest.mark.parametrize("look_ahead", [1, STEPS])
def test_bytes_and_hits_are_those_of_the_batches_rows(path: Path, by_threads: bool, look_ahead: int) -> None:
    store = opened(path, 0.4, by_threads=by_threads)
    near = shard_of(store).tables["node", "x"].num_in_memory
    assert 0 < near < NUM_NODES
    began = time.perf_counter()
    batches = loaded(store, look_ahead=look_ahead)
    wall = time.perf_counter() - began
    ids = [batch.n_id for batch in batches]
    far = [some[some >= near] for some in ids]
    read = far if look_ahead == 1 else [torch.cat(far).unique()]  # all steps are one window
    said = store.reading()
    assert said["wanted_bytes"] == ROW * sum(map(len, read))
    assert said["bytes"] == sum(blocks_of(store, rows) for rows in read)
    assert said["asked"] == sum(map(len, ids))
    assert said["asked"] - said["found"] == sum(map(len, read))
    assert 0 < said["requests"] <= said["bytes"]
    assert 0 < said["busy_seconds"] < wall


def test_edges_that_are_read_count_too(path: Path) -> None:
    store = opened(path)
    near = shard_of(store).lists[0].indices.num_in_memory
    batches = loaded(store, fields=[], look_ahead=1)
    edges = torch.cat([batch.e_id for batch in batches])
    said = store.reading()
    assert 0 < near < store.num_edges
    assert (said["asked"], said["found"]) == (len(edges), int((edges < near).sum()))
    assert said["wanted_bytes"] == 4 * int((edges >= near).sum())


def test_whole_lists_count_all_their_edges(path: Path) -> None:
    store = opened(path)
    seeds = torch.arange(0, NUM_NODES, 7)
    list(NeighborLoader(store, [-1], seeds, batch_size=100, fields=[], look_ahead=1))
    num_edges = int(store.parts[0].lists[0].indptr.diff()[seeds].sum())
    assert store.reading()["wanted_bytes"] == 4 * num_edges


def test_rows_that_are_aggregated_are_read_too(path: Path) -> None:
    """By the core, not by page faults, whatever of the mapped file the budget leaves out."""
    store = opened(path, 0.4)
    options = {"mode": "blocks", "aggregate": "mean", "look_ahead": STEPS}
    batches = loaded(store, **options)
    rows = torch.cat([batch.n_id for batch in batches]).unique()
    assert store.reading()["wanted_bytes"] == ROW * int(
        (rows >= shard_of(store).tables["node", "x"].num_in_memory).sum()
    )
    asked = sum(len(batch.n_id) + len(batch.x) for batch in batches)  # aggregated, and inner nodes' own rows
    assert store.reading()["asked"] == asked
    assert_same_batches(loaded(hoploom.open(path), **options), batches)


def test_a_store_that_reads_nothing_has_nothing_to_say(path: Path) -> None:
    assert hoploom.open(path).reading() == {}
    assert hoploom.open(path, memory="1GB").reading() == {}


def test_seconds_in_which_two_reads_are_under_way_are_busy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 5.0, 7.0, 20.0, 21.5, 22.0])  # begins, asked, the last of two ends; begins, asked, ends
    monkeypatch.setattr("hoploom.ops.disk.time.perf_counter", lambda: next(now))
    reads = Reads()
    with reads._in_flight():
        with reads._in_flight():
            pass
        assert reads.so_far()["busy_seconds"] == 4
    assert reads.so_far()["busy_seconds"] == 6
    with reads._in_flight():
        assert reads.so_far()["busy_seconds"] == 7.5
