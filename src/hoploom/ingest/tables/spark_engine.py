"""The same expressions on Spark. What is kept stays with the executors; only small results come to this process."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ibis
import ibis.expr.types as ir
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from hoploom.errors import HoploomError
from hoploom.ingest.spark.frames import RETURNED, set_batch_rows
from hoploom.ingest.spark.session import explained, sent
from hoploom.ingest.tables.engine import Fold, UnreadableError, sql_of
from hoploom.ingest.tables.id_counts import IdCounts
from hoploom.ingest.tables.spark_ids import counted, numbered

UNREADABLE = "Spark cannot read the tables"


class SparkEngine:
    """Runs expressions over tables that all executors reach."""

    def __init__(self, session: SparkSession) -> None:
        self.session, self._made, self._kept = session, 0, list[DataFrame]()
        self._connection = ibis.pyspark.connect(session)

    def read(self, paths: Sequence[str]) -> ir.Table:
        with explained(UNREADABLE, UnreadableError):
            return self.table(self.files(paths))

    def files(self, paths: Sequence[str]) -> DataFrame:
        """The rows of some files, with Spark's `_metadata`."""
        return self.session.read.parquet(*map(_literal, paths))

    def count_up(self, count: int) -> ir.Table:
        return self.table(self.session.range(count))

    def table(self, frame: DataFrame) -> ir.Table:
        """A frame for expressions."""
        self._made += 1
        name = f"hoploom_{id(self)}_{self._made}"
        frame.createOrReplaceTempView(name)
        return self._connection.table(name)

    def frame(self, table: ir.Table) -> DataFrame:
        """The rows of an expression, where Spark has them."""
        with explained(UNREADABLE, UnreadableError):
            return self.session.sql(sql_of(table, "pyspark"))

    def stream(self, table: ir.Table, row_bytes: int = 16, *, as_read: bool = False) -> Iterator[pa.RecordBatch]:
        with explained(UNREADABLE, UnreadableError):
            rows = self.frame(table).toArrow()
        yield from rows.to_batches()

    def fold(self, table: ir.Table, task: Fold, row_bytes: int = 16) -> list[dict[str, Any]]:
        set_batch_rows(self.session, row_bytes)
        with explained(UNREADABLE, UnreadableError):
            made = self.frame(table).mapInArrow(partial(_folded, task), RETURNED).collect()
        return [json.loads(row[0]) for row in made]

    def keep(self, table: ir.Table, name: str) -> ir.Table:
        return self.table(self._keep(self.frame(table)))

    def number(self, ids: ir.Table, num_rows: int, name: str) -> tuple[ir.Table, IdCounts]:
        with explained(UNREADABLE, UnreadableError):
            pairs, counts = counted(self._keep(numbered(self.frame(ids), num_rows)))
        return self.table(pairs), counts

    def _keep(self, frame: DataFrame) -> DataFrame:
        self._kept.append(frame.persist(StorageLevel.MEMORY_AND_DISK))
        return self._kept[-1]

    def __enter__(self) -> "SparkEngine":
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()

    def close(self) -> None:
        with suppress(Exception):  # of a Spark that is gone, which has been said
            for frame in self._kept:
                frame.unpersist()


def _folded(task: Fold, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        made = json.dumps(task(batches))
    except HoploomError as error:
        raise sent(error) from error
    yield pa.RecordBatch.from_pydict({"made": [made]})


def _literal(path: str) -> str:
    """A path that Spark reads as it is; without this, it looks for what a pattern such as [a] stands for."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)
