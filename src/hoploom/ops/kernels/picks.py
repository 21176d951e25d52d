"""What the kernels that sample have in common: how their arguments are taken, a row's key, where a pick goes.

A row is a place of the frontier; row r is node begin + r. `bounds` is the running sum of the rows' picks.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from hoploom.ops.kernels.philox import mix


def kernel(function: Callable[..., None]) -> Any:
    """A kernel that is not compiled afresh when a size is 1 or a tensor lies elsewhere, as some do in every batch."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


@triton.jit
def rows_of(rows_at_once: tl.constexpr):
    """The rows of this program."""
    return tl.program_id(0).to(tl.int64) * rows_at_once + tl.arange(0, rows_at_once)


@triton.jit
def key_of(key_at, trees, place, is_row):
    """The rule's key, or in disjoint sampling one for every tree."""
    key = tl.load(key_at).to(tl.uint64, bitcast=True) + (place * 0).to(tl.uint64)
    if trees is not None:
        key = mix(key, tl.load(trees + place, mask=is_row, other=0).to(tl.uint64))
    return key


@triton.jit
def put(out, position, place, is_pick, indices, sources, edges, destinations, capacity):
    """Write the pick of an edge for a node's place; what is beyond the capacity is left out."""
    fits = is_pick & (out < capacity)
    source = tl.load(indices + position, mask=fits, other=0).to(tl.int64)
    tl.store(sources + out, source, mask=fits)
    tl.store(edges + out, position, mask=fits)
    tl.store(destinations + out, place, mask=fits)
