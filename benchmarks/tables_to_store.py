"""How fast do tables become a store, against DuckDB doing only the joins of the ids and the sort?

Parquet tables of nodes and edges with scattered ids, integers or text. DuckDB numbers the nodes, joins both ends of
every edge and sorts the result into a table in memory; ours does that and ends with a complete store on disk, its
checksums and flushes included. Both have two threads and four gigabytes.
"""

import shutil
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import report
from measure import take_turns
from report import CORES, Report, Row, Target

from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import read_graph

REPETITIONS, WARMUPS = 5, 1
ROWS_AT_ONCE = 1_000_000
RECIPE = """
[nodes.node]
files = "nodes.parquet"
id = "id"
[edges."node to node"]
files = "edges.parquet"
source = "source"
destination = "destination"
"""
JOIN = """
create or replace table edges as
select s.place as source, d.place as destination
from '{folder}/edges.parquet' e
join numbered s on e.source = s.id join numbered d on e.destination = d.id
order by d.place, s.place
"""
NUMBER = (
    "create or replace table numbered as select id, row_number() over (order by id) - 1 as place "
    "from '{folder}/nodes.parquet'"
)


def measure(tiny: bool) -> Report:
    """Integer ids, then text."""
    num_nodes, num_edges = (10_000, 200_000) if tiny else (1_000_000, 20_000_000)
    rows = [
        _compare(kind, as_text, limit, (num_nodes, num_edges))
        for kind, as_text, limit in (("int64", False, 1 / 2), ("text", True, 1 / 3))
    ]
    return Report(rows, [f"{num_edges:,} edges, {num_nodes:,} nodes; ratio is DuckDB's time over ours"])


def _compare(kind: str, as_text: bool, limit: float, sizes: tuple[int, int]) -> Row:
    with tempfile.TemporaryDirectory(prefix="hoploom-bench-") as name:
        folder = Path(name)
        _write_tables(folder, as_text, *sizes)
        spreads = take_turns(
            {"ours": lambda _: _ours(folder), "theirs": lambda _: _theirs(folder)},
            repetitions=REPETITIONS,
            warmups=WARMUPS,
        )
    ours, theirs = spreads["ours"], spreads["theirs"]
    ratio = theirs.median / ours.median
    return Row(
        f"tables to store, {kind} ids", "s", ours, "DuckDB, joins and sort", theirs, ratio, Target("ratio", ">=", limit)
    )


def _write_tables(folder: Path, as_text: bool, num_nodes: int, num_edges: int) -> None:
    draw = np.random.default_rng(1)
    numbers = np.unique(draw.integers(2**62, size=num_nodes + num_nodes // 8 + 8))
    numbers = draw.permutation(numbers)[:num_nodes]
    ids = pa.array([f"user-{number}" for number in numbers.tolist()]) if as_text else pa.array(numbers)
    pq.write_table(pa.table({"id": ids}), folder / "nodes.parquet")
    schema = pa.schema([("source", ids.type), ("destination", ids.type)])
    with pq.ParquetWriter(folder / "edges.parquet", schema) as file:
        for begin in range(0, num_edges, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, num_edges - begin)
            sources = draw.integers(num_nodes, size=count)
            destinations = (draw.random(count) ** 3 * num_nodes).astype(np.int64)  # a few hubs
            file.write_table(pa.table([ids.take(pa.array(sources)), ids.take(pa.array(destinations))], schema))
    (folder / "graph.toml").write_text(RECIPE)


def _ours(folder: Path) -> float:
    shutil.rmtree(folder / "out.store", ignore_errors=True)
    begin = time.perf_counter()
    build(read_graph(folder / "graph.toml"), folder / "out.store", BuildOptions(threads=CORES))
    return time.perf_counter() - begin


def _theirs(folder: Path) -> float:
    with duckdb.connect() as connection:
        connection.execute(f"set threads = {CORES}; set memory_limit = '4GB'")
        begin = time.perf_counter()
        connection.execute(NUMBER.format(folder=folder))
        connection.execute(JOIN.format(folder=folder))
        return time.perf_counter() - begin


if __name__ == "__main__":
    report.main(measure)
