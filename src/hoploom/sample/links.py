"""Seeds of link prediction: the ends of links and of drawn negative links, and the local id of each end."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from hoploom import keys, ops
from hoploom.batch import Seeds
from hoploom.errors import DataError
from hoploom.schema import RelationName, Schema
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
    weights: tuple[WeightSums | None, WeightSums | None] = (None, None)  # of sources and of destinations


@dataclass(frozen=True)
class LinkSeeds:
    """The seeds of a batch of links, and batch fields with the links' ends in local ids, labels and times."""

    seeds: Seeds
    fields: Mapping[str, Tensor | None]  # edge_label_index, ... or src_index, dst_pos_index, ...
    link_of: Tensor | None  # [num_trees] int64: the positive link of each tree; disjoint sampling only


def make_link_task(
    key: RelationName,
    negatives: NegativeSampling | None,
    *,
    strict: bool = False,
    node_times: NodeTimes | None = None,
) -> LinkTask:
    if negatives is None:
        return LinkTask(key)
    weights = [None if w is None else weight_sums(w) for w in (negatives.src_weight, negatives.dst_weight)]
    return LinkTask(key, negatives, strict, node_times, (weights[SOURCE], weights[DESTINATION]))


class Ends(NamedTuple):
    """The node ids of both ends of all links, positives first. In triplet mode, a negative is a destination only."""

    sources: Tensor
    destinations: Tensor
    source_times: Tensor | None
    destination_times: Tensor | None
    owners: Tensor  # [num_negatives] int64: the positive link of each negative


def make_link_seeds(graph: GraphStore, links: Links, task: LinkTask, key: int, *, disjoint: bool) -> LinkSeeds:
    """Draw negative links; return the ends of all links as seeds, with the batch fields that refer to them."""
    ends = _with_negatives(graph, links, task, key)
    schema = graph.schema
    types = schema.type_index[task.key[0]], schema.type_index[task.key[2]]
    link_of = None
    if disjoint:
        seeds, sources, destinations = _seeds_with_trees(schema, types, ends, links.first)
        of_all = torch.cat([torch.arange(links.sources.numel()), ends.owners])
        link_of = torch.cat([of_all[: sources.numel()], of_all])
    else:
        seeds, sources, destinations = _unique_seeds(schema, types, ends)
    fields = _fields(links, task.negatives, sources, destinations, ends.source_times)
    return LinkSeeds(seeds, fields, link_of)


def _with_negatives(graph: GraphStore, links: Links, task: LinkTask, key: int) -> Ends:
    times = links.times
    if task.negatives is None:
        return Ends(links.sources, links.destinations, times, times, links.sources[:0])
    positives, repeats = _owners(links, task.negatives.amount)
    slot_times = None if times is None else times[positives]
    all_times = None if times is None or slot_times is None else torch.cat([times, slot_times])
    slots = (links.first + positives) | repeats << 40  # unique among the negatives of the step
    if task.negatives.is_binary():
        sources, destinations = _negative_pairs(graph, task, key, slots, slot_times)
        sources = torch.cat([links.sources, sources])
        return Ends(sources, torch.cat([links.destinations, destinations]), all_times, all_times, positives)
    sources = links.sources[positives]
    destinations = _negative_destinations(graph, task, key, (slots, sources), slot_times)
    return Ends(links.sources, torch.cat([links.destinations, destinations]), times, all_times, positives)


def _owners(links: Links, amount: float) -> tuple[Tensor, Tensor]:
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


def _negative_pairs(
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


def _negative_destinations(
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


def _unique_seeds(schema: Schema, types: tuple[int, int], ends: Ends) -> tuple[Seeds, Tensor, Tensor]:
    """Return the distinct ends as seeds, ascending as in PyG, and the local ids of all sources and destinations."""
    nodes: list[Tensor | None] = [None] * len(schema.node_types)
    no_trees = (None,) * len(nodes)
    if types[0] == types[1]:
        nodes[types[0]], place = torch.unique(torch.cat([ends.sources, ends.destinations]), return_inverse=True)
        split = ends.sources.numel()
        return Seeds(tuple(nodes), no_trees), place[:split], place[split:]
    nodes[types[0]], sources = torch.unique(ends.sources, return_inverse=True)
    nodes[types[1]], destinations = torch.unique(ends.destinations, return_inverse=True)
    return Seeds(tuple(nodes), no_trees), sources, destinations


def _seeds_with_trees(
    schema: Schema, types: tuple[int, int], ends: Ends, first_link: int
) -> tuple[Seeds, Tensor, Tensor]:
    """Return every link end as the seed of a tree, with a number unique over all ranks, and the ends' local ids."""
    nodes: list[Tensor | None] = [None] * len(schema.node_types)
    trees: list[Tensor | None] = [None] * len(nodes)
    num_sources, num_destinations = ends.sources.numel(), ends.destinations.numel()
    first = first_link << 20
    tree = torch.arange(num_sources + num_destinations) + first
    sources, destinations = torch.arange(num_sources), torch.arange(num_destinations)
    if types[0] == types[1]:
        nodes[types[0]], trees[types[0]] = torch.cat([ends.sources, ends.destinations]), tree
        destinations = destinations + num_sources
    else:
        nodes[types[0]], trees[types[0]] = ends.sources, tree[:num_sources]
        nodes[types[1]], trees[types[1]] = ends.destinations, tree[num_sources:]
    times = None
    if ends.source_times is not None and ends.destination_times is not None:
        times = torch.cat([ends.source_times, ends.destination_times])
    return Seeds(tuple(nodes), tuple(trees), times, first), sources, destinations


def _fields(
    links: Links,
    negatives: NegativeSampling | None,
    sources: Tensor,
    destinations: Tensor,
    times: Tensor | None,
) -> dict[str, Tensor | None]:
    if negatives is None or negatives.is_binary():
        labels = links.labels
        if negatives is not None:
            positive = torch.ones(links.sources.numel()) if labels is None else labels
            extra = sources.numel() - links.sources.numel()
            labels = torch.cat([positive, positive.new_zeros((extra, *positive.shape[1:]))])
        return {
            "edge_label_index": torch.stack([sources, destinations]),
            "edge_label": labels,
            "edge_label_time": times,
        }
    count = links.sources.numel()
    negative = destinations[count:].view(-1, count).t().contiguous()  # triplet i holds column i
    return {
        "src_index": sources,
        "dst_pos_index": destinations[:count],
        "dst_neg_index": negative.squeeze(-1),
        "seed_time": times,
    }


# --- negatives: keyed draws of nodes, weighted, in time, and strict on request -----------------


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
