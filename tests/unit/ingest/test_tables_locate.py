"""Ids of one kind at both ends, features beside the table, and where a value stands."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hoploom import ConfigError, DataError, HoploomError
from hoploom.ingest.tables.graph_file import GraphFile, NodeTable, parse_graph
from hoploom.ingest.tables.sources import TableSource, read_sources
from hoploom.ingest.tables.table_files import largest_value

ENDS = '[edges."a to b"]\nfiles = "e.parquet"\nsource = "s"\ndestination = "d"\n'
TABLES = f'[nodes.a]\nfiles = "a.parquet"\nid = "id"\n[nodes.b]\ncount = 5\n{ENDS}'


def _sources(folder: Path, text: str = TABLES, **columns: Any) -> dict[str, TableSource]:
    """Tables a (id) and e (s, d)."""
    given = {"id": [1, 2], "s": [1], "d": [4]} | columns
    pq.write_table(pa.table({"id": given["id"]}), folder / "a.parquet")
    pq.write_table(pa.table({"s": given["s"], "d": given["d"]}), folder / "e.parquet")
    scratch = folder / f"scratch{len(list(folder.glob('scratch*')))}"
    scratch.mkdir()
    return dict(read_sources(parse_graph(text, folder=folder), scratch))


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int16(), pa.uint32(), pa.int64(), pa.uint64()], ids=str)
def test_integers_of_any_width_are_ids(tmp_path: Path, kind: pa.DataType) -> None:
    sources = _sources(tmp_path, id=pa.array([1, 2], kind))
    assert list(sources) == ["nodes.a", 'edges."a to b"']  # a count has no file


TEXT = pa.array(["1"])
AT_NODES = ("a.parquet is int64; cast one", '[nodes.a.columns.id] cast = "string"')
AT_EDGES = '[edges."a to b".columns.s] cast = "string"'
BEYOND = pa.array([1, 2**63], pa.uint64())
REFUSED = {  # claim: columns, keys at the end, error, what is said
    "fractions": ({"id": [1.5]}, "", ConfigError, "graph.toml:3: nodes.a.id: column id of ", " is double; ids are"),
    "truths": ({"d": [True]}, "", ConfigError, 'edges."a to b".destination: column d of ', " is bool; ids are"),
    "text at edges": (
        {"s": TEXT},
        "",
        ConfigError,
        "s of ",
        "e.parquet is string, but for nodes.a column id of ",
        *AT_NODES,
    ),
    "text at the nodes": ({"id": TEXT}, "", ConfigError, "e.parquet is int64", "is string", AT_EDGES),
    "text at a count": ({"d": TEXT}, "", ConfigError, "but nodes.b has a count, so its ids are integers"),
    "some text": ({"id": ["1", "x"]}, "", ConfigError, "a.parquet is string (", "a.parquet, row 2 holds 'x'); cast"),
    "text cast": ({"id": TEXT}, '[nodes.a.columns]\nid.cast = "int64"', ConfigError, "graph.toml:11: ", "only CSV is"),
    "too large": ({"id": BEYOND}, "", DataError, "a.parquet, row 2: id is 9223372036854775808"),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED.keys())
def test_ids_of_other_kinds_are_refused(tmp_path: Path, row: tuple[Any, ...]) -> None:
    columns, keys, error, *said = row
    with pytest.raises(error) as raised:
        _sources(tmp_path, TABLES + keys, **columns)
    assert isinstance(raised.value, HoploomError)
    assert [part for part in said if part not in str(raised.value)] == [], str(raised.value)


def test_a_cast_makes_ids_the_same(tmp_path: Path) -> None:
    text = TABLES + "[nodes.a.columns]\nid.cast = 'string'\n"
    sources = _sources(tmp_path, text, s=TEXT)
    assert sources["nodes.a"].has_text("id")
    assert sources['edges."a to b"'].has_text("s")


def _two_files(folder: Path) -> TableSource:
    values = [["a", "b", "a"], [None, "b", "c"]]
    for index, rows in enumerate(values):
        table = pa.table({"v": pa.array(rows, pa.string()), "n": range(3 * index, 3 * index + 3)})
        pq.write_table(table, folder / f"{index}.parquet", row_group_size=2)
    paths = tuple(str(folder / f"{index}.parquet") for index in (0, 1))
    schema = pq.read_schema(paths[0])
    return TableSource(GraphFile({}, {}), NodeTable("a"), paths, ("first.csv", "second.csv"), schema, 6)


def test_a_value_is_located_where_it_first_stands_or_comes_again(tmp_path: Path) -> None:
    source = _two_files(tmp_path)
    assert source.locate("v", ["c", "a", "z", None], most_rows=2) == {
        "a": "first.csv, row 1",
        None: "second.csv, row 1",
        "c": "second.csv, row 3",
    }
    assert source.locate("v", ["b", "a", "c"], skip=1, most_rows=2) == {
        "a": "first.csv, row 3",
        "b": "second.csv, row 2",
    }
    assert source.locate("n", [4]) == {4: "second.csv, row 2"}
    assert source.locate("n", ["4"]) == {"4": "second.csv, row 2"}


@pytest.mark.parametrize("statistics", [True, False])
def test_the_footer_tells_the_largest_integer(tmp_path: Path, statistics: bool) -> None:
    path, values = tmp_path / "ids.parquet", pa.array([3, None, 2**63, None, None, 5], pa.uint64())
    pq.write_table(pa.table({"x": values, "y": values}), path, row_group_size=2, write_statistics=statistics)
    assert largest_value(str(path), "y") == (2**63 if statistics else 2**64)
    pq.write_table(pa.table({"y": values[4:]}), path, write_statistics=statistics)
    assert largest_value(str(path), "y") == (5 if statistics else 2**64)


def test_ids_are_not_read_where_the_footer_tells_that_they_fit(tmp_path: Path) -> None:
    path = tmp_path / "n.parquet"
    pq.write_table(pa.table({"id": pa.array(range(1 << 20), pa.uint64())}), path, compression="none")
    footer = int.from_bytes(path.read_bytes()[-8:-4], "little") + 8
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size - footer))  # what stands before the footer cannot be read now
    nodes = '[nodes.n]\nfiles = "n.parquet"\nid = "id"\n'
    edges = '[edges."n to n"]\nfiles = "n.parquet"\nsource = "id"\ndestination = "id"\n'
    source = read_sources(parse_graph(nodes + edges, folder=tmp_path), tmp_path)["nodes.n"]
    assert source.num_rows == 1 << 20
    with pytest.raises(DataError, match="cannot be read"):
        next(source.scan("id"))
