"""How much there is of everything: bytes of a store and a host, nodes that a batch reaches, what crosses the network.

Picks are draws from a skewed popularity, and a node drawn twice counts once: the node at rank r (a share, 0 the most
popular) is drawn with density (1 - skew) * r^-skew. Skew 0 makes all nodes alike; 0.5 is a graph whose degrees fall as
1 / d^2. Neighbours that share neighbours (clustering) make real batches smaller. Framing on the wire is left out, and
`store.json`: it is some kilobytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hoploom.ops.relabel import MAP_BUDGET
from hoploom.scale.spec import Mode, Question
from hoploom.store.format import ID_LIMIT

HEADER = 128  # bytes of a .npy file before its values
SLOT = 4  # bytes of a node in a direct map of a batch's nodes


@dataclass(frozen=True)
class Item:
    """Some files of a host, or all of one kind."""

    name: str
    disk: float
    memory: float  # of these bytes, what batches touch


def id_bytes(question: Question) -> int:
    """Of one entry of `indices`."""
    return 4 if (question.largest_type or question.nodes) < ID_LIMIT else 8


def is_hashed(question: Question) -> bool:
    """Whether a batch's nodes are found by hashing, beyond the budget of a direct map."""
    return (question.largest_type or question.nodes) * SLOT > MAP_BUDGET


def topology_bytes(question: Question, share: float) -> float:
    """The adjacency lists of a share of the nodes, with the weights and times that the sampler reads."""
    per_edge = id_bytes(question) + 4 * question.weights + 8 * question.times
    parts = question.parts * share
    headers = parts * ((2 + question.weights + question.times) * HEADER + 8)  # and one more entry of indptr
    return question.nodes * share * 8 + question.edges * share * per_edge + headers


def node_fields(question: Question) -> dict[str, int]:
    """Bytes of one node in each file of a field."""
    rows = {"features": question.row_bytes, "labels": 8 * question.labels, "original ids": question.original_id_bytes}
    return {name: row for name, row in rows.items() if row}


def node_bytes(question: Question) -> int:
    """What a batch holds of one node besides its ids."""
    return sum(node_fields(question).values())


def edge_fields(question: Question) -> list[int]:
    """What a batch of mode "subgraph" holds of one edge besides its ends: bytes in each file of a field."""
    own = 0 if question.edge_features is None else question.edge_features.row_bytes
    return [row for row in (own, 4 * question.weights, 8 * question.times) if row]


def host_items(question: Question, *, everywhere: bool) -> list[Item]:
    """What one host holds of the store, on disk and in memory; `everywhere`: the whole topology."""
    share = 1 / question.hosts
    nodes, edges = question.nodes * share, question.edges * share
    header = HEADER * question.parts_per_host
    topology = topology_bytes(question, 1.0 if everywhere else share)
    items = [Item("topology", topology, topology)]
    for name, row in node_fields(question).items():
        items.append(Item(name, nodes * row + header, nodes * row + header))
    per_edge = edge_fields(question)
    if per_edge:
        size = edges * sum(per_edge) + len(per_edge) * header
        items.append(Item("edge fields", size, size if question.mode == "subgraph" else 0.0))
    if question.train_share:
        items.append(Item("training seeds", nodes * question.train_share * 8 + header, 0.0))
    if question.cache and question.hosts > 1:
        items.append(Item("cache of remote rows", 0.0, cache_bytes(question)))
    return items


def cache_bytes(question: Question) -> float:
    """The rows of other hosts that a host keeps; its ranks share them."""
    return question.cache * question.nodes * (1 - 1 / question.hosts) * node_bytes(question)


def num_files(question: Question) -> int:
    """Of the whole store, besides store.json."""
    lists = 2 + question.weights + question.times
    fields = len(node_fields(question)) + len(edge_fields(question))
    return question.parts * (lists + fields + (question.train_share > 0))


POINTS = 4096  # of the integral over the ranks


def _points() -> Tensor:
    return (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS


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
        points = _points()
        ranks = among * points * points  # close together where the popularity is steep
        chances = self.chance(ranks, seeds, draws)
        return self.num_nodes * among * float((2 * points * chances).sum()) / POINTS


def picks_per_node(mean_degree: float, *fanouts: int) -> float:
    """Mean of min(degree, fanout), where degrees fall as 1 / d^2 from half their mean on; -1 takes all.

    With several fanouts the list is drawn from as often, each time afresh: how many of its edges are picked at all.
    """
    points = _points()
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


ID = 8  # bytes of an id in memory and on the wire


@dataclass(frozen=True)
class BatchSize:
    """Expected counts of a batch."""

    hops: tuple[Hop, ...]
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

    @property
    def frontier(self) -> float:
        return sum(hop.frontier for hop in self.hops)

    @property
    def rows_fetched(self) -> float:
        return self.remote_rows * (1 - self.hits)


def batch_size(question: Question, *, everywhere: bool) -> BatchSize:
    """What a batch reaches; `everywhere`: no hop leaves the host."""
    crowd = Crowd(question.nodes, question.skew)
    hops = tuple(grow(crowd, question.mean_degree, question.batch_size, question.fanouts, question.mode))
    away = _shares_away(question)
    found = [hops[0].frontier]  # nodes first reached: the seeds, then by every hop
    for hop in hops:
        found.append(max(0.0, hop.nodes - sum(found)))
    remote = [nodes * share for nodes, share in zip(found, away, strict=True)]
    frontier = picks = 0.0
    for number, hop in enumerate(hops):
        if not everywhere and hop.frontier:
            expanded = sum(remote[: number + 1]) if question.mode == "blocks" else remote[number]
            frontier += expanded
            picks += hop.picks * expanded / hop.frontier
    hits = question.hit_rate
    if not cache_bytes(question):
        hits = 0.0
    elif hits is None:
        hits = hit_rate(crowd, hops[0].frontier, hops[-1].drawn, question.cache)
    per_edge = 3 * ID + (sum(edge_fields(question)) if question.mode == "subgraph" else 0)  # its ends and position
    size = sum(hop.picks for hop in hops) * per_edge + hops[-1].nodes * (ID + node_bytes(question))
    return BatchSize(hops, frontier, picks, sum(remote), hits, size)


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


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank's step brings over the network to its host."""

    hops: float  # asking for picks, and the picks
    rows: float  # asking for rows, and the rows
    gradients: float  # this rank's share of its host's part of the all-reduce

    @property
    def total(self) -> float:
        return self.hops + self.rows + self.gradients


def traffic(question: Question, size: BatchSize) -> Traffic:
    """Requests go out and answers come in; a host answers as much as it asks, so both directions carry the sum."""
    hops = size.remote_frontier * (ID + ID) + size.remote_picks * (ID + ID)  # ids, counts; sources, positions
    rows = size.rows_fetched * (ID + node_bytes(question))
    ring = 2 * (question.hosts - 1) / question.hosts * 4 * num_parameters(question)  # crosses a host's link once
    return Traffic(hops, rows, ring / question.ranks_per_host)


def widths(question: Question) -> list[tuple[int, int]]:
    """Channels in and out of each layer, from the input on."""
    given = 0 if question.features is None else math.prod(question.features.shape)
    inner = [question.hidden] * (len(question.fanouts) - 1)
    return list(pairwise([given or question.hidden, *inner, question.classes]))


def num_parameters(question: Question) -> int:
    """Of GraphSAGE: two matrices and a bias per layer."""
    return sum(2 * into * out + out for into, out in widths(question))
