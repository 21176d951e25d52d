"""Expected sizes: bytes of a store and of a host, distinct nodes of a batch, bytes over the network.

Picks are random draws in which some nodes are more popular; a node drawn twice counts once. With nodes ranked by
popularity, from r = 0 (most popular) to 1, the density of draws is (1 - skew) * r^-skew. Clustering makes real batches
smaller. Message framing and `store.json`, some kilobytes, are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hoploom.scale.inputs import Question

# Copies of constants in ops.sample and store.format, because importing those would import torch.
MAP_BUDGET, ID_LIMIT = 256 << 20, 1 << 31
HEADER = 128  # bytes of a .npy file before its values
SLOT = 4  # bytes of a node in a direct map from ids to positions in a batch
ID = 8  # bytes of an id, in memory and on the wire
RANKS = [(point + 0.5) / 1024 for point in range(1024)]  # where numerical integrals are evaluated


@dataclass(frozen=True)
class Item:
    """One kind of data of a host, such as its topology or its cache of remote rows."""

    name: str
    disk: float  # bytes; 0 if no file holds the data
    memory: float  # bytes that batches touch


# --- the store -----------------------------------------------------------------------------------


def is_hashed(question: Question) -> bool:
    """Return whether batches are relabelled by a hash table: a direct map of all nodes would exceed MAP_BUDGET."""
    return question.nodes * SLOT > MAP_BUDGET


def topology_bytes(question: Question, num_hosts: float) -> float:
    """Return the bytes of the adjacency lists of `num_hosts` parts; each host holds one part."""
    lists = question.nodes * 8 + question.edges * (4 if question.nodes < ID_LIMIT else 8)
    return lists * num_hosts / question.hosts + num_hosts * (2 * HEADER + 8)  # one more offset than nodes


def node_fields(question: Question) -> dict[str, int]:
    """Return, by field name, the bytes that one node takes in the field's file."""
    features = 0 if question.features is None else question.features.row_bytes
    rows = {"features": features, "labels": 8, "original ids": question.original_id_bytes}
    return {name: row for name, row in rows.items() if row}


def node_bytes(question: Question) -> int:
    """Return the bytes that all fields of one node take in a batch."""
    return sum(node_fields(question).values())


def host_items(question: Question, *, everywhere: bool) -> list[Item]:
    """Return the disk and memory use of a host, item by item. If `everywhere`, the host has the whole topology."""
    nodes, edges = question.nodes / question.hosts, question.edges / question.hosts
    topology = topology_bytes(question, question.hosts if everywhere else 1)
    items = [Item("topology", topology, topology)]
    for name, row in node_fields(question).items():
        items.append(Item(name, nodes * row + HEADER, nodes * row + HEADER))
    if question.edge_features is not None:
        items.append(Item("edge features", edges * question.edge_features.row_bytes + HEADER, 0.0))
    if question.train_share:
        items.append(Item("training seeds", nodes * question.train_share * 8 + HEADER, 0.0))
    if question.cache and question.hosts > 1:
        items.append(Item("cache of remote rows", 0.0, cache_bytes(question)))
    return items


def cache_bytes(question: Question) -> float:
    """Return the bytes of the cache of remote rows that the ranks of a host share."""
    return question.cache * question.nodes * (1 - 1 / question.hosts) * node_bytes(question)


# --- a batch -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Popularity:
    """The chance of each node to be picked as a neighbour: equal if `skew` is 0, else higher for some nodes."""

    num_nodes: int
    skew: float = 0.5

    def distinct(self, seeds: float, draws: float, among: float = 1.0) -> float:
        """Return the expected number of distinct nodes reached. Count only the most popular, a share `among` of all."""
        missed = math.log1p(-seeds / self.num_nodes) if seeds < self.num_nodes else -math.inf
        total = 0.0
        for point in RANKS:
            density = (1 - self.skew) * (among * point * point) ** -self.skew  # denser where popularity is steep
            total -= 2 * point * math.expm1(missed - draws / self.num_nodes * density)  # exact however small
        return self.num_nodes * among * total / len(RANKS)

    def hit_rate(self, seeds: float, draws: float, cached: float) -> float:
        """Return the expected hit rate of a cache that holds the most popular nodes, a share `cached` of all."""
        return min(1.0, self.distinct(seeds, draws, min(1.0, cached)) / self.distinct(seeds, draws))


def picks_per_node(mean_degree: float, *fanouts: int) -> float:
    """Return the mean picks per node. Degrees are Pareto: the share of nodes with more than d edges falls as 1 / d^2.

    A node is sampled once with each of the `fanouts`; an edge sampled twice counts once. Fanout -1 takes all edges.
    """
    total = 0.0
    for point in RANKS:
        degree = mean_degree / 2 / point  # the share of nodes above this is the point squared
        left = math.prod(max(0.0, 1 - fanout / degree) if fanout >= 0 else 0.0 for fanout in fanouts)
        total += 2 * point * degree * (1 - left)
    return total / len(RANKS)


@dataclass(frozen=True)
class Hop:
    """Expected numbers of nodes and edges of one hop, and of the batch up to this hop."""

    frontier: float  # nodes expanded: all reached so far
    picks: float
    drawn: float  # distinct edges picked so far
    nodes: float  # distinct, seeds included


def grow(popularity: Popularity, mean_degree: float, batch_size: int, fanouts: Sequence[int]) -> list[Hop]:
    """Estimate the sizes of a batch's hops in blocks mode: each hop samples neighbours of all nodes reached so far."""
    seeds = float(min(batch_size, popularity.num_nodes))
    reached = [seeds]  # nodes first reached by each hop, the seeds first
    hops: list[Hop] = []
    for number, fanout in enumerate(fanouts):
        frontier = sum(reached)
        drawn = 0.0  # edges that a later hop picks again lead to no new node
        for hop, nodes in enumerate(reached):
            drawn += nodes * picks_per_node(mean_degree, *fanouts[hop : number + 1])
        nodes = max(frontier, popularity.distinct(seeds, drawn))
        hops.append(Hop(frontier, frontier * picks_per_node(mean_degree, fanout), drawn, nodes))
        reached.append(nodes - frontier)
    return hops


@dataclass(frozen=True)
class BatchSize:
    """Expected sizes of a batch: its nodes and picks, the remote ones among them, and its bytes."""

    hops: list[Hop]
    remote_frontier: float  # nodes expanded on other hosts, over all hops
    remote_picks: float
    remote_rows: float  # distinct nodes of other hosts, including cached ones
    hits: float  # share of remote_rows that the cache holds
    bytes: float  # in memory

    @property
    def nodes(self) -> float:
        return self.hops[-1].nodes

    @property
    def picks(self) -> float:
        return sum(hop.picks for hop in self.hops)


def batch_size(question: Question, *, everywhere: bool) -> BatchSize:
    """Return the expected sizes of a batch. If `everywhere`, each host has the whole topology: no pick is remote."""
    popularity = Popularity(question.nodes, question.skew)
    hops = grow(popularity, question.edges / question.nodes, question.batch_size, question.fanouts)
    reached = [hops[0].frontier, *(hop.nodes - hop.frontier for hop in hops)]
    *asked, rows = accumulate(nodes * share for nodes, share in zip(reached, _shares_away(question), strict=True))
    frontier = picks = 0.0
    if not everywhere:
        frontier = sum(asked)
        picks = sum(hop.picks * away / hop.frontier for hop, away in zip(hops, asked, strict=True))
    hits = popularity.hit_rate(hops[0].frontier, hops[-1].drawn, question.cache) if cache_bytes(question) else 0.0
    size = hops[-1].nodes * (ID + node_bytes(question))
    size += sum(hop.picks for hop in hops) * 3 * ID  # both ends, and the edge id
    return BatchSize(hops, frontier, picks, rows, hits, size)


def _shares_away(question: Question) -> list[float]:
    """Return the shares of the seeds and of each hop's new nodes on other hosts; an edge stays with chance 1 - cut."""
    others = question.hosts - 1
    home = 1.0 if question.local_seeds else 1 / question.hosts
    shares = [1 - home]
    for _ in question.fanouts:
        home = home * (1 - question.cut) + ((1 - home) * question.cut / others if others else 0.0)
        shares.append(1 - home)
    return shares


# --- the network ---------------------------------------------------------------------------------


def traffic(question: Question, size: BatchSize) -> dict[str, float]:
    """Return the bytes that a rank receives in a step, by purpose. Hosts send about as many bytes as they receive."""
    ring = 2 * (question.hosts - 1) / question.hosts * 4 * num_parameters(question)  # over a host's link
    return {
        "hops": (size.remote_frontier + size.remote_picks) * 2 * ID,  # ids, counts; sources, positions
        "rows": size.remote_rows * (1 - size.hits) * (ID + node_bytes(question)),
        "gradients": ring / question.ranks_per_host,
    }


def widths(question: Question) -> list[tuple[int, int]]:
    """Return the input and output channels of each layer."""
    given = 0 if question.features is None else math.prod(question.features.shape)
    inner = [question.hidden] * (len(question.fanouts) - 1)
    return list(pairwise([given or question.hidden, *inner, question.classes]))


def num_parameters(question: Question) -> int:
    """Return the number of GraphSAGE's parameters: two matrices and a bias per layer."""
    return sum(2 * into * out + out for into, out in widths(question))
