"""A store, or the part of it between some nodes, as PyG's Data or HeteroData in memory.

Edges are in your own order if the store has one, else in the store's. Everything is copied: this is for looking at
a graph, and for graphs that fit into memory; training goes through a loader.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hoploom.errors import ConfigError
from hoploom.schema import EDGE_ID, NodeType, Relation, read_members
from hoploom.store.base import NODES, Wanted, in_edges
from hoploom.store.views import Explored, FieldRows
from hoploom.system import require_memory

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

TAKES = "to read the graph takes"
LESS = "take a part of it with store.subgraph(ids), or batches from hoploom.NeighborLoader(store, ...)"


def to_pyg(store: Explored) -> "Data | HeteroData":
    """Return the whole graph; raise ConfigError if it would not fit into memory."""
    edges = [relation.num_edges * _edge_bytes(relation) for relation in store.schema.relations]
    nodes = {t.name: torch.arange(t.num_nodes) for t in store.schema.node_types}
    require_memory(_node_bytes(store, nodes) + sum(edges), TAKES, LESS)
    return _data(store, nodes)


def _node_bytes(store: Explored, nodes: Mapping[str, Tensor]) -> int:
    """Return the bytes of the fields, masks and ids of these nodes."""
    per_node = {
        t.name: 8 + len(t.splits) + sum(f.row_bytes for f in t.fields.values()) for t in store.schema.node_types
    }
    return sum(ids.numel() * per_node[name] for name, ids in nodes.items())


def _edge_bytes(relation: Relation) -> int:
    """Return the bytes of an edge at the peak: found, concatenated, and sorted with its fields."""
    return 24 + 24 + 24 + 2 * sum(field.row_bytes for field in relation.fields.values())


def subgraph(store: Explored, subset: Any) -> "Data | HeteroData":
    """Return these nodes, the edges between them, and the fields of both."""
    schema = store.schema
    if schema.homogeneous:
        subset = {schema.node_types[0].name: subset}
    if not isinstance(subset, Mapping):
        way_out = f"give the nodes by node type, {{type: ids}}; the graph has {store.node_types}"
        raise ConfigError(f"subset is {subset!r:.80}; {way_out}")
    for name in subset:
        schema.node_type(name)
    nodes = {t.name: _members(store, t, subset.get(t.name, [])) for t in schema.node_types}
    require_memory(_node_bytes(store, nodes), TAKES, LESS)
    data = _data(store, nodes)
    for name, ids in nodes.items():
        (data if schema.homogeneous else data[name]).n_id = ids
    return data


def _members(store: Explored, node_type: NodeType, given: Any) -> Tensor:
    """Return the node ids of a split's name, a list, a tensor or a mask; raise ConfigError for duplicates."""
    if isinstance(given, str):
        return store.split(given, node_type.name)
    what = f"ids of {node_type.name!r}"
    try:
        ids = torch.as_tensor(given[:] if isinstance(given, FieldRows) else given).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{what} are {given!r:.80}; give a list of ids, a mask or a split's name") from error
    ids = read_members(what, ids if ids.numel() else ids.long(), node_type.num_nodes, ConfigError)
    if torch.unique(ids).numel() != ids.numel():
        raise ConfigError(f"{what} name a node twice; give every node once: ids.unique()")
    return ids


def _data(store: Explored, nodes: Mapping[str, Tensor]) -> "Data | HeteroData":
    from torch_geometric.data import Data, HeteroData  # takes a second to import

    data: Any = Data() if store.schema.homogeneous else HeteroData()
    for node_type in store.schema.node_types:
        fields = _node_fields(store, node_type, nodes[node_type.name])
        holder = data if store.schema.homogeneous else data[node_type.name]
        if not fields:
            holder.num_nodes = nodes[node_type.name].numel()
        for name, rows in fields.items():
            holder[name] = rows
    for relation in store.schema.relations:
        holder = data if store.schema.homogeneous else data[relation.key]
        for name, rows in _edge_fields(store, relation, nodes).items():
            holder[name] = rows
    return data


def _node_fields(store: Explored, node_type: NodeType, ids: Tensor) -> dict[str, Tensor]:
    """Return the fields of these nodes, and a mask for every split."""
    names = list(node_type.fields)
    fields = dict(zip(names, store.features.gather([Wanted(node_type.name, name, ids) for name in names]), strict=True))
    for split in node_type.splits:
        if f"{split}_mask" not in fields:
            fields[f"{split}_mask"] = torch.isin(ids, store.split(split, node_type.name))
    return fields


def _edge_fields(store: Explored, relation: Relation, nodes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the edges between these nodes in local ids, and their fields."""
    ends, sources = nodes[relation.destination], nodes[relation.source]
    index, order = store.schema.relation_index[relation.key], sources.argsort()
    found: list[tuple[Tensor, Tensor]] = [(torch.empty(2, 0, dtype=torch.int64), ends[:0])]
    num_found = 0
    for first in range(0, ends.numel() if sources.numel() else 0, NODES):
        picks = in_edges(store.graph, index, ends[first : first + NODES])
        places = order[torch.searchsorted(sources[order], picks.sources).clamp_(max=sources.numel() - 1)]
        inside = sources[places] == picks.sources
        local = torch.repeat_interleave(torch.arange(first, first + picks.counts.numel()), picks.counts)
        found.append((torch.stack([places[inside], local[inside]]), picks.edges[inside]))
        num_found += found[-1][1].numel()
        require_memory(num_found * (_edge_bytes(relation) - 24), TAKES, LESS)  # those found are in memory already
    edges, positions = torch.cat([pair[0] for pair in found], dim=1), torch.cat([pair[1] for pair in found])
    rows = store.features.gather([Wanted(relation.key, name, positions) for name in relation.fields])
    fields = {"edge_index": edges, **dict(zip(relation.fields, rows, strict=True))}
    if EDGE_ID not in fields:
        return fields
    own = fields.pop(EDGE_ID).argsort()
    return {name: values[:, own] if name == "edge_index" else values[own] for name, values in fields.items()}
