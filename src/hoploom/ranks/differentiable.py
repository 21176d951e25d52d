"""Sums and rows of all ranks with gradients. All pass through host memory, as in other calls that ranks share."""

from typing import Any

import torch
from torch import Tensor

from hoploom.ranks.context import Context


def rows_of_all_ranks(rows: Tensor, context: Context) -> Tensor:
    """Return the rows of this rank, then those of the others, in the order of ranks. Numbers of rows may differ.

    Gradients are those of a rank's rows, summed over all ranks.
    """
    counts = [int(count) for count in context.gather(torch.tensor(rows.shape[0]))]
    found: Tensor = _Gathered.apply(rows, counts, context)  # type: ignore[no-untyped-call]
    of_ranks = list(torch.split(found, counts))
    own = of_ranks.pop(context.rank)
    return torch.cat([own, *of_ranks])


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], context: Context) -> Tensor:
        ctx.counts, ctx.context = counts, context
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        return torch.cat([found[:count] for found, count in zip(context.gather(padded), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = torch.split(ctx.context.sum(gradient), ctx.counts)[ctx.context.rank]
        return own.to(gradient.dtype), None, None


def sum_over_ranks(values: Tensor, context: Context) -> Tensor:
    """Return the sum of `values` over all ranks. The gradient is the sum of all ranks' gradients."""
    return _Summed.apply(values, context)  # type: ignore[no-untyped-call, no-any-return]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return context.sum(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.context.sum(gradient), None
