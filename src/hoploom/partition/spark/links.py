"""Which neighbours a node asks for its place: some of its in-edges, and where it has few, some of its out-edges.

Links lie where they are heard from: a bucket's file holds, for its own nodes, who listens to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hoploom.partition.spark.exchange import Array, BucketMessage, Columns, gathered, sent_to
from hoploom.partition.spark.level import ID_BITS, Level, begins_of, mix
from hoploom.partition.spark.read import CHUNK_EDGES, CHUNK_NODES, InLists, StoreOnPlace

SAMPLES = 16  # in-edges of a node
ENOUGH = 8  # in-edges: with fewer, out-edges are asked too
KEPT = 8  # out-edges
DEGREE = -2  # among the kinds of loads


@dataclass(frozen=True)
class SampleLinks:
    """Nodes send to those that they hear, and all edges to their sources where there are nodes with few in-edges."""

    store: StoreOnPlace
    nodes: Level
    key: int
    all_edges: bool

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        begin, end = self.nodes.buckets.span(bucket)
        degrees = self.nodes.loads(bucket)[:, DEGREE]
        before = np.zeros(end - begin, np.int64)
        offsets = (mix(self.key, np.arange(begin, end)) % np.maximum(degrees, 1).astype(np.uint64)).astype(np.int64)
        for lists in self.store.in_lists(begin, end):
            for low in range(0, lists.indptr.size - 1, CHUNK_NODES):
                high = min(lists.indptr.size - 1, low + CHUNK_NODES)
                own = slice(lists.place + low, lists.place + high)
                nodes, wanted = chosen(degrees[own], offsets[own], before[own], np.diff(lists.indptr[low : high + 1]))
                wanted += lists.indptr[low:high][nodes]
                nodes += begin + lists.place + low
                yield from self._read(lists, low, high, nodes, wanted, begin)
            before[lists.place : lists.place + lists.indptr.size - 1] += np.diff(lists.indptr)

    def _read(
        self, lists: InLists, low: int, high: int, nodes: Array, wanted: Array, begin: int
    ) -> Iterator[BucketMessage]:
        for first in range(int(lists.indptr[low]), int(lists.indptr[high]), CHUNK_EDGES):
            last = min(int(lists.indptr[high]), first + CHUNK_EDGES)
            sources = lists.edges.read(first, last) + lists.source
            some = slice(*np.searchsorted(wanted, [first, last]))
            heard = sources[wanted[some] - first]
            links = heard != nodes[some]
            yield from sent_to(
                self.nodes.buckets.of(heard[links]), {"heard": heard[links], "listener": nodes[some][links]}
            )
            if self.all_edges:
                ends = np.searchsorted(lists.indptr[low : high + 1], np.arange(first, last), side="right") - 1
                ends += low + begin + lists.place
                links = sources != ends
                yield from sent_to(
                    self.nodes.buckets.of(sources[links]), {"source": sources[links], "end": ends[links]}
                )


def chosen(degrees: Array, offsets: Array, before: Array, counts: Array) -> tuple[Array, Array]:
    """Of each node's in-edges some at equal distances, or all: those that are in this list, with their nodes.

    `before` [n] is how many in-edges of other lists come before, `counts` [n] how many this one has. The first of two
    [m] arrays ascends, and within a node the second does.
    """
    samples = np.arange(SAMPLES)
    many = degrees[:, None] > SAMPLES
    at = np.where(many, (samples * degrees[:, None] + offsets[:, None]) // SAMPLES, samples) - before[:, None]
    here = (at >= 0) & (at < counts[:, None]) & (many | (samples < degrees[:, None]))
    return np.nonzero(here)[0], at[here]


@dataclass(frozen=True)
class KeepOutEdges:
    """Sources with few in-edges keep some of their out-edges: they listen to the ends."""

    nodes: Level
    key: int

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        begin, _ = self.nodes.buckets.span(bucket)
        few = self.nodes.loads(bucket)[:, DEGREE] < ENOUGH
        kept = np.empty(0, np.int64), np.empty(0, np.int64)
        waiting: list[Columns] = []
        size = 0
        for columns in received:
            if "heard" in columns:
                yield BucketMessage(bucket, columns)
                continue
            waiting.append(columns)
            size += columns["source"].size
            if size > max(CHUNK_EDGES, kept[0].size):
                kept, waiting, size = self._kept(kept, waiting, few, begin), [], 0
        sources, ends = self._kept(kept, waiting, few, begin)
        yield from sent_to(self.nodes.buckets.of(ends), {"heard": ends, "listener": sources})

    def _kept(self, kept: tuple[Array, Array], waiting: list[Columns], few: Array, begin: int) -> tuple[Array, Array]:
        """Of each source the out-edges with the smallest words; of an edge that comes twice one."""
        sources = np.concatenate([kept[0], *(columns["source"] for columns in waiting)])
        ends = np.concatenate([kept[1], *(columns["end"] for columns in waiting)])
        is_few = few[sources - begin]
        sources, ends = sources[is_few], ends[is_few]
        words = mix(self.key, sources) ^ mix(self.key + 1, ends)
        order = np.lexsort((ends, words, sources))
        sources, ends = sources[order], ends[order]
        new = np.ones(sources.size, bool)
        new[1:] = (sources[1:] != sources[:-1]) | (ends[1:] != ends[:-1])
        sources, ends = sources[new], ends[new]
        ranks = np.arange(sources.size) - np.searchsorted(sources, sources)
        return sources[ranks < KEPT], ends[ranks < KEPT]


@dataclass(frozen=True)
class WriteLinks:
    """Those who are heard note who listens."""

    nodes: Level

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        heard, listeners = gathered(received, ("heard", "listener"), ("<i8", "<i8"))
        links = (heard - self.nodes.buckets.span(bucket)[0]) << ID_BITS | listeners
        links.sort()
        heard, listeners = (links >> ID_BITS).astype(np.uint32), links & ((1 << ID_BITS) - 1)
        self.nodes.state.save("links", bucket, heard=heard, listener=listeners)
        yield BucketMessage(0, {"count": np.array([heard.size])})


# --- links with weights --------------------------------------------------------------------------


class LinkSums:
    """Links with weights, summed up whenever many have come. Listeners are places in a bucket."""

    def __init__(self) -> None:
        self._pairs, self._weights = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        self._count, self._enough = 0, CHUNK_EDGES

    def add(self, places: Array, heard: Array, weights: Array) -> None:
        self._pairs.append(places.astype(np.int64) << ID_BITS | heard)
        self._weights.append(weights)
        self._count += heard.size
        if self._count > self._enough:
            self._sum_up()
            self._count = self._pairs[0].size
            self._enough = max(CHUNK_EDGES, 2 * self._count)

    def total(self) -> Iterator[tuple[Array, Array, Array]]:
        """Listeners, heard and weights: every pair once, in order, and all of a listener together."""
        self._sum_up()
        (pairs,), (weights,) = self._pairs, self._weights
        begin = 0
        while begin < pairs.size:
            last = min(begin + CHUNK_EDGES, pairs.size) - 1
            end = int(np.searchsorted(pairs, (pairs[last] >> ID_BITS) + 1 << ID_BITS))
            yield pairs[begin:end] >> ID_BITS, pairs[begin:end] & ((1 << ID_BITS) - 1), weights[begin:end]
            begin = end

    def _sum_up(self) -> None:
        """Arrays go as soon as they are copied: this is where a task holds most."""
        pairs, self._pairs = np.concatenate(self._pairs), []
        weights, self._weights = np.concatenate(self._weights), []
        order = np.argsort(pairs)
        pairs, weights = pairs[order], weights[order]
        begins = begins_of(pairs)
        self._pairs = [pairs[begins]]
        self._weights = [np.add.reduceat(weights, begins) if begins.size else weights]


def heaviest(places: Array, heard: Array, weights: Array, count: int) -> Array:
    """Positions of each listener's `count` heaviest links; of equal weights (to one in 2^16), those with small hashes.

    `places` [n] ascends. One sort by one word is much faster than three.
    """
    begins = begins_of(places)
    sizes = np.diff(begins, append=places.size)
    some = np.nonzero(np.repeat(sizes > count, sizes))[0]  # of those who have too many
    rounded = weights[some].astype(np.float32).view(np.uint32) >> 7  # 24 bits: right to one in 2^16
    words = (((1 << 24) - 1) - rounded).astype(np.uint64) << np.uint64(18) | mix(0, heard[some]) >> np.uint64(46)
    order = some[np.argsort(places[some].astype(np.uint64) << np.uint64(42) | words, kind="stable")]
    ranks = np.arange(order.size) - np.searchsorted(places[some], places[some])
    few = np.nonzero(np.repeat(sizes <= count, sizes))[0]
    return np.concatenate([few, order[ranks < count]])
