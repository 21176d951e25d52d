"""Clusters of clusters, until the core can place them on parts in the driver's memory; then back down to nodes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hoploom import ops
from hoploom.ops import ClusterLinks, PartitionRule
from hoploom.partition.spark.clusters import contract, propagate
from hoploom.partition.spark.exchange import Array, BucketMessage, Columns, InProcess, TaskExchange, gathered, sent_to
from hoploom.partition.spark.level import Level, log_class, mix
from hoploom.partition.spark.stages import AnswerAll, Ask, answered, total

MOST_CLUSTERS = 1 << 16  # in the driver
CLUSTERS_PER_PART = 8  # at least
GROWTH = 16  # of the largest cluster, from level to level: small clusters find their neighbours better
ENOUGH_PER_PART = 64  # clusters: the core does the rest
SHRINKING = 0.9  # of the vertices, or fewer, become clusters; else the next level would be no smaller
SIZES = 8 * 64  # classes of sizes: eight for every doubling


def size_class(sizes: Array) -> Array:
    """[n] int64."""
    return np.minimum(log_class(sizes, 8), SIZES - 1)


@dataclass(frozen=True)
class CountSizes:
    level: Level

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        counts = np.zeros(SIZES, np.int64)
        if bucket < self.level.buckets.count:
            counts = np.bincount(size_class(self.level.sizes(bucket)), minlength=SIZES)
        yield BucketMessage(0, {"sum": counts})


@dataclass(frozen=True)
class SendLarge:
    """The large clusters to the driver, and the links from them to those who listen."""

    level: Level
    least: int  # class of size

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        links, large = self.level.links(bucket), size_class(self.level.sizes(bucket)) >= self.least
        chosen = large[links["heard"]]
        heard = links["heard"][chosen] + self.level.buckets.span(bucket)[0]
        columns = {"listener": links["listener"][chosen], "heard": heard, "weight": links["weight"][chosen]}
        yield from sent_to(self.level.buckets.of(columns["listener"]), columns)


@dataclass(frozen=True)
class CollectLarge:
    level: Level
    least: int

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        large, first = size_class(self.level.sizes(bucket)) >= self.least, self.level.buckets.span(bucket)[0]
        yield BucketMessage(0, {"number": np.nonzero(large)[0] + first, "loads": self.level.loads(bucket)[large]})
        for columns in received:
            chosen = large[columns["listener"] - first]
            yield BucketMessage(0, {name: values[chosen] for name, values in columns.items()})


@dataclass(frozen=True)
class SavePlaced:
    """The parts of the topmost vertices: as placed, the small ones by a hash where there is room."""

    level: Level
    numbers: Array  # [n] int64, ascending
    parts: Array  # [n] int16
    shares: Array  # [num_parts] int64, ascending up to 2^32

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        ids = np.arange(*self.level.buckets.span(bucket))
        words = (mix(0, ids) >> np.uint64(32)).astype(np.int64)
        parts = np.searchsorted(self.shares, words, side="right").astype(np.int16)
        low, high = np.searchsorted(self.numbers, [ids[0], ids[-1] + 1]) if ids.size else (0, 0)
        parts[self.numbers[low:high] - ids[:1]] = self.parts[low:high]
        self.level.state.save("parts-0", bucket, part=parts)
        return
        yield


@dataclass(frozen=True)
class SaveParts:
    """The parts of vertices: those of their clusters."""

    level: Level

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        parts = answered(self.level.above(bucket), received).astype(np.int16)
        self.level.state.save("parts-0", bucket, part=parts)
        return
        yield


def place_nodes(exchange: TaskExchange, nodes: Level, totals: Array, most: Array, rule: PartitionRule) -> None:
    """A first part for every node, in the file `parts-0` of its bucket: few edges between parts, none much too full."""
    levels, whole = [nodes], int(totals @ nodes.weights)
    largest, final = whole // nodes.buckets.num_ids, whole // (rule.num_parts * CLUSTERS_PER_PART)
    while True:
        below = levels[-1]
        largest = min(final, largest * GROWTH)
        usual = int(2 * nodes.weights[0]) if len(levels) == 1 else whole // below.buckets.num_ids
        where = exchange if below.buckets.num_ids > MOST_CLUSTERS else InProcess()
        turns = propagate(where, below, largest, usual, rule.key + len(levels))
        levels.append(contract(where, below, turns, nodes.state / f"level-{len(levels)}"))
        num_clusters = levels[-1].buckets.num_ids
        is_stuck = largest == final and num_clusters > SHRINKING * below.buckets.num_ids
        if num_clusters <= ENOUGH_PER_PART * rule.num_parts or is_stuck:
            break
    where = exchange if levels[-1].buckets.num_ids > MOST_CLUSTERS else InProcess()
    _place_topmost(where, levels[-1], totals, most, rule)
    for below, above in zip(levels[-2::-1], levels[:0:-1], strict=True):
        known = AnswerAll(partial(_first_parts, above), above.buckets)
        where = exchange if below.buckets.num_ids > MOST_CLUSTERS else InProcess()
        where.run(below.buckets.count, [Ask(below.above, above.buckets), known, SaveParts(below)])
    for number in range(1, len(levels)):
        nodes.state.drop(f"level-{number}")


def _first_parts(level: Level, bucket: int) -> Array:
    return level.state.load("parts-0", bucket, "part")["part"]


def _place_topmost(exchange: TaskExchange, level: Level, totals: Array, most: Array, rule: PartitionRule) -> None:
    count = level.buckets.count
    larger = np.cumsum(total(exchange, count, CountSizes(level))[::-1])
    least = SIZES - int(np.searchsorted(larger, MOST_CLUSTERS, side="right"))
    told = exchange.run(count, [SendLarge(level, least), CollectLarge(level, least)])
    numbers, parts = np.empty(0, np.int64), np.empty(0, np.int16)
    held = np.zeros(rule.num_parts, np.int64)
    found = [columns for columns in told if "number" in columns and columns["number"].size]
    if found:
        numbers = np.concatenate([columns["number"] for columns in found])
        loads = np.concatenate([columns["loads"] for columns in found])
        order = np.argsort(numbers)
        numbers, loads = numbers[order], np.ascontiguousarray(loads[order])
        sizes = loads @ level.weights
        links = _links(numbers, [columns for columns in told if "listener" in columns])
        given = torch.from_numpy(loads), torch.from_numpy(sizes), links, torch.from_numpy(most)
        parts = ops.place_clusters(*given, rule).numpy()
        np.add.at(held, parts, sizes)
    room = np.maximum(0, int(totals @ level.weights) // rule.num_parts + 1 - held).astype(np.float64)
    shares = (np.cumsum(room) / room.sum() * 2**32).astype(np.int64)
    shares[-1] = 1 << 32
    exchange.run(count, [SavePlaced(level, numbers, parts, shares)])


def _links(numbers: Array, told: Sequence[Columns]) -> ClusterLinks:
    """Links between the clusters of these numbers, every pair once."""
    names = ("listener", "heard", "weight")
    listeners, heard, weights = gathered(iter(told), names, ("<i8", "<i8", "<i8"))
    ends = np.sort(np.stack([np.searchsorted(numbers, listeners), np.searchsorted(numbers, heard)]), axis=0)
    order = np.lexsort((weights, ends[1], ends[0]))
    ends, weights = ends[:, order], weights[order]
    last = np.ones(order.size, bool)  # both ends may have kept the link: it has the same weight for both
    last[:-1] = (ends[:, 1:] != ends[:, :-1]).any(0)
    return ClusterLinks(*(torch.from_numpy(each[last]) for each in (ends[0], ends[1], weights)))
