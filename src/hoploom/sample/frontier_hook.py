"""A frontier of the user's own: `sample_frontier(layer, graph, seeds)` says which edges lead to a layer's seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.ops import Frontier, Picks
from hoploom.schema import RelationName
from hoploom.store import Draw, GraphStore


@dataclass(frozen=True)
class Edges:
    """Edges into a layer's seeds, in global ids: what a frontier hook returns."""

    sources: Tensor  # [e] int64
    destinations: Tensor  # [e] int64, each of them one of the seeds
    positions: Tensor | None = None  # [e] int64 positions in the store, where they are known


HookEdges = Edges | Mapping[RelationName, Edges]
SampleFrontier = Callable[[int, "LayerGraph", Tensor | Mapping[str, Tensor]], HookEdges]


class LayerGraph:
    """What a frontier hook sees of the graph, with the layer's randomness bound.

    >>> def sample_frontier(layer, graph, seeds):
    ...     return graph.sample_neighbors(seeds, fanout=10)
    """

    def __init__(self, graph: GraphStore, key: int, layer: int) -> None:
        self.schema = graph.schema
        self._graph, self._key, self._layer = graph, key, layer

    def sample_neighbors(
        self,
        seeds: Tensor | Mapping[str, Tensor],
        fanout: int | Mapping[RelationName, int],
        *,
        replace: bool = False,
        labor: bool = False,
        weighted: bool = False,
    ) -> HookEdges:
        """Picks of in-edges, as the sampler itself would make them; fanout -1 gives all."""
        relations = self.schema.relations
        if weighted and self.schema.weight is None:
            raise ConfigError("weighted=True needs a store built with weight_attr; leave it out")
        if isinstance(fanout, Mapping):
            for key in fanout:
                self.schema.relation(key)
            fanouts = [fanout.get(relation.key, 0) for relation in relations]
        else:
            fanouts = [fanout] * len(relations)
        given = seeds if isinstance(seeds, Mapping) else {self.schema.node_types[0].name: seeds}
        by_type = {name: _as_ids(f"seeds of {name!r}", nodes) for name, nodes in given.items()}
        frontiers = [Frontier(by_type[t.name]) if t.name in by_type else None for t in self.schema.node_types]
        draw = Draw(self._key, self._layer, fanouts, replace, False, labor, weighted)
        found = {}
        for relation, picks in zip(relations, self._graph.sample(frontiers, draw), strict=True):
            if picks is not None:
                destinations = torch.repeat_interleave(by_type[relation.destination], picks.counts)
                found[relation.key] = Edges(picks.sources, destinations, picks.edges)
        return next(iter(found.values())) if self.schema.homogeneous and found else found

    def in_edges(self, seeds: Tensor | Mapping[str, Tensor]) -> HookEdges:
        """All in-edges of the seeds."""
        return self.sample_neighbors(seeds, -1)


def ask_hook(
    hook: SampleFrontier, graph: GraphStore, key: int, layer: int, frontiers: Sequence[Frontier | None]
) -> list[Picks | None]:
    """The edges that the hook gives for a layer's frontiers, checked."""
    schema = graph.schema
    nodes = {
        t.name: torch.empty(0, dtype=torch.int64) if f is None else f.nodes
        for t, f in zip(schema.node_types, frontiers, strict=True)
    }
    by_type = {name: _distinct(seeds) for name, seeds in nodes.items()}
    seeds = by_type[schema.node_types[0].name] if schema.homogeneous else by_type
    answer = hook(layer, LayerGraph(graph, key, layer), seeds)
    by_relation = {schema.relations[0].key: answer} if isinstance(answer, Edges) else dict(answer)
    for name, edges in by_relation.items():
        schema.relation(name)
        if not isinstance(edges, Edges):
            raise ConfigError(f"sample_frontier returned a {type(edges).__name__} for {name}; return hoploom.Edges")
    return [
        _as_picks(by_relation[r.key], nodes[r.destination]) if r.key in by_relation else None for r in schema.relations
    ]


def _distinct(nodes: Tensor) -> Tensor:
    """Each node once, in order of first sight."""
    unique, inverse = torch.unique(nodes, return_inverse=True)
    if unique.numel() == nodes.numel():
        return nodes
    first = torch.full_like(unique, nodes.numel()).scatter_reduce(0, inverse, torch.arange(nodes.numel()), "amin")
    return nodes[torch.sort(first).values]


def _as_picks(edges: Edges, seeds: Tensor) -> Picks:
    """The hook's edges grouped by seed; a repeated seed has the same edges at every place."""
    unique, inverse = torch.unique(seeds, return_inverse=True)
    edges = _checked(edges, unique)
    group = torch.searchsorted(unique, edges.destinations)
    by_group = torch.argsort(group, stable=True)
    group_counts = torch.bincount(group, minlength=unique.numel())
    begins = torch.cumsum(group_counts, 0) - group_counts
    counts = group_counts[inverse]
    shift = begins[inverse] - (torch.cumsum(counts, 0) - counts)
    chosen = by_group[torch.repeat_interleave(shift, counts) + torch.arange(int(counts.sum()))]
    positions = torch.full_like(edges.sources, -1) if edges.positions is None else edges.positions
    return Picks(counts, edges.sources[chosen], positions[chosen])


def _as_ids(what: str, ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.dim() != 1:
        raise ConfigError(f"{what} have dtype {ids.dtype} and shape {tuple(ids.shape)}; give a list of integer ids")
    return ids.to("cpu", torch.int64).contiguous()


def _checked(edges: Edges, seeds: Tensor) -> Edges:
    columns = [edges.sources, edges.destinations, *([] if edges.positions is None else [edges.positions])]
    edges = Edges(*(_as_ids("edges of sample_frontier", column) for column in columns))
    shapes = {column.numel() for column in columns}
    if len(shapes) != 1:
        raise ConfigError(f"sample_frontier gave columns of {sorted(shapes)} edges; give one source per destination")
    strangers = edges.destinations[~torch.isin(edges.destinations, seeds)]
    if strangers.numel():
        raise ConfigError(f"sample_frontier gave an edge to {int(strangers[0])}, no seed of the layer; leave it out")
    return edges
