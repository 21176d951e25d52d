"""Sampling: seeds to subgraphs or blocks."""

from hoploom.sample.hops import Workspace, make_bidirectional, sample_hops
from hoploom.sample.layer_graph import Edges, Layer, LayerGraph, SampleFrontier
from hoploom.sample.links import make_link_seeds
from hoploom.sample.negatives import Links, LinkTask

__all__ = [
    "Edges",
    "Layer",
    "LayerGraph",
    "LinkTask",
    "Links",
    "SampleFrontier",
    "Workspace",
    "make_bidirectional",
    "make_link_seeds",
    "sample_hops",
]
__dir__ = __all__.copy
