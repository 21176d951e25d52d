"""How often training will ask for each node: the visits to expect in an epoch, carried hop by hop against the edges.

A batch visits a node once, however many of its nodes sampled it, so each hop goes on from the nodes that a batch is
expected to reach for the first time. Sums are of whole numbers: no order of messages changes them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hoploom.load.presample import BATCH_SIZE
from hoploom.partition.spark.exchange import Array, BucketMessage, Columns, TaskExchange, sent_to
from hoploom.partition.spark.read import CHUNK_EDGES, Buckets, InLists, StoreOnPlace
from hoploom.partition.spark.state import State
from hoploom.partition.spark.stream import SeedSplit

ONE = 1 << 20  # a visit: sums count millionths of visits
SQUARINGS = 10  # of 1 - x / 2^10, for e^-x: no two processors disagree about multiplications
MOST_PER_BATCH = 64  # visits to a node; e^-64 is nothing
MOST_VISITS = 1 << 61  # to a node, in an epoch, in these units: adding as many again does not overflow


@dataclass(frozen=True)
class ExpectedVisits:
    """Visits in an epoch that samples these fanouts from the members of a split, in a file for every bucket."""

    store: StoreOnPlace
    buckets: Buckets
    state: State
    seeds: SeedSplit
    fanouts: Sequence[Sequence[int]]  # per hop, per relation

    def visits(self, bucket: int, hop: int | None = None) -> Array:
        """What has come until after a hop, or in all: [n] int64."""
        return self.state.load(f"visits-{len(self.fanouts) if hop is None else hop}", bucket, "visits")["visits"]

    @property
    def num_batches(self) -> int:
        """In an epoch."""
        name = self.store.schema.node_types[self.seeds.type].name
        num_seeds = sum(part.splits.get(name, {}).get(self.seeds.split, 0) for part in self.store.parts)
        return max(1, -(-num_seeds // BATCH_SIZE))

    def reached(self, visits: Array) -> Array:
        """The batches of an epoch that are expected to have each node: [n] float64, in the units of visits."""
        per_batch = np.minimum(visits / (ONE * self.num_batches), MOST_PER_BATCH)
        absent = 1 - per_batch / (1 << SQUARINGS)
        for _ in range(SQUARINGS):
            absent = absent * absent
        return (1 - absent) * (ONE * self.num_batches)


@dataclass(frozen=True)
class SpreadVisits:
    """Nodes that a hop has reached hand visits on; before the first hop, these are the seeds."""

    of: ExpectedVisits
    hop: int

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        before, visits = self._visits(bucket, received)
        self.of.state.save(f"visits-{self.hop}", bucket, visits=visits)
        if self.hop == len(self.of.fanouts):
            return
        new = self.of.reached(visits) - self.of.reached(before)
        for lists in self.of.store.in_lists(*self.of.buckets.span(bucket)):
            fanout = self.of.fanouts[self.hop][lists.relation]
            if fanout:
                yield from self._spread(lists, _handed_on(lists, new, fanout))

    def _visits(self, bucket: int, received: Iterator[Columns]) -> tuple[Array, Array]:
        """Until after the hop before, and until now."""
        if self.hop == 0:
            begin, end = self.of.buckets.span(bucket)
            before = np.zeros(end - begin, np.int64)
            visits = before.copy()
            visits[self.of.store.members(self.of.seeds.type, self.of.seeds.split, begin, end)] = ONE
            return before, visits
        before = self.of.visits(bucket, self.hop - 1)
        visits = before.copy()
        for columns in received:
            np.add.at(visits, columns["place"], columns["visits"].astype(np.int64))
            np.minimum(visits, MOST_VISITS, out=visits)  # in any order of messages
        return before, visits

    def _spread(self, lists: InLists, amounts: Array) -> Iterator[BucketMessage]:
        buckets = self.of.buckets
        for first in range(0, int(lists.indptr[-1]), CHUNK_EDGES):
            last = min(int(lists.indptr[-1]), first + CHUNK_EDGES)
            low = int(np.searchsorted(lists.indptr, first, side="right")) - 1
            high = int(np.searchsorted(lists.indptr, last))
            if not amounts[low:high].any():
                continue
            visits = np.repeat(amounts[low:high], np.diff(lists.indptr[low : high + 1].clip(first, last)))
            some = visits > 0
            sources = lists.edges.read(first, last)[some] + lists.source
            owners = buckets.of(sources)
            places = (sources - owners * buckets.size).astype(np.uint32)
            yield from sent_to(owners, {"place": places, "visits": visits[some]})


def _handed_on(lists: InLists, new: Array, fanout: int) -> Array:
    """What every in-edge of a node gets: [n] float32, whole numbers."""
    degrees = np.diff(lists.indptr)
    amounts = new[lists.place : lists.place + degrees.size]
    if fanout > 0:
        amounts = amounts * np.minimum(1, fanout / np.maximum(degrees, 1))
    return np.rint(amounts).astype(np.float32)


def expect_visits(exchange: TaskExchange, visits: ExpectedVisits) -> None:
    """Write the files of every bucket."""
    hops = len(visits.fanouts)
    exchange.run(visits.buckets.count, [SpreadVisits(visits, hop) for hop in range(hops + 1)])
    for hop in range(hops):
        visits.state.drop(f"visits-{hop}")
