"""Layers and models, with PyG's arguments and parameters, for sampled batches and whole graphs."""

from hoploom.nn.attention import GATConv, GATv2Conv
from hoploom.nn.decoders import MLP, Bilinear, ComplEx, Cosine, Decoder, DistMult, Dot, RotatE, TransE
from hoploom.nn.homogeneous import GAT, GCN, GIN, GraphSAGE
from hoploom.nn.layers import Conv, GCNConv, GINConv, GINEConv, LayerView, SAGEConv, views_of
from hoploom.nn.models import GNN, Shape
from hoploom.nn.pna import PNAConv
from hoploom.nn.relational import HGTConv, RelationLayer, RGCNConv, SimpleHGNConv

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "GNN",
    "MLP",
    "Bilinear",
    "ComplEx",
    "Conv",
    "Cosine",
    "Decoder",
    "DistMult",
    "Dot",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GINEConv",
    "GraphSAGE",
    "HGTConv",
    "LayerView",
    "PNAConv",
    "RGCNConv",
    "RelationLayer",
    "RotatE",
    "SAGEConv",
    "Shape",
    "SimpleHGNConv",
    "TransE",
    "views_of",
]
__dir__ = __all__.copy
