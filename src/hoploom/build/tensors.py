"""A store over tensors in memory: ids stay the user's own, features are not copied."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import DataError
from hoploom.ops import Csc, EdgeLists
from hoploom.schema import (
    DTYPE_NAMES,
    EDGE_ID,
    HOMOGENEOUS_RELATION,
    HOMOGENEOUS_TYPE,
    Field,
    NodeType,
    Owner,
    Relation,
    RelationName,
    Schema,
    check_schema,
)
from hoploom.store import Part, Store, Table, assemble

Fields = Mapping[str, Tensor]
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def from_tensors(
    nodes: Mapping[str, Any],
    edges: Any,
    *,
    num_nodes: Any = None,
    splits: Mapping[str, Any] | None = None,
    weight_attr: str | None = None,
    time_attr: str | None = None,
) -> Store:
    """A store over tensors. One graph type: plain mappings; several: mappings by type and relation.

    >>> from_tensors({"x": x, "y": y}, edge_index, splits={"train": train_ids})
    >>> from_tensors({"paper": {"x": x}}, {("paper", "cites", "paper"): {"edge_index": ei, "weight": w}})

    Edges are `edge_index` [2, e] (source row first), or `indptr` and `indices` (in-edges by destination).
    """
    homogeneous = not (isinstance(edges, Mapping) and all(isinstance(key, tuple) for key in edges))
    if homogeneous:
        nodes, edges = {HOMOGENEOUS_TYPE: nodes}, {HOMOGENEOUS_RELATION: edges}
        splits = {HOMOGENEOUS_TYPE: splits or {}}
        num_nodes = {} if num_nodes is None else {HOMOGENEOUS_TYPE: num_nodes}
    return build_store(
        {name: dict(fields) for name, fields in nodes.items()},
        {key: _edge_fields(key, given) for key, given in edges.items()},
        num_nodes=dict(num_nodes or {}),
        splits={name: dict(given) for name, given in (splits or {}).items()},
        homogeneous=homogeneous,
        weight_attr=weight_attr,
        time_attr=time_attr,
    )


def build_store(
    nodes: dict[str, dict[str, Tensor]],
    edges: dict[RelationName, dict[str, Tensor]],
    *,
    num_nodes: dict[str, int],
    splits: dict[str, dict[str, Tensor]],
    homogeneous: bool,
    weight_attr: str | None,
    time_attr: str | None,
) -> Store:
    """The one way from tensors to a store; checks everything a loop could trip over."""
    counts = {name: _num_nodes(name, fields, num_nodes) for name, fields in nodes.items()}
    for key in edges:
        for end in (key[0], key[2]):
            if end not in counts:
                raise DataError(f"relation {key} names node type {end!r}; the node types are {list(counts)}")
    tables: dict[tuple[Owner, str], Table] = {}
    split_ids = {
        # Sorted: the order of a split must not depend on how a store is cut into parts.
        (name, split): torch.sort(_ids(f"split {split!r} of {name!r}", ids, counts[name])).values
        for name, given in splits.items()
        for split, ids in given.items()
    }
    node_types = []
    for name, fields in nodes.items():
        described = {field: _describe(f"{name}.{field}", rows, counts[name]) for field, rows in fields.items()}
        tables.update({(name, field): Table(rows.contiguous()) for field, rows in fields.items()})
        sizes = {split: ids.numel() for (owner, split), ids in split_ids.items() if owner == name}
        node_types.append(NodeType(name, counts[name], described, sizes))
    relations, lists = [], []
    for key, given in edges.items():
        relation, edge_lists, edge_tables = _build_relation(key, given, nodes, counts, weight_attr, time_attr)
        relations.append(relation)
        lists.append(edge_lists)
        tables.update(edge_tables)
    schema = Schema(tuple(node_types), tuple(relations), homogeneous, weight_attr, time_attr)
    check_schema(schema)
    _check_attrs(schema, nodes)
    sizes_by_type = tuple(t.num_nodes for t in node_types)
    part = Part(schema, (0,) * len(node_types), sizes_by_type, tuple(lists), tables, split_ids)
    return assemble(schema, [part])


def _edge_fields(key: RelationName, given: Any) -> dict[str, Tensor]:
    if isinstance(given, Tensor):
        return {"edge_index": given}
    if not isinstance(given, Mapping):
        raise DataError(f"edges of {key} are a {type(given).__name__}; give an edge_index tensor or a mapping")
    return dict(given)


def _num_nodes(name: str, fields: Fields, given: Mapping[str, int]) -> int:
    for field, rows in fields.items():
        if not isinstance(rows, Tensor):
            raise DataError(f"{name}.{field} is a {type(rows).__name__}; give a tensor")
    sizes = {field: rows.shape[0] if rows.dim() else 0 for field, rows in fields.items()}
    count = given.get(name, next(iter(sizes.values()), None))
    if count is None:
        raise DataError(f"node type {name!r} has no fields to tell its size; give num_nodes")
    wrong = [field for field, size in sizes.items() if size != count]
    if wrong:
        raise DataError(f"{name}.{wrong[0]} has {sizes[wrong[0]]} rows for {count} nodes; give one row per node")
    return count


def _describe(what: str, rows: Tensor, count: int) -> Field:
    if rows.dtype not in DTYPE_NAMES:
        raise DataError(f"{what} has dtype {rows.dtype}; cast it to one of {sorted(DTYPE_NAMES.values())}")
    if rows.device.type != "cpu":
        raise DataError(f"{what} lies on {rows.device}; move it to the CPU, batches go to the device")
    if rows.dim() == 0 or rows.shape[0] != count:
        raise DataError(f"{what} has shape {tuple(rows.shape)}; give {count} rows")
    return Field(DTYPE_NAMES[rows.dtype], tuple(rows.shape[1:]))


def _ids(what: str, ids: Tensor, limit: int) -> Tensor:
    if ids.dtype == torch.bool:
        if ids.numel() != limit:
            raise DataError(f"{what} is a mask of {ids.numel()} entries for {limit} nodes")
        return torch.nonzero(ids).view(-1)
    if ids.dtype not in ID_DTYPES or ids.dim() != 1:
        raise DataError(f"{what} has dtype {ids.dtype} and shape {tuple(ids.shape)}; give a list of integer ids")
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise DataError(f"{what} holds id {bad}, out of range [0, {limit})")
    return ids.to(torch.int64)


def _build_relation(
    key: RelationName,
    given: dict[str, Tensor],
    nodes: Mapping[str, Fields],
    counts: Mapping[str, int],
    weight_attr: str | None,
    time_attr: str | None,
) -> tuple[Relation, EdgeLists, dict[tuple[Owner, str], Table]]:
    if EDGE_ID in given and "indptr" not in given:
        raise DataError(f"{key} has a field {EDGE_ID!r}, the name of the edges' own ids; rename it")
    fields = {name: rows for name, rows in given.items() if name not in ("edge_index", "indptr", "indices", EDGE_ID)}
    csc, num_edges = _topology(key, given, fields, nodes, counts, time_attr)
    described = {name: _describe(f"{key}.{name}", rows, num_edges) for name, rows in fields.items()}
    tables: dict[tuple[Owner, str], Table] = {
        (key, name): Table(rows.contiguous(), by_edge_id=csc.permutation is not None) for name, rows in fields.items()
    }
    if csc.permutation is not None:
        described[EDGE_ID] = Field("int64")
        tables[key, EDGE_ID] = Table(csc.permutation)

    def in_order(rows: Tensor) -> Tensor:
        return rows if csc.permutation is None else rows[csc.permutation]

    edge_time, source_time = _times(key, fields, nodes, time_attr)
    lists = EdgeLists(
        csc.indptr,
        csc.indices,
        weight=in_order(_weights(key, fields[weight_attr])) if weight_attr in fields else None,
        edge_time=None if edge_time is None else in_order(edge_time),
        source_time=source_time,
    )
    return Relation(*key, num_edges, described), lists, tables


def _topology(
    key: RelationName,
    given: Mapping[str, Tensor],
    fields: Fields,
    nodes: Mapping[str, Fields],
    counts: Mapping[str, int],
    time_attr: str | None,
) -> tuple[Csc, int]:
    sizes = counts[key[0]], counts[key[2]]
    edge_time, source_time = _times(key, fields, nodes, time_attr)
    if "indptr" in given:
        csc = _checked_csc(key, given["indptr"], given["indices"], sizes, given.get(EDGE_ID))
        return _in_time_order(csc, sizes, edge_time, source_time), csc.indices.numel()
    if "edge_index" not in given:
        raise DataError(f"relation {key} has no edge_index; it has {list(given)}")
    edge_index = given["edge_index"]
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype not in ID_DTYPES:
        raise DataError(
            f"edge_index of {key} has dtype {edge_index.dtype} and shape {tuple(edge_index.shape)}; give [2, e] int64"
        )
    if edge_time is not None and edge_time.numel() != edge_index.shape[1]:
        raise DataError(f"{key}.{time_attr} has {edge_time.numel()} rows for {edge_index.shape[1]} edges")
    return ops.build_csc(edge_index, *sizes, edge_time=edge_time, source_time=source_time), edge_index.shape[1]


def _checked_csc(
    key: RelationName, indptr: Tensor, indices: Tensor, sizes: tuple[int, int], edge_ids: Tensor | None
) -> Csc:
    if indptr.dtype not in ID_DTYPES or indices.dtype not in ID_DTYPES:
        raise DataError(f"indptr and indices of {key} are {indptr.dtype} and {indices.dtype}; give integers")
    indptr = indptr.to(torch.int64).contiguous()
    if indptr.numel() != sizes[1] + 1:
        raise DataError(f"indptr of {key} has {indptr.numel()} entries for {sizes[1]} nodes; give {sizes[1] + 1}")
    if int(indptr[0]) != 0 or int(indptr[-1]) != indices.numel():
        raise DataError(f"indptr of {key} runs from {int(indptr[0])} to {int(indptr[-1])}, not 0 to {indices.numel()}")
    if (indptr[1:] < indptr[:-1]).any():
        raise DataError(f"indptr of {key} decreases at node {int(torch.nonzero(indptr[1:] < indptr[:-1])[0])}; sort it")
    _ids(f"indices of {key}", indices, sizes[0])
    dtype = torch.int32 if sizes[0] < 2**31 else torch.int64
    return Csc(indptr, indices.to(dtype).contiguous(), None if edge_ids is None else edge_ids.to(torch.int64))


def _in_time_order(csc: Csc, sizes: tuple[int, int], edge_time: Tensor | None, source_time: Tensor | None) -> Csc:
    """The same lists, each in time order."""
    if edge_time is None and source_time is None:
        return csc
    ids = csc.permutation
    edge_index = torch.stack([csc.indices.to(torch.int64), torch.repeat_interleave(csc.indptr.diff())])
    times = edge_time if edge_time is None or ids is None else edge_time[ids]
    ordered = ops.build_csc(edge_index, *sizes, edge_time=times, source_time=source_time)
    if ids is None or ordered.permutation is None:
        return ordered._replace(permutation=ids if ordered.permutation is None else ordered.permutation)
    return ordered._replace(permutation=ids[ordered.permutation])


def _times(
    key: RelationName, fields: Fields, nodes: Mapping[str, Fields], time_attr: str | None
) -> tuple[Tensor | None, Tensor | None]:
    if time_attr is None:
        return None, None
    edge_time, source_time = fields.get(time_attr), nodes[key[0]].get(time_attr)
    for what, times in ((f"{key}.{time_attr}", edge_time), (f"{key[0]}.{time_attr}", source_time)):
        if times is not None and (times.dtype not in ID_DTYPES or times.dim() != 1):
            raise DataError(f"{what} has dtype {times.dtype} and shape {tuple(times.shape)}; give one integer each")
    if edge_time is not None:
        return edge_time.to(torch.int64).contiguous(), None
    return None, None if source_time is None else source_time.to(torch.int64).contiguous()


def _weights(key: RelationName, weight: Tensor) -> Tensor:
    weight = weight.view(-1) if weight.dim() == 2 and weight.shape[1] == 1 else weight
    if weight.dim() != 1 or (not weight.is_floating_point() and weight.dtype not in ID_DTYPES):
        raise DataError(
            f"weights of {key} have dtype {weight.dtype} and shape {tuple(weight.shape)}; give one number each"
        )
    weight = weight.to(torch.float32)
    bad = ~(torch.isfinite(weight) & (weight >= 0))
    if bad.any():
        edge = int(torch.nonzero(bad)[0])
        raise DataError(f"weight of edge {edge} of {key} is {float(weight[edge])}; give finite weights, none negative")
    return weight.contiguous()


def _check_attrs(schema: Schema, nodes: Mapping[str, Fields]) -> None:
    weight, time = schema.weight, schema.time
    if weight is not None and not any(weight in r.fields for r in schema.relations):
        known = sorted({name for r in schema.relations for name in r.fields})
        raise DataError(f"weight_attr {weight!r} is no edge field; the edge fields are {known}")
    if time is None:
        return
    on_nodes = any(time in fields for fields in nodes.values())
    if on_nodes and schema.edge_time:
        raise DataError(f"time_attr {time!r} is both a node field and an edge field; rename one of them")
    if not on_nodes and not schema.edge_time:
        raise DataError(f"time_attr {time!r} is neither a node field nor an edge field")


def as_tensor(value: Any) -> Tensor | None:
    """The value as a tensor, None if it is no array."""
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else None
