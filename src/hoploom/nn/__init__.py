"""Layers and models over `ops.aggregate`."""

from hoploom.nn.convs import Conv, GATConv, GCNConv, GINConv, SAGEConv
from hoploom.nn.models import GAT, GCN, GIN, GNN, KINDS, GraphSAGE, RelationLayer, Shape
from hoploom.nn.views import LayerView, views_of

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
