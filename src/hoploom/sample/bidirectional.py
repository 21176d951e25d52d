"""Add the reverse of each sampled edge, as PyG's subgraph_type='bidirectional'."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from hoploom.batch import Sampled
from hoploom.schema import REVERSE, Relation, Schema


def make_bidirectional(sampled: Sampled, schema: Schema) -> Sampled:
    """Return every edge and its reverse once, sorted by destination, then source."""
    edge_index, edges = list(sampled.edge_index), list(sampled.edges)
    for index, relation in enumerate(schema.relations):
        if not schema.homogeneous and relation.name.startswith(REVERSE):
            continue
        back, both = _reverse_of(schema, index, relation)
        if back is None:
            warnings.warn(f"relation {relation.key} has no reverse; its edges stay directional", stacklevel=2)
            continue
        known = schema.homogeneous  # a reverse edge of another relation has no id in this one
        sizes = [
            sampled.nodes[schema.sources[index]].numel(),
            sampled.nodes[schema.destinations[index]].numel(),
        ]
        merged, kept = _merge(sampled.edge_index[index], sampled.edge_index[back].flip(0), sizes)
        edge_index[index] = merged
        edges[index] = _kept_edges(sampled.edges[index], sampled.edges[back], kept) if known else None
        if both:
            edge_index[back], edges[back] = merged.flip(0), None
    return Sampled(sampled.nodes, sampled.trees, edge_index, edges, None, None)


def _reverse_of(schema: Schema, index: int, relation: Relation) -> tuple[int | None, bool]:
    """Return the relation of the reverse edges, and whether it is rewritten too."""
    named = (relation.destination, REVERSE + relation.name, relation.source)
    if named in schema.relation_index:
        return schema.relation_index[named], True
    if relation.source == relation.destination:
        return index, False
    candidates = [
        i
        for i, r in enumerate(schema.relations)
        if (r.source, r.destination) == (relation.destination, relation.source)
    ]
    return (candidates[0], False) if len(candidates) == 1 else (None, False)


def _merge(forward: Tensor, backward: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    both = torch.cat([forward, backward], dim=1)
    order_key = both[1] * max(1, sizes[0]) + both[0]
    order = torch.argsort(order_key, stable=True)
    ascending = order_key[order]
    first = torch.ones_like(ascending, dtype=torch.bool)
    first[1:] = ascending[1:] != ascending[:-1]
    kept = order[first]
    return both[:, kept].contiguous(), kept


def _kept_edges(forward: Tensor | None, backward: Tensor | None, kept: Tensor) -> Tensor | None:
    if forward is None or backward is None:
        return None
    return torch.cat([forward, backward])[kept]
