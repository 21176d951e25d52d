"""The cross-entropy of choosing a true row among candidates that all queries share, by dot products.

The matrix of scores is never in memory. The forward pass computes the gradients, too, for losses of equal weight; a
backward pass with other weights computes them again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hoploom import _core


def shared_softmax(queries: Tensor, truths: Tensor, candidates: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the loss of each query: [n]. Rows are float32 on the CPU: truths [n, d], candidates [m, d]."""
    found: Tensor = _SharedSoftmax.apply(queries, truths, candidates, temperature)  # type: ignore[no-untyped-call]
    return found


class _SharedSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, truths: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        rows = [each.detach().contiguous() for each in (queries, truths, candidates)]
        losses, ctx.gradients = _losses(rows, temperature, None)
        ctx.save_for_backward(*rows)
        ctx.temperature = temperature
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if weights.numel() and gradients is not None and bool((weights == weights[0]).all()):
            return *(each.mul_(weights[0]) for each in gradients), None
        return *_losses(ctx.saved_tensors, ctx.temperature, weights.contiguous())[1], None


def _losses(rows: Sequence[Tensor], temperature: float, weights: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Return the losses, and the gradients of their weighted sum."""
    queries, truths, candidates = (each.numpy() for each in rows)
    losses, gradients = torch.empty(len(queries)), [torch.empty_like(each) for each in rows]
    given, outs = None if weights is None else weights.numpy(), (losses.numpy(), *(each.numpy() for each in gradients))
    _core.shared_softmax(queries, truths, candidates, temperature, given, torch.get_num_threads(), *outs)
    return losses, gradients
