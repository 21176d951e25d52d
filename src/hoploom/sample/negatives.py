"""Negative links: keyed draws of nodes, weighted, in time, and strict on request."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hoploom import keys, ops
from hoploom.errors import DataError
from hoploom.store import GraphStore
from hoploom.store.base import in_edges

ROUNDS = 256  # if nine of ten draws are bad, one in 10^12 is still bad after these
DrawNodes = Callable[[Tensor, int], Tensor]  # (slots, attempt) -> nodes
IsBad = Callable[[Tensor, Tensor], Tensor]  # (nodes, their indices) -> mask of draws to repeat
SOURCE, DESTINATION = 0, 1  # which end of a link is drawn


class WeightSums(NamedTuple):
    """Running sums of weights: O(nodes) once, O(log nodes) per draw."""

    sums: Tensor  # [num_nodes] float64, running
    last: int  # the last node with a weight above zero


def weight_sums(weight: Tensor) -> WeightSums:
    return WeightSums(torch.cumsum(weight.to(torch.float64), 0), int(torch.nonzero(weight > 0)[-1]))


def draw_nodes(key: int, slots: Tensor, end: int, attempt: int, num_nodes: int, weight: WeightSums | None) -> Tensor:
    """Draw one node per slot: uniform by multiply-shift over 64 bits, or by inverting the running sum of weights."""
    stream = keys.NEGATIVE_STREAM + end
    if weight is None:
        return ops.draw_bounded(key, slots, stream, attempt, num_nodes)
    words = ops.draw_words(key, slots, stream, attempt).to(torch.int64)
    high, low = words[:, 0], words[:, 1]
    unit = ((high << 20 | low >> 12).to(torch.float64) + 0.5) * 2.0**-52
    return torch.searchsorted(weight.sums, unit * weight.sums[-1], right=True).clamp(max=weight.last)


def draw_until(draw: DrawNodes, is_bad: IsBad, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Redraw bad slots for up to ROUNDS rounds; return the draws and the indices that are still bad."""
    drawn = draw(slots, 0)
    bad = torch.nonzero(is_bad(drawn, torch.arange(slots.numel()))).view(-1)
    for attempt in range(1, ROUNDS):
        if bad.numel() == 0:
            break
        drawn[bad] = draw(slots[bad], attempt)
        bad = bad[is_bad(drawn[bad], bad)]
    return drawn, bad


def are_edges(graph: GraphStore, relation: int, sources: Tensor, destinations: Tensor) -> Tensor:
    """Return a mask of the pairs that are edges of a relation. Reads the destinations' complete lists."""
    unique, place = torch.unique(destinations, return_inverse=True)
    picks = in_edges(graph, relation, unique)
    stride = graph.schema.node_types[graph.schema.sources[relation]].num_nodes
    edges = torch.repeat_interleave(torch.arange(unique.numel()), picks.counts) * stride + picks.sources
    return torch.isin(place * stride + sources, edges)


def too_dense(relation: object) -> DataError:
    return DataError(f"nearly every pair is an edge of {relation}: no strict negatives; set strict_negatives=False")
