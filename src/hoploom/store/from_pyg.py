"""PyG's data as a store: Data, HeteroData, or a (feature_store, graph_store) pair."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.typing import TensorFrame

from hoploom import ops
from hoploom.errors import ConfigError, DataError
from hoploom.ops import Empty
from hoploom.schema import (
    DTYPE_NAMES,
    HOMOGENEOUS_RELATION,
    HOMOGENEOUS_TYPE,
    Field,
    Owner,
    RelationName,
    Schema,
)
from hoploom.store import FeatureStore as HoploomFeatures
from hoploom.store import Store, Wanted
from hoploom.store.base import Triple, read_wanted
from hoploom.store.from_tensors import as_tensor, build_store, mask_splits


@dataclass(frozen=True)
class PygGraph:
    """A store made from PyG's data, and the attributes of that data which its batches carry."""

    store: Store
    template: Data | HeteroData  # attributes that every batch carries unchanged
    field_order: Mapping[Owner, tuple[str, ...]]  # of the user's data
    frames: dict[Owner, dict[str, TensorFrame | Tensor]]  # tables of pytorch-frame by name; fields added later
    deleted: set[tuple[Owner, str]]  # fields that the data had, and has no more


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
    """Return a store over a PyG graph, with the template of its batches."""
    if not isinstance(data, Data | HeteroData):
        raise ConfigError(f"data is a {type(data).__name__}; give Data, HeteroData, a store, or a store's path")
    template = copy.copy(data)
    homogeneous = isinstance(data, Data)
    node_stores = {HOMOGENEOUS_TYPE: data._store} if homogeneous else dict(data.node_items())
    edge_stores = {HOMOGENEOUS_RELATION: data._store} if homogeneous else dict(data.edge_items())
    nodes, splits, edges, num_nodes = {}, {}, {}, {}
    frames: dict[Owner, dict[str, TensorFrame | Tensor]] = {}
    for name, storage in node_stores.items():
        frames[name] = _frames(storage, storage.is_node_attr)
        nodes[name] = _tensors(name, storage, storage.is_node_attr)
        if storage.num_nodes is None:
            raise DataError(f"the number of nodes of {name!r} is unknown; set num_nodes")
        num_nodes[name] = int(storage.num_nodes)
        splits[name] = mask_splits(nodes[name])
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
    """Return the storage's tables of pytorch-frame with a row for each node, or edge."""
    return {name: value for name, value in storage.items() if isinstance(value, TensorFrame) and belongs(name)}


def _tensors(owner: Owner, storage: Any, belongs: Any) -> dict[str, Tensor]:
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


# --- a pair of PyG's own stores -------------------------------------------------------------


def read_pair(features: FeatureStore, graph: GraphStore, *, time_attr: str | None = None) -> PygGraph:
    """Return a store over PyG's (feature_store, graph_store) pair: topology is read once, features stay there."""
    attrs = graph.get_all_edge_attrs()
    homogeneous = all(attr.edge_type is None for attr in attrs)
    rows = PairFeatures(features, homogeneous)
    nodes: dict[str, dict[str, Tensor]] = {name: {} for name in rows.num_nodes}
    num_nodes = dict(rows.num_nodes)
    for attr in attrs:
        ends = (HOMOGENEOUS_TYPE,) * 2 if homogeneous else (attr.edge_type[0], attr.edge_type[2])
        for end, size in zip(ends, attr.size or (None, None), strict=True):
            nodes.setdefault(end, {})
            if size is not None:
                num_nodes.setdefault(end, int(size))
    for owner, field in rows.attrs:
        if field == time_attr:
            nodes[owner][field] = rows.all_rows(owner, field)
    built = build_store(
        nodes,
        _pair_edges(graph, homogeneous),
        num_nodes=num_nodes,
        splits={},
        homogeneous=homogeneous,
        weight_attr=None,
        time_attr=time_attr,
    )
    types = tuple(replace(t, fields=rows.fields(t.name)) for t in built.schema.node_types)
    schema = replace(built.schema, node_types=types)
    store = Store(schema, built.graph, _Joined(schema, rows, built.features), built.parts)
    first = ("edge_index", "num_nodes") if homogeneous else ("num_nodes",)
    order: dict[Owner, tuple[str, ...]] = {t.name: (*first, *t.fields) if t.fields else () for t in types}
    return PygGraph(store, Data() if homogeneous else HeteroData(), order, {}, set())


def _pair_edges(graph: GraphStore, homogeneous: bool) -> dict[RelationName, dict[str, Tensor]]:
    columns = graph.csc()
    indices, indptr, order = ({HOMOGENEOUS_RELATION: column} for column in columns) if homogeneous else columns
    edges = {}
    for key in indptr:
        if order[key] is None:
            edges[key] = {"indptr": indptr[key], "indices": indices[key]}
            continue
        # Back to the user's own order: PyG's sort leaves the order within a list to chance.
        destinations = torch.repeat_interleave(indptr[key].diff())
        edge_index = torch.empty(2, order[key].numel(), dtype=torch.int64)
        edge_index[:, order[key]] = torch.stack([indices[key].to(torch.int64), destinations])
        edges[key] = {"edge_index": edge_index}
    return edges


class PairFeatures:
    """Rows of node fields from the user's own feature store."""

    def __init__(self, feature_store: FeatureStore, homogeneous: bool) -> None:
        self._features = feature_store
        self.attrs: dict[tuple[str, str], Any] = {}
        for attr in feature_store.get_all_tensor_attrs():
            if isinstance(attr.group_name, tuple):
                continue  # features of edges: PyG leaves them out of batches too
            if homogeneous:
                attr.group_name = None  # Data leaves it unset, and then refuses what it gave
            self.attrs[HOMOGENEOUS_TYPE if homogeneous else attr.group_name, attr.attr_name] = attr
        self.num_nodes = {owner: int(feature_store.get_tensor_size(a)[0]) for (owner, _), a in self.attrs.items()}

    def fields(self, node_type: str) -> dict[str, Field]:
        """Return the fields of a node type, with dtype and shape of their first row."""
        found = {}
        for owner, name in self.attrs:
            if owner == node_type:
                row = self.rows([Wanted(owner, name, torch.zeros(min(1, self.num_nodes[owner]), dtype=torch.int64))])[0]
                found[name] = Field(DTYPE_NAMES[row.dtype], tuple(row.shape[1:]))
        return found

    def all_rows(self, owner: str, field: str) -> Tensor:
        attr = copy.copy(self.attrs[owner, field])
        attr.index = None
        return torch.as_tensor(self._features.get_tensor(attr))

    def rows(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Return all wanted rows by one call of multi_get_tensor, so that the user's store can optimise it."""
        attrs = []
        for owner, field, ids in wanted:
            attr = copy.copy(self.attrs[str(owner), field])
            attr.index = ids
            attrs.append(attr)
        return [torch.as_tensor(rows) for rows in self._features.multi_get_tensor(attrs)]


@dataclass(frozen=True)
class _Joined:
    """A FeatureStore with node rows from the user's store, and edge ids from the topology."""

    schema: Schema
    nodes: PairFeatures
    edges: HoploomFeatures

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[Tensor]:
        wanted = read_wanted(self.schema, wanted)
        of_nodes = [want for want in wanted if isinstance(want.owner, str)]
        of_edges = [want for want in wanted if not isinstance(want.owner, str)]
        rows = iter(self.nodes.rows(of_nodes) if of_nodes else [])
        ids = iter(self.edges.gather(of_edges))
        found = [next(rows) if isinstance(want.owner, str) else next(ids) for want in wanted]
        return found if empty is ops.empty else [empty(tuple(rows.shape), rows.dtype).copy_(rows) for rows in found]
