"""What kernels read and write: arrays of fixed capacity, of which only the device knows how much is filled.

The host never waits to learn a size: it starts programs for the most there can be, and those beyond the end do nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# What `faults` on the device holds, the greatest of what was seen; 0: nothing.
NODE_OUT_OF_RANGE, LIST_DAMAGED, SOURCE_OUT_OF_RANGE = 1, 2, 3


@dataclass(frozen=True)
class DeviceSpan:
    """The places [begin, end) of an array. What is beyond the array's capacity was counted but not written."""

    begin: Tensor  # [] int64
    end: Tensor  # [] int64
    most: int  # end - begin is at most this


@dataclass(frozen=True)
class DeviceLists:
    """One relation's in-edges for all destinations, in device memory or in host memory that the device can read."""

    indptr: Tensor  # [num_nodes + 1] int64
    indices: Tensor  # [num_edges] int32 or int64 source ids
    device: torch.device  # where kernels run
    weight: Tensor | None = None  # [num_edges] float32
    edge_time: Tensor | None = None  # [num_edges] int64, ascending within a list
    source_time: Tensor | None = None  # [num_sources] int64, lists ascending by it; edge_time goes first


@dataclass(frozen=True)
class DeviceFrontier:
    """The nodes of one type that a hop expands: nodes[begin:end]."""

    nodes: Tensor  # [capacity] int64
    span: DeviceSpan
    trees: Tensor | None = None  # [capacity] int64: disjoint sampling only
    times: Tensor | None = None  # [num_trees] int64: temporal sampling only; of tree first_tree + i
    first_tree: int = 0


@dataclass(frozen=True)
class DevicePicks:
    """Where a hop's picks go: places span.begin on. sample() writes span.end."""

    sources: Tensor  # [capacity] int64 node ids
    edges: Tensor  # [capacity] int64 positions in the store's CSC order
    destinations: Tensor  # [capacity] int64: the place of each pick's node in frontier.nodes
    span: DeviceSpan
    indptr: Tensor | None = None  # [nodes' capacity + 1] int64: where the picks of each place in frontier.nodes begin
