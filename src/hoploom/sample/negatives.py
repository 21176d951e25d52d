"""Negative links: keyed draws of nodes, shared by a step or of earlier links, in time and strict; or listed nodes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from hoploom import keys, ops
from hoploom.errors import ConfigError, DataError
from hoploom.ops import Frontier
from hoploom.sample.exclusions import opposite_relations
from hoploom.schema import RelationName, Schema
from hoploom.store import Draw, GraphStore
from hoploom.store.base import NODES, in_edges

SLOT_BITS = 40  # of the number of a negative; its repeat is in the higher bits
ROUNDS = 256  # if nine of ten draws are bad, one in 10^12 is still bad after these
DrawNodes = Callable[[Tensor, int], Tensor]  # (unique numbers of the negatives, attempt) -> nodes
IsBad = Callable[[Tensor, Tensor], Tensor]  # (nodes, their indices) -> mask of draws to repeat
SOURCE, DESTINATION = 0, 1  # which end of a link is drawn
EARLIER, LISTED = 2, 3  # further streams of random numbers
EARLIER_FANOUTS = (8, 512, -1)  # earlier edges drawn for a negative; more only if all lead to the link's destination
EARLIER_HOP = 1 << 14  # of their random numbers; no batch has as many
AT_ONCE = 1 << 20  # of these edges, in memory
Kind = Literal["uniform", "joint", "historical", "all", "listed"]  # of candidates
KINDS: tuple[Kind, ...] = get_args(Kind)
NodeTimes = Callable[[RelationName], Mapping[int, Tensor]]  # relation -> {node type of an end: time of each node}


class WeightSums(NamedTuple):
    """Running sums of node weights, for weighted draws: built once in O(nodes); a draw takes O(log nodes)."""

    sums: Tensor  # [num_nodes] float64, running
    last: int  # the last node with a weight above zero


@dataclass(frozen=True)
class Links:
    """The links of one batch."""

    sources: Tensor  # [n] int64
    destinations: Tensor  # [n] int64
    labels: Tensor | None = None  # [n, ...]
    times: Tensor | None = None  # [n] int64
    first: int = 0  # the index of the first link within the step, over all ranks
    candidates: Tensor | None = None  # [n, m] int64: listed destinations; -1: none


@dataclass(frozen=True)
class KnownLinks:
    """A set of links, such as true ones beside the graph's edges."""

    pairs: Tensor  # [n] int64, ascending: source * num_destinations + destination
    num_destinations: int

    def holds(self, sources: Tensor, destinations: Tensor) -> Tensor:
        """Return a mask of the links that are in the set."""
        links = sources.to(torch.int64) * self.num_destinations + destinations
        if not self.pairs.numel():
            return torch.zeros_like(links, dtype=torch.bool)
        at = torch.searchsorted(self.pairs, links).clamp(max=self.pairs.numel() - 1)
        return self.pairs[at] == links


def known_links(ends: Tensor, num_destinations: int) -> KnownLinks:
    """Return the links `ends`, [2, n] int64, as KnownLinks."""
    return KnownLinks(torch.sort(ends[0] * num_destinations + ends[1]).values, num_destinations)


@dataclass(frozen=True)
class LinkTask:
    """A link prediction task: the relation of the links, which the graph may lack, and the options of negatives."""

    key: RelationName
    negatives: NegativeSampling | None = None
    strict: bool = False
    node_times: NodeTimes | None = None  # if given, negatives must exist at the link's time
    candidates: Kind = "uniform"
    known: KnownLinks | None = None  # not drawn either by strict negatives

    @property
    def shares_candidates(self) -> bool:
        """Whether all links of a step have the same candidates; if times matter, each may have its own."""
        return self.candidates == "joint" and not self.strict

    def check(self, schema: Schema) -> None:
        """Raise ConfigError if the candidates do not fit the other options or the graph."""
        kind, negatives = self.candidates, self.negatives
        if self.strict and self.key not in schema.relation_index:
            raise ConfigError(
                f"strict_negatives looks for edges of {self.key}, which the graph does not have; leave it out"
            )
        if kind == "uniform":
            return
        if negatives is None or negatives.is_binary():
            raise ConfigError(f"{kind} candidates are for triplets; give neg_sampling=NegativeSampling('triplet', k)")
        if negatives.dst_weight is not None and kind in ("all", "listed"):
            raise ConfigError(f"dst_weight has no effect on {kind} candidates; leave it out")
        if kind != "historical":
            return
        if self.strict:
            raise ConfigError("historical candidates are true links of an earlier time; leave strict_negatives out")
        index = schema.relation_index.get(self.key)
        reverses = [] if index is None else [schema.relations[other] for other in opposite_relations(schema, index)]
        if len(reverses) != 1:
            raise ConfigError(
                f"historical candidates need one relation with the reverse edges of {self.key}, and there are "
                f"{[reverse.key for reverse in reverses]}; add it with ToUndirected(), or take other candidates"
            )
        (reverse,) = reverses
        if self.node_times is not None and schema.edge_time and schema.time not in reverse.fields:
            raise ConfigError(f"edges of {reverse.key} have no {schema.time!r} to tell earlier ones; give it to them")

    @cached_property
    def weights(self) -> tuple[WeightSums | None, WeightSums | None]:
        """The weights with which sources and destinations are drawn; None if all weights are equal."""
        given = (None, None) if self.negatives is None else (self.negatives.src_weight, self.negatives.dst_weight)
        of_sources, of_destinations = (None if weight is None else weight_sums(weight) for weight in given)
        return of_sources, of_destinations


def owners_of(links: Links, amount: float) -> tuple[Tensor, Tensor]:
    """Return, for each negative, the index of its link and its number among that link's negatives.

    A fraction of `amount` is spread by the index in the step, alike on all ranks.
    """
    count, full = links.sources.numel(), math.floor(amount)
    places = torch.arange(links.first, links.first + count + 1, dtype=torch.float64)
    chosen = torch.ceil(places * (amount - full)).diff().nonzero().view(-1)
    positives = torch.cat([torch.arange(count).repeat(full), chosen])
    return positives, torch.cat([torch.arange(full).repeat_interleave(count), torch.full_like(chosen, full)])


def _draw(graph: GraphStore, task: LinkTask, key: int, end: int) -> tuple[DrawNodes, Tensor | None]:
    """Return a function that draws nodes for one end of links; and the times of that end's nodes, None if unknown."""
    schema = graph.schema
    node_type = schema.type_index[task.key[0 if end == SOURCE else 2]]
    weight = task.weights[end]
    num_nodes = schema.node_types[node_type].num_nodes
    node_times = None if task.node_times is None else task.node_times(task.key).get(node_type)
    shift = SLOT_BITS if task.candidates == "joint" else 0  # then the links of a step share each repeat's draw
    return lambda slots, attempt: draw_nodes(key, slots >> shift, end, attempt, num_nodes, weight), node_times


def _in_time(drawn: Tensor, bad: Tensor, node_times: Tensor | None) -> Tensor:
    """Replace the nodes drawn[bad] by the oldest node, as PyG does. They are still too late after all redraws."""
    if bad.numel() and node_times is not None:
        drawn[bad] = node_times.argmin()
    return drawn


def negative_pairs(
    graph: GraphStore, task: LinkTask, key: int, slots: Tensor, times: Tensor | None
) -> tuple[Tensor, Tensor]:
    ends = []
    draws = []
    for end in (SOURCE, DESTINATION):
        draw, node_times = _draw(graph, task, key, end)
        drawn, bad = draw_until(draw, _too_late(node_times, times), slots)
        ends.append(_in_time(drawn, bad, node_times))
        draws.append((draw, node_times))
    if not task.strict:
        return ends[0], ends[1]
    is_edge = partial(_is_true, graph, task)
    bad = torch.nonzero(is_edge(*ends)).view(-1)
    for attempt in range(ROUNDS, 2 * ROUNDS):
        if bad.numel() == 0:
            return ends[0], ends[1]
        for nodes, (draw, node_times) in zip(ends, draws, strict=True):
            fresh = draw(slots[bad], attempt)
            late = _too_late(node_times, times)(fresh, bad)
            nodes[bad] = torch.where(late, nodes[bad], fresh)
        bad = bad[is_edge(ends[0][bad], ends[1][bad])]
    raise too_dense(task)


def negative_destinations(
    graph: GraphStore, links: Links, task: LinkTask, key: int, positives: Tensor, slots: Tensor
) -> Tensor:
    """Return a destination for each negative, -1 if its link has no more candidates.

    positives[i] is the link, slots[i] a number that no other negative has.
    """
    if task.candidates in ("all", "listed"):
        return _candidates(graph, links, task, key).t().reshape(-1)
    draw, node_times = _draw(graph, task, key, DESTINATION)
    too_late = _too_late(node_times, None if links.times is None else links.times[positives])
    if not task.strict:
        drawn = _in_time(*draw_until(draw, too_late, slots), node_times)
        if task.candidates == "historical":
            return _earlier(graph, links, task, key, (positives, slots), drawn)
        return drawn
    sources = links.sources[positives]
    drawn, bad = draw_until(
        draw, lambda nodes, at: too_late(nodes, at) | _is_true(graph, task, sources[at], nodes), slots
    )
    drawn = _in_time(drawn, bad[too_late(drawn[bad], bad)], node_times)
    if bad.numel() and bool(_is_true(graph, task, sources[bad], drawn[bad]).any()):
        raise too_dense(task)
    return drawn


def _earlier(
    graph: GraphStore, links: Links, task: LinkTask, key: int, drawn_for: tuple[Tensor, Tensor], others: Tensor
) -> Tensor:
    """Return the end of a random earlier edge of each negative's source, not the link's own; if none, others[i]."""
    positives, slots = drawn_for
    schema, left = graph.schema, torch.arange(slots.numel())
    (relation,) = opposite_relations(schema, schema.relation_index[task.key])
    frontiers: list[Frontier | None] = [None] * len(schema.node_types)
    for fanout in EARLIER_FANOUTS:
        fanouts = [fanout if other == relation else 0 for other in range(len(schema.relations))]
        unsure = []
        for some in torch.split(left, AT_ONCE // fanout if fanout > 0 else 16):
            of, at = positives[some], slots[some]
            until = None if links.times is None else links.times[of] - 1
            frontiers[schema.destinations[relation]] = Frontier(links.sources[of], at, until)
            picks = graph.sample(frontiers, Draw(key, EARLIER_HOP, fanouts))[relation]
            assert picks is not None
            owners = torch.repeat_interleave(torch.arange(some.numel()), picks.counts)
            is_other = picks.sources != links.destinations[of][owners]
            count = torch.bincount(owners[is_other], minlength=some.numel())
            words, has_some = ops.draw_words(key, at, keys.NEGATIVE_STREAM + EARLIER).to(torch.int64), count > 0
            place = torch.cumsum(count, 0) - count + (words[:, 0] * count + (words[:, 1] * count >> 32) >> 32)
            others[some[has_some]] = picks.sources[is_other][place[has_some]]
            unsure.append(some[~has_some & (picks.counts == fanout)])
        left = torch.cat(unsure)
        if not left.numel():
            break
    return others


def _candidates(graph: GraphStore, links: Links, task: LinkTask, key: int) -> Tensor:
    """Return each link's listed candidates, or all other destinations: [n, amount]; -1 for those that do not count."""
    assert task.negatives is not None
    num_nodes, own = graph.schema.node_type(task.key[2]).num_nodes, links.destinations[:, None]
    if links.candidates is None:
        nodes = torch.arange(num_nodes - 1).expand(own.numel(), -1)
        nodes = nodes + (nodes >= own)
    else:
        nodes = links.candidates.clone()
    _, node_times = _draw(graph, task, key, DESTINATION)
    if node_times is not None and links.times is not None:
        nodes[node_times[nodes.clamp(min=0)] > links.times[:, None]] = -1
    if task.strict or task.known is not None:
        rows, columns = (nodes >= 0).nonzero(as_tuple=True)
        is_true = _is_true(graph, task, links.sources[rows], nodes[rows, columns])
        nodes[rows[is_true], columns[is_true]] = -1
    amount = int(task.negatives.amount)
    if amount == nodes.shape[1]:
        return nodes
    places = links.first + torch.arange(own.numel())[:, None] | torch.arange(nodes.shape[1]) << SLOT_BITS
    words = ops.draw_words(key, places.reshape(-1), keys.NEGATIVE_STREAM + LISTED)[:, 0].to(torch.int64)
    in_order = torch.argsort(words.view(nodes.shape) + ((nodes < 0).long() << 32), dim=1, stable=True)
    return nodes.gather(1, in_order[:, :amount])


def _is_true(graph: GraphStore, task: LinkTask, sources: Tensor, destinations: Tensor) -> Tensor:
    """Return a mask of the links that are known or, if negatives are strict, edges of the graph."""
    is_known = torch.zeros_like(sources, dtype=torch.bool)
    if task.known is not None:
        is_known = task.known.holds(sources, destinations)
    if not task.strict:
        return is_known
    return is_known | are_edges(graph, graph.schema.relation_index[task.key], sources, destinations)


def _too_late(node_times: Tensor | None, times: Tensor | None) -> IsBad:
    if node_times is None or times is None:
        return lambda nodes, at: torch.zeros_like(nodes, dtype=torch.bool)
    return lambda nodes, at: node_times[nodes] > times[at]


def weight_sums(weight: Tensor) -> WeightSums:
    return WeightSums(torch.cumsum(weight.to(torch.float64), 0), int(torch.nonzero(weight > 0)[-1]))


def draw_nodes(key: int, slots: Tensor, end: int, attempt: int, num_nodes: int, weight: WeightSums | None) -> Tensor:
    """Return a random node for each number in `slots`, drawn uniformly or, with `weight`, in proportion to weights."""
    stream = keys.NEGATIVE_STREAM + end
    if weight is None:
        return ops.draw_bounded(key, slots, stream, attempt, num_nodes)
    words = ops.draw_words(key, slots, stream, attempt).to(torch.int64)
    high, low = words[:, 0], words[:, 1]
    unit = ((high << 20 | low >> 12).to(torch.float64) + 0.5) * 2.0**-52
    return torch.searchsorted(weight.sums, unit * weight.sums[-1], right=True).clamp(max=weight.last)


def draw_until(draw: DrawNodes, is_bad: IsBad, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a node for each slot, again where `is_bad`, ROUNDS times at most; return nodes, and indices still bad."""
    drawn = draw(slots, 0)
    bad = torch.nonzero(is_bad(drawn, torch.arange(slots.numel()))).view(-1)
    for attempt in range(1, ROUNDS):
        if bad.numel() == 0:
            break
        drawn[bad] = draw(slots[bad], attempt)
        bad = bad[is_bad(drawn[bad], bad)]
    return drawn, bad


def are_edges(graph: GraphStore, relation: int, sources: Tensor, destinations: Tensor) -> Tensor:
    """Return a mask of the pairs that are edges of a relation. Reads in-edges of the destinations piece by piece."""
    schema, found = graph.schema, []
    stride = schema.node_types[schema.destinations[relation]].num_nodes
    num_sources = schema.node_types[schema.sources[relation]].num_nodes
    is_wanted = torch.zeros(num_sources, dtype=torch.bool).index_fill_(0, sources, True)
    for nodes in torch.split(torch.unique(destinations), NODES):
        picks = in_edges(graph, relation, nodes)
        of_source = is_wanted[picks.sources]
        ends = torch.repeat_interleave(nodes, picks.counts)[of_source]
        found.append(picks.sources[of_source] * stride + ends)
    return torch.isin(sources * stride + destinations, torch.cat(found))


def too_dense(task: LinkTask) -> DataError:
    newer = "" if task.node_times is None else ", or has a node that is newer than the link"
    return DataError(
        f"no strict negatives: nearly every pair is an edge of {task.key}{newer}; set strict_negatives=False"
    )
