"""Seeds of link prediction: the ends of links and of negative links, and the local id of each end."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.sampler import NegativeSampling

from hoploom.batch import Seeds
from hoploom.sample.negatives import SLOT_BITS, Links, LinkTask, negative_destinations, negative_pairs, owners_of
from hoploom.schema import Schema
from hoploom.store import GraphStore


@dataclass(frozen=True)
class LinkSeeds:
    """The seeds of a batch of links, and batch fields with the links' ends in local ids, labels and times."""

    seeds: Seeds
    fields: Mapping[str, Tensor | None]  # edge_label_index, ... or src_index, dst_pos_index, ...
    link_of: Tensor | None  # [num_trees] int64: the positive link of each tree; disjoint sampling only


class Ends(NamedTuple):
    """The node ids of both ends of all links, positives first. In triplet mode, a negative is a destination only."""

    sources: Tensor
    destinations: Tensor
    source_times: Tensor | None
    destination_times: Tensor | None
    owners: Tensor  # [num_negatives] int64: the positive link of each negative


def make_link_seeds(graph: GraphStore, links: Links, task: LinkTask, key: int, *, disjoint: bool) -> LinkSeeds:
    """Draw negative links; return the ends of all links as seeds, with the batch fields that refer to them."""
    is_shared = task.shares_candidates and links.times is None and not disjoint
    drawn = _with_negatives(graph, links, task, key, is_shared=is_shared)
    ends, is_there = _those_there(drawn)
    schema = graph.schema
    types = schema.type_index[task.key[0]], schema.type_index[task.key[2]]
    link_of = None
    if disjoint:
        seeds, sources, destinations = _seeds_with_trees(schema, types, ends, links.first)
        of_all = torch.cat([torch.arange(links.sources.numel()), ends.owners])
        link_of = torch.cat([of_all[: sources.numel()], of_all])
    else:
        seeds, sources, destinations = _unique_seeds(schema, types, ends)
    if is_there is not None:
        destinations = torch.full_like(drawn.destinations, -1).masked_scatter_(is_there, destinations)
    fields = _fields(links, task.negatives, sources, destinations, ends.source_times, is_shared=is_shared)
    return LinkSeeds(seeds, fields, link_of)


def _with_negatives(graph: GraphStore, links: Links, task: LinkTask, key: int, *, is_shared: bool) -> Ends:
    """Return the ends of all links. Candidates that all links of a step share are there once."""
    times = links.times
    if task.negatives is None:
        return Ends(links.sources, links.destinations, times, times, links.sources[:0])
    if is_shared:
        repeats = torch.arange(int(task.negatives.amount))
        positives = torch.zeros_like(repeats)
    else:
        positives, repeats = owners_of(links, task.negatives.amount)
    slot_times = None if times is None else times[positives]
    all_times = None if times is None or slot_times is None else torch.cat([times, slot_times])
    slots = (links.first + positives) | repeats << SLOT_BITS  # unique among the negatives of the step
    if task.negatives.is_binary():
        sources, destinations = negative_pairs(graph, task, key, slots, slot_times)
        sources = torch.cat([links.sources, sources])
        return Ends(sources, torch.cat([links.destinations, destinations]), all_times, all_times, positives)
    destinations = negative_destinations(graph, links, task, key, positives, slots)
    return Ends(links.sources, torch.cat([links.destinations, destinations]), times, all_times, positives)


def _those_there(ends: Ends) -> tuple[Ends, Tensor | None]:
    """Return the ends without destinations of -1, which stand for no candidate, and a mask of the others; None: all."""
    is_there = ends.destinations >= 0
    if bool(is_there.all()):
        return ends, None
    times = None if ends.destination_times is None else ends.destination_times[is_there]
    owners = ends.owners[is_there[ends.sources.numel() :]]
    return ends._replace(destinations=ends.destinations[is_there], destination_times=times, owners=owners), is_there


def _unique_seeds(schema: Schema, types: tuple[int, int], ends: Ends) -> tuple[Seeds, Tensor, Tensor]:
    """Return the distinct ends as seeds, ascending as in PyG, and the local ids of all sources and destinations."""
    nodes: list[Tensor | None] = [None] * len(schema.node_types)
    no_trees, counts = (None,) * len(nodes), [node_type.num_nodes for node_type in schema.node_types]
    if types[0] == types[1]:
        nodes[types[0]], place = _unique(torch.cat([ends.sources, ends.destinations]), counts[types[0]])
        split = ends.sources.numel()
        return Seeds(tuple(nodes), no_trees), place[:split], place[split:]
    nodes[types[0]], sources = _unique(ends.sources, counts[types[0]])
    nodes[types[1]], destinations = _unique(ends.destinations, counts[types[1]])
    return Seeds(tuple(nodes), no_trees), sources, destinations


def _unique(ids: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return the distinct ids, ascending, and the place of each id among them. Many ids of few nodes are not sorted."""
    if ids.numel() < num_nodes:
        distinct, places = torch.unique(ids, return_inverse=True)
        return distinct, places
    is_seen = torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, ids, True)
    return is_seen.nonzero().view(-1), (is_seen.cumsum(0) - 1)[ids]


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
    *,
    is_shared: bool,
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
    drawn = destinations[count:]
    own = None if is_shared else drawn.view(-1, count).t().contiguous().squeeze(-1)  # triplet i holds column i
    return {
        "src_index": sources,
        "dst_pos_index": destinations[:count],
        "dst_neg_index": own,
        "dst_neg_shared": drawn if is_shared else None,
        "seed_time": times,
    }
