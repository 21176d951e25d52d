"""Seeds -> subgraph."""

from hoploom.sample.bidirectional import make_bidirectional
from hoploom.sample.blocks import Edges, LayerGraph, SampleFrontier, sample_blocks
from hoploom.sample.hops import Workspace, sample_subgraph
from hoploom.sample.links import Links, LinkSeeds, LinkTask, make_link_seeds, make_link_task

__all__ = [
    "Edges",
    "LayerGraph",
    "LinkSeeds",
    "LinkTask",
    "Links",
    "SampleFrontier",
    "Workspace",
    "make_bidirectional",
    "make_link_seeds",
    "make_link_task",
    "sample_blocks",
    "sample_subgraph",
]
