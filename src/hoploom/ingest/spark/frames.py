"""Rows of a frame to tasks: shuffled by ranges of store ids, or as they lie; what each task returns is collected.

A range is a partition: its number says which ids its rows have. Spark places a row by the hash of a column; the column
here holds, for every range, a number with the hash that leads there.
"""

import gc
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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

from hoploom import ops
from hoploom.errors import DataError, HoploomError, StoreError
from hoploom.ingest.spark.session import explained, sent
from hoploom.ingest.stream.spill import from_bytes
from hoploom.schema import Field
from hoploom.store.storage_path import StoragePath

BATCH_BYTES, MOST_ROWS = 4 << 20, 1 << 17
RETURNED = "made string"
FAILED = "failed"  # tasks whose rows are bad, in the staging place
JOIN_TASKS = "spark.sql.shuffle.partitions"
JOINED_BYTES, JOIN_BYTES = 32, 128 << 20  # of a row, and of a task
LEAST_ROWS = 1 << 16  # of a range, about
MOST_RANGES = 1 << 14
Task = Callable[[int, Iterator[pa.RecordBatch]], Any]  # number of the partition, rows -> what JSON can hold


@dataclass(frozen=True)
class SharedRows:
    """The rows of a frame, and what a batch of them becomes; `decode` is sent to the executors.

    Rows of nodes have a column `node`; those of edges have `source` and `destination`, and `position` where lists keep
    the order in which edges come.
    """

    frame: DataFrame
    decode: Callable[[pa.RecordBatch], Any]
    num_rows: int | None  # about; of edges
    row_bytes: int = 16
    counted: Callable[[int, int], None] | None = None  # called with the rows that came, and those that were left out
    # what only the driver can say of a task's error, if it can say more
    explained: Callable[[HoploomError], HoploomError | None] | None = None


@dataclass(frozen=True)
class Ranges:
    """Ids from 0 on, in ranges of equal span."""

    num_ids: int
    span: int

    @property
    def count(self) -> int:
        return -(-self.num_ids // self.span)

    def limits(self, number: int) -> tuple[int, int]:
        """The first id of a range, and the end."""
        return number * self.span, min(self.num_ids, (number + 1) * self.span)

    def number_of(self, column: str) -> Column:
        """The range of an id; an id that is unknown is below 0, and goes to the first range."""
        return sql.expr(f"cast(greatest({column}, 0) div {self.span} as int)")


def ranges_for(num_ids: int, num_rows: int, row_bytes: int, memory: int, tasks: int, step: int = 1) -> Ranges:
    """Ranges of whole steps: enough that each fits a task's memory and that all tasks have some."""
    fitting = -(-num_rows * row_bytes // max(1, memory // 8))
    wanted = max(fitting, min(2 * tasks, -(-num_rows // LEAST_ROWS)), 1)
    span = max(1, -(-num_ids // min(wanted, MOST_RANGES)))
    return Ranges(num_ids, -(-span // step) * step)


def shuffled(frame: DataFrame, number: Column, count: int, order: Sequence[str] = ()) -> DataFrame:
    """The frame in `count` partitions, each row in that of its number; in order inside a partition, if one is given."""
    columns = frame.columns
    leading = sql.expr(f"array({','.join(map(str, leading_there(count)))})")
    moved = frame.withColumn("range", sql.element_at(leading, number + 1)).repartition(count, "range")
    return (moved.sortWithinPartitions(*order) if order else moved).select(*columns)


def numbers(session: SparkSession, count: int) -> DataFrame:
    """One row in each of `count` partitions."""
    return session.range(0, count, 1, count)


def returned(frame: DataFrame, count: int, task: Task, staging: StoragePath, row_bytes: int = 16) -> list[Any]:
    """What the task returns for each of `count` partitions. In `staging` it writes what is wrong with its rows."""
    set_batch_rows(frame.sparkSession, row_bytes)
    with explained("Spark cannot write the store", DataError):
        found = frame.mapInArrow(partial(_run, task, staging), RETURNED).collect()
    answers = dict(json.loads(row[0]) for row in found)
    if len(answers) != count:
        raise StoreError(f"Spark ran {len(answers):,} tasks of {count:,}, so that rows may be missing; try again")
    return [answers[number] for number in range(count)]


def set_join_tasks(session: SparkSession, num_rows: int) -> None:
    """Enough tasks for the largest join: Spark may merge small ones, but never splits one."""
    wanted, now = min(MOST_RANGES, num_rows * JOINED_BYTES // JOIN_BYTES), session.conf.get(JOIN_TASKS, "200")
    if str(now).isdecimal() and wanted > int(str(now)):
        session.conf.set(JOIN_TASKS, str(wanted))


def set_batch_rows(session: SparkSession, row_bytes: int) -> None:
    """How many rows a task gets at once."""
    rows = max(256, min(MOST_ROWS, BATCH_BYTES // max(1, row_bytes)))
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(rows))


def freeze_imports() -> None:
    """pyspark collects garbage after every task: leave out the objects that imports have made, 0.15 s a task."""
    if not gc.get_freeze_count():
        gc.freeze()


def _run(task: Task, staging: StoragePath, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    number = context.partitionId()
    freeze_imports()
    found = f"{FAILED}/{context.stageId()}-{number}"
    if context.attemptNumber() and staging.size(found) is not None:
        with staging.open(found) as file:
            raise RuntimeError(file.read().decode())
    try:
        answer = task(number, batches)
        deque(batches, maxlen=0)  # a process that leaves rows unread is not used again
    except HoploomError as error:
        told = sent(error)
        if isinstance(error, DataError):  # Spark tries it again, and the rows will be as bad as they are
            with suppress(StoreError), staging.create(found) as file:
                file.write(str(told).encode())
        raise told from error
    yield pa.RecordBatch.from_pydict({"made": [json.dumps([number, answer])]})


# --- the hash that Spark places rows by ----------------------------------------------------------


def binary_column(rows: Tensor) -> pa.Array:
    """Return rows [n, ...] as a column of bytes, which Spark moves unread; less than 2 GiB."""
    raw = ops.byte_rows(rows.contiguous())
    ends = np.arange(len(raw) + 1, dtype=np.int64) * raw.shape[1]
    buffers = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(raw.numpy())]
    return pa.Array.from_buffers(pa.binary(), len(raw), buffers)


def rows_of_binary(column: pa.Array, field: Field) -> Tensor:
    """Return the rows of a field that `binary_column` has written."""
    _, offsets, values = column.buffers()
    begin = int(np.frombuffer(offsets, np.int32)[column.offset]) if len(column) else 0
    count = len(column) * field.row_bytes
    raw = np.frombuffer(values, np.uint8)[begin : begin + count] if count else np.empty(0, np.uint8)
    return from_bytes(torch.from_numpy(raw.copy()).view(len(column), field.row_bytes), field)


@cache
def leading_there(count: int) -> list[int]:
    """For every partition of `count` an integer that Spark's hash puts there."""
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
    """Murmur3 of 32-bit integers, as Spark's `hash` computes it."""

    def turned(word: Any, by: int) -> Any:
        return (word << np.uint32(by)) | (word >> np.uint32(32 - by))

    with np.errstate(over="ignore"):
        word = turned(values.view(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        word = turned(np.uint32(seed) ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        word ^= np.uint32(4)
        word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return (word ^ (word >> np.uint32(16))).view(np.int32)  # type: ignore[no-any-return]
