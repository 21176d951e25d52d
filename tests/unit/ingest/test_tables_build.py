"""Stores from tables hold what the tables say, whatever the ids; bad tables are refused with file, row and value."""

import datetime
import json
import math
import re
from collections import Counter
from fractions import Fraction
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

import hoploom
from hoploom.cli import main
from hoploom.errors import DataError, HoploomError
from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import parse_graph
from hoploom.ingest.tables.ids import padded
from hoploom.ingest.tables.transforms import UNIT, exact_sum
from hoploom.schema import ORIGINAL_ID, Field
from hoploom.store.format import Manifest, manifest_from_json, manifest_to_json
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
        split = "split = { train = 0.6, val = 0.1, rest = 0.3 }"
        text = f"[graph]\nseed = {seed}\n" + NODES.split("features")[0] + split
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
    columns.size.fill = 7
    columns.colour = { fill = "red", categories = "one-hot" }
    columns.grade.cast = "float32"
    columns.venue.categories = "codes"
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
    columns = { big.standardise = true, same.standardise = true, list.standardise = true }
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
    edges = {"src": ["a", "x", "b", "a"], "dst": ["b", "a", "y", "a"], "f": [1, 2, 3, 4]}
    write_table(tmp_path / "edges.parquet", edges)
    store, report = build_here(tmp_path, NODES.split("features")[0] + EDGES + 'features = "f"', drop_dangling=True)
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


IDS_ALONE = {"id": ["a", "b", "c"]}
ENDS = {"src": ["a", "b", "c"], "dst": ["b", "c", "a"]}


def text(nodes: str = "", edges: str = "", more: str = "") -> str:
    return f"""
[nodes.node]
files = ["n-0.parquet", "n-1.parquet"]
id = "id"
{nodes}
[edges."node to node"]
files = "e.parquet"
source = "src"
destination = "dst"
{edges}
{more}
"""


def refused(folder: Path, graph: str, nodes: Any, edges: Any = ENDS, **options: Any) -> str:
    write_table(folder / "n.parquet", nodes, files=2 if len(nodes["id"]) else 1)
    write_table(folder / "e.parquet", edges)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(HoploomError) as caught:
        build_here(folder, graph, **options)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize("drop", [False, True])
def test_null_ids(tmp_path: Path, drop: bool) -> None:
    message = refused(tmp_path, text(), {"id": ["a", "b", "c", None]}, drop_dangling=drop)
    assert message == "n-1.parquet, row 2: column 'id' of nodes.node has a null; give every node an id"
    message = refused(tmp_path, text(), {"id": [1, None, None, 4]}, {"src": [1], "dst": [4]})
    where = "n-0.parquet, row 2: column 'id' of nodes.node"
    assert message == f"{where} has 2 nulls, this is the first; give every node an id"
    message = refused(tmp_path, text(), IDS_ALONE, {"src": ["a", "a"], "dst": ["a", None]}, drop_dangling=drop)
    assert message.startswith("e.parquet, row 2: column 'dst' of edges.\"node to node\" has a null; give every edge")


@pytest.mark.parametrize("as_text", [False, True])
def test_duplicate_ids(tmp_path: Path, as_text: bool) -> None:
    def of(values: list[int]) -> list[Any]:
        return [f"v{value}" for value in values] if as_text else values

    ids = of([1, 2, 5, 2, 9, 1])
    message = refused(tmp_path, text(), {"id": ids}, {"src": ids, "dst": ids})
    listed = f"{ids[0]!r} (again in n-1.parquet, row 3), {ids[1]!r} (again in n-1.parquet, row 1)"
    assert message == f"column 'id' of nodes.node: 2 ids have more than one row: {listed}; keep one row each"
    dense = of([0, 1, 2, 2, 4])  # as many rows as an unbroken range would have
    message = refused(tmp_path, text(), {"id": dense}, {"src": ids[:2], "dst": ids[:2]})
    assert "an id has more than one row" in message


@pytest.mark.parametrize("of", [lambda v: v, lambda v: v * v * 7, lambda v: f"v{v}"], ids=["dense", "sparse", "text"])
def test_edges_of_unknown_nodes(tmp_path: Path, of: Any) -> None:
    nodes = [of(v) for v in range(4)]
    unknown = [of(v) for v in range(4, 11)]
    edges = {"src": [nodes[0]] * 9, "dst": [nodes[1], *reversed(unknown), unknown[0]]}
    message = refused(tmp_path, text(), {"id": nodes}, edges)
    ascending = sorted(unknown)
    rows = {value: edges["dst"].index(value) + 1 for value in unknown}
    listed = ", ".join(f"{value!r} (e.parquet, row {rows[value]})" for value in ascending[:5])
    what = "edges.\"node to node\": 8 edges end at ids that nodes.node does not have: column 'dst' holds"
    assert message == f"{what} {listed} and 2 more; add them to nodes.node, or pass --drop-dangling"
    message = refused(tmp_path, text(), {"id": nodes}, {"src": [unknown[0]], "dst": [nodes[0]]})
    assert "1 edge begins at ids that nodes.node does not have" in message


def test_ids_of_other_types(tmp_path: Path) -> None:
    message = refused(tmp_path, text(), {"id": [1, 2, 3]}, ENDS)
    assert all(part in message for part in ("string", "int64", "e.parquet"))


F, THREE = 'features = "f"\n', 'label = "f"\nnum_classes = 3'
AT_0, AT_1 = (f"^n-{file}.parquet, row {row}: column 'f' of nodes.node" for file, row in ((0, 2), (1, 1)))
NULL = f"{AT_1} is null; give a value, or fill nulls with columns.f.fill$"
TEXT = "^graph.toml:5: nodes.node.features: column 'f' is string, not a number: n-1.parquet, row 1 holds 'z'; correct"
BAD_COLUMNS = [  # keys, values of f, what is said between ^ and $
    (F, [1, 2, None], NULL),
    (F, [[1, 2], [3, 4], None], NULL),
    (F, [[1, 2], [3], [5, 6]], f"{AT_0} has a list of 1 values, others have 2; give lists of one length$"),
    (F, pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), "n-0.parquet, row 2"),
    (THREE, [0, 2, 3], f"{AT_1} holds 3, not in [0, 3)"),
    (THREE, [0, -2, 1], f"{AT_0} holds -2, not in [0, 3)"),
    (F + 'dtype = "int8"', [1, 2, 300], f"{AT_1} holds 300, which does not fit int8"),
    (F + 'dtype = "float16"', [1.0, 1e6, 2.0], f"{AT_0} holds 1000000.0, too large for float16"),
    (F + 'columns.f.cast = "float32"', ["1", "2", "three"], f"{AT_1} cannot be cast to float"),
    (F, ["1", None, "z"], f'{TEXT} it, or give columns.f.categories = "one-hot"$'),
    ('label = "f"', ["1", "2", "3"], 'not a number; but its text reads as one; give columns.f.cast = "float32"$'),
    (F, [datetime.time(1)] * 3, "n-0.parquet, row 1 holds datetime.time(1, 0); write numbers, or leave it out$"),
    ('time = "f"', [0.5, 1, 2], "times are integers or timestamps"),
    (F + 'columns.f.fill = "none"', [1, 2, None], "'none' is no value of a column of int64"),
]


@pytest.mark.parametrize(("keys", "values", "said"), BAD_COLUMNS, ids=[row[2].strip("^$")[-40:] for row in BAD_COLUMNS])
def test_a_value_that_its_column_cannot_have_is_named(tmp_path: Path, keys: str, values: Any, said: str) -> None:
    message = refused(tmp_path, text(keys), IDS_ALONE | {"f": values})
    assert said in f"^{message}$"


def test_edge_features_that_are_null(tmp_path: Path) -> None:
    message = refused(tmp_path, text(edges='weight = "w"'), IDS_ALONE, ENDS | {"w": [1.0, None, 2.0]})
    assert message.startswith("e.parquet, row 2: column 'w' of edges.\"node to node\" is null")


def test_more_parts_than_nodes(tmp_path: Path) -> None:
    assert refused(tmp_path, text(), IDS_ALONE, parts=4) == "parts is 4, but nodes.node has 3 nodes; give at most 3"
    message = refused(tmp_path, text(), {"id": [1, 2, 3]}, {"src": [1], "dst": [2]}, parts=4)
    assert message == "parts is 4, but nodes.node has 3 nodes; give at most 3"
    assert "give 1 to 65536" in refused(tmp_path, text(), IDS_ALONE, parts=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 64 << 20}, "memory is 67 MB"),
        ({"engine": "polars"}, "engine is 'polars'; give one of"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_options_are_looked_at_before_tables(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(HoploomError, match=re.escape(message)):
        build_here(tmp_path, text(), **options)  # no table is there


def test_ids_with_a_zero_byte(tmp_path: Path) -> None:
    message = refused(tmp_path, text(), {"id": ["a", "b", "c\0d"]})
    assert message.startswith("n-1.parquet, row 1: column 'id' of nodes.node holds 'c\\x00d'")


def test_columns_of_edges_are_standardised_over_all_rows(tmp_path: Path) -> None:
    """The numbers are in the schema, so that new edges can be treated alike. NaN stays, and does not count."""
    values = [1.0, 2.0, 3.0, float("nan"), 6.0, 1e12]
    write_table(tmp_path / "nodes.parquet", {"id": [0, 1]})
    given = {"src": [0, 1, 0, 1, 0, 1], "dst": [1, 0, 1, 0, 1, 0], "w": values, "raw": values, "same": [0.1] * 6}
    write_table(tmp_path / "edges.parquet", given)
    more = """features = ["w", "raw", "same"]
    columns = { w.standardise = true, same.standardise = true }
    """
    nodes = '[nodes.node]\nfiles = "nodes.parquet"\nid = "id"\n'
    store, _ = build_here(tmp_path, nodes + EDGES + more)
    known = np.array([value for value in values if value == value])
    found = field(store, ("node", "to", "node"), "edge_attr").double().numpy()
    wanted = (np.array(values) - known.mean()) / known.std()
    np.testing.assert_allclose(np.sort(found[:, 0]), np.sort(wanted), rtol=1e-6)
    np.testing.assert_allclose(np.sort(found[:, 1]), np.sort(values), rtol=1e-6)
    assert found[:, 2].tolist() == [0.0] * 6
    stored = store.schema.relations[0].fields["edge_attr"]
    assert stored.mean == (pytest.approx(known.mean()), 0.0, 0.1)  # "raw" is as it was: less 0, over 1
    assert stored.deviation == (pytest.approx(known.std()), 1.0, 1.0)
    back = found * stored.deviation + stored.mean
    np.testing.assert_allclose(np.sort(back[:, 0]), np.sort(values), rtol=1e-6, atol=known.std() * 1e-6)


def test_every_copy_of_a_store_keeps_the_means_and_deviations(tmp_path: Path, capsys: Any) -> None:
    write_table(tmp_path / "nodes.parquet", {"id": [0, 1, 2, 3], "year": [2000, 2010, 2000, 2010], "raw": [1.0] * 4})
    write_table(tmp_path / "edges.parquet", {"src": [0, 1], "dst": [1, 0], "w": [2.0, 6.0]})
    text = """[nodes.node]\nfiles = "nodes.parquet"\nid = "id"\nfeatures = ["raw", "year"]
    columns = { year.standardise = true }
    """
    more = 'fields = { w = "w" }\ncolumns = { w.standardise = true }\n'
    store, _ = build_here(tmp_path, text + EDGES + more)
    hoploom.partition(store, tmp_path / "two", 2)
    hoploom.open(tmp_path / "two").save(tmp_path / "saved")
    sent = manifest_to_json(Manifest(store.schema, store.ranges, {}))
    for schema in (hoploom.open(tmp_path / "saved").schema, manifest_from_json(json.loads(sent)).schema):
        assert schema.node_types[0].fields["x"] == Field("float32", (2,), (0.0, 2005.0), (1.0, 5.0))
        assert schema.relations[0].fields["w"] == Field("float32", (), (4.0,), (2.0,))
    assert main(["info", str(tmp_path / "two")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["node", "x", "1", "2005", "5"] in lines
    assert ["node", "to", "node", "w", "0", "4", "2"] in lines
    assert main(["info", "--json", str(tmp_path / "two")]) == 0
    (described,) = json.loads(capsys.readouterr().out)["node_types"]
    assert described["fields"]["x"] == {"dtype": "float32", "shape": [2], "mean": [0, 2005], "deviation": [1, 5]}


def test_sums_are_exact_in_any_order() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal(2000) * 10.0 ** rng.integers(-300, 140, 2000)
    values = np.concatenate([values, [5e-324, -0.0, 1e145, -1e145]])
    expected = sum(map(Fraction, values.tolist()))
    for shuffled_values in (values, rng.permutation(values)):
        assert Fraction(exact_sum(shuffled_values), 1 << UNIT) == expected
    assert exact_sum(np.array([])) == 0


def test_tables_without_rows(tmp_path: Path) -> None:
    empty = {"id": pa.array([], pa.string())}
    assert "no rows" in refused(tmp_path, text().replace('["n-0.parquet", "n-1.parquet"]', '"n.parquet"'), empty)


@pytest.mark.parametrize("name", ["n-1.parquet", "e.parquet"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    ids = [f"node-{v * 7919 % 1000:010d}" for v in range(1000)]
    write_table(tmp_path / "n.parquet", {"id": ids}, files=2)
    write_table(tmp_path / "e.parquet", {"src": ids, "dst": ids})
    content = bytearray((tmp_path / name).read_bytes())
    content[1000:1400] = b"\xff" * 400
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: column '\w+' cannot be read: .*; write it again"):
        build_here(tmp_path, text())
    assert not (tmp_path / "out.store").exists()
