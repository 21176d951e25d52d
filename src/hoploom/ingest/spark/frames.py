"""Shuffle a frame's rows into ranges of store ids, run a task on each range, and collect the results.

Each range of ids is a partition, so the partition's number tells a task its ids. Spark assigns a row to a partition by
the hash of a column. For each range, this column has an integer whose hash selects the range's partition.
"""

import gc
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from torch import Tensor

from hoploom.errors import DataError, HoploomError, StoreError
from hoploom.ingest.spark.session import explained, sendable
from hoploom.ingest.stream.spill import from_bytes
from hoploom.schema import Field

BATCH_BYTES, MOST_ROWS = 4 << 20, 1 << 17
RETURNED = "made string"
JOIN_TASKS = "spark.sql.shuffle.partitions"
JOINED_BYTES, JOIN_BYTES = 32, 128 << 20  # of a row in a join, and of all rows of a joining task
LEAST_ROWS = 1 << 16  # least rows of a range, about
MOST_RANGES = 1 << 14
Task = Callable[[int, Iterator[pa.RecordBatch]], Any]  # number of the partition, rows -> a value for JSON


@dataclass(frozen=True)
class SharedRows:
    """The rows of a Spark data frame, and the function that decodes a batch of rows on the executors."""

    frame: DataFrame
    decode: Callable[[pa.RecordBatch], Any]
    num_rows: int | None  # required for edges; may be approximate
    row_bytes: int = 16
    counted: Callable[[int, int], None] | None = None  # called with the number of rows read, and of rows left out
    explained: Callable[[HoploomError], HoploomError | None] | None = None  # returns a better error than the task's


@dataclass(frozen=True)
class Ranges:
    """The ids 0 to num_ids - 1, divided into ranges of `span` ids; the last range may be shorter."""

    num_ids: int
    span: int

    @property
    def count(self) -> int:
        return -(-self.num_ids // self.span)

    def limits(self, number: int) -> tuple[int, int]:
        """Return the first id of range `number`, and one more than its last id."""
        return number * self.span, min(self.num_ids, (number + 1) * self.span)

    def number_of(self, column: str) -> Column:
        """Return a Spark expression for the number of the range that holds the id in `column`; negative ids give 0."""
        return sql.expr(f"cast(greatest({column}, 0) div {self.span} as int)")


def ranges_for(num_ids: int, num_rows: int, row_bytes: int, memory: int, tasks: int) -> Ranges:
    """Divide the ids into ranges that fit a task's memory, enough for `tasks` cores."""
    fitting = -(-num_rows * row_bytes // max(1, memory // 8))
    wanted = max(fitting, min(2 * tasks, -(-num_rows // LEAST_ROWS)), 1)
    return Ranges(num_ids, max(1, -(-num_ids // min(wanted, MOST_RANGES))))


def shuffled(frame: DataFrame, number: Column, count: int, order: Sequence[str] = ()) -> DataFrame:
    """Return `frame` in `count` partitions, each sorted by `order`. `number` is an expression for a row's partition."""
    columns = frame.columns
    leading = sql.expr(f"array({','.join(map(str, leading_there(count)))})")
    moved = frame.withColumn("range", sql.element_at(leading, number + 1)).repartition(count, "range")
    return (moved.sortWithinPartitions(*order) if order else moved).select(*columns)


def one_row_each(session: SparkSession, count: int) -> DataFrame:
    """Return a frame with `count` partitions of one row each, to run tasks that need no input."""
    return session.range(0, count, 1, count)


def run_tasks(frame: DataFrame, count: int, task: Task, row_bytes: int = 16) -> list[Any]:
    """Run `task` on each of the `count` partitions of `frame`, on executors; return the results in order."""
    set_batch_rows(frame.sparkSession, row_bytes)
    with explained("Spark cannot write the store", DataError):
        found = frame.mapInArrow(partial(_run, task), RETURNED).collect()
    results = dict(json.loads(row[0]) for row in found)
    if len(results) != count:
        raise StoreError(f"Spark ran {len(results):,} tasks of {count:,}, so that rows may be missing; try again")
    return [results[number] for number in range(count)]


def set_join_tasks(session: SparkSession, num_rows: int) -> None:
    """Raise Spark's number of join tasks if a join of `num_rows` rows needs more. Spark itself can only lower it."""
    wanted, now = min(MOST_RANGES, num_rows * JOINED_BYTES // JOIN_BYTES), session.conf.get(JOIN_TASKS, "200")
    if str(now).isdecimal() and wanted > int(str(now)):
        session.conf.set(JOIN_TASKS, str(wanted))


def set_batch_rows(session: SparkSession, row_bytes: int) -> None:
    """Set the number of rows in the batches that tasks receive, so that a batch has about BATCH_BYTES."""
    rows = max(256, min(MOST_ROWS, BATCH_BYTES // max(1, row_bytes)))
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(rows))


def freeze_imports() -> None:
    """Exclude imported objects from the garbage collection that pyspark runs after each task; saves 0.15 s a task."""
    if not gc.get_freeze_count():
        gc.freeze()


def task_number() -> int:
    """Return the number of the partition that the current Spark task processes."""
    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def _run(task: Task, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    freeze_imports()
    try:
        result = task(task_number(), batches)
        deque(batches, maxlen=0)  # a process that leaves rows unread is not used again
    except HoploomError as error:
        raise sendable(error) from error
    yield pa.RecordBatch.from_pydict({"made": [json.dumps([task_number(), result])]})


def binary_column(rows: "np.ndarray[Any, Any]") -> pa.Array:
    """Return rows [n, ...] as a binary column, which Spark moves without decoding. Rows must take less than 2 GiB."""
    width = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
    raw = pa.py_buffer(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(rows), [None, raw]).cast(pa.binary())


def rows_of_binary(column: pa.Array, field: Field) -> Tensor:
    """Return the rows [n, *field.shape] from a column that `binary_column` made."""
    values = column.cast(pa.binary(field.row_bytes)).buffers()[1]
    raw = np.frombuffer(values, np.uint8)[: len(column) * field.row_bytes]
    return from_bytes(torch.from_numpy(raw.copy()).view(len(column), field.row_bytes), field)


@cache
def leading_there(count: int) -> list[int]:
    """Return a list with one integer per partition, which Spark's hash partitioning sends to this partition."""
    found = np.full(count, -1)
    begin, step = 0, 1 << 16
    while (found < 0).any():
        given = np.arange(begin, begin + step, dtype=np.int32)
        there, first = np.unique(np.remainder(murmur3(given), count), return_index=True)
        unset = found[there] < 0
        found[there[unset]] = given[first[unset]]
        begin += step
    return [int(value) for value in found]


def murmur3(values: "np.ndarray[Any, np.dtype[np.int32]]", seed: int = 42) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Return Murmur3 hashes of 32-bit integers, as Spark's `hash` computes them."""

    def turned(word: Any, by: int) -> Any:
        return (word << np.uint32(by)) | (word >> np.uint32(32 - by))

    with np.errstate(over="ignore"):
        word = turned(values.view(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        word = turned(np.uint32(seed) ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        word ^= np.uint32(4)
        word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return (word ^ (word >> np.uint32(16))).view(np.int32)  # type: ignore[no-any-return]
