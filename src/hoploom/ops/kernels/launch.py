"""Declare and launch Triton kernels on arrays of fixed capacity (defined below); sizes in use are on the device.

The host never waits for a size: it starts programs for the largest size, and those beyond the actual size do nothing.
"""

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Grid = tuple[int, ...]
INT32_MAX = 2**31 - 1
# Triton exposes kernels to other threads before loading them, and its interpreter has global state.
_ONE_AT_A_TIME = threading.Lock()


def kernel(function: Callable[..., None]) -> Any:
    """Declare a kernel that Triton does not recompile when a size becomes 1 or changes alignment between batches."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


def launch(kernel: Any, grid: Grid, *arguments: Any, device: torch.device, **constants: Any) -> None:
    """Start a kernel on a device's current stream, unless the grid is empty.

    Multiply and add are not fused, so results are rounded like the core's.
    """
    if 0 in grid:
        return
    is_elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    current = torch.cuda.device(device) if is_elsewhere else nullcontext()
    with current, _ONE_AT_A_TIME:
        kernel[grid](*arguments, enable_fp_fusion=False, **constants)


def blocks_of(size: int, block: int) -> Grid:
    """Return the grid of programs for `size` elements if each program takes `block` elements."""
    return (triton.cdiv(size, block),)


# --- arrays -----------------------------------------------------------------------------------

# Values of `faults` on the device: the greatest fault seen, 0 for none.
NODE_OUT_OF_RANGE, LIST_DAMAGED, SOURCE_OUT_OF_RANGE = 1, 2, 3


@dataclass(frozen=True)
class DeviceSpan:
    """The entries [begin, end) of an array. Entries beyond the array's capacity were counted but not written."""

    begin: Tensor  # [] int64
    end: Tensor  # [] int64
    most: int  # end - begin is at most this


@dataclass(frozen=True)
class DeviceLists:
    """One relation's in-edges for a range of destinations, in device memory or in host memory mapped to the device."""

    indptr: Tensor  # [num_nodes + 1] int64
    indices: Tensor  # [num_edges] int32 or int64 source ids
    device: torch.device  # that runs the kernels
    weight: Tensor | None = None  # [num_edges] float32
    edge_time: Tensor | None = None  # [num_edges] int64, ascending within a list
    source_time: Tensor | None = None  # [num_sources] int64; lists ascend by it if there is no edge_time
    first_node: int = 0  # id of the first destination


@dataclass(frozen=True)
class DeviceFrontier:
    """The nodes of one type that a hop expands: nodes[begin:end]."""

    nodes: Tensor  # [capacity] int64
    span: DeviceSpan
    trees: Tensor | None = None  # [capacity] int64, disjoint sampling only: the seed number of each node
    times: Tensor | None = None  # [num_trees] int64, temporal sampling only: the time of each seed, from first_tree on
    first_tree: int = 0


@dataclass(frozen=True)
class DevicePicks:
    """Arrays to which `sample` writes the picks of a hop, from index span.begin on; it writes span.end, too."""

    sources: Tensor  # [capacity] int64 node ids
    edges: Tensor  # [capacity] int64: positions in the columns of DeviceLists
    destinations: Tensor  # [capacity] int64: the index of each pick's node in frontier.nodes
    span: DeviceSpan
    indptr: Tensor | None = None  # [nodes' capacity + 1] int64: offsets of the picks of each entry of frontier.nodes
