"""Bad tables: an error that names file, row and value and the way out, and nothing half-written."""

import datetime
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.tables import build_here, write_table

from hoploom.errors import DataError, HoploomError

pytestmark = pytest.mark.usefixtures("no_sync")

NODES = {"id": ["a", "b", "c"]}
EDGES = {"src": ["a", "b", "c"], "dst": ["b", "c", "a"]}


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


def refused(folder: Path, graph: str, nodes: Any, edges: Any = EDGES, **options: Any) -> str:
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
    message = refused(tmp_path, text(), NODES, {"src": ["a", "a"], "dst": ["a", None]}, drop_dangling=drop)
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
    message = refused(tmp_path, text(), {"id": [1, 2, 3]}, EDGES)
    assert all(part in message for part in ("string", "int64", "e.parquet"))


def test_features_that_are_null_or_uneven(tmp_path: Path) -> None:
    wanted = text('features = ["f"]')
    message = refused(tmp_path, wanted, NODES | {"f": [1, 2, None]})
    way_out = "give a value, or fill nulls with columns.f.fill"
    assert message == f"n-1.parquet, row 1: column 'f' of nodes.node is null; {way_out}"
    message = refused(tmp_path, wanted, NODES | {"f": [[1, 2], [3], [5, 6]]})
    uneven = "has a list of 1 values, others have 2; give lists of one length"
    assert message == f"n-0.parquet, row 2: column 'f' of nodes.node {uneven}"
    message = refused(tmp_path, wanted, NODES | {"f": [[1, 2], [3, 4], None]})
    assert message == f"n-1.parquet, row 1: column 'f' of nodes.node is null; {way_out}"
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    assert "n-0.parquet, row 2" in refused(tmp_path, wanted, NODES | {"f": fixed})


def test_edge_features_that_are_null(tmp_path: Path) -> None:
    message = refused(tmp_path, text(edges='weight = "w"'), NODES, EDGES | {"w": [1.0, None, 2.0]})
    assert message.startswith("e.parquet, row 2: column 'w' of edges.\"node to node\" is null")


def test_labels_out_of_range(tmp_path: Path) -> None:
    message = refused(tmp_path, text('label = "y"\nnum_classes = 3'), NODES | {"y": [0, 2, 3]})
    assert message.startswith("n-1.parquet, row 1: column 'y' of nodes.node holds 3, not in [0, 3)")
    message = refused(tmp_path, text('label = "y"\nnum_classes = 3'), NODES | {"y": [0, -2, 1]})
    assert message.startswith("n-0.parquet, row 2: column 'y' of nodes.node holds -2, not in [0, 3)")


def test_values_that_a_dtype_cannot_hold(tmp_path: Path) -> None:
    message = refused(tmp_path, text('features = "f"\ndtype = "int8"'), NODES | {"f": [1, 2, 300]})
    assert message.startswith("n-1.parquet, row 1: column 'f' of nodes.node holds 300, which does not fit int8")
    message = refused(tmp_path, text('features = "f"\ndtype = "float16"'), NODES | {"f": [1.0, 1e6, 2.0]})
    assert message.startswith("n-0.parquet, row 2: column 'f' of nodes.node holds 1000000.0, too large for float16")
    cast = '[nodes.node.columns.f]\ncast = "float32"'
    message = refused(tmp_path, text('features = "f"', more=cast), NODES | {"f": ["1", "2", "three"]})
    assert message.startswith("n-1.parquet, row 1: column 'f' of nodes.node cannot be cast to float")


def test_columns_that_are_no_numbers(tmp_path: Path) -> None:
    message = refused(tmp_path, text('features = "f"'), NODES | {"f": ["1", None, "z"]})
    what = "graph.toml:5: nodes.node.features: column 'f' is string, not a number: n-1.parquet, row 1 holds 'z'"
    assert message == f'{what}; correct it, or give columns.f.categories = "one-hot"'
    message = refused(tmp_path, text('label = "f"'), NODES | {"f": ["1", "2", "3"]})
    assert message.endswith('not a number; but its text reads as one; give columns.f.cast = "float32"')
    times = [datetime.time(hour) for hour in (1, 2, 3)]
    message = refused(tmp_path, text('features = "f"'), NODES | {"f": times})
    assert message.endswith("n-0.parquet, row 1 holds datetime.time(1, 0); write numbers, or leave it out")
    assert "times are integers or timestamps" in refused(tmp_path, text('time = "f"'), NODES | {"f": [0.5, 1, 2]})


def test_a_fill_that_is_no_value_of_the_column(tmp_path: Path) -> None:
    more = '[nodes.node.columns.f]\nfill = "none"'
    message = refused(tmp_path, text('features = "f"', more=more), NODES | {"f": [1, 2, None]})
    assert "'none' is no value of a column of int64" in message


def test_more_parts_than_nodes(tmp_path: Path) -> None:
    assert refused(tmp_path, text(), NODES, parts=4) == "parts is 4, but nodes.node has 3 nodes; give at most 3"
    message = refused(tmp_path, text(), {"id": [1, 2, 3]}, {"src": [1], "dst": [2]}, parts=4)
    assert message == "parts is 4, but nodes.node has 3 nodes; give at most 3"
    assert "give 1 to 65536" in refused(tmp_path, text(), NODES, parts=0)


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


def test_standardised_edge_features(tmp_path: Path) -> None:
    more = '[edges."node to node".columns.w]\nstandardise = true'
    message = refused(tmp_path, text(edges='features = "w"', more=more), NODES, EDGES | {"w": [1.0, 2.0, 3.0]})
    assert "only columns of nodes are standardised" in message


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
