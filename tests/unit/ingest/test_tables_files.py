"""Files become Parquet with the same rows; what is wrong with one is named with file, row and value."""

import csv
import gzip
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc
from support.table_files import EDGES, NODES, as_csv, read, refused, rows_in, small_tables

from hoploom import ConfigError
from hoploom.ingest.tables.table_files import TableFile, arrow_batches

FIELD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_tables(tmp_path)


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


@settings(max_examples=15, deadline=None)
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


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ("n", [1, 2, 3]),
        ("n/*.csv", [1, 2]),
        ("n/*", [1, 2, 3]),
        ("n/**/*.csv", [1, 2, 3]),
        ('["n/b.csv", "n/a.csv"]', [2, 1]),
    ],
)
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
    message = refused(folder, said, error=ConfigError, table=files)
    assert message.startswith("graph.toml:2: nodes.node.files: ")


def test_a_file_listed_twice_and_a_table_in_two_formats_are_refused(folder: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), folder / "n.parquet")
    refused(folder, "nodes.csv is named twice", error=ConfigError, table='["nodes.csv", "nod*.csv"]')
    refused(folder, "n.parquet is parquet", "nodes.csv is csv", error=ConfigError, table='["nodes.csv", "n.parquet"]')


def test_a_glob_of_features_keeps_the_order_and_leaves_out_other_roles(folder: Path) -> None:
    columns = {"f_2": [1], "id": [1], "f_10": [2], "f_y": [3], "g": [4]}
    as_csv(folder / "n.csv", columns)
    source = read(folder, 'features = ["g", "f_*", "*"]\nlabel = "f_y"', table="n.csv")[NODES]
    assert source.features == ("g", "f_2", "f_10")
    assert source.schema.names == ["id", "f_y", "g", "f_2", "f_10"]


COLUMNS = [
    (
        "label = 'qq'",
        "graph.toml:4: nodes.node.label: ",
        'nodes.csv has no column "qq"; its columns are "id", "a", "b"',
    ),
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


def test_times_are_in_microseconds(folder: Path) -> None:
    as_csv(folder / "n.csv", {"id": [1], "t": ["2020-01-01 00:00:01"]})
    source = read(folder, "time = 't'", table="n.csv")[NODES]
    assert source.schema.field("t").type == pa.timestamp("us")
    assert pq.read_table(source.paths[0])["t"].cast(pa.int64()).to_pylist() == [1577836801 * 10**6]


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
        source = read(folder, "label = 'y'", table=table)[NODES]
        assert source.schema.field("y").type == pa.string()


def test_no_edges_at_all_are_refused_and_a_shard_without_rows_is_not(folder: Path) -> None:
    (folder / "none.csv").write_text("s,d\n")
    refused(folder, 'edges."node to node": there are no rows in', links="none.csv")
    source = read(folder, links='["none.csv", "edges.csv"]')
    assert source[EDGES].num_rows == 9


@pytest.mark.parametrize(
    ("one", "two"), [("float", "halffloat"), ("timestamp[us]", "timestamp[ms]"), ("date32", "timestamp[us]")]
)
def test_arrow_files_of_a_table_have_the_same_types_of_their_own(folder: Path, one: str, two: str) -> None:
    for name, kind in ("n0.arrow", one), ("n1.arrow", two):
        table = pa.table({"id": [int(name[1])], "a": pa.nulls(1, pa.type_for_alias(kind))})
        with ipc.new_file(folder / name, table.schema) as writer:
            writer.write_table(table)
    refused(folder, "n1.arrow: a is ", "in ", "n0.arrow; write all", nodes="label = 'a'", table="n*.arrow")
