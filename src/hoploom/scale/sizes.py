"""How much there is of everything: bytes of a store and a host, nodes that a batch reaches, what crosses the network.

Picks are draws from a skewed popularity, and a node drawn twice counts once: the node at rank r (a share, 0 the most
popular) is drawn with density (1 - skew) * r^-skew. Neighbours that share neighbours (clustering) make real batches
smaller. Framing on the wire is left out, and `store.json`: it is some kilobytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hoploom.scale.spec import Question

if TYPE_CHECKING:
    from torch import Tensor  # imported when it is used: the help of `plan` does without

HEADER = 128  # bytes of a .npy file before its values
SLOT = 4  # bytes of a node in a direct map of a batch's nodes
ID = 8  # bytes of an id in memory and on the wire
POINTS = 4096  # of the integral over the ranks


@dataclass(frozen=True)
class Item:
    """Some files of a host, or memory that no file backs."""

    name: str
    disk: float
    memory: float  # of these bytes, what batches touch


# --- the store -----------------------------------------------------------------------------------


def is_hashed(question: Question) -> bool:
    """Whether a batch's nodes are found by hashing, beyond the budget of a direct map."""
    from hoploom.ops.relabel import MAP_BUDGET

    return question.nodes * SLOT > MAP_BUDGET


def topology_bytes(question: Question, num_hosts: float) -> float:
    """The adjacency lists that so many hosts hold, with the weights and times that the sampler reads."""
    from hoploom.store.format import ID_LIMIT

    share = num_hosts / question.hosts
    per_edge = (4 if question.nodes < ID_LIMIT else 8) + 4 * question.weights + 8 * question.times
    headers = num_hosts * ((2 + question.weights + question.times) * HEADER + 8)  # and one more entry of indptr
    return question.nodes * share * 8 + question.edges * share * per_edge + headers


def node_fields(question: Question) -> dict[str, int]:
    """Bytes of one node in each file of a field."""
    rows = {"features": question.row_bytes, "labels": 8, "original ids": question.original_id_bytes}
    return {name: row for name, row in rows.items() if row}


def node_bytes(question: Question) -> int:
    """What a batch holds of one node besides its ids."""
    return sum(node_fields(question).values())


def host_items(question: Question, *, everywhere: bool) -> list[Item]:
    """What one host holds; `everywhere`: of the topology the whole."""
    nodes, edges = question.nodes / question.hosts, question.edges / question.hosts
    topology = topology_bytes(question, question.hosts if everywhere else 1)
    items = [Item("topology", topology, topology)]
    for name, row in node_fields(question).items():
        items.append(Item(name, nodes * row + HEADER, nodes * row + HEADER))
    own = 0 if question.edge_features is None else question.edge_features.row_bytes
    of_edges = sum(edges * row + HEADER for row in (own, 4 * question.weights, 8 * question.times) if row)
    seeds = nodes * question.train_share * 8 + HEADER if question.train_share else 0.0
    rest = (Item("edge fields", of_edges, 0.0), Item("training seeds", seeds, 0.0))
    cache = Item("cache of remote rows", 0.0, cache_bytes(question))
    return [*items, *(item for item in (*rest, cache) if item.disk or item.memory)]


def cache_bytes(question: Question) -> float:
    """The rows of other hosts that a host keeps; its ranks share them."""
    return question.cache * question.nodes * (1 - 1 / question.hosts) * node_bytes(question)


# --- a batch -------------------------------------------------------------------------------------


def _points() -> "Tensor":
    import torch

    return (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS


@dataclass(frozen=True)
class Crowd:
    """The nodes that picks are drawn from."""

    num_nodes: int
    skew: float = 0.5

    def distinct(self, seeds: float, draws: float, among: float = 1.0) -> float:
        """Expected distinct nodes of seeds and draws, of the `among` share most popular alone if that is given."""
        points = _points()
        ranks = among * points * points  # close together where the popularity is steep
        popularity = (1 - self.skew) * ranks.pow(-self.skew)
        missed = math.log1p(-seeds / self.num_nodes) if seeds < self.num_nodes else -math.inf
        chances = -(missed - draws / self.num_nodes * popularity).expm1()  # exact however small
        return self.num_nodes * among * float((2 * points * chances).sum()) / POINTS

    def hit_rate(self, seeds: float, draws: float, cached: float) -> float:
        """The share of a batch's distinct nodes that a cache of the `cached` share most popular holds."""
        if cached <= 0:
            return 0.0
        return min(1.0, self.distinct(seeds, draws, min(1.0, cached)) / self.distinct(seeds, draws))


def picks_per_node(mean_degree: float, *fanouts: int) -> float:
    """Mean of min(degree, fanout), where degrees fall as 1 / d^2 from half their mean on; -1 takes all.

    With several fanouts the list is drawn from as often, each time afresh: how many of its edges are picked at all.
    """
    points = _points()
    degrees = mean_degree / 2 / points  # the share of nodes above this is points squared
    left = degrees.new_ones(POINTS)  # the chance that an edge of such a list is not picked
    for fanout in fanouts:
        left = left * (1 - (degrees.clamp(max=fanout) if fanout >= 0 else degrees) / degrees)
    return float((2 * points * degrees * (1 - left)).sum()) / POINTS


@dataclass(frozen=True)
class Hop:
    """One hop, and what the batch holds after it."""

    frontier: float  # nodes expanded: all so far
    picks: float
    drawn: float  # distinct edges picked so far
    nodes: float  # distinct, seeds included


def grow(crowd: Crowd, mean_degree: float, batch_size: int, fanouts: Sequence[int]) -> list[Hop]:
    """Hop by hop, as blocks grow: every hop expands all nodes again.

    >>> grow(Crowd(2_100_000), 59.05, 1024, [15, 10, 5])[-1].nodes
    """
    seeds = float(min(batch_size, crowd.num_nodes))
    reached = [seeds]  # nodes first reached: the seeds, then by every hop
    hops: list[Hop] = []
    for number, fanout in enumerate(fanouts):
        frontier = sum(reached)
        drawn = 0.0  # edges picked again by a later hop lead to no other node
        for hop, nodes in enumerate(reached):
            drawn += nodes * picks_per_node(mean_degree, *fanouts[hop : number + 1])
        nodes = max(frontier, crowd.distinct(seeds, drawn))
        hops.append(Hop(frontier, frontier * picks_per_node(mean_degree, fanout), drawn, nodes))
        reached.append(nodes - frontier)
    return hops


@dataclass(frozen=True)
class BatchSize:
    """Expected counts of a batch."""

    hops: list[Hop]
    remote_frontier: float  # nodes expanded by other hosts, over all hops
    remote_picks: float
    remote_rows: float  # distinct nodes of other hosts, those that the cache holds included
    hits: float  # share of them that the cache holds
    bytes: float  # in memory

    @property
    def nodes(self) -> float:
        return self.hops[-1].nodes

    @property
    def picks(self) -> float:
        return sum(hop.picks for hop in self.hops)


def batch_size(question: Question, *, everywhere: bool) -> BatchSize:
    """What a batch reaches; `everywhere`: no hop leaves the host."""
    crowd = Crowd(question.nodes, question.skew)
    hops = grow(crowd, question.edges / question.nodes, question.batch_size, question.fanouts)
    reached = [hops[0].frontier, *(hop.nodes - hop.frontier for hop in hops)]
    *asked, rows = accumulate(nodes * share for nodes, share in zip(reached, _shares_away(question), strict=True))
    frontier = picks = 0.0
    if not everywhere:
        frontier = sum(asked)
        picks = sum(hop.picks * away / hop.frontier for hop, away in zip(hops, asked, strict=True))
    hits = question.hit_rate if cache_bytes(question) else 0.0
    if hits is None:
        hits = crowd.hit_rate(hops[0].frontier, hops[-1].drawn, question.cache)
    size = sum(hop.picks for hop in hops) * 3 * ID + hops[-1].nodes * (ID + node_bytes(question))  # ends and position
    return BatchSize(hops, frontier, picks, rows, hits, size)


def _shares_away(question: Question) -> list[float]:
    """Per hop, the seeds first: the share of the nodes first reached there that other hosts hold.

    An edge stays on its host with 1 - cut, and leads to each other host alike.
    """
    others = question.hosts - 1
    home = 1.0 if question.local_seeds else 1 / question.hosts
    shares = [1 - home]
    for _ in question.fanouts:
        home = home * (1 - question.cut) + ((1 - home) * question.cut / others if others else 0.0)
        shares.append(1 - home)
    return shares


# --- the network ---------------------------------------------------------------------------------


def traffic(question: Question, size: BatchSize) -> dict[str, float]:
    """Requests go out and answers come in; a host answers as much as it asks, so both directions carry the sum."""
    ring = 2 * (question.hosts - 1) / question.hosts * 4 * num_parameters(question)  # crosses a host's link once
    return {
        "hops": (size.remote_frontier + size.remote_picks) * 2 * ID,  # ids, counts; sources, positions
        "rows": size.remote_rows * (1 - size.hits) * (ID + node_bytes(question)),
        "gradients": ring / question.ranks_per_host,
    }


def widths(question: Question) -> list[tuple[int, int]]:
    """Channels in and out of each layer, from the input on."""
    given = 0 if question.features is None else math.prod(question.features.shape)
    inner = [question.hidden] * (len(question.fanouts) - 1)
    return list(pairwise([given or question.hidden, *inner, question.classes]))


def num_parameters(question: Question) -> int:
    """Of GraphSAGE: two matrices and a bias per layer."""
    return sum(2 * into * out + out for into, out in widths(question))
