"""Tasks that work on buckets and send each other arrays, in stages: on Spark, a stage's messages are one shuffle.

A message is a few whole arrays, not a row per value: what a row costs Spark, Arrow and Python is paid once for a
million values. The cost is that Spark plans nothing on its own. The result is the same for any number of executors
because every stage puts what it gets into an order of its own.
"""

import json
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import TaskContext

from hoploom.errors import DataError, HoploomError
from hoploom.ingest.spark.frames import freeze_imports, leading_there
from hoploom.ingest.spark.session import explained, sent

Array = NDArray[Any]
Columns = Mapping[str, Array]
MESSAGE_BYTES = 2 << 20  # of a message, about
ADAPTIVE = "spark.sql.adaptive.enabled"
ROWS = 8  # messages that Spark hands to a task at once


class BucketMessage(NamedTuple):
    to: int  # a bucket
    columns: Columns


# What a task does: the bucket, what other tasks have sent to it, and what it sends. The last stage's go to the driver.
Stage = Callable[[int, Iterator[Columns]], Iterator[BucketMessage]]


class TaskExchange(Protocol):
    """Where stages run."""

    def run(self, num_buckets: int, stages: Sequence[Stage]) -> list[Columns]:
        """Run the stages in turn, each for all buckets; what the last one sends, in any order."""
        ...


class InProcess:
    """All tasks one after the other, here."""

    def run(self, num_buckets: int, stages: Sequence[Stage]) -> list[Columns]:
        inboxes: list[list[Columns]] = [[] for _ in range(num_buckets)]
        for number, stage in enumerate(stages):
            sent = [m for bucket, inbox in enumerate(inboxes) for m in stage(bucket, iter(inbox))]
            if number == len(stages) - 1:
                return [message.columns for message in sent]
            inboxes = [[] for _ in range(num_buckets)]
            for message in sent:
                inboxes[message.to].append(unpack(pack(message.columns)))
        return []


class OnSpark:
    """Every bucket is a task of Spark's."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._adapting = session.conf.get(ADAPTIVE)
        session.conf.set(ADAPTIVE, "false")  # every bucket is a task: there is nothing to adapt

    def close(self) -> None:
        """Leave the session as it was."""
        self._session.conf.set(ADAPTIVE, self._adapting)

    def run(self, num_buckets: int, stages: Sequence[Stage]) -> list[Columns]:
        self._session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(ROWS))
        leading = leading_there(num_buckets)
        frame = self._session.range(0, num_buckets, 1, num_buckets)
        frame = frame.selectExpr("cast(id as int) as key", "cast(null as binary) as message")
        for number, stage in enumerate(stages):
            is_last = number == len(stages) - 1
            frame = frame.repartition(num_buckets, "key") if number else frame
            frame = frame.mapInArrow(_Task(stage, [] if is_last else leading), "key int, message binary")
        with explained("Spark cannot cut the store", DataError):
            rows = frame.collect()
        return [unpack(row.message) for row in rows if row.message is not None]


class _Task:
    """A stage over Arrow batches: messages to a bucket carry a key that leads there.

    Each bucket sends itself nothing, too, so that one to which nobody sends anything has a task.
    """

    def __init__(self, stage: Stage, leading: Sequence[int]) -> None:
        self._stage, self._leading = stage, leading

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        bucket = context.partitionId()
        freeze_imports()
        try:
            for message in self._stage(bucket, _received(batches)):
                yield self._row(message.to, pack(message.columns))
            deque(batches, maxlen=0)  # a process that leaves rows unread is not used again
        except HoploomError as error:
            raise sent(error) from error
        if self._leading:
            yield self._row(bucket, None)

    def _row(self, to: int, message: bytes | None) -> Any:
        key = self._leading[to] if self._leading else 0
        columns = {"key": pa.array([key], pa.int32()), "message": pa.array([message], pa.binary())}
        return pa.RecordBatch.from_pydict(columns)


def _received(batches: Iterator[Any]) -> Iterator[Columns]:
    for batch in batches:
        for message in batch.column(1):
            if message.is_valid:
                yield unpack(message.as_buffer())


# --- messages ------------------------------------------------------------------------------------


def pack(columns: Columns) -> bytes:
    """Arrays as bytes: their names, dtypes and shapes, then their values."""
    about = json.dumps([(name, values.dtype.str, values.shape) for name, values in columns.items()]).encode()
    return b"".join(
        [struct.pack("<I", len(about)), about, *(np.ascontiguousarray(v).tobytes() for v in columns.values())]
    )


def unpack(packed: Any) -> Columns:
    """The inverse of pack; the arrays lie in what it is given."""
    (length,) = struct.unpack_from("<I", packed)
    about, at, columns = json.loads(bytes(memoryview(packed)[4 : 4 + length])), 4 + length, {}
    for name, dtype, shape in about:
        columns[name] = np.frombuffer(packed, dtype, int(np.prod(shape)), at).reshape(shape)
        at += columns[name].nbytes
    return columns


def sent_to(buckets: Array, columns: Columns) -> Iterator[BucketMessage]:
    """Values to the buckets that they are for, in messages that are not too large."""
    if not buckets.size:
        return
    if buckets.max() < 1 << 16:
        buckets = buckets.astype(np.uint16)  # sorted by counting
    order = np.argsort(buckets, kind="stable")
    found, begins = np.unique(buckets[order], return_index=True)
    width = sum(values[:1].nbytes for values in columns.values())
    step = max(1, MESSAGE_BYTES // max(1, width))
    for bucket, begin, end in zip(found, begins, [*begins[1:], buckets.size], strict=True):
        for at in range(begin, end, step):
            some = order[at : min(end, at + step)]
            yield BucketMessage(int(bucket), {name: values[some] for name, values in columns.items()})


def gathered(received: Iterator[Columns], names: Sequence[str], dtypes: Sequence[str]) -> list[Array]:
    """The arrays of these names of all messages, joined."""
    pieces: list[list[Array]] = [[np.empty(0, dtype)] for dtype in dtypes]
    for columns in received:
        if names[0] in columns:
            for found, name in zip(pieces, names, strict=True):
                found.append(columns[name])
    return [np.concatenate(found) for found in pieces]
