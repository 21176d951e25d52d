"""Softmax within each list, per head, and its backward: a program processes a few lists, some entries at a time.

Makes three passes over the scores; the first one loads them into the cache. One program processes a list of any length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hoploom.ops.kernels.launch import blocks_of, launch
from hoploom.ops.kernels.reduce import SIZES, most_of, short_lists

FEW, MANY = 16, 128  # entries at a time
TILE_BYTES = 2048  # of sums of a tile


@triton.jit
def _tile(begin, end, step, heads, ENTRIES: tl.constexpr, HEADS: tl.constexpr):
    """Return the indices and the mask of the next entries' values: [lists, entries, heads]."""
    entry = begin + step + tl.arange(0, ENTRIES)[None, :]
    head = tl.arange(0, HEADS)[None, None, :]
    return (entry * heads)[:, :, None] + head, (entry < end)[:, :, None] & (head < heads)


@triton.jit(do_not_specialize=SIZES)
def soften(
    indptr, scores, out, num_lists, heads, longest,
    SUM: tl.constexpr, LISTS: tl.constexpr, ENTRIES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write exp(score - maximum) / total."""
    _, _, begin, end = short_lists(indptr, num_lists, longest, LISTS)
    most = most_of(end - begin)
    greatest = tl.full([LISTS, HEADS], -float("inf"), SUM)
    for step in range(0, most, ENTRIES):
        at, mask = _tile(begin, end, step, heads, ENTRIES, HEADS)
        greatest = tl.maximum(greatest, tl.max(tl.load(scores + at, mask=mask, other=-float("inf")).to(SUM), 1))
    total = tl.zeros([LISTS, HEADS], SUM)
    for step in range(0, most, ENTRIES):
        at, mask = _tile(begin, end, step, heads, ENTRIES, HEADS)
        score = tl.load(scores + at, mask=mask, other=0).to(SUM)
        total += tl.sum(tl.where(mask, tl.exp(score - greatest[:, None, :]), 0), 1)
    for step in range(0, most, ENTRIES):
        at, mask = _tile(begin, end, step, heads, ENTRIES, HEADS)
        score = tl.load(scores + at, mask=mask, other=0).to(SUM)
        tl.store(out + at, tl.exp(score - greatest[:, None, :]) / total[:, None, :], mask=mask)


@triton.jit(do_not_specialize=SIZES)
def soften_backward(
    indptr, weights, grad, out, num_lists, heads, longest,
    SUM: tl.constexpr, LISTS: tl.constexpr, ENTRIES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write weight * (grad - the list's sum of weight * grad)."""
    _, _, begin, end = short_lists(indptr, num_lists, longest, LISTS)
    most = most_of(end - begin)
    total = tl.zeros([LISTS, HEADS], SUM)
    for step in range(0, most, ENTRIES):
        at, mask = _tile(begin, end, step, heads, ENTRIES, HEADS)
        weight = tl.load(weights + at, mask=mask, other=0).to(SUM)
        total += tl.sum(weight * tl.load(grad + at, mask=mask, other=0).to(SUM), 1)
    for step in range(0, most, ENTRIES):
        at, mask = _tile(begin, end, step, heads, ENTRIES, HEADS)
        weight = tl.load(weights + at, mask=mask, other=0).to(SUM)
        value = tl.load(grad + at, mask=mask, other=0).to(SUM)
        tl.store(out + at, weight * (value - total[:, None, :]), mask=mask)


def softmax_lists(indptr: Tensor, scores: Tensor, grad: Tensor | None) -> Tensor:
    """Implement hoploom.ops.rows on a device; half precision returns float32."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    out = torch.zeros(scores.shape, dtype=wide, device=scores.device)
    num_lists, (num_entries, heads) = indptr.numel() - 1, scores.shape
    entries = FEW if num_entries <= 2 * FEW * num_lists else MANY
    wide_heads = triton.next_power_of_2(max(heads, 1))
    lists = max(1, TILE_BYTES // wide.itemsize // (entries * wide_heads))
    arrays = (scores.contiguous(),) if grad is None else (scores.contiguous(), grad.contiguous())
    launch(
        soften if grad is None else soften_backward,
        blocks_of(num_lists if heads else 0, lists),
        indptr, *arrays, out, num_lists, heads, num_entries,
        device=scores.device, SUM=tl.float64 if wide == torch.float64 else tl.float32,
        LISTS=lists, ENTRIES=entries, HEADS=wide_heads,
    )  # fmt: skip
    return out
