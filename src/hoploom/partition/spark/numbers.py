"""Parts by id alone, and the new number of every node: part after part, in a part the most visited first.

Visits are put into classes, 16 for every doubling. Nodes of one class keep the order that they had.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hoploom.partition.assign import parts_by_hash, parts_by_range
from hoploom.partition.spark.exchange import Array, BucketMessage, Columns, Stage, TaskExchange, gathered, sent_to
from hoploom.partition.spark.hotness import ExpectedVisits
from hoploom.partition.spark.level import log_class
from hoploom.partition.spark.read import Buckets, StoreOnPlace
from hoploom.partition.spark.stages import answered
from hoploom.partition.spark.state import State

BY_ID = {"hash": parts_by_hash, "range": parts_by_range}
PER_DOUBLING, CLASS_BITS = 16, 11  # classes of visits


@dataclass(frozen=True)
class AssignById:
    """Parts by hash or by range, as in one process."""

    store: StoreOnPlace
    buckets: Buckets
    state: State
    method: str
    num_parts: int

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        begin, end = self.buckets.span(bucket)
        found, bounds = [np.empty(0, np.int16)], self.store.bounds
        for index, (first, last) in enumerate(pairwise(bounds)):
            low, high = max(begin, first), min(end, last)
            if low < high:
                span = (low - first, high - first)
                found.append(BY_ID[self.method](self.store.schema, index, self.num_parts, span).numpy())
        self.state.save("parts", bucket, part=np.concatenate(found))
        return
        yield


@dataclass(frozen=True)
class NewNumbers:
    """Which numbers nodes get. A number counts the nodes of its type."""

    store: StoreOnPlace
    buckets: Buckets
    state: State
    num_parts: int
    visits: ExpectedVisits | None = None  # None: nodes keep their order within a part

    def sort_keys(self, bucket: int) -> Array:
        """[n] int64: type, part and class of visits of every node in one number; nodes are numbered in this order."""
        parts = self.state.load("parts", bucket, "part")["part"].astype(np.int64)
        groups = self.store.types(*self.buckets.span(bucket)) * self.num_parts + parts
        if self.visits is None:
            return groups << CLASS_BITS
        classes = log_class(self.visits.visits(bucket), PER_DOUBLING)
        keys: Array = groups << CLASS_BITS | (1 << CLASS_BITS) - 1 - classes
        return keys

    @property
    def num_groups(self) -> int:
        """Of nodes of one type in one part."""
        return len(self.store.schema.node_types) * self.num_parts

    def new(self, bucket: int) -> Array:
        """[n] int64: the new numbers."""
        return self.state.load("new", bucket, "number")["number"]


@dataclass(frozen=True)
class CountKeys:
    """Sends how many nodes of the bucket have each key to the bucket that puts the keys of this group in order."""

    to: NewNumbers

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        keys, counts = np.unique(self.to.sort_keys(bucket), return_counts=True)
        columns = {"key": keys, "count": counts, "bucket": np.full(keys.size, bucket)}
        yield from sent_to((keys >> CLASS_BITS) % self.to.buckets.count, columns)


@dataclass(frozen=True)
class FirstNumbers:
    """Every bucket hears how large all groups are, and how many nodes of a group come before those of each key."""

    to: NewNumbers

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        keys, counts, buckets = gathered(received, ("key", "count", "bucket"), ("<i8", "<i8", "<i8"))
        if not keys.size:
            return
        order = np.lexsort((buckets, keys))
        keys, counts, buckets = keys[order], counts[order], buckets[order]
        groups, begins = np.unique(keys >> CLASS_BITS, return_index=True)
        sizes, before = np.add.reduceat(counts, begins), np.cumsum(counts) - counts
        before -= np.repeat(before[begins], np.diff(begins, append=keys.size))
        for to in range(self.to.buckets.count):
            yield BucketMessage(to, {"group": groups, "size": sizes})
        yield from sent_to(buckets, {"key": keys, "value": before})


@dataclass(frozen=True)
class NumberNodes:
    """Nodes get their numbers. The driver hears how large parts are, and of which types nodes have moved."""

    to: NewNumbers

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        sizes, answers = np.zeros(self.to.num_groups, np.int64), []
        for columns in received:
            if "group" in columns:
                sizes[columns["group"]] = columns["size"]
            else:
                answers.append(columns)
        by_type = sizes.reshape(-1, self.to.num_parts)
        if bucket == 0:
            yield BucketMessage(0, {"sizes": by_type})
        firsts = (np.cumsum(by_type, axis=1) - by_type).reshape(-1)
        keys = self.to.sort_keys(bucket)
        order, ranks = np.argsort(keys, kind="stable"), np.empty(keys.size, np.int64)
        ranks[order] = np.arange(keys.size) - np.searchsorted(keys[order], keys[order])
        numbers = firsts[keys >> CLASS_BITS] + answered(keys, iter(answers)) + ranks
        self.to.state.save("new", bucket, number=numbers)
        begin, end = self.to.buckets.span(bucket)
        types = self.to.store.types(begin, end)
        moved = numbers + np.array(self.to.store.bounds)[types] != np.arange(begin, end)
        yield BucketMessage(0, {"moved": np.unique(types[moved])})


def number_nodes(exchange: TaskExchange, numbers: NewNumbers) -> tuple[list[list[int]], set[int]]:
    """Number the nodes by the file `parts`; the bounds of the parts by type, and the types that do not stay as is."""
    stages: list[Stage] = [CountKeys(numbers), FirstNumbers(numbers), NumberNodes(numbers)]
    bounds: list[list[int]] = []
    changed: set[int] = set()
    for columns in exchange.run(numbers.buckets.count, stages):
        if "sizes" in columns:
            bounds = [[0, *np.cumsum(sizes).tolist()] for sizes in columns["sizes"]]
        else:
            changed |= set(columns["moved"].tolist())
    return bounds, changed
