"""Make a store from PyG's Data or HeteroData."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import TensorFrame

from hoploom.errors import ConfigError, DataError
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName, TypeKey
from hoploom.store import Store
from hoploom.store.from_tensors import as_tensor, build_store, mask_splits

USUAL = ("x", "y", "pos", "edge_attr", "edge_weight", "edge_type")  # names that PyG uses for fields of nodes and edges


@dataclass(frozen=True)
class PygGraph:
    """A store made from PyG's data, with the attributes that the store does not hold and batches need."""

    store: Store
    template: Data | HeteroData  # attributes that every batch carries unchanged
    field_order: Mapping[TypeKey, tuple[str, ...]]  # of attributes, as in the user's data
    frames: dict[TypeKey, dict[str, TensorFrame | Tensor]]  # TensorFrames by name; tensors added later
    deleted: set[tuple[TypeKey, str]]  # fields that the user deleted from the data later


def from_pyg(data: Data | HeteroData, *, weight_attr: str | None = None, time_attr: str | None = None) -> Store:
    """Make a store from a PyG `Data` or `HeteroData`. Your ids stay the same; features are not copied.

    >>> store = hoploom.from_pyg(dataset[0])
    >>> store.save("cora.store")
    """
    graph = read_pyg(data, weight_attr=weight_attr, time_attr=time_attr)
    for owner, names in graph.frames.items():
        raise DataError(
            f"{owner}.{', '.join(names)} is a TensorFrame, and a store holds tensors; give a loader the data itself, "
            "or make a tensor of its columns and delete it"
        )
    return graph.store


def read_pyg(data: Data | HeteroData, *, weight_attr: str | None = None, time_attr: str | None = None) -> PygGraph:
    """Return a store over a PyG graph, with the other attributes that its batches need."""
    if not isinstance(data, Data | HeteroData):
        raise ConfigError(f"data is a {type(data).__name__}; give Data, HeteroData, a store, or a store's path")
    template = copy.copy(data)
    homogeneous = isinstance(data, Data)
    node_stores = {HOMOGENEOUS_TYPE: data._store} if homogeneous else dict(data.node_items())
    edge_stores = {HOMOGENEOUS_RELATION: data._store} if homogeneous else dict(data.edge_items())
    nodes, splits, edges, num_nodes = {}, {}, {}, {}
    frames: dict[TypeKey, dict[str, TensorFrame | Tensor]] = {}
    for name, storage in node_stores.items():
        frames[name] = _frames(storage, storage.is_node_attr)
        nodes[name] = _tensors(name, storage, storage.is_node_attr)
        if storage.num_nodes is None:
            raise DataError(f"the number of nodes of {name!r} is unknown; set num_nodes")
        num_nodes[name] = int(storage.num_nodes)
        splits[name] = mask_splits(nodes[name])
    for owner, storage in {**node_stores, **edge_stores}.items():
        _check_lengths(owner, storage)
    for key, storage in edge_stores.items():
        edges[key] = _edges(key, storage, homogeneous)
        of_nodes = frames[HOMOGENEOUS_TYPE] if homogeneous else {}
        found = _frames(storage, storage.is_edge_attr)
        frames[key] = {name: frame for name, frame in found.items() if name not in of_nodes}
    for owner, fields in [*nodes.items(), *edges.items(), *frames.items()]:
        holder = template._store if homogeneous else template[owner]
        for field in fields:
            if field in holder:
                del holder[field]
    store = build_store(
        nodes,
        edges,
        num_nodes=num_nodes,
        splits=splits,
        homogeneous=homogeneous,
        weight_attr=weight_attr,
        time_attr=time_attr,
    )
    storages = [*node_stores.items(), *edge_stores.items()]
    order = {owner: tuple(storage.keys()) for owner, storage in storages}
    return PygGraph(store, template, order, {owner: named for owner, named in frames.items() if named}, set())


def _frames(storage: Any, belongs: Callable[[str], bool]) -> dict[str, TensorFrame | Tensor]:
    """Return, by name, the TensorFrames in PyG's `storage` whose names `belongs` accepts: nodes' or edges' names."""
    return {name: value for name, value in storage.items() if isinstance(value, TensorFrame) and belongs(name)}


def _check_lengths(owner: TypeKey, storage: Any) -> None:
    """Raise DataError for a usual field of nodes or edges with another number of rows; others may be the graph's."""
    for field, rows in storage.items():
        if (field not in USUAL and not field.endswith("_mask")) or not isinstance(rows, Tensor | np.ndarray):
            continue
        one = "edge" if isinstance(owner, tuple) or field.startswith("edge_") else "node"
        is_of_graph = field == "y" and (rows.ndim == 0 or len(rows) == 1)
        if not is_of_graph and not storage.is_node_attr(field) and not storage.is_edge_attr(field):
            count = storage.num_edges if one == "edge" else storage.num_nodes
            raise DataError(f"{owner}.{field} has shape {tuple(rows.shape)} for {count} {one}s; give one row per {one}")


def _tensors(owner: TypeKey, storage: Any, belongs: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for field, value in storage.items():
        if field in ("num_nodes", "edge_index", "adj_t", "adj") or isinstance(value, TensorFrame) or not belongs(field):
            continue
        rows = as_tensor(value)
        if rows is None:
            raise DataError(f"{owner}.{field} is a {type(value).__name__}, no tensor; convert or delete it")
        if storage._parent().__cat_dim__(field, value, storage) != 0 and rows.dim() > 1:
            continue  # PyG's own edge indices: they belong to the graph as a whole
        found[field] = rows
    return found


def _edges(key: RelationName, storage: Any, homogeneous: bool) -> dict[str, Tensor]:
    if "adj_t" in storage or "adj" in storage:
        raise DataError(f"edges of {key} are a SparseTensor; give edge_index instead")
    edge_index = storage.get("edge_index", None)
    if edge_index is None:
        edge_index = torch.empty(2, 0, dtype=torch.int64)
    fields = _tensors(key, storage, storage.is_edge_attr)
    if homogeneous:  # a graph with as many nodes as edges: PyG calls such a field a node's
        fields = {name: rows for name, rows in fields.items() if not storage.is_node_attr(name)}
    return {"edge_index": torch.as_tensor(edge_index), **fields}
