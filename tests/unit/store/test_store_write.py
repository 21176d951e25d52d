"""A store is written whole or not at all, whatever stops the writer."""

import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.graphs import ring
from support.stores import NO_EDGES, assert_same, left_in
from torch import Tensor
from torch_geometric.data import HeteroData

import hoploom
from hoploom import Store, StoreError
from hoploom.schema import Field, NodeType, Schema
from hoploom.store import format as layout
from hoploom.store.check import problems
from hoploom.store.write import StoreWriter, combine

pytestmark = pytest.mark.usefixtures("no_sync")


class TransformError(Exception):
    """What a user's own code may raise."""


@pytest.mark.parametrize("error", [TransformError("x"), KeyboardInterrupt(), OSError(errno.EIO, "I/O error")], ids=repr)
def test_an_error_between_two_chunks_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    def chunks() -> Iterator[Tensor]:
        yield torch.zeros(5, 4)
        raise error

    expected = StoreError if isinstance(error, OSError) else type(error)
    schema = Schema((NodeType("node", 10, {"x": Field("float32", (4,))}),), (), homogeneous=False)
    part = layout.PartRange((0,), (10,), (), (), {"node": {}})
    with pytest.raises(expected), StoreWriter(tmp_path / "store", schema, [part]) as writer:
        writer.write(layout.node_file(0, "node", "x"), "float32", (10, 4), chunks())
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("num_rows_given", [4, 6])
def test_an_array_with_too_few_or_too_many_rows_is_refused(num_rows_given: int, tmp_path: Path) -> None:
    schema = Schema((NodeType("node", 5, {"x": Field("float32")}),), (), homogeneous=False)
    part = layout.PartRange((0,), (5,), (), (), {"node": {}})
    with (
        pytest.raises(StoreError, match=f"got {num_rows_given} rows of 5"),
        StoreWriter(tmp_path / "store", schema, [part]) as writer,
    ):
        writer.write(layout.node_file(0, "node", "x"), "float32", (5,), [torch.zeros(num_rows_given)])
    assert left_in(tmp_path) == []


def test_an_io_error_at_any_file_leaves_nothing(
    ring_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring_store.save(tmp_path / "sound")
    num_files = sum(path.is_file() for path in (tmp_path / "sound").rglob("*"))
    for failing in range(num_files):
        calls = iter(range(num_files))

        def fsync(descriptor: int, calls: Iterator[int] = calls, failing: int = failing) -> None:
            if next(calls) == failing:
                raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(StoreError, match="Input/output error"):
            ring_store.save(tmp_path / "store")
        assert left_in(tmp_path) == ["sound"]


def test_every_file_is_on_the_disk_before_the_store_has_its_name(
    ring_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    rename = os.rename

    def checked_rename(source: Path, target: Path) -> None:
        files = [path for path in Path(source).rglob("*") if path.is_file()]
        assert {path.stat().st_ino for path in files} <= synced
        rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(os, "rename", checked_rename)
    ring_store.save(tmp_path / "store")
    assert left_in(tmp_path) == ["store"]


@pytest.mark.parametrize("options", ["size={}k", "size=1m,nr_inodes={}"])
def test_a_disk_may_fill_up_at_any_moment(options: str, ring_store: Store, small_disk: Callable[[str], Path]) -> None:
    messages: list[str] = []
    for size in range(1, 200) if "inodes" in options else range(4, 800, 4):
        disk = small_disk(options.format(size))
        try:
            ring_store.save(disk / "store")
            break
        except StoreError as error:
            messages.append(str(error))
        assert left_in(disk) == []
    assert len(messages) >= 12
    assert [message for message in messages if "the disk is full" not in message] == []
    assert left_in(disk) == ["store"]
    assert list(problems(disk / "store")) == []


@pytest.mark.parametrize("existing", ["file", "directory", "store", "link to nothing"])
def test_what_exists_is_refused_and_left_alone(existing: str, ring_store: Store, tmp_path: Path) -> None:
    target = tmp_path / "store"
    if existing == "file":
        target.write_text("precious")
    elif existing == "directory":
        target.mkdir()
    elif existing == "store":
        ring_store.save(target)
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=r"/store exists; .*remove it"):
        hoploom.from_pyg(ring(5)).save(target)
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every path below a folder with its time of change and its bytes."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("place", ["file/store", "/proc/store"])
def test_a_place_that_cannot_be_written_is_a_store_error(place: str, ring_store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        ring_store.save(tmp_path / place)
    assert left_in(tmp_path) == ["file"]


def test_a_saved_store_has_the_permissions_of_any_new_directory(ring_store: Store, tmp_path: Path) -> None:
    ring_store.save(tmp_path / "store")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "store").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_of_many_writers_one_wins_and_its_store_is_sound(tmp_path: Path) -> None:
    num_writers = 8
    stores = [
        hoploom.from_tensors({"x": torch.full((50,), float(i)), "y": torch.full((50,), i)}, NO_EDGES)
        for i in range(num_writers)
    ]
    start = threading.Barrier(num_writers)

    def save(number: int) -> int:
        start.wait(timeout=60)
        stores[number].save(tmp_path / "store")
        return number

    with ThreadPoolExecutor(num_writers) as pool:
        saving = [pool.submit(save, number) for number in range(num_writers)]
    (winner,) = [one.result() for one in saving if one.exception() is None]
    assert {type(one.exception()) for number, one in enumerate(saving) if number != winner} == {StoreError}
    assert left_in(tmp_path) == ["store"]
    assert list(problems(tmp_path / "store")) == []
    assert_same(stores[winner], hoploom.open(tmp_path / "store"))


def test_a_store_whose_features_lie_elsewhere_is_not_saved(tmp_path: Path) -> None:
    data = HeteroData()
    data["paper"].x = torch.zeros(3, 2)
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [1, 2]])
    store = hoploom.from_pyg(data)
    with pytest.raises(hoploom.HoploomError, match="cannot be saved"):
        Store(store.schema, store.graph, store.features).save(tmp_path / "store")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("sizes", [(0, 0), (0, 9), (1, 0), (3, 4), (128, 100_003), (1, 1 << 20)])
def test_the_checksum_of_two_pieces_follows_from_that_of_each(sizes: tuple[int, int]) -> None:
    first, second = (bytes(number * 7 % 251 for number in range(size)) for size in sizes)
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    target = tmp_path / "a[b]*.store"
    left, other = (tmp_path / f".{name}.partial-0123" for name in (target.name, "ab.store"))
    for folder in (left, other):
        (folder / "part-00000").mkdir(parents=True)
    with StoreWriter(target) as first:
        assert not left.exists()
        assert other.exists()  # another store's, though the name looks like a pattern for it
        with pytest.raises(ValueError, match="stop here"), StoreWriter(target):
            raise ValueError("stop here")
        assert first.scratch.is_dir()
        first.describe(Schema((NodeType("node", 0),), (), True), [layout.PartRange((0,), (0,), (), (), {})])
    assert target.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, target.name]
