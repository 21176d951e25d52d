"""Stages that several steps are made of: sums over all buckets, and values that other buckets have."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hoploom.partition.spark.exchange import Array, BucketMessage, Columns, TaskExchange, gathered, sent_to
from hoploom.partition.spark.read import Buckets


@dataclass(frozen=True)
class Add:
    """Sums arrays of one name and shape from all buckets; whoever sends them sends them to bucket 0."""

    name: str

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        total: Array | None = None
        for columns in received:
            total = columns[self.name].copy() if total is None else total + columns[self.name]
        if total is not None:
            yield BucketMessage(0, {self.name: total})


@dataclass(frozen=True)
class Ask:
    """Sends each key, once, to the bucket that knows its value."""

    keys: Callable[[int], Array]  # of a bucket
    buckets: Buckets

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        keys = np.unique(self.keys(bucket))
        yield from sent_to(self.buckets.of(keys), {"key": keys, "asker": np.full(keys.size, bucket, np.int32)})


@dataclass(frozen=True)
class AnswerAll:
    """Sends the values back."""

    values: Callable[[int], Array]  # of a bucket's ids
    buckets: Buckets

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        values, first = None, self.buckets.span(bucket)[0]
        for columns in received:
            if values is None:
                values = self.values(bucket)
            found = {"key": columns["key"], "value": values[columns["key"] - first]}
            yield from sent_to(columns["asker"].astype(np.int64), found)


def answered(keys: Array, received: Iterator[Columns]) -> Array:
    """The values of keys, as they were answered."""
    known, values = gathered(received, ("key", "value"), ("<i8", "<i8"))
    order = np.argsort(known)
    return values[order][np.searchsorted(known[order], keys)]


def total(
    exchange: TaskExchange, num_buckets: int, stage: Callable[[int, Iterator[Columns]], Iterator[BucketMessage]]
) -> Array:
    """The sum of what all buckets send under the name "sum"."""
    (columns,) = exchange.run(num_buckets, [stage, Add("sum")])
    return columns["sum"]
