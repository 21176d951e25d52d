"""Make a store over tensors in memory: node ids stay as the user gives them, and features are not copied."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.config.values import as_int
from hoploom.errors import DataError
from hoploom.ops import EdgeLists
from hoploom.schema import (
    DTYPE_NAMES,
    EDGE_ID,
    HOMOGENEOUS_RELATION,
    HOMOGENEOUS_TYPE,
    ID_DTYPES,
    Field,
    NodeType,
    Relation,
    RelationName,
    Schema,
    TypeKey,
    check_schema,
    read_members,
)
from hoploom.store import Part, Store, Table, assemble

Fields = Mapping[str, Tensor]
OF_EDGES = "an edge_index tensor or a mapping"


def from_tensors(
    nodes: Mapping[str, Any],
    edges: Any,
    *,
    num_nodes: Any = None,
    splits: Mapping[str, Any] | None = None,
    weight_attr: str | None = None,
    time_attr: str | None = None,
) -> Store:
    """Make a store from tensors. For several types, give mappings by node type and relation.

    >>> from_tensors({"x": x, "y": y}, edge_index, splits={"train": train_ids})
    >>> from_tensors({"paper": {"x": x}}, {("paper", "cites", "paper"): {"edge_index": ei, "weight": w}})

    Row 0 of `edge_index` [2, e] has the sources, row 1 the destinations.
    """
    homogeneous = not (isinstance(edges, Mapping) and all(isinstance(key, tuple) for key in edges))
    splits = {} if splits is None else splits
    if homogeneous:
        nodes, edges, splits = {HOMOGENEOUS_TYPE: nodes}, {HOMOGENEOUS_RELATION: edges}, {HOMOGENEOUS_TYPE: splits}
        num_nodes = {} if num_nodes is None else {HOMOGENEOUS_TYPE: num_nodes}
    return build_store(
        {name: _mapping(f"fields of {name!r}", given) for name, given in _mapping("nodes", nodes).items()},
        {
            key: _mapping(f"edges of {key}", {"edge_index": given} if isinstance(given, Tensor) else given, OF_EDGES)
            for key, given in edges.items()
        },
        num_nodes=_mapping(f"num_nodes={num_nodes!r:.40}", {} if num_nodes is None else num_nodes),
        splits={name: _mapping(f"splits of {name!r}", given) for name, given in _mapping("splits", splits).items()},
        homogeneous=homogeneous,
        weight_attr=weight_attr,
        time_attr=time_attr,
    )


def build_store(
    nodes: Mapping[str, Mapping[str, Any]],
    edges: Mapping[RelationName, Mapping[str, Any]],
    *,
    num_nodes: Mapping[str, Any],
    splits: Mapping[str, Mapping[str, Any]],
    homogeneous: bool,
    weight_attr: str | None,
    time_attr: str | None,
) -> Store:
    """Make a store from tensors by node type and relation; raise DataError if sampling would fail on them later."""
    _check_types(nodes, edges, {"num_nodes": num_nodes, "splits": splits})
    nodes = {t: {f: _read_tensor(f"{t}.{f}", rows) for f, rows in fields.items()} for t, fields in nodes.items()}
    counts = {name: _num_nodes(name, fields, num_nodes) for name, fields in nodes.items()}
    split_ids = {
        (name, split): _read_split(f"split {split!r} of {name!r}", given, counts[name])
        for name, by_name in splits.items()
        for split, given in by_name.items()
    }
    tables: dict[tuple[TypeKey, str], Table] = {}
    node_types = []
    for name, fields in nodes.items():
        described = {field: _describe(f"{name}.{field}", rows, counts[name], "node") for field, rows in fields.items()}
        tables.update({(name, field): Table(rows.contiguous()) for field, rows in fields.items()})
        sizes = {split: ids.numel() for (owner, split), ids in split_ids.items() if owner == name}
        node_types.append(NodeType(name, counts[name], described, sizes))
    relations, lists = [], []
    for key, given in edges.items():
        fields = {name: _read_tensor(f"{key}.{name}", rows) for name, rows in given.items()}
        relation, edge_lists, edge_tables = _build_relation(key, fields, nodes, counts, weight_attr, time_attr)
        relations.append(relation)
        lists.append(edge_lists)
        tables.update(edge_tables)
    schema = Schema(tuple(node_types), tuple(relations), homogeneous, weight_attr, time_attr)
    check_schema(schema)
    sizes_by_type = tuple(t.num_nodes for t in node_types)
    part = Part(schema, (0,) * len(node_types), sizes_by_type, tuple(lists), tables, split_ids)
    return assemble(schema, [part])


def _mapping(what: str, given: Any, wanted: str = "a mapping") -> dict[Any, Any]:
    if not isinstance(given, Mapping):
        raise DataError(f"{what} is of type {type(given).__name__}; give {wanted}")
    return dict(given)


def _check_types(nodes: Mapping[str, Any], edges: Mapping[Any, Any], by_type: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise DataError for a relation, size or split of an unknown node type."""
    for key in edges:
        if not isinstance(key, tuple) or len(key) != 3 or not all(isinstance(name, str) for name in key):
            raise DataError(f"relation {key!r} is not named by (source type, name, destination type); give all three")
    named = [(f"relation {key}", end) for key in edges for end in (key[0], key[2])]
    named += [(what, name) for what, given in by_type.items() for name in given]
    for what, name in named:
        if name not in nodes:
            raise DataError(f"{what} names node type {name!r}; the node types are {list(nodes)}")


def _read_tensor(what: str, given: Any) -> Tensor:
    """Return a dense tensor in CPU memory; raise DataError for anything else."""
    if not isinstance(given, Tensor):
        raise DataError(f"{what} is a {type(given).__name__}; give a tensor")
    if given.layout != torch.strided:
        raise DataError(f"{what} is sparse; give its values with to_dense(), or edges as edge_index")
    if given.device.type != "cpu":
        raise DataError(f"{what} lies on {given.device}; move it to the CPU, batches go to the device")
    return given.detach()


def _read_split(what: str, given: Any, num_nodes: int) -> Tensor:
    """Return the sorted ids of a split, which is given as ids or as a mask. Partitioning keeps a sorted order."""
    return torch.sort(read_members(what, _read_tensor(what, given), num_nodes)).values


def _num_nodes(name: str, fields: Fields, given: Mapping[str, Any]) -> int:
    count = given.get(name, next((len(rows) for rows in fields.values() if rows.dim()), None))
    if count is None:
        raise DataError(f"node type {name!r} has no fields to tell its size; give num_nodes")
    return as_int(f"num_nodes of {name!r}", count, 0, "give a count")


def _describe(what: str, rows: Tensor, count: int, one: Literal["node", "edge"]) -> Field:
    if rows.dtype not in DTYPE_NAMES:
        raise DataError(f"{what} has dtype {rows.dtype}; cast it to one of {sorted(DTYPE_NAMES.values())}")
    if rows.dim() == 0 or rows.shape[0] != count:
        raise DataError(f"{what} has shape {tuple(rows.shape)} for {count} {one}s; give one row per {one}")
    return Field(DTYPE_NAMES[rows.dtype], tuple(rows.shape[1:]))


# --- edges ----------------------------------------------------------------------------------


def _build_relation(
    key: RelationName,
    given: dict[str, Tensor],
    nodes: Mapping[str, Fields],
    counts: Mapping[str, int],
    weight_attr: str | None,
    time_attr: str | None,
) -> tuple[Relation, EdgeLists, dict[tuple[TypeKey, str], Table]]:
    if EDGE_ID in given:
        raise DataError(f"{key} has a field {EDGE_ID!r}, the name of the edges' own ids; rename it")
    if "edge_index" not in given:
        raise DataError(f"relation {key} has {list(given)}, and no edges; give edge_index")
    edge_index = given["edge_index"]
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype not in ID_DTYPES:
        raise DataError(f"edge_index of {key} is {edge_index.dtype} {tuple(edge_index.shape)}; give [2, e] int64")
    num_edges = edge_index.shape[1]
    fields = {name: rows for name, rows in given.items() if name != "edge_index"}
    described = {name: _describe(f"{key}.{name}", rows, num_edges, "edge") for name, rows in fields.items()}
    edge_time, source_time = _times(key, fields, nodes[key[0]], time_attr)
    csc = ops.build_csc(edge_index, counts[key[0]], counts[key[2]], edge_time=edge_time, source_time=source_time)
    tables: dict[tuple[TypeKey, str], Table] = {
        (key, name): Table(rows.contiguous(), by_edge_id=csc.permutation is not None) for name, rows in fields.items()
    }
    if csc.permutation is not None:
        described[EDGE_ID] = Field("int64")
        tables[key, EDGE_ID] = Table(csc.permutation)

    def in_order(rows: Tensor) -> Tensor:
        return rows if csc.permutation is None else rows[csc.permutation]

    weight = in_order(_weights(key, fields[weight_attr])) if weight_attr in fields else None
    edge_time = None if edge_time is None else in_order(edge_time)
    lists = EdgeLists(csc.indptr, csc.indices, weight=weight, edge_time=edge_time, source_time=source_time)
    return Relation(*key, num_edges, described), lists, tables


def _times(
    key: RelationName, fields: Fields, sources: Fields, time_attr: str | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the times of the edges, [e] int64, and of the source nodes, [n] int64; one or both of these are None."""
    if time_attr is None:
        return None, None
    edge_time, source_time = fields.get(time_attr), sources.get(time_attr)
    for what, times in ((f"{key}.{time_attr}", edge_time), (f"{key[0]}.{time_attr}", source_time)):
        if times is not None and (times.dtype not in ID_DTYPES or times.dim() != 1):
            raise DataError(f"{what} has dtype {times.dtype} and shape {tuple(times.shape)}; give one integer each")
    if edge_time is not None:
        return edge_time.to(torch.int64).contiguous(), None
    return None, None if source_time is None else source_time.to(torch.int64).contiguous()


def _weights(key: RelationName, weight: Tensor) -> Tensor:
    weight = weight.view(-1) if weight.dim() == 2 and weight.shape[1] == 1 else weight
    if weight.dim() != 1 or weight.dtype == torch.bool:
        raise DataError(f"weights of {key} are {weight.dtype} {tuple(weight.shape)}; give one number each")
    weight = weight.to(torch.float32)
    bad = ~(torch.isfinite(weight) & (weight >= 0))
    if bad.any():
        edge = int(torch.nonzero(bad)[0])
        raise DataError(f"weight of edge {edge} of {key} is {float(weight[edge])}; give finite weights, none negative")
    return weight.contiguous()


def as_tensor(value: Any) -> Tensor | None:
    """Return a tensor or a numeric NumPy array as a tensor; None for any other value."""
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else None


def mask_splits(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the boolean masks among the fields, by split: `train_mask` is the split `train`."""
    return {
        name.removesuffix("_mask"): mask
        for name, mask in fields.items()
        if name.endswith("_mask") and mask.dtype == torch.bool and mask.dim() == 1
    }
