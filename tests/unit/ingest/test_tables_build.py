"""Stores from tables hold what the tables say, whatever the ids are; checked against plain dictionaries."""

import datetime
import math
from collections import Counter
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.stores import contents
from support.tables import (
    EDGES,
    IDS,
    NODES,
    build_here,
    by_id,
    edges_of,
    field,
    graph,
    original,
    shuffled,
    write_graph,
    write_table,
)

from hoploom.errors import DataError
from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import parse_graph
from hoploom.ingest.tables.ids import padded
from hoploom.ingest.tables.transforms import Moments, moments_of
from hoploom.schema import ORIGINAL_ID
from hoploom.train.tasks import NodeClassification

pytestmark = pytest.mark.usefixtures("no_sync")


@pytest.mark.parametrize(
    ("name", "parts"),
    [("dense", 1), ("from 100", 1), ("text", 1), ("dense", 3), ("sparse", 3), ("wide", 3), ("text", 3)],
)
def test_a_store_holds_what_the_tables_say(tmp_path: Path, name: str, parts: int) -> None:
    nodes, edges = graph(IDS[name])
    write_graph(tmp_path, IDS[name], seed=3)
    store, report = build_here(tmp_path, NODES, parts=parts)
    assert len(store.parts) == parts
    assert report.nodes == {"node": 40}
    assert sorted(original(store), key=str) == sorted(nodes["id"], key=str)
    rows = zip(nodes["year"], nodes["emb"], strict=True)
    assert by_id(store, "x") == {i: [y, *e] for i, (y, e) in zip(nodes["id"], rows, strict=True)}
    labels = zip(nodes["id"], nodes["venue"], strict=True)
    assert by_id(store, "y") == {i: -1 if label is None else label for i, label in labels}
    assert by_id(store, "time") == dict(zip(nodes["id"], nodes["published"], strict=True))
    assert by_id(store, "rank") == dict(zip(nodes["id"], nodes["rank"], strict=True))
    ids = original(store)
    for split in ("train", "val", "test"):
        members = {ids[node] for node in store.split(split).tolist()}
        assert members == {i for i, fold in zip(nodes["id"], nodes["fold"], strict=True) if fold == split}
    key = ("node", "to", "node")
    stored = [
        (s, d, *a, w, k)
        for (s, d), a, w, k in zip(
            edges_of(store), *(field(store, key, n).tolist() for n in ("edge_attr", "weight", "kind")), strict=True
        )
    ]
    wanted = zip(*(edges[column] for column in ("src", "dst", "a", "b", "w", "kind")), strict=True)
    assert sorted(stored, key=str) == sorted(((s, d, float(a), b, w, k) for s, d, a, b, w, k in wanted), key=str)


def test_integers_ascend_in_a_part(tmp_path: Path) -> None:
    write_graph(tmp_path, IDS["wide"], seed=1)
    store, _ = build_here(tmp_path, NODES, parts=2)
    for part in store.parts:
        ids = part.tables["node", ORIGINAL_ID].rows.tolist()
        assert ids == sorted(ids)
        assert len({(i % (2**31 - 1)) * 48271 % (2**31 - 1) % 2 for i in ids}) == 1


def test_texts_ascend_by_bucket_and_bytes_in_a_part(tmp_path: Path) -> None:
    write_table(tmp_path / "nodes.parquet", {"id": [f"{v}{'é' * (v % 2)}" for v in range(6000)]})
    write_table(tmp_path / "edges.parquet", {"src": ["0"], "dst": ["2"]})
    store, _ = build_here(tmp_path, NODES.split("features")[0] + EDGES, parts=3)
    ids, found = original(store), list[tuple[int, str, bytes]]()
    for part, bounds in enumerate(store.parts):
        for node in range(bounds.first_nodes[0], bounds.first_nodes[0] + bounds.num_nodes[0]):
            digest = md5(ids[node].encode()).hexdigest()
            assert sum(int(digit, 16) * 16**power for power, digit in enumerate(digest[3:7])) % 3 == part
            found.append((part, digest[:3], ids[node].encode()))
    assert found == sorted(found)


@pytest.mark.parametrize(("name", "parts"), [("dense", 1), ("sparse", 3), ("text", 3)])
def test_order_files_row_groups_and_threads_change_nothing(tmp_path: Path, name: str, parts: int) -> None:
    made = []
    ways = ((None, 1, 1000, 1), (5, 3, 4, 2))
    for index, (seed, files, row_groups, threads) in enumerate(ways):
        folder = tmp_path / str(index)
        folder.mkdir()
        write_graph(folder, IDS[name], seed, files=files, row_groups=row_groups)
        text = NODES + "[nodes.node.columns.year]\nstandardise = true\n"
        build_here(folder, text, parts=parts, threads=threads, memory=(2 + index) << 30)
        made.append(contents(folder / "out.store"))
    assert made[0] == made[1]


def test_types_with_a_count_need_no_table(tmp_path: Path) -> None:
    text = """
    [nodes.paper]
    files = "papers.parquet"
    id = "id"
    [nodes.author]
    count = 6
    [edges."author writes paper"]
    files = "writes.parquet"
    source = "who"
    destination = "what"
    reverse = true
    """
    write_table(tmp_path / "papers.parquet", {"id": ["a", "b", "c"]})
    ends = [(5, "a"), (0, "c"), (3, "a"), (5, "b")]
    write_table(tmp_path / "writes.parquet", {"who": [s for s, _ in ends], "what": [d for _, d in ends]})
    for parts in (1, 2):
        store, _ = build_here(tmp_path, text, out=f"{parts}.store", parts=parts)
        assert sorted(original(store, "author")) == list(range(6))
        assert sorted(edges_of(store, ("author", "writes", "paper"))) == sorted(ends)
        turned = edges_of(store, ("paper", "rev_writes", "author"))
        assert sorted(turned) == sorted((paper, author) for author, paper in ends)


@pytest.mark.parametrize("name", ["sparse", "text"])
def test_shares_are_drawn_by_id_and_seed_alone(tmp_path: Path, name: str) -> None:
    count, drawn = 1000, list[set[Any]]()
    for way, (seed, parts) in enumerate(((0, 1), (0, 4), (1, 1))):
        ids = shuffled({"id": [IDS[name](v) for v in range(count)]}, way)["id"]
        write_table(tmp_path / "nodes.parquet", {"id": ids})
        write_table(tmp_path / "edges.parquet", {"src": ids[:1], "dst": ids[1:2]})
        text = (
            f"[graph]\nseed = {seed}\n" + NODES.split("features")[0] + "split = { train = 0.6, val = 0.1, rest = 0.3 }"
        )
        store, _ = build_here(tmp_path, text + EDGES, out=f"{way}.store", parts=parts)
        members = [set(store.split(split).tolist()) for split in ("train", "val", "rest")]
        assert sum(map(len, members)) == count == len(set.union(*members))
        for share, chosen in zip((0.6, 0.1, 0.3), members, strict=True):  # three deviations of a binomial
            assert abs(len(chosen) - count * share) < 3 * (count * share * (1 - share)) ** 0.5
        own = original(store)
        drawn.append({own[node] for node in members[0]})
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(("name", "none"), [("sparse", None), ("text", None), ("dense", math.nan), ("sparse", -1)])
def test_shares_are_drawn_among_nodes_with_a_label(tmp_path: Path, name: str, none: Any) -> None:
    ids = [IDS[name](v) for v in range(90)]
    write_table(tmp_path / "edges.parquet", {"src": ids[:1], "dst": ids[1:2]})
    keys, members = "split = { train = 0.6, rest = 0.4 }\nlabel = 'y'\n", list[dict[str, set[Any]]]()
    for way, labels in enumerate(([0, 1, 1], [0, 1, none])):
        write_table(tmp_path / "nodes.parquet", {"id": ids, "y": labels * 30})
        store, report = build_here(tmp_path, NODES.split("features")[0] + keys + EDGES, out=f"{way}.store")
        own = original(store)
        members.append({split: {own[node] for node in store.split(split).tolist()} for split in ("train", "rest")})
    known = {own for v, own in enumerate(ids) if v % 3 != 2}
    assert members[1] == {split: nodes & known for split, nodes in members[0].items()}
    stored = "NaN" if none is math.nan else -1
    said = f"nodes.node: 30 of 90 nodes have no label (column 'y' is null or {stored}); they are in no split"
    assert (report.notes, report.unlabelled) == ([said], {"nodes.node": 30})


def test_a_split_column_may_name_nodes_without_a_label_and_the_report_says_so(tmp_path: Path) -> None:
    text = NODES.split("features")[0] + "label = 'y'\nsplit = 's'\n" + EDGES
    write_table(tmp_path / "edges.parquet", {"src": [0], "dst": [1]})
    nodes = {"id": range(4), "y": [1, None, -1, None], "s": ["train", "train", "test", None]}
    write_table(tmp_path / "nodes.parquet", nodes)
    store, report = build_here(tmp_path, text)
    assert store.split("train").tolist() == [0, 1]
    assert report.notes[0].endswith("training refuses a split of column 's' that holds such nodes")
    with pytest.raises(DataError, match=r"^node 1 is a seed with the label y=-1; .*, or leave it out of the split$"):
        NodeClassification(2).check(store, store.split("train"))


def test_columns_are_filled_cast_and_put_into_categories(tmp_path: Path) -> None:
    text = """
    [nodes.node]
    files = "nodes.parquet"
    id = "id"
    features = ["size", "colour", "grade"]
    label = "venue"
    fields = { list = "list" }
    columns.list.fill = 9
    [nodes.node.columns.size]
    fill = 7
    [nodes.node.columns.colour]
    fill = "red"
    categories = "one-hot"
    [nodes.node.columns.grade]
    cast = "float32"
    [nodes.node.columns.venue]
    categories = "codes"
    """
    nodes = {
        "id": [30, 10, 20],
        "size": [None, 1, 2],
        "colour": ["blue", None, "green"],
        "grade": ["1.5", "2", "-3"],
        "venue": ["b", None, "a"],
        "list": [[1, None], None, [3, 4]],
    }
    write_table(tmp_path / "nodes.parquet", nodes)
    write_table(tmp_path / "edges.parquet", {"src": [10], "dst": [20]})
    store, _ = build_here(tmp_path, text + EDGES)  # blue, green, red
    assert by_id(store, "x") == {30: [7, 1, 0, 0, 1.5], 10: [1, 0, 0, 1, 2], 20: [2, 0, 1, 0, -3]}
    assert by_id(store, "y") == {30: 1, 10: -1, 20: 0}
    assert by_id(store, "list") == {30: [1, 9], 10: [9, 9], 20: [3, 4]}


def test_standardised_columns_have_mean_0_and_deviation_1(tmp_path: Path) -> None:
    text = """
    [nodes.node]
    files = "nodes.parquet"
    id = "id"
    features = ["plain", "big", "same"]
    fields = { list = "list" }
    [nodes.node.columns.big]
    standardise = true
    [nodes.node.columns.same]
    standardise = true
    [nodes.node.columns.list]
    standardise = true
    """
    values = [10**12 + (v * 7919) % 1000 for v in range(500)]
    nodes = {
        "id": list(range(0, 1000, 2)),
        "plain": values,
        "big": values,
        "same": [0.1] * 500,
        "list": [[float(v), 2.0 * v] for v in range(500)],
    }
    write_table(tmp_path / "nodes.parquet", shuffled(nodes, 4))
    write_table(tmp_path / "edges.parquet", {"src": [0], "dst": [2]})
    store, _ = build_here(tmp_path, text + EDGES)
    wanted = np.array(values, np.float64)
    wanted = (wanted - wanted.mean()) / wanted.std()
    x = field(store, "node", "x")
    assert x.dtype == torch.float32
    assert torch.allclose(x[:, 1], torch.from_numpy(wanted).float(), atol=1e-6)
    assert torch.equal(x[:, 0], torch.tensor(values).float())
    assert torch.equal(x[:, 2], torch.zeros(500))
    listed = field(store, "node", "list").double()
    assert torch.allclose(listed.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(listed.std(0, correction=0), torch.ones(2, dtype=torch.float64), atol=1e-6)


def test_texts_are_padded_wherever_they_begin_in_memory() -> None:
    texts = pa.array(["left out", "é", "", "abc", "left out"]).slice(1, 3)
    assert [bytes(row) for row in padded(texts, 4).tolist()] == ["é".encode() + b"\0\0", b"\0" * 4, b"abc\0"]


def test_moments_of_chunks_are_those_of_the_whole() -> None:
    values = np.random.default_rng(0).normal(1e6, 3, (1000, 3))
    values[::3, 1] = np.nan
    values[:, 2] = 0.1
    moments = Moments(3)
    for begin, end in ((0, 1), (1, 1), (1, 300), (300, 1000)):
        moments.add(moments_of(values[begin:end]))
    assert np.allclose(moments.centre, np.nanmean(values, axis=0), rtol=1e-12)
    assert np.allclose(moments.deviation[:2], np.nanstd(values, axis=0)[:2], rtol=1e-9)
    assert (moments.centre[2], moments.deviation[2]) == (0.1, 1)


def test_times_and_dates_are_integers(tmp_path: Path) -> None:
    when = [datetime.datetime(1970, 1, 1, 0, 0, v) for v in range(3)]
    nodes = {"id": [0, 1, 2], "at": when, "day": pa.array([0, 1, 2], pa.date32())}
    write_table(tmp_path / "nodes.parquet", nodes)
    write_table(tmp_path / "edges.parquet", {"src": [0, 1], "dst": [1, 2]})
    text = NODES.split("features")[0] + 'time = "at"\nfields = { day = "day" }\n'
    store, _ = build_here(tmp_path, text + EDGES)
    assert field(store, "node", "time").tolist() == [0, 10**6, 2 * 10**6]
    assert field(store, "node", "day").tolist() == [0, 86400 * 10**6, 2 * 86400 * 10**6]
    assert store.schema.time == "time"


def test_dangling_edges_are_dropped_and_counted(tmp_path: Path) -> None:
    write_table(tmp_path / "nodes.parquet", {"id": ["a", "b"]})
    write_table(
        tmp_path / "edges.parquet", {"src": ["a", "x", "b", "a"], "dst": ["b", "a", "y", "a"], "f": [1, 2, 3, 4]}
    )
    text = NODES.split("features")[0]
    store, report = build_here(tmp_path, text + EDGES + 'features = "f"', drop_dangling=True)
    assert sorted(edges_of(store)) == [("a", "a"), ("a", "b")]
    assert sorted(field(store, ("node", "to", "node"), "edge_attr").flatten().tolist()) == [1, 4]
    assert list(report.dropped.values()) == [2]
    assert list(report.edges.values()) == [4]


def test_loops_repeated_edges_and_directions(tmp_path: Path) -> None:
    write_table(tmp_path / "nodes.parquet", {"id": [10, 20, 30]})
    ends = [(10, 20), (10, 20), (20, 20), (30, 10)]
    write_table(tmp_path / "edges.parquet", {"src": [s for s, _ in ends], "dst": [d for _, d in ends]})
    rules = {
        "deduplicate = true": {(10, 20): 1, (20, 20): 1, (30, 10): 1},
        'self_loops = "drop"': {(10, 20): 2, (30, 10): 1},
        "undirected = true": {(10, 20): 2, (20, 10): 2, (20, 20): 1, (30, 10): 1, (10, 30): 1},
    }
    nodes = NODES.split("features")[0]
    for index, (rule, wanted) in enumerate(rules.items()):
        store, _ = build_here(tmp_path, nodes + EDGES + rule, out=f"{index}.store")
        assert Counter(edges_of(store)) == wanted
        assert store.schema.homogeneous
        assert store.schema.relations[0].reverse == ("to" if rule == "undirected = true" else None)
    store, _ = build_here(tmp_path, nodes + EDGES + 'reverse = "back"')
    assert not store.schema.homogeneous
    assert [relation.reverse for relation in store.schema.relations] == ["back", "to"]
    assert Counter(edges_of(store, ("node", "back", "node"))) == Counter((d, s) for s, d in ends)


def test_progress_and_seconds_name_the_stages(tmp_path: Path) -> None:
    write_graph(tmp_path, IDS["text"])
    told: list[str] = []
    report = build(parse_graph(NODES, folder=tmp_path), tmp_path / "out.store", BuildOptions(), progress=told.append)
    assert told[:2] == ["reading the tables", "numbering the nodes"]
    assert set(report.seconds) == set(told)
    assert all(seconds >= 0 for seconds in report.seconds.values())


def test_ids_that_are_store_ids_are_not_stored_again(tmp_path: Path) -> None:
    for name, kept in (("dense", False), ("from 100", True)):
        (tmp_path / name).mkdir()
        write_graph(tmp_path / name, IDS[name])
        store, _ = build_here(tmp_path / name, NODES)
        assert (ORIGINAL_ID in store.schema.node_types[0].fields) == kept
