"""One batch of one rank: what it holds, and what of it comes from other hosts.

What crosses the wire is counted as the tensors that the protocols of a store exchange; framing is left out.
"""

from dataclasses import dataclass

from hoploom.scale.growth import Crowd, Hop, grow, hit_rate
from hoploom.scale.sizes import cache_bytes, edge_field_bytes, node_bytes
from hoploom.scale.spec import Question

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


def crowd_of(question: Question) -> Crowd:
    return Crowd(question.nodes, question.skew)


def batch_size(question: Question, *, everywhere: bool) -> BatchSize:
    """What a batch reaches; `everywhere`: no hop leaves the host."""
    crowd = crowd_of(question)
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
    return BatchSize(hops, frontier, picks, sum(remote), _hits(question, hops), _bytes(question, hops))


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


def _hits(question: Question, hops: tuple[Hop, ...]) -> float:
    if not cache_bytes(question):
        return 0.0
    if question.hit_rate is not None:
        return question.hit_rate
    return hit_rate(crowd_of(question), hops[0].frontier, hops[-1].drawn, question.cache)


def _bytes(question: Question, hops: tuple[Hop, ...]) -> float:
    """Ends and positions of the edges, ids and fields of the nodes."""
    per_edge = 3 * ID + (edge_field_bytes(question) if question.mode == "subgraph" else 0)
    return sum(hop.picks for hop in hops) * per_edge + hops[-1].nodes * (ID + node_bytes(question))


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
    given = 0 if question.features is None else question.row_bytes // _element(question)
    count = len(question.fanouts)
    ins = [given or question.hidden, *[question.hidden] * (count - 1)]
    outs = [*[question.hidden] * (count - 1), question.classes]
    return list(zip(ins, outs, strict=True))


def num_parameters(question: Question) -> int:
    """Of GraphSAGE: two matrices and a bias per layer."""
    return sum(2 * into * out + out for into, out in widths(question))


def _element(question: Question) -> int:
    assert question.features is not None
    count = 1
    for extent in question.features.shape:
        count *= extent
    return question.features.row_bytes // count
