"""What becomes of one column's values, by role and rule: rows, or an error that names file, row and value."""

import datetime
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.tables import build_here, by_id, field, write_table

from hoploom.errors import ConfigError, HoploomError
from hoploom.ingest.tables.build import open_engine
from hoploom.ingest.tables.graph_file import ColumnRule, parse_graph
from hoploom.ingest.tables.graph_streams import NodeRows, Report
from hoploom.ingest.tables.ids import Numbering
from hoploom.ingest.tables.sources import TableSource, read_sources
from hoploom.ingest.tables.transforms import Moments, Planner, SourceColumn, UnfitError, moments_of, numbers_of

pytestmark = pytest.mark.usefixtures("no_sync")

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
        (
            NULLS,
            FEATURE,
            "",
            "column 'v' is null, not a number; it holds nulls only; leave it out, or give columns.v a f",
        ),
        ([None, None, nan], LABEL, CODES, "holds nulls only, so there are no categories"),
        ([[1], [2], [3]], LABEL, CODES, "holds lists, which have no categories"),
    ],
)
def test_values_are_refused(tmp_path: Path, values: Any, role: str, rule: str, message: str) -> None:
    with pytest.raises(HoploomError, match=message):
        build(tmp_path, f"{role}\n{rule}", values)


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
    with pytest.raises(HoploomError, match=message):
        build(tmp_path, "", [0, 1, 2], 'weight = "w"', w=weights)


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
            with pytest.raises(
                ConfigError, match=r"columns\.v: it has more than \d+ .*values; use numbers in the table"
            ):
                Planner(engine, source, **limits).fields()


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


def test_the_deviation_of_tiny_values_is_no_zero() -> None:
    moments = Moments(1)
    moments.add(moments_of(np.array([[1e-200], [2e-200]])))
    assert moments.deviation.tolist() == [1]
