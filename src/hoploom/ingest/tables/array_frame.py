"""Features in .npy files, read by Spark's executors: rows of the table find their numbers, then tasks read slices."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from urllib.parse import unquote

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import functions as sql

from hoploom.errors import HoploomError
from hoploom.ingest.spark import SharedRows
from hoploom.ingest.spark.frames import Ranges, binary_column, rows_of_binary, shuffled
from hoploom.ingest.spark.session import sent
from hoploom.ingest.stream import Rows
from hoploom.ingest.tables.array_rows import ArrayRows, array_spans, array_values
from hoploom.ingest.tables.ids import cast_ids, int64_of
from hoploom.ingest.tables.spark_engine import SparkEngine
from hoploom.ingest.tables.table_files import TableFile, open_array, parquet_footer
from hoploom.schema import Field

SCHEME = re.compile(r"^[a-zA-Z0-9+.-]+:/+")
SLICE_ROWS = 1 << 20  # of the table, for a task


def array_rows_on(engine: SparkEngine, rows: ArrayRows) -> SharedRows:
    """The rows of the arrays, with the store ids of the table's rows."""
    source, numbered = rows.source, _numbered(engine, rows)
    ids = numbered.select(row=numbered["row"], id=cast_ids(numbered["id"], source, "id"))
    placed = engine.frame(rows.numbering.attach(ids, "id", "node").select("row", "node"))
    ranges = Ranges(source.num_rows, min(SLICE_ROWS, source.num_rows))
    frame = shuffled(placed, ranges.number_of("row"), ranges.count, ["row"])
    paths = [str(array.filename) for array in source.arrays]
    read = frame.mapInArrow(partial(_read, paths, rows.field), "node long, x binary")
    return SharedRows(read, partial(_decoded, rows.field), source.num_rows, 16 + rows.field.row_bytes)


def _numbered(engine: SparkEngine, rows: ArrayRows) -> ir.Table:
    """The table's ids with the numbers of their rows, counted through its files."""
    source = rows.source
    counts = [parquet_footer(TableFile(path, path, "parquet"))[1] for path in source.paths]
    first = dict(zip(map(_plain, source.paths), accumulate(counts, initial=0), strict=False))
    frame = engine.files(source.paths)
    kind = "string" if source.has_text(source.id_column) else "long"
    given = frame.select(
        sql.col("_metadata.file_path").alias("file"),
        sql.col("_metadata.row_index").alias("row"),
        sql.col(f"`{source.id_column}`").cast(kind).alias("id"),
    )
    return engine.table(given.mapInArrow(partial(_counted_through, first), f"row long, id {kind}"))


def _counted_through(first: Mapping[str, int], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        files = batch.column("file").dictionary_encode()
        before = np.array([first[_plain(unquote(file))] for file in files.dictionary.to_pylist()], np.int64)
        row = batch.column("row").to_numpy() + before[files.indices.to_numpy()]
        yield pa.RecordBatch.from_pydict({"row": row, "id": batch.column("id")})


def _plain(path: str) -> str:
    return SCHEME.sub("/", path)


def _read(paths: list[str], field: Field, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The slice of the arrays that goes with consecutive rows."""
    rows = [batch for batch in batches if batch.num_rows]
    if not rows:
        return
    nodes = torch.cat([int64_of(batch.column("node")) for batch in rows])
    first, done = rows[0].column("row")[0].as_py(), 0
    try:
        arrays = [open_array(TableFile(path, path, "npy")) for path in paths]
        ends = list(accumulate(map(len, arrays), initial=0))
        for array, before in zip(arrays, ends, strict=False):
            low, high = max(0, first - before), min(len(array), first + len(nodes) - before)
            for begin, end in array_spans(array, low, high):
                values = array_values(array, begin, end, field)
                columns = [pa.array(nodes[done : done + end - begin].numpy()), binary_column(values)]
                yield pa.RecordBatch.from_arrays(columns, ["node", "x"])
                done += end - begin
    except HoploomError as error:
        raise sent(error) from error


def _decoded(field: Field, batch: pa.RecordBatch) -> Rows:
    return Rows(int64_of(batch.column("node")), {"x": rows_of_binary(batch.column("x"), field)})
