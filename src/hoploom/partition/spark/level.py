"""A graph in buckets, whose vertices are nodes or clusters; a hash, and classes of numbers."""

from dataclasses import dataclass

import numpy as np

from hoploom.partition.spark.exchange import Array, Columns
from hoploom.partition.spark.read import Buckets
from hoploom.partition.spark.state import State

ID_BITS = 40  # above them stands a vertex's place in its bucket


def mix(key: int, values: Array) -> Array:
    """keys.mix over an array: [n] uint64."""
    z = (values.astype(np.uint64) ^ np.uint64(key)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def half_of(key: int, ids: Array, half: int) -> Array:
    """Which of the ids are in one of two halves that the key draws: [n] bool."""
    halves: Array = (mix(key, ids) & np.uint64(1)).astype(np.int64) == half
    return halves


def begins_of(ascending: Array) -> Array:
    """Where a new value begins."""
    if not ascending.size:
        return np.empty(0, np.int64)
    return np.concatenate([[0], np.nonzero(ascending[1:] != ascending[:-1])[0] + 1])


def log_class(values: Array, per_doubling: int) -> Array:
    """[n] int64: 0 for 0, and so many classes for every doubling."""
    share, doublings = np.frexp(values.astype(np.float64))
    classes: Array = per_doubling * (doublings.astype(np.int64) - 1) + (2 * per_doubling * share).astype(np.int64)
    return classes.clip(0)


@dataclass(frozen=True)
class Level:
    """A graph of vertices: nodes, or clusters of those of the level below.

    Its files, by bucket: `loads` [n, kinds] int64 is what a vertex counts for; `links` are who is heard (its place in
    the bucket), who listens (an id) and, but for nodes, with which weight.
    """

    state: State
    buckets: Buckets
    weights: Array  # [kinds] int64: what one of each kind adds to a vertex's size
    weighted: bool

    def loads(self, bucket: int) -> Array:
        return self.state.load("loads", bucket, "loads")["loads"]

    def sizes(self, bucket: int) -> Array:
        """All kinds in one number: [n] int64."""
        return self.loads(bucket) @ self.weights

    def links(self, bucket: int) -> Columns:
        return self.state.load("links", bucket, "heard", "listener", *(("weight",) if self.weighted else ()))

    def labels(self, bucket: int, turn: int) -> Array:
        """[n] int64 ids of vertices, after so many turns."""
        if turn == 0:
            return np.arange(*self.buckets.span(bucket))
        return self.state.load(f"labels-{turn}", bucket, "label")["label"]

    def above(self, bucket: int) -> Array:
        """[n] int64: the number of each vertex's cluster, which is a vertex of the level above."""
        return self.state.load("above", bucket, "number")["number"]
