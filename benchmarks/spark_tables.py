"""The tables that a build on Spark is measured with: sparse integers as ids, edges with random ends, several files."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

EDGES_PER_NODE = 10
NODE_FILES, EDGE_FILES = 2, 8
ROWS_AT_ONCE = 1_000_000
SCATTER = 2654435761  # a prime: ids are distinct, in no order, and have gaps
RECIPE = """
[nodes.node]
files = "nodes-*.parquet"
id = "id"
[edges."node to node"]
files = "edges-*.parquet"
source = "source"
destination = "destination"
"""


def write_tables(folder: Path, num_edges: int) -> None:
    """Parquet, compressed by zstd, and the graph.toml that describes it."""
    folder.mkdir(parents=True)
    draw, num_nodes = np.random.default_rng(1), num_edges // EDGES_PER_NODE
    for number, rows in enumerate(np.array_split(np.arange(num_nodes), NODE_FILES)):
        _write(
            folder / f"nodes-{number}.parquet", len(rows), lambda begin, end, rows=rows: {"id": _ids(rows[begin:end])}
        )
    for number, rows in enumerate(np.array_split(np.arange(num_edges), EDGE_FILES)):
        _write(folder / f"edges-{number}.parquet", len(rows), lambda begin, end: _edges(draw, num_nodes, end - begin))
    (folder / "graph.toml").write_text(RECIPE)


def _edges(draw: np.random.Generator, num_nodes: int, count: int) -> dict[str, np.ndarray]:
    return {name: _ids(draw.integers(num_nodes, size=count)) for name in ("source", "destination")}


def _ids(nodes: np.ndarray) -> np.ndarray:
    return nodes * SCATTER % (1 << 40)


def _write(path: Path, num_rows: int, columns: object) -> None:
    writer = None
    for begin in range(0, num_rows, ROWS_AT_ONCE):
        rows = pa.table(columns(begin, min(num_rows, begin + ROWS_AT_ONCE)))  # type: ignore[operator]
        writer = writer or pq.ParquetWriter(path, rows.schema, compression="zstd", use_dictionary=False)
        writer.write_table(rows)
    if writer is not None:
        writer.close()
