"""A store on disk is the store in memory, in any number of parts, and is written whole or not at all."""

import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.graphs import cut, ring, save_in_parts
from support.refusals import assert_raises
from support.stores import NO_EDGES, Graph, assert_same, bits, every_graph, left_in, picks_of, rows_of
from torch import Tensor
from torch_geometric.data import HeteroData

import hoploom
from hoploom import ConfigError, DataError, Store, StoreError
from hoploom.schema import DTYPES, HOMOGENEOUS_RELATION, Field, NodeType, Schema
from hoploom.store import Draw, Table, Wanted, assemble
from hoploom.store import format as layout
from hoploom.store.check import problems
from hoploom.store.write import StoreWriter, combine

pytestmark = pytest.mark.usefixtures("no_sync")


SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 3)]


@every_graph
def test_an_opened_store_is_the_one_that_was_saved(graph: Graph, tmp_path: Path) -> None:
    store = hoploom.from_pyg(graph.make(), **graph.options)
    assert_same(store, store.save(tmp_path / "store"), graph.until)
    assert_same(store, hoploom.open(str(tmp_path / "store")), graph.until)
    assert list(problems(tmp_path / "store")) == []


@pytest.mark.parametrize("num_parts", [2, 3, 5])
@every_graph
def test_parts_are_the_same_store_on_disk_and_in_memory(graph: Graph, num_parts: int, tmp_path: Path) -> None:
    store = hoploom.from_pyg(graph.make(), **graph.options)
    opened = save_in_parts(store, tmp_path / "store", num_parts)
    assert len(opened.parts) == num_parts
    assert_same(store, opened, graph.until)
    assert_same(store, assemble(store.schema, cut(store, num_parts)), graph.until)
    assert list(problems(tmp_path / "store")) == []


def test_a_part_may_hold_no_node_of_a_type(library_store: Store, tmp_path: Path) -> None:
    opened = save_in_parts(library_store, tmp_path / "store", 12)
    assert {part.num_nodes[2] for part in opened.parts} == {0, 1}
    assert_same(library_store, opened)


def test_a_saved_store_of_parts_saves_again(library_store: Store, tmp_path: Path) -> None:
    again = save_in_parts(library_store, tmp_path / "one", 3).save(tmp_path / "two")
    assert len(again.parts) == 3
    assert_same(library_store, again)


def test_an_opened_ring_has_the_values_that_arithmetic_gives(ring_store: Store, tmp_path: Path) -> None:
    opened = ring_store.save(tmp_path / "store")
    positions, nodes = torch.arange(24), torch.arange(12)
    (counts, sources, edges), *_ = picks_of(opened, Draw(0, 0, [-1]))
    assert counts.tolist() == [2] * 12
    assert torch.equal(edges, positions)
    assert torch.equal(sources, (positions // 2 + positions % 2 + 1) % 12)
    assert torch.equal(rows_of(opened, HOMOGENEOUS_RELATION, "edge_id"), positions // 2 + positions % 2 * 12)
    assert torch.equal(rows_of(opened, "node", "x"), nodes.float().view(-1, 1).expand(-1, 4))
    assert torch.equal(opened.split("val"), torch.tensor([6, 7, 8]))


def test_edge_ids_are_read_once_for_all_fields_in_the_users_order(monkeypatch: pytest.MonkeyPatch) -> None:
    edges, a, b = torch.tensor([[1, 2, 0], [2, 0, 1]]), torch.tensor([10, 20, 30]), torch.tensor([1, 2, 3])
    store = hoploom.from_tensors({"x": torch.zeros(3)}, {"edge_index": edges, "a": a, "b": b})
    read, gather_at = [], Table.gather_at
    monkeypatch.setattr(Table, "gather_at", lambda self, *asked: (read.append(self), gather_at(self, *asked)))
    positions = torch.tensor([2, 0])  # by destination: into node 2, the user's first edge, and into node 0, the second
    for names in (["a", "edge_id", "b"], ["edge_id", "a", "b"], ["a", "b"]):
        read.clear()
        rows = store.features.gather([Wanted(HOMOGENEOUS_RELATION, name, positions) for name in names])
        expected = {"a": [10, 20], "edge_id": [0, 1], "b": [1, 2]}
        assert [of_field.tolist() for of_field in rows] == [expected[name] for name in names]
        assert sum(table is store.parts[0].tables[HOMOGENEOUS_RELATION, "edge_id"] for table in read) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_every_dtype_and_shape_survives_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    data = ring(12)
    data.field, data.edge_field = random_bits(12, shape, dtype), random_bits(24, shape, dtype)
    store = hoploom.from_pyg(data)
    opened = save_in_parts(store, tmp_path / "store", 2)
    assert rows_of(opened, "node", "field").dtype == dtype
    assert torch.equal(bits(rows_of(opened, "node", "field")), bits(data.field))
    edge_ids = rows_of(opened, HOMOGENEOUS_RELATION, "edge_id")
    assert torch.equal(bits(rows_of(opened, HOMOGENEOUS_RELATION, "edge_field")), bits(data.edge_field[edge_ids]))


def random_bits(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows of any bits that the dtype allows, NaNs among them."""
    high = 2 if dtype == torch.bool else 256
    size = torch.zeros(shape, dtype=dtype).nbytes
    raw = torch.randint(high, (count * size,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return raw.view(dtype).view(count, *shape)


def test_splits_keep_their_names_and_ids(tmp_path: Path) -> None:
    splits = {"train": torch.tensor([11, 0, 3]), "cold.start/é": torch.tensor([5]), "none": torch.tensor([], dtype=int)}
    store = hoploom.from_tensors({"x": torch.zeros(12)}, ring(12).edge_index, splits=splits)
    opened = save_in_parts(store, tmp_path / "store", 3)
    assert {name: opened.split(name).tolist() for name in splits} == {
        name: sorted(ids.tolist())
        for name, ids in splits.items()  # in the same order for any number of parts
    }


@pytest.mark.parametrize("num_nodes", [0, 3])
def test_a_graph_without_edges_survives(num_nodes: int, tmp_path: Path) -> None:
    splits = {"train": torch.arange(num_nodes)}
    store = hoploom.from_tensors({"x": torch.zeros(num_nodes, 4)}, NO_EDGES, splits=splits)
    assert_same(store, store.save(tmp_path / "store"))


def test_rows_without_values_survive(tmp_path: Path) -> None:
    store = hoploom.from_tensors({"x": torch.zeros(12, 0)}, ring(12).edge_index)
    assert rows_of(save_in_parts(store, tmp_path / "store", 2), "node", "x").shape == (12, 0)


@pytest.mark.parametrize("as_parameter", [False, True])
def test_features_that_require_a_gradient_are_saved_as_values(as_parameter: bool, tmp_path: Path) -> None:
    x = torch.nn.Parameter(ring(12).x) if as_parameter else ring(12).x.requires_grad_()
    store = hoploom.from_tensors({"x": x}, ring(12).edge_index)
    assert torch.equal(rows_of(store.save(tmp_path / "store"), "node", "x"), x.detach())
    assert not rows_of(store, "node", "x").requires_grad


NAMES = ["../x", "/x", "a/b", ".", "..", "", "é", "a b", "a.b", "split.train", "csc.indptr", "%2E", "~", "x\n"]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_any_name_can_be_saved_and_stays_inside(name: str, tmp_path: Path) -> None:
    edges = {"edge_index": torch.tensor([[0, 1, 2], [1, 2, 0]]), name: torch.arange(3.0)}
    store = hoploom.from_tensors(
        {name: {name: torch.arange(3)}}, {(name, name, name): edges}, splits={name: {name: torch.tensor([2])}}
    )
    opened = store.save(tmp_path / "inner" / "store")
    assert_same(store, opened)
    assert torch.equal(rows_of(opened, (name, name, name), name), torch.tensor([2.0, 0.0, 1.0]))
    assert list(tmp_path.iterdir()) == [tmp_path / "inner"]
    assert list((tmp_path / "inner").iterdir()) == [tmp_path / "inner" / "store"]


def test_relations_whose_names_join_alike_have_files_of_their_own(tmp_path: Path) -> None:
    nodes = {name: {"x": torch.zeros(2)} for name in ("a~b", "a", "c")}
    one, other = torch.tensor([[0, 1], [0, 0]]), torch.tensor([[1, 1], [0, 1]])
    store = hoploom.from_tensors(nodes, {("a~b", "r", "c"): one, ("a", "b~r", "c"): other})
    assert_same(store, store.save(tmp_path / "store"))


def test_an_opened_store_survives_a_change_of_directory(
    ring_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened = ring_store.save("store")
    monkeypatch.chdir("/")
    assert_same(ring_store, opened)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2], dtype=torch.int32)])
def test_ids_to_gather_are_any_list_of_integers(ids: Any) -> None:
    (rows,) = hoploom.from_pyg(ring(8)).features.gather([("node", "x", ids)])
    assert rows[:, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([("node", "x", ["a"])], r"ids of 'node'.x are \['a'\]; give a list of integer ids"),
        ([("node", "x", torch.ones(1))], r"ids of 'node'.x has dtype torch.float32 .*; give a list of integer ids"),
        ([("node", "x", 3)], r"ids of 'node'.x has dtype torch.int64 and shape \(\); give a list of integer ids"),
        ([("node", "x", [1, 8])], r"ids of 'node'.x holds id 8, out of range \[0, 8\)"),
        ([(("node", "to", "node"), "edge_attr", [16])], r"holds id 16, out of range \[0, 16\)"),
        (("node", "x", [1]), r"'node' is wanted; give a list of \(type, field, ids\)"),
    ],
)
def test_wrong_ids_to_gather_are_told(wanted: Any, said: str) -> None:
    assert_raises(ConfigError, said, lambda: hoploom.from_pyg(ring(8)).features.gather(wanted))


@pytest.fixture
def store() -> Store:
    """Users with text ids of several lengths, items with integers, tags without ids of their own."""
    names = [f"ü{user}" * (1 + user % 3) for user in range(50)]
    width = max(len(name.encode()) for name in names)
    text = torch.tensor([list(name.encode().ljust(width, b"\0")) for name in names], dtype=torch.uint8)
    likes = {("user", "likes", "item"): torch.stack([torch.arange(50), torch.arange(50) % 20])}
    nodes = {"user": {"original_id": text}, "item": {"original_id": torch.arange(20) * 7 - 30}, "tag": {}}
    return hoploom.from_tensors(nodes, likes, num_nodes={"tag": 5})


def test_ids_are_looked_up_in_both_directions(store: Store) -> None:
    nodes = torch.tensor([49, 3, 3, 0])
    for node_type, wanted in {"user": ["ü49ü49", "ü3", "ü3", "ü0"], "item": [103, -9, -9, -30]}.items():
        ids, some = store.ids(node_type), nodes if node_type == "user" else nodes % 30
        assert ids.original(some).tolist() == wanted
        assert ids.stored(wanted).tolist() == some.tolist()
        assert ids.stored(np.array(wanted)).tolist() == some.tolist()
        assert ids.stored([]).tolist() == []
        assert ids.stored(ids.original(range(20))).tolist() == list(range(20))
    assert store.ids("tag").stored([4, 0]).tolist() == store.ids("tag").original([4, 0]).tolist() == [4, 0]


@pytest.mark.parametrize(
    ("node_type", "given", "kind", "message"),
    [
        ("user", ["ü0", "nobody", "no"], DataError, r"'user' has no node with the id 'nobody' \(2 of 3 are unknown\);"),
        ("user", [3], ConfigError, r"ids of 'user' are \[3\]...; give ids such as 'ü0', which is node 0 of the store"),
        ("item", ["a"], ConfigError, r"ids of 'item' are \['a'\]...; give ids such as -30"),
        ("item", [1.5], ConfigError, r"ids of 'item' are \[1.5\]"),
        ("item", [0], DataError, "'item' has no node with the id 0; give ids such as -30"),
        ("tag", [5], DataError, "'tag' has no node with the id 5; give ids such as 0"),
        ("user", "ü0", ConfigError, "give a list of ids"),
        ("tag", np.array([4.9], object), ConfigError, r"ids of 'tag' are \[4.9\]...; give ids such as 0"),
        ("tag", np.array([True], object), ConfigError, r"ids of 'tag' are \[True\]"),
        ("tag", np.array([2**64 - 1], np.uint64), ConfigError, r"ids of 'tag' are \[.*18446744073709551615"),
        ("tag", [2**70], ConfigError, r"ids of 'tag' are \[1180591620717411303424\]"),
        ("tag", [str(2**70)], ConfigError, r"ids of 'tag' are \['1180591620717411303424'\]"),
    ],
)
def test_an_id_that_no_node_has_is_named(store: Store, node_type: str, given: Any, kind: Any, message: str) -> None:
    assert_raises(kind, message, lambda: store.ids(node_type).stored(given))


def test_the_node_type_is_named_where_there_are_several(store: Store) -> None:
    assert_raises(ConfigError, r"name one of \['user', 'item', 'tag'\]", store.ids)


def test_loaders_take_text_ids(store: Store) -> None:
    batch = next(iter(hoploom.NeighborLoader(store, [0], ("user", ["ü7ü7", "ü1ü1"]), batch_size=2)))
    assert batch["user"].n_id.tolist() == [7, 1]
    links = (("user", "likes", "tag"), (["ü1ü1", "ü0"], ["4", "2"]))
    batch = next(iter(hoploom.LinkNeighborLoader(store, [0], links, batch_size=2)))
    assert batch["tag"].n_id[batch["user", "likes", "tag"].edge_label_index[1]].tolist() == [4, 2]
    with pytest.raises(ConfigError, match="object"):  # integers are the store's ids, so they are not looked up
        hoploom.NeighborLoader(store, [0], ("item", np.array([5, 12], object)))
    with pytest.raises(DataError, match="'user' has no node with the id 'nobody'"):
        hoploom.NeighborLoader(store, [0], ("user", ["nobody"]))


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
        assert_raises(StoreError, "Input/output error", ring_store.save, tmp_path / "store")
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
    assert_raises(StoreError, r"/store exists; .*remove it", lambda: hoploom.from_pyg(ring(5)).save(target))
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every path below a folder with its time of change and its bytes."""
    found = folder.rglob("*")
    return {str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in found}


@pytest.mark.parametrize("place", ["file/store", "/proc/store"])
def test_a_place_that_cannot_be_written_is_a_store_error(place: str, ring_store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_raises(StoreError, "cannot write", ring_store.save, tmp_path / place)
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
