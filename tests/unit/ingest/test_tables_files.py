"""Files become Parquet with the same rows and types; what is wrong with one is named with file, row and value."""

import csv
import gzip
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

import hoploom
from hoploom import ConfigError, DataError, HoploomError
from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import parse_graph
from hoploom.ingest.tables.sources import ReadLimits, TableSource, read_sources
from hoploom.ingest.tables.table_files import TableFile, arrow_batches

pytestmark = pytest.mark.usefixtures("no_sync")


NODES = "nodes.node"
EDGES = 'edges."node to node"'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A node table with the ids 0 to 9, and edges from v to v + 1."""
    ids = range(10)
    as_csv(tmp_path / "nodes.csv", {"id": ids, "a": [v / 2 for v in ids], "b": ids})
    as_csv(tmp_path / "edges.csv", {"s": range(9), "d": range(1, 10)})
    return tmp_path


def as_csv(path: Path, columns: Mapping[str, Any], separator: str = ",") -> None:
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join(separator.join(map(str, row)) for row in [columns.keys(), *rows]) + "\n")


def read(
    folder: Path, nodes: str = "", edges: str = "", *, table: str = "nodes.csv", links: str = "edges.csv", **limits: int
) -> Any:
    table, links = (name if name.startswith("[") else f'"{name}"' for name in (table, links))
    ends = 'source = "s"\ndestination = "d"\n'
    text = f'[{NODES}]\nfiles = {table}\nid = "id"\n{nodes}\n[{EDGES}]\nfiles = {links}\n{ends}{edges}\n'
    scratch = folder / f"scratch{len(list(folder.glob('scratch*')))}"
    scratch.mkdir()
    return read_sources(parse_graph(text, folder=folder), scratch, ReadLimits(**limits))


def rows_in(source: TableSource) -> dict[str, list[Any]]:
    tables = [pq.read_table(path).select(source.schema.names) for path in source.paths]
    assert sum(table.num_rows for table in tables) == source.num_rows
    rows: dict[str, list[Any]] = pa.concat_tables(tables).to_pydict()
    return rows


def refused(folder: Path, *said: str, error: type[HoploomError] = DataError, **arguments: Any) -> str:
    with pytest.raises(error) as raised:
        read(folder, **arguments)
    message = str(raised.value)
    assert [part for part in said if part not in message] == [], message
    assert "\n" not in message
    return message


FIELD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@pytest.mark.parametrize("name", ["n.csv", "n.tsv", "n.csv.gz", "n.parquet", "n.arrow", "n.arrows", "n.feather"])
def test_every_format_gives_the_same_rows(folder: Path, name: str) -> None:
    columns = {"id": list(range(10)), "a": [v / 2 for v in range(10)], "unused": ["u"] * 10, "name": ["é"] * 10}
    table = pa.table(columns)
    if name == "n.parquet":
        pq.write_table(table, folder / name)
    elif name == "n.arrow":
        with ipc.new_file(folder / name, table.schema) as file:
            file.write_table(table, max_chunksize=3)
    elif name == "n.arrows":
        with ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=3)
    elif name == "n.feather":
        pyarrow.feather.write_feather(table, folder / name)
    else:
        as_csv(folder / name.removesuffix(".gz"), columns, "\t" if name == "n.tsv" else ",")
        if name.endswith(".gz"):
            (folder / name).write_bytes(gzip.compress((folder / "n.csv").read_bytes()))
    source = read(folder, 'features = "a"\nlabel = "name"', table=name)[NODES]
    assert rows_in(source) == {"id": columns["id"], "name": columns["name"], "a": columns["a"]}
    assert source.num_rows == 10
    assert source.features == ("a",)
    assert source.origins == (str(folder / name),)


def test_parquet_is_read_where_it_lies(folder: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), folder / "n.parquet")
    assert read(folder, table="n.parquet")[NODES].paths == (str(folder / "n.parquet"),)


def test_a_name_that_looks_like_a_pattern_is_read_through_a_link(folder: Path) -> None:
    (folder / "k=1").mkdir()
    pq.write_table(pa.table({"id": [1]}), folder / "k=1" / "n[0].parquet")
    source = read(folder, table="k=1/n[0].parquet")[NODES]
    assert os.path.realpath(source.paths[0]) == str(folder / "k=1" / "n[0].parquet")
    assert not set("=[]") & set(source.paths[0].removeprefix(str(folder)))
    assert source.origins == (str(folder / "k=1" / "n[0].parquet"),)


def test_blocks_and_row_groups_do_not_show(folder: Path) -> None:
    expected = rows_in(read(folder, 'features = ["a", "b"]')[NODES])
    source = read(folder, 'features = ["a", "b"]', csv_block=16, row_group=50)[NODES]
    assert rows_in(source) == expected
    assert pq.ParquetFile(source.paths[0]).num_row_groups > 2


@settings(max_examples=15)
@given(st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=20), st.sampled_from([",", "\t"]), st.integers(16, 64))
def test_text_comes_out_as_the_csv_module_wrote_it(rows: list[tuple[str, str]], separator: str, block: int) -> None:
    with TemporaryDirectory() as name:
        block = 4096 if any(len(a) + len(b) > 6 for a, b in rows) else block
        table = f"n.{'csv' if separator == ',' else 'tsv'}"
        with (Path(name) / table).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=separator).writerows([("id", "a"), *rows])
        (Path(name) / "edges.csv").write_text("s,d\nx,x\n")
        keys = "label = 'a'\ncolumns = { id.cast = 'string', a.cast = 'string' }"
        found = rows_in(read(Path(name), keys, table=table, csv_block=block)[NODES])
    assert found == {"id": [row[0] or None for row in rows], "a": [row[1] or None for row in rows]}


def _shards(folder: Path) -> None:
    (folder / "n" / "more").mkdir(parents=True)
    for name, id in ("n/b.csv", 2), ("n/a.csv", 1), ("n/more/c.csv", 3), ("n/_d.csv", 4), ("n/.e.csv", 5):
        as_csv(folder / name, {"id": [id]})
    (folder / "n" / "README.md").write_text("no table")


LISTED = {
    "n": [1, 2, 3],
    "n/*.csv": [1, 2],
    "n/*": [1, 2, 3],
    "n/**/*.csv": [1, 2, 3],
    '["n/b.csv", "n/a.csv"]': [2, 1],
}


@pytest.mark.parametrize(("files", "ids"), LISTED.items())
def test_files_are_listed_in_one_order(folder: Path, files: str, ids: list[int]) -> None:
    _shards(folder)
    assert rows_in(read(folder, table=files)[NODES])["id"] == ids


def test_a_url_names_a_file_a_folder_or_a_pattern(folder: Path) -> None:
    for name in ("r/b.parquet", "r/a.parquet"):
        (folder / "r").mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": [ord(name[2])]}), folder / name)
    url = f"file://{folder}/r"
    for files, ids in (url, [97, 98]), (f"{url}/*.parquet", [97, 98]), (f"{url}/b.parquet", [98]):
        source = read(folder, table=files)[NODES]
        assert [pq.read_table(path.removeprefix("file://"))["id"].to_pylist()[0] for path in source.paths] == ids
        assert all(path.startswith(url) for path in source.paths)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ("node.csv", 'node.csv does not exist; did you mean "nodes.csv"?'),
        ("m/*.csv", "nodes.node.files: nothing matches /"),
        ("n/README.md", "README.md has no known format; give one of .arrow"),
        ("empty", "empty holds nothing that ends in .arrow, .arrows, .csv"),
        ("file:///not/there", "nodes.node.files: file:///not/there cannot be listed"),
        ("ftp://host/x.csv", "ftp://host/x.csv cannot be listed"),
    ],
)
def test_files_that_are_not_there_are_named(folder: Path, files: str, said: str) -> None:
    _shards(folder)
    (folder / "empty").mkdir()
    assert refused(folder, said, error=ConfigError, table=files).startswith("graph.toml:2: nodes.node.files: ")


def test_a_file_listed_twice_and_a_table_in_two_formats_are_refused(folder: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), folder / "n.parquet")
    refused(folder, "nodes.csv is named twice", error=ConfigError, table='["nodes.csv", "nod*.csv"]')
    refused(folder, "n.parquet is parquet", "nodes.csv is csv", error=ConfigError, table='["nodes.csv", "n.parquet"]')


def test_a_glob_of_features_keeps_the_order_and_leaves_out_other_roles(folder: Path) -> None:
    as_csv(folder / "n.csv", {"f_2": [1], "id": [1], "f_10": [2], "f_y": [3], "g": [4]})
    source = read(folder, 'features = ["g", "f_*", "*"]\nlabel = "f_y"', table="n.csv")[NODES]
    assert source.features == ("g", "f_2", "f_10")
    assert source.schema.names == ["id", "f_y", "g", "f_2", "f_10"]


COLUMNS = [
    ("label = 'q'", "graph.toml:4: nodes.node.label: ", 'nodes.csv has no column "q"; its columns are "id", "a", "b"'),
    ("label = 'A'", "graph.toml:4: nodes.node.label: ", 'did you mean "a"?'),
    ("features = ['a', 'idd']", "nodes.node.features: ", 'no column "idd"; did you mean "id"?'),
    ("features = ['a', 'a']", 'nodes.node.features: "a" is named twice; drop one'),
    ("features = 'f_*'", "no column of", 'matches "f_*"; its columns are'),
    ("fields = { z = 'zz' }", "nodes.node.fields.z: ", 'no column "zz"'),
    ("features = 'a'\ncolumns.b = { fill = 0 }", 'nodes.node.columns.b: no key uses a column "b"; '),
]


@pytest.mark.parametrize(("keys", "said"), [(row[0], row[1:]) for row in COLUMNS], ids=[row[0] for row in COLUMNS])
def test_a_column_that_does_not_exist_is_named(folder: Path, keys: str, said: tuple[str, ...]) -> None:
    refused(folder, *said, error=ConfigError, nodes=keys)


def test_a_column_missing_in_a_later_file_or_there_twice_is_named(folder: Path) -> None:
    as_csv(folder / "nodes2.csv", {"id": [1], "c": [2]})
    refused(folder, 'nodes2.csv has no column "a"', error=ConfigError, nodes="label = 'a'", table="nodes*.csv")
    (folder / "n.csv").write_text("id,a,a\n1,2,3\n")
    refused(folder, 'n.csv has columns "a", "a", which', error=ConfigError, nodes="label = 'a'", table="n.csv")
    (folder / "n.csv").write_text("id;a\n1;2\n")
    refused(folder, 'its only column is "id;a"; write commas', error=ConfigError, nodes="label = 'a'", table="n.csv")
    (folder / "n.csv").write_text("id,a,A\n1,2,3\n")
    refused(folder, 'n.csv has columns "a", "A", which', error=ConfigError, nodes="label = 'A'", table="n.csv")
    assert rows_in(read(folder, table="n.csv")[NODES]) == {"id": [1]}


@pytest.mark.parametrize("name", ["n.csv", "n.arrow", "n.arrows"])
def test_times_are_cut_to_microseconds(folder: Path, name: str) -> None:
    table = pa.table({"id": [1, 2], "t": pa.array([1577836800123456789, 2], pa.timestamp("ns"))})
    if name == "n.csv":
        as_csv(folder / name, {"id": [1, 2], "t": ["2020-01-01 00:00:00.123456789", "1970-01-01 00:00:00.000000002"]})
    else:
        with (ipc.new_file if name == "n.arrow" else ipc.new_stream)(folder / name, table.schema) as file:
            file.write_table(table)
    source = read(folder, "time = 't'", table=name)[NODES]
    assert pq.read_table(source.paths[0])["t"].cast(pa.int64()).to_pylist() == [1577836800123456, 0]


def test_what_goes_wrong_while_an_arrow_file_is_used_is_told_as_it_is(folder: Path) -> None:
    pyarrow.feather.write_feather(pa.table({"id": [1]}), folder / "n.arrow")
    place = TableFile(str(folder / "n.arrow"), "n.arrow", "arrow")
    with pytest.raises(pa.ArrowInvalid, match="of the user of the file"), arrow_batches(place):
        raise pa.ArrowInvalid("of the user of the file")


@pytest.mark.parametrize("name", ["n.parquet", "n.arrow", "n.csv.gz"])
def test_a_file_cut_short_is_named(folder: Path, name: str) -> None:
    table = pa.table({"id": np.random.default_rng(0).integers(0, 2**60, 1000)})
    if name == "n.parquet":
        pq.write_table(table, folder / name)
    elif name == "n.arrow":
        pyarrow.feather.write_feather(table, folder / name)
    else:
        as_csv(folder / "n.csv", table.to_pydict())
        (folder / name).write_bytes(gzip.compress((folder / "n.csv").read_bytes()))
    whole = (folder / name).read_bytes()
    for length in (len(whole) - 9, len(whole) // 2, 3, 0):
        (folder / name).write_bytes(whole[:length])
        refused(folder, name, table=name)


def test_files_of_one_table_with_other_types_are_refused(folder: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), folder / "n0.parquet")
    pq.write_table(pa.table({"id": ["1"]}), folder / "n1.parquet")
    refused(folder, "n1.parquet: id is string, but int64 in ", "n0.parquet", table="n*.parquet")
    pyarrow.feather.write_feather(pa.table({"id": [1]}), folder / "m0.arrow")
    pyarrow.feather.write_feather(pa.table({"id": [1.5]}), folder / "m1.arrow")
    refused(folder, "m1.arrow: id is double, but int64 in ", "m0.arrow", table="m*.arrow")


def test_how_text_is_held_in_memory_makes_no_other_type(folder: Path) -> None:
    for name, kind in ("n0", pa.string()), ("n1", pa.large_string()), ("n2", pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"id": pa.array([1]), "y": pa.array([name]).cast(kind)}), folder / f"{name}.parquet")
        pyarrow.feather.write_feather(pq.read_table(folder / f"{name}.parquet"), folder / f"{name}.arrow")
    for table in ("n*.parquet", "n*.arrow"):
        assert read(folder, "label = 'y'", table=table)[NODES].schema.field("y").type == pa.string()


def test_no_edges_at_all_are_refused_and_a_shard_without_rows_is_not(folder: Path) -> None:
    (folder / "none.csv").write_text("s,d\n")
    refused(folder, 'edges."node to node": there are no rows in', links="none.csv")
    assert read(folder, links='["none.csv", "edges.csv"]')[EDGES].num_rows == 9


@pytest.mark.parametrize(
    ("one", "two"), [("float", "halffloat"), ("timestamp[us]", "timestamp[ms]"), ("date32", "timestamp[us]")]
)
def test_arrow_files_of_a_table_have_the_same_types_of_their_own(folder: Path, one: str, two: str) -> None:
    for name, kind in ("n0.arrow", one), ("n1.arrow", two):
        table = pa.table({"id": [int(name[1])], "a": pa.nulls(1, pa.type_for_alias(kind))})
        with ipc.new_file(folder / name, table.schema) as writer:
            writer.write_table(table)
    refused(folder, "n1.arrow: a is ", "in ", "n0.arrow; write all", nodes="label = 'a'", table="n*.arrow")


TEXTS = ["9223372036854775808", "007,8", "-0", "+1", "0x1F", "1.0,2", "2020-01-01", "true,NA,null,NaN"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        *((text.split(","), text.split(",")) for text in TEXTS),
        (["1", "-2", "0"], [1, -2, 0]),
        (["9223372036854775807"], [2**63 - 1]),
        (["a", '""', "b"], ["a", None, "b"]),
        (["1", '""', "2"], [1, None, 2]),
    ],
    ids=str,
)
def test_ids_are_integers_only_if_each_is_written_so(folder: Path, values: list[str], expected: list[Any]) -> None:
    as_csv(folder / "n.csv", {"id": values, "z": values})
    scratch = folder / "x"
    scratch.mkdir()
    text = f'[{NODES}]\nfiles = "n.csv"\nid = "id"\n[{EDGES}]\nfiles = "n.csv"\nsource = "id"\ndestination = "z"'
    sources = read_sources(parse_graph(text, folder=folder), scratch)
    assert rows_in(sources[NODES])["id"] == expected
    assert rows_in(sources[EDGES]) == {"id": expected, "z": expected}


def test_types_are_those_that_graph_toml_asks_for(folder: Path) -> None:
    as_csv(folder / "n.csv", {"id": ["007", "8"], "a": [1, 2], "b": [1, 2], "c": ["1", "x"], "d": [0, 1], "e": [3, 4]})
    keys = """
        features = ["a", "b", "c", "d"]
        split = "e"
        columns = { id = { cast = "int64" }, b = { categories = "codes" }, d = { cast = "bool" } }
    """
    rows = rows_in(read(folder, keys, table="n.csv")[NODES])
    assert rows == {"id": [7, 8], "e": ["3", "4"], "a": [1.0, 2.0], "b": [1, 2], "c": ["1", "x"], "d": [False, True]}
    assert [type(value) for value in (rows["a"][0], rows["b"][0])] == [float, int]
    rows = rows_in(read(folder, "features = 'a'\ndtype = 'int64'\ncolumns.id.cast = 'int64'", table="n.csv")[NODES])
    assert type(rows["a"][0]) is int


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ([1, 2], ["x", 10], ["1", "2", "x", "10"]),
        ([1, 2], [1.5, ""], [1.0, 2.0, 1.5, None]),
        (["", ""], [1, 2], [None, None, 1, 2]),
        (["2020-01-01"], ["2020-01-01 00:00:00.5"], [datetime(2020, 1, 1), datetime(2020, 1, 1, microsecond=500000)]),
        (["2020-01-01"], [7], ["2020-01-01", "7"]),
    ],
    ids=str,
)
def test_a_type_holds_the_values_of_all_files_whatever_their_order(
    folder: Path, one: list[Any], two: list[Any], expected: list[Any]
) -> None:
    as_csv(folder / "a.csv", {"id": range(len(one)), "y": one})
    as_csv(folder / "b.csv", {"id": range(len(one), len(expected)), "y": two})
    for files in ("a.csv", "b.csv"), ("b.csv", "a.csv"):
        found = read(folder, "label = 'y'", table=str(list(files)).replace("'", '"'))[NODES]
        rows = dict(zip(rows_in(found)["id"], rows_in(found)["y"], strict=True))
        assert repr([rows[id] for id in range(len(expected))]) == repr(expected)  # 1.0 is not 1 here


def test_integers_that_pandas_wrote_as_fractions_are_cast(folder: Path) -> None:
    as_csv(folder / "n.csv", {"id": ["3.0", '""', "1.0"], "y": ["3.0", '""', "1.0"]})
    keys = "label = 'y'\ncolumns = { id = { cast = 'int64' }, y = { cast = 'int64' } }"
    source = read(folder, keys, table="n.csv")[NODES]
    assert [repr(id) for id in rows_in(source)["id"]] == ["3", "None", "1"]
    assert rows_in(source)["y"] == [3.0, None, 1.0]  # cast where nulls become -1
    for id in ("1.5", "9223372036854775808.0", "x"):
        as_csv(folder / "n.csv", {"id": ["3.0", id]})
        said = f"n.csv, row 2: id is '{id.removesuffix('.0')}', not int64 as its cast says"
        refused(folder, said, nodes="columns.id.cast = 'int64'", table="n.csv")
    as_csv(folder / "n.csv", {"id": ["3.0", f"{2**53 + 1}.0"]})  # a float64 would round it
    assert rows_in(read(folder, nodes="columns.id.cast = 'int64'", table="n.csv")[NODES])["id"] == [3, 2**53 + 1]


def test_ids_with_a_cast_may_have_spaces_and_signs_and_null_words(folder: Path) -> None:
    values = [" 1", "2 ", "+3", "-4", "05", "6.0", "NA", "null", "nan"]
    as_csv(folder / "n.csv", {"id": values})
    rows = rows_in(read(folder, "columns.id.cast = 'int64'", table="n.csv")[NODES])
    assert rows["id"] == [1, 2, 3, -4, 5, 6, None, None, None]
    for value in "+-7", "1 2", "0x1":
        as_csv(folder / "n.csv", {"id": [1, value]})
        refused(folder, f"n.csv, row 2: id is '{value}', not int64", nodes="columns.id.cast='int64'", table="n.csv")


def test_ids_that_are_the_splits_too_stay_integers(folder: Path) -> None:
    as_csv(folder / "n.csv", {"id": [1, 2]})
    assert rows_in(read(folder, "split = 'id'", table="n.csv")[NODES])["id"] == [1, 2]


def test_ids_written_as_fractions_are_not_taken_for_text(folder: Path) -> None:
    as_csv(folder / "e.csv", {"s": ["1", "2"], "d": ['""', "2.0"]})
    said = 'e.csv, row 2: the id d is \'2.0\', a fraction; [edges."node to node".columns.d] cast = "int64" makes them'
    refused(folder, said, links="e.csv")
    edges = "columns = { s = { cast = 'string' }, d = { cast = 'string' } }"
    source = read(folder, edges=edges, nodes="columns.id.cast = 'string'", links="e.csv")[EDGES]
    assert rows_in(source) == {"s": ["1", "2"], "d": [None, "2.0"]}


def test_built_labels_of_pandas_are_integers(folder: Path) -> None:
    as_csv(folder / "n.csv", {"id": range(3), "y": ["3.0", '""', "1.0"]})
    as_csv(folder / "e.csv", {"s": [0], "d": [1]})
    text = f'[{NODES}]\nfiles = "n.csv"\nid = "id"\nlabel = "y"\nnum_classes = 4\ncolumns.y.cast = "int64"\n'
    text += f'[{EDGES}]\nfiles = "e.csv"\nsource = "s"\ndestination = "d"\n'
    build(parse_graph(text, folder=folder), folder / "out.store", BuildOptions(threads=1))
    y = hoploom.open(folder / "out.store").parts[0].tables["node", "y"].rows
    assert (y.dtype, y.tolist()) == (torch.int64, [3, -1, 1])


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("2.5", 2.5), ("x", "x")])
def test_a_column_that_begins_with_nulls_has_the_type_of_its_first_value(
    folder: Path, value: str, expected: Any
) -> None:
    as_csv(folder / "n.csv", {"id": range(50), "y": [*[""] * 48, value, ""]})
    found = rows_in(read(folder, "label = 'y'", table="n.csv", csv_block=32)[NODES])["y"]
    assert found == [*[None] * 48, expected, None]


BROKEN = {  # claim: the text of n.csv, what is said
    "too few": ("id,a\n1,2\n3\n4,5\n", "n.csv, row 2: it has 1 fields, the header has 2: '3'"),
    "too many": ("id,a\n1,2\n\n3,4\n5,6,7\n", "n.csv, row 3: it has 3 fields, the header has 2: '5,6,7'"),
    "no end of quotes": ('id,a\n1,2\n"3,4\n5,6\n', "n.csv, row 2: it has 1 fields"),
    "nothing": ("", "n.csv cannot be read as CSV: Empty CSV file"),
    "only a header": ("id,a\n", "nodes.node: there are no rows in ", "n.csv; give files with rows"),
}


@pytest.mark.parametrize(("text", "said"), [(row[0], row[1:]) for row in BROKEN.values()], ids=BROKEN.keys())
def test_a_broken_csv_is_named_with_its_row(folder: Path, text: str, said: tuple[str, ...]) -> None:
    (folder / "n.csv").write_text(text)
    refused(folder, *said, nodes="label = 'a'", table="n.csv")


def test_a_later_value_of_another_type_is_named(folder: Path) -> None:
    for id, a, said in (
        ("x", 1, "id is 'x', not int64 as in the first rows"),
        ("007", 1, "id is '007', not int64 as in the first rows"),
        ("99999999999999999999", 1, "id is '99999999999999999999', not int64"),
        (5, "b", "a is 'b', not int64 as in the first rows"),
    ):
        as_csv(folder / "n.csv", {"id": [*range(200), id, 0], "a": [*[0] * 200, a, 0]})
        message = refused(folder, said, "n.csv, row 201: ", nodes="label = 'a'", table="n.csv", csv_block=64)
        column, cast = ("a", "float32") if a == "b" else ("id", "string")
        assert message.endswith(f'[nodes.node.columns.{column}] cast = "{cast}"'), message


def test_a_quote_left_open_before_many_rows_is_suspected(folder: Path) -> None:
    (folder / "n.csv").write_text("id,a\n" + "1,2\n" * 20 + '"' + "3,4\n" * 200)
    refused(
        folder,
        "n.csv cannot be read as CSV: a row is longer than 64 bytes; is a quote left open?",
        table="n.csv",
        csv_block=64,
    )


def test_a_byte_order_mark_is_no_part_of_the_first_name(folder: Path) -> None:
    (folder / "n.csv").write_bytes(b"\xef\xbb\xbfid,a\r\n7,1\r\n")
    assert rows_in(read(folder, table="n.csv")[NODES]) == {"id": [7]}


def test_a_value_that_is_not_what_its_cast_says_is_named(folder: Path) -> None:
    as_csv(folder / "n.csv", {"id": [1, 2], "a": [1, "b"]})
    keys = "label = 'a'\ncolumns.a.cast = 'float32'"
    refused(folder, "n.csv, row 2: a is 'b', not float as its cast says; correct it", nodes=keys, table="n.csv")


def test_bytes_that_are_no_text_are_refused(folder: Path) -> None:
    for text in (b"id,a\nx,y\ncaf\xe9,y\n", b"a,id\ny,x\ny,caf\xe9\n"):
        (folder / "n.csv").write_bytes(text)
        refused(folder, "n.csv, row 2: id is no UTF-8; write the file in UTF-8", table="n.csv")
    (folder / "n.csv").write_bytes(b"id,a\n1,caf\xe9\n2,b\n")
    refused(folder, "n.csv, row 1: a is no UTF-8", nodes="label = 'a'", table="n.csv")


def test_fractions_of_seconds_may_follow_whole_ones(folder: Path) -> None:
    as_csv(folder / "n.csv", {"id": range(50), "t": [*["2020-01-01 00:00:00"] * 49, "2020-01-01 00:00:00.25"]})
    assert rows_in(read(folder, "time = 't'", table="n.csv", csv_block=64)[NODES])["t"][-1] == datetime(
        2020, 1, 1, 0, 0, 0, 250000
    )


def test_a_quote_that_is_left_open_is_named(folder: Path) -> None:
    for end in ("", "\n"):
        (folder / "n.csv").write_text('id,a\n0,1\n1,"1\n1,2\n2,3' + end)
        refused(folder, "n.csv, row 2: a quote is left open before '1\\n1,2", nodes="label = 'a'", table="n.csv")
        (folder / "n.csv").write_text('id,a\n0,1\n1,"1\n1,2\n2,3"' + end)
        assert rows_in(read(folder, "label = 'a'", table="n.csv")[NODES])["a"] == ["1", "1\n1,2\n2,3"]


def test_what_is_said_of_a_column_of_categories_is_to_read_it_as_text(folder: Path) -> None:
    as_csv(folder / "n.csv", {"id": range(100), "y": [*[0] * 99, "x"]})
    keys = "label = 'y'\ncolumns.y.categories = 'codes'"
    said = ("row 100: y is 'x', not int64", 'columns.y] cast = "string"')
    refused(folder, *said, nodes=keys, table="n.csv", csv_block=64)


def test_a_compressed_file_cut_short_is_said_to_be_so(folder: Path) -> None:
    text = "id\n" + "".join(f"{number}\n" for number in range(1000))
    (folder / "n.csv.gz").write_bytes(gzip.compress(text.encode())[:-500])
    assert refused(folder, "n.csv.gz", table="n.csv.gz").endswith("; it is damaged or cut short, so write it again")
