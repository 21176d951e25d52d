"""A store within a budget of memory: what it holds, what it reads, and what happens when its files cannot be read."""

import ctypes
import mmap
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import assert_same_batches

import hoploom
from hoploom import ConfigError, NeighborLoader, Store, StoreError, ops
from hoploom.ops import Reads
from hoploom.store.budget import USUAL, measure_disk, plan_budget
from hoploom.store.on_disk import OnDisk

NUM_NODES, WIDTH = 6000, 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget") / "graph.store"
    hoploom.generate(folder, num_nodes=NUM_NODES, avg_degree=10, num_features=WIDTH, num_classes=4)
    return folder


def _sizes(path: Path) -> tuple[int, int, int]:
    """Bytes of where lists begin, of lists, and of wide rows."""
    (part,) = hoploom.open(path).parts
    begins = sum(lists.indptr.nbytes for lists in part.lists)
    columns = sum(column.nbytes for lists in part.lists for column in lists.columns)
    return begins, columns - begins, part.tables["node", "x"].rows.nbytes


def loaded(store: Store, **options: object) -> list[hoploom.NeighborLoader]:
    given = {"batch_size": 100, "shuffle": True, "seed": 3} | options
    return list(NeighborLoader(store, [5, 3], torch.arange(0, NUM_NODES, 7), **given))  # type: ignore[arg-type]


def test_memory_takes_edges_then_small_fields_then_the_first_rows(path: Path) -> None:
    begins, lists, rows = _sizes(path)
    whole = hoploom.open(path)
    few, half = (plan_budget(whole.parts, begins + int(share * lists)) for share in (0.2, 2.5))
    assert 0.1 < few.lists < 0.2  # the window has a quarter
    assert (few.rows, few.small_fields) == (0.0, False)
    assert (half.lists, half.small_fields) == (1, True)
    assert 0 < half.rows < 1
    opened = hoploom.open(path, memory=begins + int(2.5 * lists))
    assert isinstance(opened.shards[0], OnDisk)
    assert "all edges, small fields and " in repr(opened)
    assert " of the rows in memory, " in repr(opened)
    assert half.num_bytes >= begins + lists + int(half.rows * rows) + half.window


@pytest.mark.parametrize("topology", ["own", "all"])
def test_some_parts_have_a_budget_too(path: Path, tmp_path: Path, topology: str) -> None:
    cut = tmp_path / "parts"
    hoploom.partition(path, cut, 3, method="range")
    if topology == "own":  # a host has the files of its own parts
        shutil.rmtree(cut / "part-00000")
    opened = [hoploom.open(cut, parts=[1], topology=topology, memory=m) for m in (None, 60_000)]  # type: ignore[arg-type]
    seeds = torch.arange(opened[0].ranges[1].first_nodes[0], opened[0].ranges[2].first_nodes[0], 9)
    fanouts = [0] if topology == "own" else [4]
    options: dict[str, Any] = {"batch_size": 50, "fields": []}
    drawn = [[batch.n_id for batch in NeighborLoader(store, fanouts, seeds, **options)] for store in opened]
    assert not opened[1].budget.holds_all
    for ours, theirs in zip(*drawn, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(*[store.features.gather([("node", "x", seeds)])[0] for store in opened])


def test_an_epoch_without_steps_is_empty(path: Path) -> None:
    store = hoploom.open(path, memory=_sizes(path)[0] + 1000)
    assert not list(NeighborLoader(store, [2], torch.arange(5), batch_size=10, drop_last=True))


@pytest.mark.parametrize("options", [{}, {"scratch": "."}], ids=["window", "scratch"])
def test_an_epoch_goes_on_at_another_world_size(path: Path, tmp_path: Path, options: dict[str, str]) -> None:
    """The steps behind us have no seeds then: the first one ahead is measured."""
    begins, lists, rows = _sizes(path)
    options = {name: str(tmp_path) for name in options}

    def rest(store: Store) -> list[Any]:
        given: dict[str, Any] = {"batch_size": 50, "shuffle": True, "seed": 3}
        left = NeighborLoader(store, [5, 3], torch.arange(3000), rank=0, world_size=2, **given)
        batches = iter(left)
        for _ in range(7):
            next(batches)
        state = left.state_dict()
        batches.close()  # type: ignore[attr-defined]
        loader = NeighborLoader(store, [5, 3], torch.arange(3000), rank=1, world_size=3, **given)
        loader.load_state_dict(state)
        return list(loader)

    expected = rest(hoploom.open(path))
    assert expected
    assert_same_batches(expected, rest(hoploom.open(path, memory=begins + lists + rows // 8, **options)))


def test_a_budget_that_holds_all_changes_nothing(path: Path) -> None:
    store = hoploom.open(path, memory="1GB")
    assert store.budget.holds_all
    assert store.shards == store.parts
    assert "all edges, small fields and all rows in memory, 0 B on disk" in repr(store)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (
            "9kB",
            "memory of 9.00 kB for the store is too small: where lists begin takes 48.0 kB; give at least 60.0 kB",
        ),
        ("much", "memory is 'much'; give a size such as 512GB or 64GiB"),
        (0, "give bytes such as '6GB'"),
        (1.5, "give bytes such as '6GB'"),
    ],
)
def test_a_wrong_budget_is_refused_with_the_way_out(path: Path, memory: str | int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hoploom.open(path, memory=memory)


def test_batches_larger_than_the_window_are_made_one_at_a_time(path: Path) -> None:
    """Whatever the loader's threads: what is made and not yet asked for takes memory too."""
    begins, lists, _ = _sizes(path)
    store = hoploom.open(path, memory=begins + lists // 2)
    made = [0]

    def count(batch: Any) -> Any:
        made[0] += 1
        return batch

    loader = NeighborLoader(store, [5, 3], torch.arange(NUM_NODES), batch_size=400, num_workers=2, transform=count)
    ops.pool_trim()
    num_had = 0
    for batch in loader:
        num_had += 1
        end = time.monotonic() + 20
        while made[0] < min(num_had + 1, len(loader)) and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.02)  # for those that should not be made
        assert made[0] == min(num_had + 1, len(loader))  # one beside the consumer's own
        assert batch.num_nodes * WIDTH * 4 > store.budget.window
        assert ops.pool_use()[0] <= store.budget.window
    assert num_had == len(loader)


def test_what_fits_is_read_in_the_background(path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(path, tmp_path / "graph.store")
    begins, lists, rows = _sizes(path)
    file = next(copy.rglob("x.npy"))
    os.sync()
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _resident(file):
        pytest.skip("this file system keeps its pages")
    store = hoploom.open(copy, memory=2 * (begins + lists) + rows // 2)
    wanted = int(store.budget.rows * rows) // mmap.PAGESIZE
    assert 0 < wanted < rows // mmap.PAGESIZE
    end = time.monotonic() + 20
    while _resident(file) < wanted and time.monotonic() < end:
        time.sleep(0.01)
    assert _resident(file) >= wanted


def _resident(file: Path) -> int:
    """How many pages of a file are in memory."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE) as pages:
        states = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        begin = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
        assert ctypes.CDLL(None, use_errno=True).mincore(begin, ctypes.c_size_t(len(pages)), states) == 0
        return sum(state & 1 for state in states)


def test_a_file_that_shrinks_is_one_error_that_names_file_and_row(path: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(path, tmp_path / path.name)
    store = hoploom.open(copied, memory=_sizes(path)[0] + 1000)
    (file,) = copied.glob("part-00000/nodes/*/x.npy")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(StoreError, match=r"row \d+ of 'x' of 'node' \(.*x\.npy\) cannot be read: the file ends there"):
        loaded(store, num_workers=2)


def test_files_that_are_removed_are_read_to_the_end(path: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(path, tmp_path / path.name)
    store = hoploom.open(copied, memory=_sizes(path)[0] + 1000)
    for file in copied.rglob("*.npy"):
        file.unlink()
    assert_same_batches(loaded(hoploom.open(path)), loaded(store))


def test_a_disk_is_measured_by_a_large_file(tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    large.write_bytes(bytes(64 << 20))
    found = measure_disk(large)
    assert found.gap > 0
    assert found != measure_disk(Path(__file__)) == USUAL


HEADER, BLOCK = 128, 4096
ROW = 4 * WIDTH
STEPS = 9


def opened(path: Path, share_of_rows: float = 0.0, **options: bool) -> Store:
    """With all edges and labels in memory and so many rows of x, or with neither; single blocks are read."""
    (part,) = hoploom.open(path).parts
    rows, labels = (part.tables["node", name].rows.nbytes for name in ("x", "y"))
    begins = part.lists[0].indptr.nbytes
    lists = part.lists[0].indices.nbytes + labels
    held = lists + int(share_of_rows * rows) if share_of_rows else 6000
    store = hoploom.open(path, memory=begins + int(held / 0.75) + 8)
    store.reads.gap, store.reads.by_threads = 0, options.get("by_threads", False)
    return store


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
    edges = torch.cat([batch.e_id for batch in loaded(store, fields=[], look_ahead=1)])
    said = store.reading()
    assert 0 < near < store.num_edges
    assert (said["asked"], said["found"]) == (len(edges), int((edges < near).sum()))
    assert said["wanted_bytes"] == 4 * int((edges >= near).sum())


def test_whole_lists_count_all_their_edges(path: Path) -> None:
    store = opened(path)
    seeds = torch.arange(0, NUM_NODES, 7)
    list(NeighborLoader(store, [-1], seeds, batch_size=100, fields=[], look_ahead=1))
    assert store.reading()["wanted_bytes"] == 4 * int(store.parts[0].lists[0].indptr.diff()[seeds].sum())


def test_rows_that_are_aggregated_are_read_too(path: Path) -> None:
    """By the core, not by page faults, whatever of the mapped file the budget leaves out."""
    store = opened(path, 0.4)
    options = {"mode": "blocks", "aggregate": "mean", "look_ahead": STEPS}
    batches = loaded(store, **options)
    rows = torch.cat([batch.n_id for batch in batches]).unique()
    near = shard_of(store).tables["node", "x"].num_in_memory
    assert store.reading()["wanted_bytes"] == ROW * int((rows >= near).sum())
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
