"""The rows of coming batches are packed in scratch space, and nothing of them is left there."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import assert_same_batches

import hoploom
from hoploom import ConfigError, NeighborLoader, Store, StoreError
from hoploom.load.look_ahead import GROUPS, LookAhead, RowLists
from hoploom.store.on_disk import BLOCK

NUM_NODES, WIDTH, BATCH = 20_000, 128, 100
MEMORY = "8MB"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "graph.store"
    hoploom.generate(folder, num_nodes=NUM_NODES, avg_degree=10, num_features=WIDTH, num_classes=4)
    return folder


def _loader(store: Store, **options: Any) -> NeighborLoader:
    seeds = torch.arange(0, NUM_NODES, 5)
    return NeighborLoader(store, [5, 3], seeds, **{"batch_size": BATCH, "shuffle": True, "seed": 3, **options})


def _packing(loader: NeighborLoader) -> LookAhead:
    assert isinstance(loader._producer, LookAhead)
    return loader._producer


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_reads_its_rows_together(path: Path, tmp_path: Path, num_workers: int) -> None:
    alone, packed = hoploom.open(path, memory=MEMORY), hoploom.open(path, memory=MEMORY, scratch=tmp_path)
    loader = _loader(packed, num_workers=num_workers)
    assert_same_batches(_loader(alone, look_ahead=1), loader)
    producer = _packing(loader)
    assert producer.num_packed is not None
    assert producer.num_packed > 2
    assert len(producer.packed) == -(-len(loader) // producer.num_packed)
    assert alone.reads is not None
    assert packed.reads is not None
    alone.reads.gap = 0
    packed.reads.gap = 0
    before = alone.reads.requests, packed.reads.requests
    list(_loader(alone, look_ahead=1))
    list(loader)
    assert packed.reads.requests - before[1] < (alone.reads.requests - before[0]) / 2


def test_nothing_is_left_in_scratch_space_at_any_time(path: Path, tmp_path: Path) -> None:
    """Its files have no name, so that not even SIGKILL leaves any."""
    loader = _loader(hoploom.open(path, memory=MEMORY, scratch=tmp_path), num_workers=2)
    for step, _ in enumerate(loader):
        assert not list(tmp_path.iterdir())
        assert _open_files(tmp_path)
        if step == 3:
            break
    assert sum(_packing(loader).packed) > 0
    del _
    left = threading.enumerate()
    assert not [thread.name for thread in left if thread.name.startswith("hoploom-") and thread.name[8:].isdigit()]
    assert not _open_files(tmp_path)


def _open_files(folder: Path) -> list[str]:
    """Also those without a name."""
    files = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    return [file for file in files if file.startswith(str(folder))]


def test_scratch_space_that_is_too_small_is_not_used(path: Path, small_disk: Callable[[str], Path]) -> None:
    """The window in memory holds steps too."""
    disk = small_disk("size=12m")
    (disk / "other").write_bytes(bytes(11 << 20))
    loader = _loader(hoploom.open(path, memory=MEMORY, scratch=disk))
    assert_same_batches(_loader(hoploom.open(path)), loader)
    assert not _packing(loader).packed


@pytest.mark.parametrize("num_workers", [0, 2])
def test_scratch_space_that_others_fill_is_an_error_with_the_way_out(
    path: Path, small_disk: Callable[[str], Path], num_workers: int
) -> None:
    disk = small_disk("size=12m")
    loader = _loader(hoploom.open(path, memory="1MB", scratch=disk), num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    with pytest.raises(StoreError, match=f"scratch space {disk} cannot be used: No space left.*another folder"):
        _use_up(batches, disk / "other")
    num_packed = len(_packing(loader).packed)
    loader.set_epoch(0)
    assert_same_batches(_loader(hoploom.open(path)), loader)  # the window in memory does it
    assert len(_packing(loader).packed) == num_packed


def _use_up(batches: Iterator[Any], file: Path) -> None:
    """Read batches while all room on a disk is taken; a stretch that is done gives some of it back."""
    with file.open("ab", buffering=0) as other:
        while True:
            with suppress(OSError):
                while other.write(bytes(BLOCK)):
                    pass
            next(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_shrinks_while_packed_is_one_error_naming_it(path: Path, tmp_path: Path, num_workers: int) -> None:
    copy = shutil.copytree(path, tmp_path / "graph.store")
    loader = _loader(hoploom.open(copy, memory="1MB", scratch=tmp_path), num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    assert (_packing(loader).num_packed or 0) < len(loader) // 4  # more stretches are to come
    file = next(copy.rglob("x.npy"))
    os.truncate(file, file.stat().st_size * 19 // 20)
    with pytest.raises(StoreError, match=r"of epoch 0.*row \d+ of 'x' of 'node' .*x\.npy\) cannot be read"):
        list(batches)


def test_a_window_that_holds_as_many_steps_needs_no_scratch_space(path: Path, tmp_path: Path) -> None:
    loader = _loader(hoploom.open(path, memory=MEMORY, scratch=tmp_path), batch_size=10, drop_last=True)
    assert_same_batches(_loader(hoploom.open(path), batch_size=10), loader)
    producer = _packing(loader)
    assert producer.num_packed is not None
    few = NeighborLoader(producer._maker.assembler.store, [2], torch.arange(30), batch_size=10)
    list(few)
    assert _packing(few).num_packed == 3 <= GROUPS
    assert not _packing(few).packed


def test_an_epoch_that_ends_soon_leaves_the_next_one_its_stretches(path: Path, tmp_path: Path) -> None:
    loader = _loader(hoploom.open(path, memory="1MB", scratch=tmp_path), num_workers=0)
    batches = iter(loader)
    for _ in range(len(loader) - 1):
        next(batches)
    state = loader.state_dict()
    resumed = _loader(hoploom.open(path, memory="1MB", scratch=tmp_path))
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 1
    assert not _packing(resumed).packed
    list(resumed)
    assert len(_packing(resumed).packed) > 2


def test_no_piece_takes_much_more_than_it_may() -> None:
    """However few rows a step has: these are 1,024 steps of 60."""
    draw = np.random.default_rng(0)
    lists = RowLists([np.sort(draw.choice(1_000_000, 60, replace=False)) for _ in range(1024)], 4096, 4 << 20)
    rows = np.diff(lists.begins.sum(axis=1))
    assert rows.sum() == 1024 * 60
    assert rows.max() * 4096 < 8 << 20
    assert np.median(rows) * 4096 > 1 << 20


def test_a_folder_that_is_gone_is_an_error(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    loader = _loader(hoploom.open(path, memory=MEMORY, scratch=folder))
    folder.rmdir()
    with pytest.raises(StoreError, match=r"scratch space .* cannot be used: No such file"):
        list(loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scratch": "/tmp"}, "give memory too"),
        ({"memory": MEMORY, "scratch": "/no/such/folder"}, "no folder that can be written"),
    ],
)
def test_wrong_scratch_space_is_refused(path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hoploom.open(path, **options)  # type: ignore[arg-type]


def test_scratch_space_is_for_parts_that_are_all_here(path: Path, tmp_path: Path) -> None:
    with hoploom.init() as context, pytest.raises(ConfigError, match="parts are on other hosts"):
        hoploom.open(path, context=context, memory=MEMORY, scratch=tmp_path, servers="localhost:1")
