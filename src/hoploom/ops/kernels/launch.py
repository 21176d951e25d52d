"""Declaration and launch of Triton kernels; all kernels are launched here."""

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
# Triton exposes kernels to other threads before loading them, and its interpreter has global state.
_ONE_AT_A_TIME = threading.Lock()


def kernel(function: Callable[..., None]) -> Any:
    """Declare a kernel that is not recompiled when a size is 1 or an alignment changes, as in every batch."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


def launch(kernel: Any, grid: Grid, *arguments: Any, device: torch.device, **constants: Any) -> None:
    """Run a kernel on a device's current stream; an empty grid runs nothing.

    Products and sums are not fused, so that they round as in the core.
    """
    if 0 in grid:
        return
    with _current(device), _ONE_AT_A_TIME:
        kernel[grid](*arguments, enable_fp_fusion=False, **constants)


def blocks_of(size: int, block: int) -> Grid:
    """Return the grid of programs that each take `block` of `size` elements."""
    return (triton.cdiv(size, block),)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
