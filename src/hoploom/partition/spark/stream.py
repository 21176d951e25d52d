"""The part of every node by the edges: the quality of the core's `stream`, in rounds over buckets.

Links between nodes, clusters of nodes, clusters placed on parts, then nodes moved one by one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hoploom.ops import PartitionRule
from hoploom.partition.spark.exchange import Array, BucketMessage, Columns, Stage, TaskExchange
from hoploom.partition.spark.level import Level
from hoploom.partition.spark.links import ENOUGH, KeepOutEdges, SampleLinks, WriteLinks
from hoploom.partition.spark.placing import place_nodes
from hoploom.partition.spark.read import Buckets, StoreOnPlace
from hoploom.partition.spark.refine import refine
from hoploom.partition.spark.stages import total
from hoploom.partition.spark.state import State

PLACED = 0.4  # of what a part may hold above the mean, clusters take: refinement needs room


@dataclass(frozen=True)
class SeedSplit:
    """The training seeds: a split of a node type."""

    type: int
    split: str


@dataclass(frozen=True)
class CountLoads:
    """What every node counts for: one of its type, its in-edges, and being a seed."""

    store: StoreOnPlace
    buckets: Buckets
    state: State
    seeds: SeedSplit | None

    def __call__(self, bucket: int, received: Iterator[Columns]) -> Iterator[BucketMessage]:
        begin, end = self.buckets.span(bucket)
        num_types = len(self.store.schema.node_types)
        loads = np.zeros((end - begin, num_types + 2), np.int64)
        loads[np.arange(end - begin), self.store.types(begin, end)] = 1
        loads[:, num_types] = self.store.degrees(begin, end)
        if self.seeds is not None:
            loads[self.store.members(self.seeds.type, self.seeds.split, begin, end), num_types + 1] = 1
        self.state.save("loads", bucket, loads=loads)
        few = (loads[:, num_types] < ENOUGH).sum()
        yield BucketMessage(0, {"sum": np.append(loads.sum(0), few)})


def assign_stream(
    exchange: TaskExchange,
    store: StoreOnPlace,
    buckets: Buckets,
    state: State,
    seeds: SeedSplit | None,
    rule: PartitionRule,
) -> Array:
    """Write the part of every node to the file `parts` of its bucket; what parts hold: [parts, kinds] int64."""
    *totals, few = total(exchange, buckets.count, CountLoads(store, buckets, state, seeds))
    sums = np.array(totals)
    weights = np.full(sums.size, sums[-2] // buckets.num_ids + 1)  # all kinds have about equal sums
    weights[-2:] = 1, sums[-2] // max(1, sums[-1])
    nodes = Level(state, buckets, weights, weighted=False)
    stages: list[Stage] = [SampleLinks(store, nodes, rule.key, all_edges=bool(few))]
    if few:
        stages.append(KeepOutEdges(nodes, rule.key))
    exchange.run(buckets.count, [*stages, WriteLinks(nodes)])
    place_nodes(exchange, nodes, sums, limits_of(sums, rule, PLACED * rule.imbalance), rule)
    return refine(exchange, nodes, limits_of(sums, rule, rule.imbalance), rule)


def limits_of(totals: Array, rule: PartitionRule, imbalance: float) -> Array:
    """[kinds] int64: the most that a part may hold."""
    most = np.minimum((totals / rule.num_parts * (1 + imbalance)).astype(np.int64), totals)
    least: Array = np.maximum(-(-totals // rule.num_parts) + 1, most)
    return least
