"""Dot products of the rows at both ends of every edge: edges are independent, so a long list is many programs' work."""

import triton
import triton.language as tl

from hoploom.ops.kernels.walks import SIZES


@triton.jit(do_not_specialize=SIZES)
def dot_edges(
    indptr, sources, destinations, x, y, out, num_lists, num_edges, heads, share_units, x_units, y_units,
    UNIT: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[edge, head] over the head's columns; zero behind the last list."""
    share, x_stride, y_stride = share_units * UNIT, x_units * UNIT, y_units * UNIT
    edge = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    head = tl.program_id(1)
    live = edge < tl.load(indptr + num_lists)
    source = tl.load(sources + edge, mask=live, other=0).to(tl.int64)
    destination = tl.load(destinations + edge, mask=live, other=0)
    total = tl.zeros([EDGES, COLUMNS], out.dtype.element_ty)
    for first in range(0, share, COLUMNS):
        offset = first + tl.arange(0, COLUMNS)
        column = (head * share + offset)[None, :]
        mask = live[:, None] & (offset < share)[None, :]
        left = tl.load(x + (source * x_stride)[:, None] + column, mask=mask, other=0).to(total.dtype)
        right = tl.load(y + (destination * y_stride)[:, None] + column, mask=mask, other=0).to(total.dtype)
        total += left * right
    tl.store(out + edge * heads + head, tl.sum(total, 1), mask=edge < num_edges)
