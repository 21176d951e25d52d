"""Parts by id alone, and the new number of every node: part after part, in a part by the number from before."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hoploom.partition.assign import parts_by_hash, parts_by_range
from hoploom.partition.spark.exchange import Array, BucketMessage, Columns, Stage, TaskExchange
from hoploom.partition.spark.read import Buckets, StoreOnPlace
from hoploom.partition.spark.state import State

BY_ID = {"hash": parts_by_hash, "range": parts_by_range}


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

    def groups(self, bucket: int) -> Array:
        """[n] int64: type and part of every node in one number."""
        parts = self.state.load("parts", bucket, "part")["part"].astype(np.int64)
        return self.store.types(*self.buckets.span(bucket)) * self.num_parts + parts

    @property
    def num_groups(self) -> int:
        return len(self.store.schema.node_types) * self.num_parts

    def new(self, bucket: int) -> Array:
        """[n] int64: the new numbers."""
        return self.state.load("new", bucket, "number")["number"]


@dataclass(frozen=True)
class CountGroups:
    to: NewNumbers

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        counts = np.bincount(self.to.groups(bucket), minlength=self.to.num_groups)
        yield BucketMessage(0, {"bucket": np.array([bucket]), "counts": counts})


@dataclass(frozen=True)
class FirstNumbers:
    """Bucket 0 tells every bucket the first number of each of its groups."""

    to: NewNumbers

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        counts = np.zeros((self.to.buckets.count, self.to.num_groups), np.int64)
        for columns in received:
            counts[columns["bucket"][0]] = columns["counts"]
        if bucket:
            return
        sizes = counts.sum(0).reshape(-1, self.to.num_parts)
        firsts = (np.cumsum(sizes, axis=1) - sizes).reshape(-1) + np.cumsum(counts, axis=0) - counts
        for number, first in enumerate(firsts):
            yield BucketMessage(number, {"firsts": first})
        yield BucketMessage(0, {"sizes": sizes})


@dataclass(frozen=True)
class NumberNodes:
    """Nodes get their numbers. The driver hears how large parts are, and of which types nodes have moved."""

    to: NewNumbers

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        firsts = np.zeros(self.to.num_groups, np.int64)
        for columns in received:
            if "firsts" in columns:
                firsts = columns["firsts"]
            else:
                yield BucketMessage(0, columns)
        groups = self.to.groups(bucket)
        order = np.argsort(groups, kind="stable")
        ranks = np.empty(groups.size, np.int64)
        ranks[order] = np.arange(groups.size) - np.searchsorted(groups[order], groups[order])
        numbers = firsts[groups] + ranks
        self.to.state.save("new", bucket, number=numbers)
        begin, end = self.to.buckets.span(bucket)
        types = groups // self.to.num_parts
        moved = numbers + np.array(self.to.store.bounds)[types] != np.arange(begin, end)
        yield BucketMessage(0, {"moved": np.unique(types[moved])})


def number_nodes(exchange: TaskExchange, numbers: NewNumbers) -> tuple[list[list[int]], set[int]]:
    """Number the nodes by the file `parts`; the bounds of the parts by type, and the types that do not stay as is."""
    stages: list[Stage] = [CountGroups(numbers), FirstNumbers(numbers), NumberNodes(numbers)]
    bounds: list[list[int]] = []
    changed: set[int] = set()
    for columns in exchange.run(numbers.buckets.count, stages):
        if "sizes" in columns:
            bounds = [[0, *np.cumsum(sizes).tolist()] for sizes in columns["sizes"]]
        else:
            changed |= set(columns["moved"].tolist())
    return bounds, changed
