"""Small models with the same weights every time, and a heterogeneous graph for them."""

from typing import Any

import torch
from torch import nn
from torch_geometric.data import HeteroData

import hoploom
import hoploom.nn as hnn
from hoploom import Embedding, Store
from hoploom.nn import GNN, Shape
from hoploom.schema import FEATURES
from support.graphs import library


def homogeneous(kind: str, **options: Any) -> nn.Module:
    classes = {"sage": hnn.GraphSAGE, "gcn": hnn.GCN, "gat": hnn.GAT, "gin": hnn.GIN}
    torch.manual_seed(0)
    return classes[kind](8, hidden_channels=12, num_layers=2, out_channels=5, **options)


def heterogeneous(kind: str, data: HeteroData, **options: Any) -> GNN:
    torch.manual_seed(0)
    return GNN(kind, hoploom.from_pyg(data).schema, Shape(hidden=12, num_layers=2, out=5, **options))


def books() -> HeteroData:
    data = library()
    for number, node_type in enumerate(data.node_types):
        torch.manual_seed(number)
        data[node_type].x = torch.randn(data[node_type].num_nodes, 4 + number)
    return data


def learned(store: Store, dim: int = 6) -> Store:
    """The store with learned rows of all node types without features."""
    for node_type in store.schema.node_types:
        if FEATURES not in node_type.fields:
            store = Embedding(store, node_type.name, dim=dim).store
    return store


def with_rows_of(store: Store, data: HeteroData) -> HeteroData:
    """The graph with the learned rows of a store as features."""
    for name in store.learned_types:
        data[name].x = store[name].x[:]
    return data
