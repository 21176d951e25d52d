"""Small tables in a folder, and what read_sources makes of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hoploom import DataError, HoploomError
from hoploom.ingest.tables.graph_file import parse_graph
from hoploom.ingest.tables.sources import ReadLimits, TableSource, read_sources

NODES = "nodes.node"
EDGES = 'edges."node to node"'


def small_tables(folder: Path) -> Path:
    """A node table with the ids 0 to 9, and edges from v to v + 1."""
    ids = range(10)
    as_csv(folder / "nodes.csv", {"id": ids, "a": [v / 2 for v in ids], "b": ids})
    as_csv(folder / "edges.csv", {"s": range(9), "d": range(1, 10)})
    return folder


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
