"""Inputs and outputs of kernels: arrays of fixed capacity, with sizes on the device.

The host never waits for a size: it starts programs for the maximum, and those beyond the end do nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Values of `faults` on the device: the greatest fault seen, 0 for none.
NODE_OUT_OF_RANGE, LIST_DAMAGED, SOURCE_OUT_OF_RANGE = 1, 2, 3


@dataclass(frozen=True)
class DeviceSpan:
    """The entries [begin, end) of an array. Entries beyond its capacity were counted but not written."""

    begin: Tensor  # [] int64
    end: Tensor  # [] int64
    most: int  # end - begin is at most this


@dataclass(frozen=True)
class DeviceLists:
    """One relation's in-edges for all destinations, in device memory or in host memory mapped to the device."""

    indptr: Tensor  # [num_nodes + 1] int64
    indices: Tensor  # [num_edges] int32 or int64 source ids
    device: torch.device  # that runs the kernels
    weight: Tensor | None = None  # [num_edges] float32
    edge_time: Tensor | None = None  # [num_edges] int64, ascending within a list
    source_time: Tensor | None = None  # [num_sources] int64, lists ascending by it; edge_time goes first


@dataclass(frozen=True)
class DeviceFrontier:
    """The nodes of one type that a hop expands: nodes[begin:end]."""

    nodes: Tensor  # [capacity] int64
    span: DeviceSpan
    trees: Tensor | None = None  # [capacity] int64: disjoint sampling only
    times: Tensor | None = None  # [num_trees] int64: temporal sampling only; entry i is of tree first_tree + i
    first_tree: int = 0


@dataclass(frozen=True)
class DevicePicks:
    """Output arrays of a hop's picks, from entry span.begin on. sample() writes span.end."""

    sources: Tensor  # [capacity] int64 node ids
    edges: Tensor  # [capacity] int64 positions in the store's CSC order
    destinations: Tensor  # [capacity] int64: the index of each pick's node in frontier.nodes
    span: DeviceSpan
    indptr: Tensor | None = None  # [nodes' capacity + 1] int64: offsets of the picks of each entry of frontier.nodes
