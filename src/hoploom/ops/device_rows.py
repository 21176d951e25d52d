"""Learned rows in the memory of a device, by torch's operations. An update waits for the device twice.

Every operation rounds as that of csrc/learned.cpp, in its order, so rows are equal bit by bit on every device. Only the
powers in Adam's correction may differ in their last bit.
"""

import torch
from torch import Tensor
from torch.nn import functional

from hoploom.keys import as_int64
from hoploom.ops.rows import RowRule, RowStep

LANES = 16  # partial sums of a mean square


def update_device_rows(rows: Tensor, first: int, state: Tensor, ids: Tensor, gradients: Tensor, step: RowStep) -> int:
    """Update rows as `update_rows` does, on their device."""
    in_order, order = torch.sort(ids, stable=True)
    touched, counts = torch.unique_consecutive(in_order, return_counts=True)
    gradients = gradients.index_select(0, order).double()
    sums = torch.segment_reduce(gradients, "sum", lengths=counts, axis=0, unsafe=True)  # each from first to last
    places = touched - first
    before, state_before = rows.index_select(0, places), state.index_select(0, places)
    row, kept = _followed(before.float(), (sums * step.scale).float(), state_before, step)
    are_finite = (torch.isfinite(row).all(dim=1) & torch.isfinite(kept).all(dim=1)).unsqueeze(1)
    after = _rounded(row, touched, step.key) if rows.dtype is torch.bfloat16 else row
    rows.index_copy_(0, places, torch.where(are_finite, after, before))
    state.index_copy_(0, places, torch.where(are_finite, kept, state_before))
    return int(torch.where(are_finite.squeeze(1), -1, touched).max())


def _followed(row: Tensor, gradient: Tensor, state: Tensor, step: RowStep) -> tuple[Tensor, Tensor]:
    """Return rows and their state after a step. A tensor is divided by a tensor: by a number, devices multiply."""
    rate, eps, (beta1, beta2), width = step.rate, step.eps, step.betas, row.shape[1]
    if step.rule is RowRule.sgd:
        return row - gradient * rate, state
    if step.rule is RowRule.rowwise_adagrad:
        state = state + _mean_squares(gradient)
        return row - row.new_full((1,), rate) / (_root(state) + eps) * gradient, state
    if step.rule is RowRule.adagrad:
        state = state + gradient * gradient
        return row - gradient / (_root(state) + eps) * rate, state
    first, second, count = torch.split(state, [width, width, 1], dim=1)
    count = count + 1
    corrected = (1 - beta2 ** count.double()).sqrt() / (1 - beta1 ** count.double())
    first = first + (gradient - first) * (1 - beta1)
    second = second + (gradient * gradient - second) * (1 - beta2)
    row = row - (corrected * rate).float() * (first / (_root(second) + eps))
    return row, torch.cat([first, second, count], dim=1)


def _root(values: Tensor) -> Tensor:
    return values.double().sqrt().float()  # correctly rounded; on a CPU, torch's root of float32 is not


def _mean_squares(gradient: Tensor) -> Tensor:
    """Return the mean square of each row, [n, 1], from sums of every 16th value, then of both halves of these."""
    width = gradient.shape[1]
    first, *rest = torch.split(functional.pad(gradient * gradient, (0, -width % LANES)), LANES, dim=1)
    lanes: Tensor = sum(rest, first)
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, dim=1)
        lanes = low + high
    return lanes / lanes.new_full((1,), width)


def _rounded(row: Tensor, ids: Tensor, key: int) -> Tensor:
    """Return rows as bfloat16, each value rounded up or down at random: its low bits are the chance to go up."""
    columns = torch.arange(0, row.shape[1], 4, device=row.device)
    words = mixed_words(mixed_words(torch.full_like(ids, as_int64(key)), ids).unsqueeze(1), columns)
    random = (words.unsqueeze(2) >> torch.arange(0, 64, 16, device=row.device)) & 0xFFFF
    bits = row.view(torch.int32) + random.flatten(1)[:, : row.shape[1]].int()
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def mixed_words(state: Tensor, value: Tensor) -> Tensor:
    """Return `keys.mix` of 64-bit numbers in int64, whose products wrap around."""
    mixed = (state ^ value) + as_int64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _right(mixed, shift)) * as_int64(factor)
    return mixed ^ _right(mixed, 31)


def _right(bits: Tensor, shift: int) -> Tensor:
    return (bits >> shift) & ((1 << (64 - shift)) - 1)  # zeros come in from the left
