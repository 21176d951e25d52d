"""Types of CSV are told by its values; a value that has another is named with file and row, and so is a broken row."""

import gzip
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from support.table_files import EDGES, NODES, as_csv, read, refused, rows_in, small_tables

import hoploom
from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import parse_graph
from hoploom.ingest.tables.sources import read_sources

pytestmark = pytest.mark.usefixtures("no_sync")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_tables(tmp_path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "-2", "0"], [1, -2, 0]),
        (["9223372036854775807"], [2**63 - 1]),
        (["9223372036854775808"], ["9223372036854775808"]),
        (["007", "8"], ["007", "8"]),
        (["-0"], ["-0"]),
        (["+1"], ["+1"]),
        (["0x1F"], ["0x1F"]),
        (["1.0", "2"], ["1.0", "2"]),
        (["2020-01-01"], ["2020-01-01"]),
        (["true", "NA", "null", "NaN"], ["true", "NA", "null", "NaN"]),
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
    assert rows_in(read(folder, "label = 'y'", table="n.csv", csv_block=32)[NODES])["y"] == [
        *[None] * 48,
        expected,
        None,
    ]


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
    refused(
        folder, "row 100: y is 'x', not int64", 'columns.y] cast = "string"', nodes=keys, table="n.csv", csv_block=64
    )


def test_a_compressed_file_cut_short_is_said_to_be_so(folder: Path) -> None:
    text = "id\n" + "".join(f"{number}\n" for number in range(1000))
    (folder / "n.csv.gz").write_bytes(gzip.compress(text.encode())[:-500])
    assert refused(folder, "n.csv.gz", table="n.csv.gz").endswith("; it is damaged or cut short, so write it again")
