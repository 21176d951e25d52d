"""Sampling: seeds to subgraphs or blocks."""

from hoploom.sample.hops import Workspace, make_bidirectional, sample_hops
from hoploom.sample.layer_graph import Edges, Layer, LayerGraph, SampleFrontier
from hoploom.sample.links import Links, LinkSeeds, LinkTask, make_link_seeds, make_link_task

__all__ = [
    "Edges",
    "Layer",
    "LayerGraph",
    "LinkSeeds",
    "LinkTask",
    "Links",
    "SampleFrontier",
    "Workspace",
    "make_bidirectional",
    "make_link_seeds",
    "make_link_task",
    "sample_hops",
]
__dir__ = __all__.copy
