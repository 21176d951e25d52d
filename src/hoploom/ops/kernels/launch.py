"""How kernels are declared and started: the one place that starts them."""

import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

Grid = tuple[int, ...]
INT32_MAX = 2**31 - 1
# Triton shows other threads a kernel that it has not loaded yet, and its interpreter keeps its place once for all.
_ONE_AT_A_TIME = threading.Lock()


def kernel(function: Callable[..., None]) -> Any:
    """A kernel that is not compiled afresh when a size is 1 or a tensor lies elsewhere, as some do in every batch."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


def launch(kernel: Any, grid: Grid, *arguments: Any, device: torch.device, **constants: Any) -> None:
    """Run a kernel on a device's current stream; an empty grid runs nothing.

    Products and sums are rounded one by one, as everywhere else: nothing is fused.
    """
    if 0 in grid:
        return
    with _current(device), _ONE_AT_A_TIME:
        kernel[grid](*arguments, enable_fp_fusion=False, **constants)


def blocks_of(size: int, block: int) -> Grid:
    """So many programs that each takes `block` of `size`."""
    return (triton.cdiv(size, block),)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
