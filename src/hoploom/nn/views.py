"""What each layer sees of a batch: in-edges, and how many of each type's first nodes it must compute.

A layer gets only what the layers after it still need, whatever the batch is: blocks, a sampled subgraph, a whole graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from hoploom.batch import Block
from hoploom.errors import ConfigError
from hoploom.ops import InEdges
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName


@dataclass(frozen=True)
class LayerView:
    """One layer's edges and ends. Sources are the first nodes of their type, destinations the first sources."""

    edges: Mapping[RelationName, InEdges]
    num_sources: Mapping[str, int]
    num_destinations: Mapping[str, int]


def by_type(batch: Data | HeteroData, name: str) -> dict[str, Any]:
    """A node field by node type, of those types that have it."""
    if isinstance(batch, Data):
        return {HOMOGENEOUS_TYPE: batch[name]} if name in batch else {}
    return {node_type: batch[node_type][name] for node_type in batch.node_types if name in batch[node_type]}


def by_relation(batch: Data | HeteroData, name: str) -> dict[RelationName, Any]:
    """An edge field by relation, of those relations that have it."""
    if isinstance(batch, Data):
        return {HOMOGENEOUS_RELATION: batch[name]} if name in batch else {}
    return {key: batch[key][name] for key in batch.edge_types if name in batch[key]}


def views_of(batch: Data | HeteroData, num_layers: int) -> list[LayerView]:
    """One view per layer, from the input layer on.

    >>> for view in views_of(batch, 3): ...
    """
    degrees = batch.in_degree if isinstance(batch, Data) and "in_degree" in batch else None
    if "views" in batch:  # padded ones, which only their maker can make
        if len(batch.views) != num_layers:
            raise ConfigError(f"the batch has {len(batch.views)} views for {num_layers} layers; give as many fanouts")
        return batch.views if degrees is None else [_with_degrees(view, degrees) for view in batch.views]
    if "blocks" in batch:
        if len(batch.blocks) != num_layers:
            raise ConfigError(f"the batch has {len(batch.blocks)} blocks for {num_layers} layers; give as many fanouts")
        return [_of_block(block, degrees) for block in batch.blocks]
    edge_index = by_relation(batch, "edge_index")
    counts = by_type(batch, "num_sampled_nodes")
    if not counts:
        return _of_whole(edge_index, _num_nodes(batch), num_layers)
    views = _of_subgraph(edge_index, {name: _running(hops) for name, hops in counts.items()}, num_layers)
    return views if degrees is None else [_with_degrees(view, degrees) for view in views]


def _num_nodes(batch: Data | HeteroData) -> dict[str, int]:
    if isinstance(batch, Data):
        return {HOMOGENEOUS_TYPE: int(batch.num_nodes or 0)}
    return {node_type: int(batch[node_type].num_nodes or 0) for node_type in batch.node_types}


def _with_degrees(view: LayerView, degrees: Tensor) -> LayerView:
    """The same with the sources' in-degrees in the whole graph."""
    edges = {key: replace(one, source_degrees=degrees[: one.num_sources]) for key, one in view.edges.items()}
    return replace(view, edges=edges)


def _of_block(block: Block, degrees: Tensor | None) -> LayerView:
    if not isinstance(block.edge_index, Mapping):
        edges = InEdges.of(block.edge_index, block.num_sources, block.num_destinations)  # type: ignore[arg-type]
        counts = edges.num_sources, edges.num_destinations
        view = LayerView({HOMOGENEOUS_RELATION: edges}, *({HOMOGENEOUS_TYPE: count} for count in counts))
        return view if degrees is None else _with_degrees(view, degrees)
    sources, destinations = block.num_sources, block.num_destinations
    grouped = {
        key: InEdges.of(index, sources[key[0]], destinations[key[2]])  # type: ignore[index]
        for key, index in block.edge_index.items()
    }
    return LayerView(grouped, sources, destinations)  # type: ignore[arg-type]


def _of_whole(
    edge_index: Mapping[RelationName, Tensor], num_nodes: Mapping[str, int], num_layers: int
) -> list[LayerView]:
    edges = {key: InEdges.of(index, num_nodes[key[0]], num_nodes[key[2]]) for key, index in edge_index.items()}
    return [LayerView(edges, num_nodes, num_nodes)] * num_layers


def _of_subgraph(
    edge_index: Mapping[RelationName, Tensor], running: Mapping[str, list[int]], num_layers: int
) -> list[LayerView]:
    """Grouped once; every layer has a head of it. Its destinations lie within as many hops as layers follow."""
    within = [
        {name: counts[min(hops, len(counts) - 1)] for name, counts in running.items()}
        for hops in range(num_layers, -1, -1)
    ]
    totals = {name: counts[-1] for name, counts in running.items()}
    whole = {key: InEdges.of(index, totals[key[0]], totals[key[2]]) for key, index in edge_index.items()}
    views = []
    for sources, destinations in pairwise(within):
        edges = {key: one.head(destinations[key[2]], sources[key[0]]) for key, one in whole.items()}
        views.append(LayerView(edges, sources, destinations))
    return views


def _running(hops: Any) -> list[int]:
    total, out = 0, []
    for count in hops:
        total += int(count)
        out.append(total)
    return out
