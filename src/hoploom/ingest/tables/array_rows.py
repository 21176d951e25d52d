"""Features in .npy files beside a table of nodes: their rows, one after another, go with the rows of the table."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.stream import Rows
from hoploom.ingest.tables.engine import Engine
from hoploom.ingest.tables.ids import Numbering, cast_ids, file_name, int64_of
from hoploom.ingest.tables.sources import TableSource
from hoploom.ingest.tables.table_files import MappedArray, array_rows
from hoploom.ingest.tables.transforms import UnfitError, check_range, signed
from hoploom.schema import DTYPES, Field

ARRAY_BYTES = 4 << 20  # of a file at a time


@dataclass(frozen=True)
class ArrayRows:
    """The rows of the arrays, with the store ids of the table's rows."""

    engine: Engine
    source: TableSource
    numbering: Numbering
    field: Field
    scratch: Path

    def __call__(self) -> Iterator[Rows]:
        nodes, waiting = self._nodes_in_order(), torch.empty(0, dtype=torch.int64)
        for array in self.source.arrays:
            for begin, end in array_spans(array, 0, len(array)):
                while waiting.numel() < end - begin:
                    waiting = torch.cat([waiting, next(nodes)])
                yield Rows(waiting[: end - begin], {"x": array_values(array, begin, end, self.field)})
                waiting = waiting[end - begin :]

    def _nodes_in_order(self) -> Iterator[Tensor]:
        """The store ids of the table's rows, in the order of its files."""
        column = self.source.id_column
        if self.numbering.pairs is None:
            for _, _, ids in self.source.scan(column):
                yield int64_of(ids) - self.numbering.first
            return
        path = self.scratch / f"{file_name(self.source.owner)}.rows.parquet"
        _write_numbered(self.source, path)
        rows = self.engine.read([str(path)])
        chosen = rows.select(row=rows["row"], id=cast_ids(rows["id"], self.source, column))
        numbered = self.numbering.attach(chosen, "id", "node")
        for batch in self.engine.stream(numbered.order_by("row").select("node")):
            yield int64_of(batch.column("node"))
        path.unlink()


def array_spans(array: MappedArray, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Rows of an array in pieces that may be held in memory."""
    step = max(1, ARRAY_BYTES // max(1, array.dtype.itemsize * array.shape[1]))
    return ((begin, min(end, begin + step)) for begin in range(first, end, step))


def array_values(array: MappedArray, begin: int, end: int, field: Field) -> Tensor:
    """Some rows, as they are stored; DataError where a value does not fit."""
    values = signed(array_rows(array, begin, end - begin))
    try:
        check_range(values, field.dtype)
    except UnfitError as error:
        raise DataError(f"{array.filename}, rows {begin + 1} to {end}: {error}") from error
    return torch.from_numpy(values).to(DTYPES[field.dtype])


def _write_numbered(source: TableSource, path: Path) -> None:
    """The ids of a table with the numbers of their rows, as Parquet."""
    column = source.id_column
    schema = pa.schema([("row", pa.int64()), ("id", source.schema.field(column).type)])
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for _, _, ids in source.scan(column):
            numbers = pa.array(np.arange(count, count + len(ids)))
            writer.write_table(pa.table([numbers, ids.cast(schema.field("id").type)], schema=schema))
            count += len(ids)
