"""Layers and models over `ops.aggregate`."""

from hoploom.nn.layers import Conv, GATConv, GCNConv, GINConv, LayerView, SAGEConv, views_of
from hoploom.nn.models import GAT, GCN, GIN, GNN, KINDS, GraphSAGE, RelationLayer, Shape

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "GNN",
    "KINDS",
    "Conv",
    "GATConv",
    "GCNConv",
    "GINConv",
    "GraphSAGE",
    "LayerView",
    "RelationLayer",
    "SAGEConv",
    "Shape",
    "views_of",
]
