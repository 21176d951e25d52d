"""Ids at both ends, where a value stands, and what becomes of values by role and rule: rows, or a named error."""

import datetime
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.refusals import assert_raises
from support.tables import build_here, by_id, field, write_table

from hoploom import ConfigError, DataError, HoploomError
from hoploom.ingest.tables.build import open_engine
from hoploom.ingest.tables.graph_file import ColumnRule, GraphFile, NodeTable, parse_graph
from hoploom.ingest.tables.graph_streams import NodeRows, Report
from hoploom.ingest.tables.ids import Numbering
from hoploom.ingest.tables.sources import TableSource, read_sources
from hoploom.ingest.tables.table_files import largest_value
from hoploom.ingest.tables.transforms import Planner, SourceColumn, UnfitError, numbers_of

pytestmark = pytest.mark.usefixtures("no_sync")


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
    assert list(_sources(tmp_path, id=pa.array([1, 2], kind))) == ["nodes.a", 'edges."a to b"']  # a count has no file


TEXT = pa.array(["1"])
AT_NODES = ("a.parquet is int64; cast one", '[nodes.a.columns.id] cast = "string"')
AT_EDGES = '[edges."a to b".columns.s] cast = "string"'
BEYOND = pa.array([1, 2**63], pa.uint64())
REFUSED = {  # claim: columns, keys at the end, error, what is said
    "fractions": ({"id": [1.5]}, "", ConfigError, "graph.toml:3: nodes.a.id: column id of ", " is double; ids are"),
    "truths": ({"d": [True]}, "", ConfigError, 'edges."a to b".destination: column d of ', " is bool; ids are"),
    "edges": ({"s": TEXT}, "", ConfigError, "s of ", "e.parquet is string, but for nodes.a column id of ", *AT_NODES),
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
    sources = _sources(tmp_path, TABLES + "[nodes.a.columns]\nid.cast = 'string'\n", s=TEXT)
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
    again = source.locate("v", ["b", "a", "c"], skip=1, most_rows=2)
    assert again == {"a": "first.csv, row 3", "b": "second.csv, row 2"}
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
    assert_raises(DataError, "cannot be read", lambda: next(source.scan("id")))


FEATURE, LABEL, FIELD = 'features = "v"', 'label = "v"', 'fields = { v = "v" }'
NAME = {FEATURE: "x", LABEL: "y", FIELD: "v"}
CODES, ONE_HOT = 'columns.v.categories = "codes"', 'columns.v.categories = "one-hot"'
STANDARD = "columns.v.standardise = true"
A, B, C = 1.5**0.5, 0.0, -(1.5**0.5)  # three values in even steps, standardised
HALF = pa.float16()
BIG = pa.array([1, None, 2**63], pa.uint64())
NULLS = pa.nulls(3)
MOMENTS = [datetime.datetime(2000, 1, 1, 0, 0, 0, v) for v in (1, 2, 3)]
EDGE = """
[edges."node to node"]
files = "e.parquet"
source = "s"
destination = "d"
"""


def source_of(folder: Path, keys: str, values: Any) -> TableSource:
    """A table with such a column of nodes."""
    write_table(folder / "n.parquet", {"id": range(len(values)), "v": values})
    write_table(folder / "e.parquet", {"s": [0], "d": [1]})
    graph = parse_graph(f'[nodes.node]\nfiles = "n.parquet"\nid = "id"\n{keys}\n{EDGE}', folder=folder)
    return read_sources(graph, folder)["nodes.node"]


def build(folder: Path, keys: str, values: Any, edges: str = "", **more: Any) -> Any:
    count = len(values)
    write_table(folder / "n.parquet", {"id": range(count), "v": values})
    write_table(folder / "e.parquet", {"s": range(count), "d": [*range(1, count), 0], **more})
    return build_here(folder, f'[nodes.node]\nfiles = "n.parquet"\nid = "id"\n{keys}\n{EDGE}{edges}')[0]


STORED: list[tuple[Any, str, str, list[Any]]] = [  # values, role, rule, what is stored
    ([1, None, 3], LABEL, "", [1, -1, 3]),
    ([1.0, None, 3.0], LABEL, "", [1, nan, 3]),
    ([1.0, nan, 3.0], LABEL, "", [1, nan, 3]),
    ([1, None, 3], LABEL, STANDARD, [-1, nan, 1]),
    ([1.0, None, 3.0], LABEL, STANDARD, [-1, nan, 1]),
    ([True, None, False], LABEL, "", [1, -1, 0]),
    ([0.0, -0.0, 1.0], LABEL, CODES, [0, 0, 1]),
    ([0.0, -0.0, 1.0], FEATURE, ONE_HOT, [[1, 0], [1, 0], [0, 1]]),
    ([-0.0, 2.0, nan], LABEL, CODES, [0, 1, -1]),
    ([nan, 2.0, None], LABEL, CODES, [-1, 0, -1]),
    ([nan, 2.0, None], FEATURE, CODES + "\ncolumns.v.fill = 1", [[0], [1], [0]]),
    (pa.array(np.array([0, -0.0, 1], np.float16), HALF), LABEL, CODES, [0, 0, 1]),
    (["b", None, "a"], LABEL, CODES, [1, -1, 0]),
    (["é", "z", "a"], FIELD, CODES, [2, 1, 0]),
    ([True, None, False], LABEL, CODES, [1, -1, 0]),
    (["b", "c", "a"], LABEL, ONE_HOT, [[0, 1, 0], [0, 0, 1], [1, 0, 0]]),
    ([inf, 1.0, nan], FEATURE, "", [[inf], [1], [nan]]),
    ([3.5e38, 1.0, nan], FEATURE, 'dtype = "float64"', [[3.5e38], [1], [nan]]),
    ([3.0, 2.0, 1.0], FEATURE, STANDARD, [[A], [B], [C]]),
    ([1e-300, 1e-300, 2e-300], FEATURE, STANDARD, [[0], [0], [0]]),
    (NULLS, FEATURE, "columns.v.fill = 2", [[2], [2], [2]]),
    (NULLS, FEATURE, 'columns.v = { fill = 2, cast = "float32" }', [[2], [2], [2]]),
    (NULLS, FIELD, "columns.v.fill = 0.5", [0.5, 0.5, 0.5]),
    (MOMENTS, FEATURE, 'dtype = "int64"', [[946684800000000 + v] for v in (1, 2, 3)]),
    (MOMENTS, FEATURE, STANDARD, [[C], [B], [A]]),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store with a node type for each row of the table."""
    folder, text = tmp_path_factory.mktemp("stored"), ""
    for number, (values, role, rule, _) in enumerate(STORED):
        write_table(folder / f"{number}.parquet", {"id": range(len(values)), "v": values})
        text += f'[nodes.t{number}]\nfiles = "{number}.parquet"\nid = "id"\n{role}\n{rule}\n'
    write_table(folder / "e.parquet", {"s": [0], "d": [1]})
    return build_here(folder, text + EDGE.replace("node to node", "t0 to t0"))[0]


@pytest.mark.parametrize("number", range(len(STORED)))
def test_values_are_stored_as(stored: Any, number: int) -> None:
    _, role, _, wanted = STORED[number]
    rows = field(stored, f"t{number}", NAME[role])
    assert torch.allclose(rows.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, equal_nan=True)
    assert rows.shape == torch.tensor(wanted).shape


@pytest.mark.parametrize(
    ("values", "role", "rule", "message"),
    [
        ([1.0, 1e300, 2.0], FEATURE, "", "n.parquet, row 2: .* holds 1e\\+300, too large for float32"),
        ([1.0, 2.0, -1e300], FEATURE, 'columns.v.cast = "float32"', "row 3: .* holds -1e\\+300, too large for float32"),
        ([1.0, 1e39, 2.0], LABEL, "", "row 2: .* holds 1e\\+39, too large for float32"),
        ([1.0, inf, 3.0], FEATURE, STANDARD, "row 2: .* holds inf, too large to be standardised"),
        (np.array([1.0, inf, 3.0], np.float32), FEATURE, STANDARD, "row 2: .* holds inf, too large to be standardised"),
        ([1.0, -1e200, 3.0], FEATURE, STANDARD, "row 2: .* holds -1e\\+200, too large to be standardised"),
        ([nan, 2.0, None], FEATURE, ONE_HOT, "row 1: .* is null; give a value"),
        (["a", None, "b"], LABEL, ONE_HOT, "row 2: .* is null; give a value"),
        (BIG, LABEL, "", "row 3: .* holds 9.22\\S+, which does not fit int64"),
        (BIG.fill_null(0), LABEL, "", "row 3: .* holds 9.22\\S+, which does not fit int64"),
        (MOMENTS, FEATURE, "", 'graph.toml:4: .* is timestamp.us., whose microseconds float32 rounds; .* "float64"'),
        ([d.date() for d in MOMENTS], FEATURE, "", "is date32.day., whose microseconds float32 rounds"),
        (NULLS, FEATURE, "", "column 'v' is null, not a number; it holds nulls only; leave it out, or give columns.v"),
        ([None, None, nan], LABEL, CODES, "holds nulls only, so there are no categories"),
        ([[1], [2], [3]], LABEL, CODES, "holds lists, which have no categories"),
    ],
)
def test_values_are_refused(tmp_path: Path, values: Any, role: str, rule: str, message: str) -> None:
    assert_raises(HoploomError, message, build, tmp_path, f"{role}\n{rule}", values)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0, 2.0], "e.parquet, row 2: column 'w' of .* holds -1.0, but weights are finite, and none is neg"),
        ([1.0, 2.0, nan], "e.parquet, row 3: .* holds nan, but weights"),
        ([inf, 2.0, 1.0], "e.parquet, row 1: .* holds inf, but weights"),
        ([[1.0], [2.0], [3.0]], "column 'w' has 1 numbers a row; a weight is one"),
    ],
)
def test_weights_are_finite_and_none_is_negative(tmp_path: Path, weights: Any, message: str) -> None:
    assert_raises(HoploomError, message, build, tmp_path, "", [0, 1, 2], 'weight = "w"', w=weights)


def test_codes_do_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    values, made = [5.0, nan, -0.0, 3.0, nan, 0.0, 1.0], []
    for turn in (0, 2, 5):
        (tmp_path / f"{turn}").mkdir()
        turned = values[turn:] + values[:turn]
        codes = by_id(build(tmp_path / f"{turn}", f"{LABEL}\n{CODES}", turned), "y")
        made.append([codes[(row - turn) % len(values)] for row in range(len(values))])
    assert made == [[3, -1, 0, 2, -1, 0, 1]] * 3


def test_categories_have_a_bound(tmp_path: Path) -> None:
    source = source_of(tmp_path, f"{LABEL}\n{CODES}", ["a" * 20, "b", "c"])
    with open_engine(tmp_path, 256 << 20) as engine:
        for limits in {"most_codes": 2}, {"most_bytes": 20}:
            said = r"columns\.v: it has more than \d+ .*values; use numbers in the table"
            assert_raises(ConfigError, said, Planner(engine, source, **limits).fields)


def test_a_split_column_has_few_words(tmp_path: Path) -> None:
    source = source_of(tmp_path, 'split = "v"', [f"s{row % 100}" for row in range(200)])
    numbering = Numbering("nodes.node", (0, 200))
    with open_engine(tmp_path, 256 << 20) as engine:
        stream = NodeRows(engine, source, numbering).stream(Report())
    assert len(stream.splits) == 100
    (tmp_path / "more").mkdir()
    with pytest.raises(ConfigError, match=r"graph\.toml:4: nodes\.node.split: column 'v' has more than 100 values"):
        build(tmp_path / "more", 'split = "v"', [f"s{row}" for row in range(101)])


def test_a_value_that_is_no_category_is_never_counted_as_the_last_one() -> None:
    """Only where a file is written while it is read."""
    for kind, null in (("one-hot", None), ("codes", -1)):
        column = SourceColumn("v", pa.string(), None, ColumnRule(categories=kind), pa.array(["a", "b"]), null)
        with pytest.raises(UnfitError, match="holds c, which it did not before; is it being written"):
            numbers_of(column, pa.array(["a", "c"]))
