"""Stores from streams: against a plain reference, whatever the order, the memory and the parts."""

import random
import resource
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.stores import contents
from torch import Tensor

import hoploom
from hoploom.errors import ConfigError, DataError, StoreError
from hoploom.ingest.stream import (
    EdgeRows,
    EdgeRule,
    EdgeStream,
    NodeFields,
    NodeStream,
    Rows,
    StoreOptions,
    write_store,
)
from hoploom.ingest.stream.spill import Spool
from hoploom.schema import Field
from hoploom.store.check import problems
from hoploom.store.write import StoreWriter

pytestmark = pytest.mark.usefixtures("no_sync")
X, WEIGHT, TIME = Field("float32", (3,)), Field("float32"), Field("int64")
NUM_USERS, NUM_ITEMS, NUM_EDGES = 100, 37, 2000
KEY = ("user", "buys", "item")


def features(ids: Tensor) -> Tensor:
    return torch.stack([ids, ids * 2, ids + 7], 1).to(torch.float32)


def in_chunks(ids: Tensor, size: int) -> Iterator[Rows]:
    for piece in ids.split(size):
        yield Rows(piece, {"x": features(piece), "when": piece * 10})


def shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def edges(seed: int = 0) -> list[tuple[int, int, float, int]]:
    """(source, destination, weight, time) with many repeated ends."""
    draw = random.Random(seed)
    return [
        (draw.randrange(NUM_USERS), draw.randrange(NUM_ITEMS), draw.randrange(4) / 4, draw.randrange(50))
        for _ in range(NUM_EDGES)
    ]


def edge_rows(given: Sequence[tuple[int, int, float, int]], size: int) -> Iterator[EdgeRows]:
    for begin in range(0, len(given), size):
        source, destination, weight, time = zip(*given[begin : begin + size], strict=True)
        source, destination, weight, time = map(torch.tensor, (source, destination, weight, time))
        yield EdgeRows(source, destination, {"w": weight, "t": time})


def bought(given: Sequence[tuple[int, int, float, int]], rule: EdgeRule, size: int = 300) -> EdgeStream:
    return EdgeStream(KEY, {"w": WEIGHT, "t": TIME}, lambda: edge_rows(given, size), rule)


def node_streams(parts: int = 1, order: Tensor | None = None) -> list[NodeStream]:
    users = torch.arange(NUM_USERS) if order is None else order
    bounds = [[count * part // parts for part in range(parts + 1)] for count in (NUM_USERS, NUM_ITEMS)]
    block = NodeFields({"x": X, "when": TIME}, lambda: in_chunks(users, 9))
    train = torch.tensor([5, 99, 0, 42])
    splits = {"train": lambda: iter(train.split(3))}
    return [NodeStream("user", bounds[0], [block], splits), NodeStream("item", bounds[1])]


def build(path: Path, nodes: Sequence[NodeStream], relations: Sequence[EdgeStream], **options: object) -> hoploom.Store:
    with StoreWriter(path) as writer:
        write_store(writer, nodes, relations, StoreOptions(**options))  # type: ignore[arg-type]
    assert list(problems(path)) == []
    return hoploom.open(path)


def lists_of(store: hoploom.Store, relation: int = 0) -> list[list[tuple[int, float, int]]]:
    key = store.schema.relations[relation].key
    found = []
    for part in store.parts:
        lists = part.lists[relation]
        columns = (lists.indices, part.tables[key, "w"].rows, part.tables[key, "t"].rows)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        found += [rows[begin:end] for begin, end in pairwise(lists.indptr.tolist())]
    return found


def test_a_store_from_streams_equals_a_plain_reference(tmp_path: Path) -> None:
    given = edges()
    store = build(tmp_path / "s", node_streams(3), [bought(given, EdgeRule(reverse="rev_buys"))], weight="w", time="t")
    expected = [sorted((s, w, t) for s, d, w, t in given if d == item) for item in range(NUM_ITEMS)]
    by_time = [sorted(rows, key=lambda row: row[2]) for rows in expected]
    assert [sorted(rows) for rows in lists_of(store)] == expected
    assert [[row[2] for row in rows] for rows in lists_of(store)] == [[row[2] for row in rows] for rows in by_time]
    reverse = [sorted((d, w, t) for s, d, w, t in given if s == user) for user in range(NUM_USERS)]
    assert [sorted(rows) for rows in lists_of(store, 1)] == reverse
    assert store.schema.relations[1].key == ("item", "rev_buys", "user")
    x = torch.cat([part.tables["user", "x"].rows for part in store.parts])
    assert torch.equal(x, features(torch.arange(NUM_USERS)))
    assert store.split("train").tolist() == [0, 5, 42, 99]
    weights = torch.cat([part.lists[0].weight for part in store.parts])
    assert torch.equal(weights, torch.cat([part.tables[KEY, "w"].rows for part in store.parts]))


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("room", [1 << 30, 4096])
def test_the_bytes_do_not_depend_on_order_or_memory(tmp_path: Path, timed: bool, room: int) -> None:
    options = {"weight": "w", "time": "t" if timed else None}
    given = edges()
    build(tmp_path / "a", node_streams(2), [bought(given, EdgeRule(reverse="rev"))], **options)
    random.Random(3).shuffle(given)
    order = shuffled(NUM_USERS, 1)
    streams = [bought(given, EdgeRule(reverse="rev"), 77)]
    build(tmp_path / "b", node_streams(2, order), streams, **options, memory=1, least_memory=room)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_lists_in_order_keep_the_order_in_which_edges_come(tmp_path: Path) -> None:
    given = edges()
    streams, little = [bought(given, EdgeRule(in_order=True))], {"memory": 1, "least_memory": 2048}
    store = build(tmp_path / "s", node_streams(2), streams, **little)
    assert lists_of(store) == [[(s, w, t) for s, d, w, t in given if d == item] for item in range(NUM_ITEMS)]
    timed = build(tmp_path / "t", node_streams(2), streams, **little, time="t")
    by_time = [sorted(rows, key=lambda row: row[2]) for rows in lists_of(store)]  # stable
    assert lists_of(timed) == by_time


@pytest.mark.parametrize("in_order", [True, False])
def test_of_edges_with_the_same_ends_the_first_of_the_list_stays(tmp_path: Path, in_order: bool) -> None:
    given = edges()
    kept = build(tmp_path / "s", node_streams(), [bought(given, EdgeRule(in_order=in_order))], time="t")
    first = [bought(given, EdgeRule(in_order=in_order, deduplicate=True))]
    once = build(tmp_path / "d", node_streams(), first, time="t")
    expected = []
    for found in lists_of(kept):
        first: dict[int, tuple[int, float, int]] = {}
        for row in found:
            first.setdefault(row[0], row)
        expected.append(list(first.values()))
    assert lists_of(once) == expected
    assert once.schema.relations[0].num_edges == len({edge[:2] for edge in given}) < NUM_EDGES


def ring_edges(count: int) -> Iterator[EdgeRows]:
    ids = torch.arange(count)
    yield EdgeRows(torch.cat([ids, ids]), torch.cat([(ids + 1) % count, ids]), {})  # a ring, and a loop each


@pytest.mark.parametrize(("drop", "expected"), [(True, [1, 9]), (False, [0, 1, 9])])
def test_undirected_edges_lead_both_ways_and_loops_once(tmp_path: Path, drop: bool, expected: list[int]) -> None:
    rule = EdgeRule(undirected=True, drop_loops=drop)
    stream = EdgeStream(("node", "to", "node"), {}, lambda: ring_edges(10), rule)
    store = build(tmp_path / "s", [NodeStream("node", [0, 10])], [stream], homogeneous=True)
    lists = store.parts[0].lists[0]
    assert lists.indices[: lists.indptr[1]].tolist() == expected
    assert store.schema.relations[0].num_edges == 10 * len(expected)


def test_times_of_source_nodes_order_the_lists(tmp_path: Path) -> None:
    given = [(s, d, w, 0) for s, d, w, _ in edges()]
    nodes = node_streams(2)
    ids = torch.arange(NUM_USERS)
    late_first = NodeFields({"when": TIME}, lambda: iter([Rows(ids, {"when": -ids})]))
    nodes[0] = NodeStream("user", nodes[0].bounds, [late_first])
    store = build(tmp_path / "s", nodes, [bought(given, EdgeRule())], time="when")
    sources = [[row[0] for row in rows] for rows in lists_of(store)]
    assert sources == [sorted((s for s, d, _, _ in given if d == item), reverse=True) for item in range(NUM_ITEMS)]


def test_empty_parts_types_and_relations(tmp_path: Path) -> None:
    nodes = [NodeStream("user", [0, 0, 2, 2]), NodeStream("item", [0, 0, 0, 0])]
    streams = [
        EdgeStream(KEY, {}, lambda: iter([])),
        EdgeStream(("user", "knows", "user"), {}, lambda: iter([EdgeRows(torch.tensor([1]), torch.tensor([0]), {})])),
    ]
    store = build(tmp_path / "s", nodes, streams)
    assert [part.num_nodes for part in store.parts] == [(0, 0), (2, 0), (0, 0)]
    assert [relation.num_edges for relation in store.schema.relations] == [0, 1]


@pytest.mark.parametrize("direct", [True, False])
def test_a_node_that_comes_twice_or_never_is_an_error(tmp_path: Path, direct: bool) -> None:
    for ids in ([0, 1, 2, 2], [0, 1, 2], [1, 0, 2], [0, 1, 2, 3, 4]):
        order = torch.tensor(ids if direct else ids[::-1])
        block = NodeFields({"x": X}, lambda order=order: iter([Rows(order, {"x": features(order)})]))  # type: ignore[misc]
        with pytest.raises(DataError, match=r"node|rows"):
            build(tmp_path / "s", [NodeStream("user", [0, 4], [block])], [])
        assert list(tmp_path.iterdir()) == []


def test_bad_edges_name_the_id(tmp_path: Path) -> None:
    for source, destination, wrong in ((100, 0, "id 100"), (-1, 0, "id -1"), (0, 37, "id 37"), (0, -3, "id -3")):
        row = [(source, destination, 0.0, 0)]
        with pytest.raises(DataError, match=rf"{wrong}.*out of range"):
            build(tmp_path / "s", node_streams(), [bought(row, EdgeRule())])
    with pytest.raises(DataError, match=r"weight -1\.0"):
        build(tmp_path / "s", node_streams(), [bought([(0, 0, -1.0, 0)], EdgeRule())], weight="w")
    with pytest.raises(ConfigError, match="cannot be undirected"):
        build(tmp_path / "s", node_streams(), [bought([], EdgeRule(undirected=True))])
    assert list(tmp_path.iterdir()) == []


def test_a_split_names_a_member_twice(tmp_path: Path) -> None:
    stream = NodeStream("user", [0, 5], splits={"train": lambda: iter([torch.tensor([1, 3]), torch.tensor([3])])})
    with pytest.raises(DataError, match="split 'train' of 'user': node 3 came twice"):
        build(tmp_path / "s", [stream], [])


def test_a_full_disk_leaves_nothing(small_disk: object, tmp_path: Path) -> None:
    disk = small_disk("size=48k")  # type: ignore[operator]
    with pytest.raises(StoreError, match="the disk is full writing"):
        build(disk / "s", node_streams(), [bought(edges(), EdgeRule())], memory=1, least_memory=1024)
    assert list(disk.iterdir()) == []


def test_a_spool_splits_a_bucket_that_is_too_large(tmp_path: Path) -> None:
    keys = torch.cat([shuffled(5000, number) for number in range(3)])
    with Spool(tmp_path / "spool", [0, 5000], 8, 1 << 15) as spool:
        for piece in keys.split(700):
            spool.add(piece, [(piece * 3).view(-1, 1).view(torch.uint8)])
        buckets = list(spool.buckets())
        assert max(bucket.records.numel() for bucket in buckets) <= 1 << 12
        found = torch.cat([one.records[:, :4].contiguous().view(torch.int32).view(-1) + one.first for one in buckets])
        values = torch.cat([bucket.records[:, 4:].contiguous().view(torch.int64).view(-1) for bucket in buckets])
        assert torch.equal(values, found.to(torch.int64) * 3)
        assert torch.equal(torch.sort(found).values, torch.arange(5000, dtype=torch.int32).repeat_interleave(3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_rows_of_another_dtype_or_number_are_refused_in_any_order(tmp_path: Path, order: list[int]) -> None:
    ids = torch.tensor(order)
    for values in (torch.tensor([1.7, 300, 2, 3], dtype=torch.float64), torch.zeros(3, dtype=torch.int8)):
        block = NodeFields({"f": Field("int8")}, lambda values=values: iter([Rows(ids, {"f": values})]))  # type: ignore[misc]
        with pytest.raises(DataError, match="field 'f' came as"):
            build(tmp_path / "s", [NodeStream("user", [0, 4], [block])], [])


def test_many_parts_take_few_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 24, hard))
    try:
        nodes, stream = node_streams(40, shuffled(NUM_USERS, 1)), bought(edges(), EdgeRule(reverse="rev"))
        store = build(tmp_path / "s", nodes, [stream], weight="w", time="t", memory=1, least_memory=4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(store.parts) == 40
    assert store.split("train").tolist() == [0, 5, 42, 99]
