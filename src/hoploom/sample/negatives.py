"""Negative links: keyed draws of nodes, uniform or by weight, in time, and strict on request."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from hoploom import keys, ops
from hoploom.errors import DataError
from hoploom.schema import RelationName
from hoploom.store import GraphStore
from hoploom.store.base import in_edges

ROUNDS = 256  # if nine of ten draws are bad, one in 10^12 is still bad after these
DrawNodes = Callable[[Tensor, int], Tensor]  # (unique numbers of the negatives, attempt) -> nodes
IsBad = Callable[[Tensor, Tensor], Tensor]  # (nodes, their indices) -> mask of draws to repeat
SOURCE, DESTINATION = 0, 1  # which end of a link is drawn
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


@dataclass(frozen=True)
class LinkTask:
    """A link prediction task: the relation of the links, which the graph may lack, and the options of negatives."""

    key: RelationName
    negatives: NegativeSampling | None = None
    strict: bool = False
    node_times: NodeTimes | None = None  # if given, negatives must exist at the link's time

    @cached_property
    def weights(self) -> tuple[WeightSums | None, WeightSums | None]:
        """The weights with which sources and destinations are drawn; None if all weights are equal."""
        given = (None, None) if self.negatives is None else (self.negatives.src_weight, self.negatives.dst_weight)
        of_sources, of_destinations = (None if weight is None else weight_sums(weight) for weight in given)
        return of_sources, of_destinations


def owners_of(links: Links, amount: float) -> tuple[Tensor, Tensor]:
    """Return, for each negative, the index of its positive link, and its number among the negatives of that link.

    Each link gets `amount` negatives. A fraction is spread over links by their index in the step, alike on all ranks.
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
    return lambda slots, attempt: draw_nodes(key, slots, end, attempt, num_nodes, weight), node_times


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
    is_edge = _is_edge(graph, task)
    bad = torch.nonzero(is_edge(*ends)).view(-1)
    for attempt in range(ROUNDS, 2 * ROUNDS):
        if bad.numel() == 0:
            return ends[0], ends[1]
        for nodes, (draw, node_times) in zip(ends, draws, strict=True):
            fresh = draw(slots[bad], attempt)
            late = _too_late(node_times, times)(fresh, bad)
            nodes[bad] = torch.where(late, nodes[bad], fresh)
        bad = bad[is_edge(ends[0][bad], ends[1][bad])]
    raise too_dense(task.key)


def negative_destinations(
    graph: GraphStore, task: LinkTask, key: int, drawn_for: tuple[Tensor, Tensor], times: Tensor | None
) -> Tensor:
    slots, sources = drawn_for
    draw, node_times = _draw(graph, task, key, DESTINATION)
    too_late = _too_late(node_times, times)
    if not task.strict:
        return _in_time(*draw_until(draw, too_late, slots), node_times)
    is_edge = _is_edge(graph, task)
    drawn, bad = draw_until(draw, lambda nodes, at: too_late(nodes, at) | is_edge(sources[at], nodes), slots)
    if bad.numel():
        raise too_dense(task.key)
    return drawn


def _is_edge(graph: GraphStore, task: LinkTask) -> Callable[[Tensor, Tensor], Tensor]:
    graph.schema.relation(task.key)  # strict negatives need its edges
    return partial(are_edges, graph, graph.schema.relation_index[task.key])


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
    """Draw one node for each number in `slots`. Draw again where `is_bad`, at most ROUNDS times in all.

    Return the nodes, and the indices of those that are still bad.
    """
    drawn = draw(slots, 0)
    bad = torch.nonzero(is_bad(drawn, torch.arange(slots.numel()))).view(-1)
    for attempt in range(1, ROUNDS):
        if bad.numel() == 0:
            break
        drawn[bad] = draw(slots[bad], attempt)
        bad = bad[is_bad(drawn[bad], bad)]
    return drawn, bad


def are_edges(graph: GraphStore, relation: int, sources: Tensor, destinations: Tensor) -> Tensor:
    """Return a mask of the pairs that are edges of a relation. Reads all in-edges of the destinations."""
    unique, place = torch.unique(destinations, return_inverse=True)
    picks = in_edges(graph, relation, unique)
    stride = graph.schema.node_types[graph.schema.sources[relation]].num_nodes
    edges = torch.repeat_interleave(torch.arange(unique.numel()), picks.counts) * stride + picks.sources
    return torch.isin(place * stride + sources, edges)


def too_dense(relation: object) -> DataError:
    return DataError(f"nearly every pair is an edge of {relation}: no strict negatives; set strict_negatives=False")
