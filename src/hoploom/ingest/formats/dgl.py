"""Make stores in memory from DGL's graphs, without importing dgl: ids stay as they are, features are not copied."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hoploom.errors import ConfigError, DataError
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName, TypeKey
from hoploom.store import Store
from hoploom.store.from_tensors import as_tensor, build_store, mask_splits

RENAMED = {"feat": "x", "label": "y"}  # DGL's names of features and labels -> Hoploom's


def from_dgl(graph: Any, *, weight_attr: str | None = None, time_attr: str | None = None) -> Store:
    """Make a store from a DGL graph. `feat` and `label` become `x` and `y`; masks (`train_mask`) also become splits.

    >>> store = from_dgl(dgl.data.CoraGraphDataset()[0])
    >>> store.save("cora.store")
    """
    if not all(hasattr(graph, name) for name in ("ntypes", "canonical_etypes", "num_nodes", "edges")):
        raise ConfigError(f"graph is a {type(graph).__name__}; give a dgl.DGLGraph")
    if getattr(graph, "is_block", False):
        raise ConfigError("graph is a block of a message-flow graph; give the graph it was sampled from")
    homogeneous = len(graph.ntypes) == 1 and len(graph.canonical_etypes) == 1
    nodes, edges, num_nodes = {}, {}, {}
    for theirs in graph.ntypes:
        name = HOMOGENEOUS_TYPE if homogeneous else theirs
        nodes[name] = _fields(name, graph.nodes[theirs].data)
        num_nodes[name] = int(graph.num_nodes(theirs))
    for theirs in graph.canonical_etypes:
        key: RelationName = HOMOGENEOUS_RELATION if homogeneous else tuple(theirs)
        sources, destinations = graph.edges(form="uv", order="eid", etype=theirs)
        edge_index = torch.stack([sources, destinations]).to(torch.int64)
        edges[key] = {"edge_index": edge_index, **_fields(key, graph.edges[theirs].data)}
    return build_store(
        nodes,
        edges,
        num_nodes=num_nodes,
        splits={name: mask_splits(fields) for name, fields in nodes.items()},
        homogeneous=homogeneous,
        weight_attr=weight_attr,
        time_attr=time_attr,
    )


def _fields(owner: TypeKey, given: Mapping[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in given.items():
        rows = as_tensor(value)
        if rows is None:
            found_type = type(value).__name__
            raise DataError(f"{owner}.{name} is a {found_type}; Hoploom gathers tensors, convert or delete it")
        ours = RENAMED.get(name, name) if isinstance(owner, str) else name
        found[name if ours in given else ours] = rows
    return found
