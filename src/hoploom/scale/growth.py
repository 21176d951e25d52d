"""How many nodes a batch reaches: picks are draws from a skewed popularity, and a node drawn twice counts once.

The node at rank r (a share, 0 the most popular) is drawn with density (1 - skew) * r^-skew. Skew 0 makes all nodes
alike; 0.5 is a graph whose degrees fall as 1 / d^2. What it gives up: neighbours that share neighbours (clustering)
make real batches smaller.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

POINTS = 4096  # of the integral over the ranks


@dataclass(frozen=True)
class Crowd:
    """The nodes that picks are drawn from."""

    num_nodes: int
    skew: float = 0.5

    def chance(self, ranks: Tensor, seeds: float, draws: float) -> Tensor:
        """That the nodes at these ranks are among the seeds, which are all alike, or the draws."""
        popularity = (1 - self.skew) * ranks.pow(-self.skew)
        missed = math.log1p(-seeds / self.num_nodes) if seeds < self.num_nodes else -math.inf
        return -torch.expm1(missed - draws / self.num_nodes * popularity)  # exact however small

    def distinct(self, seeds: float, draws: float, among: float = 1.0) -> float:
        """Expected distinct nodes, of the `among` share most popular alone if that is given."""
        points = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
        ranks = among * points * points  # close together where the popularity is steep
        chances = self.chance(ranks, seeds, draws)
        return self.num_nodes * among * float((2 * points * chances).sum()) / POINTS


def picks_per_node(mean_degree: float, *fanouts: int) -> float:
    """Mean of min(degree, fanout), where degrees fall as 1 / d^2 from half their mean on; -1 takes all.

    With several fanouts the list is drawn from as often, each time afresh: how many of its edges are picked at all.
    """
    points = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
    degrees = mean_degree / 2 / points  # the share of nodes above this is points squared
    left = torch.ones_like(degrees)  # the chance that an edge of such a list is not picked
    for fanout in fanouts:
        left = left * (1 - (degrees.clamp(max=fanout) if fanout >= 0 else degrees) / degrees)
    return float((2 * points * degrees * (1 - left)).sum()) / POINTS


@dataclass(frozen=True)
class Hop:
    """One hop, and what the batch holds after it."""

    frontier: float  # nodes expanded
    picks: float
    drawn: float  # distinct edges picked so far
    nodes: float  # distinct, seeds included


Mode = Literal["blocks", "subgraph"]


def grow(crowd: Crowd, mean_degree: float, batch_size: int, fanouts: Sequence[int], mode: Mode = "blocks") -> list[Hop]:
    """Hop by hop. Blocks expand every node again in each layer, subgraphs only those that are new.

    >>> grow(Crowd(2_100_000), 59.05, 1024, [15, 10, 5])[-1].nodes
    """
    seeds = float(min(batch_size, crowd.num_nodes))
    found = [seeds]  # nodes first reached: the seeds, then by every hop
    hops: list[Hop] = []
    for number, fanout in enumerate(fanouts):
        frontier = sum(found) if mode == "blocks" else found[-1]
        drawn = 0.0  # edges picked so far; those picked again by a later layer lead to no other node
        for reached, nodes in enumerate(found):
            again = fanouts[reached : number + 1] if mode == "blocks" else fanouts[reached : reached + 1]
            drawn += nodes * picks_per_node(mean_degree, *again)
        nodes = max(sum(found), crowd.distinct(seeds, drawn))
        hops.append(Hop(frontier, frontier * picks_per_node(mean_degree, fanout), drawn, nodes))
        found.append(nodes - sum(found))
    return hops


def hit_rate(crowd: Crowd, seeds: float, draws: float, cached: float) -> float:
    """The share of a batch's distinct nodes that a cache of the `cached` share most popular holds."""
    if cached <= 0:
        return 0.0
    found = crowd.distinct(seeds, draws, min(1.0, cached)) / crowd.distinct(seeds, draws)
    return min(1.0, found) if math.isfinite(found) else 0.0
