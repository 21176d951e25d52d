"""Sums, means, maxima and attention over the in-edges of every destination, differentiable.

No messages are stored: the core (CPU) or kernels (other devices) add rows in place. Half precision is widened in memory
for the core; kernels widen after reading. Results do not depend on the number of threads, nor on the order in which a
device runs its programs. Second derivatives are not supported.
"""

from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hoploom.errors import ConfigError
from hoploom.ops import rows
from hoploom.ops.edges import InEdges

Reduce = Literal["sum", "mean", "max", "softmax"]


def aggregate(x: Tensor, edges: InEdges, reduce: Reduce = "sum", weights: Tensor | None = None) -> Tensor:
    """Aggregate the rows of each destination's sources: [num_destinations, ...]. Empty lists give zeros.

    `x` is [num_sources, heads * width] or [num_sources, heads, width]. `weights` [num_edges] or [num_edges, heads], in
    the order of `edges`, multiply the rows; with "softmax" they are scores, and each list's weights sum to one.
    """
    _check(x, edges, reduce, weights)
    values = _native(x.flatten(1))
    if reduce == "max":
        out = _apply(_Max, values, edges)
    else:
        if weights is not None:
            weights = _weights(weights.unsqueeze(1) if weights.dim() == 1 else weights, edges, values.dtype, reduce)
        out = _apply(_Sum, values, weights, edges, reduce == "mean")
    return out.to(x.dtype).view(edges.num_destinations, *x.shape[1:])


def softmax(scores: Tensor, edges: InEdges) -> Tensor:
    """Return weights that sum to one within every list, per head, from scores [num_edges, heads]."""
    return _apply(_Softmax, _native(scores), edges).to(scores.dtype)


def add_ends(of_sources: Tensor, of_destinations: Tensor, edges: InEdges) -> Tensor:
    """Return, for every edge, the sum of its source's and its destination's row: [num_edges, width]."""
    return _apply(_Ends, of_sources, of_destinations, edges)


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    return function.apply(*arguments)  # type: ignore[no-untyped-call, no-any-return]


def _check(x: Tensor, edges: InEdges, reduce: str, weights: Tensor | None) -> None:
    if reduce not in get_args(Reduce):
        raise ConfigError(f"reduce is {reduce!r}; choose one of {list(get_args(Reduce))}")
    if x.dim() < 2 or x.shape[0] != edges.num_sources or not x.is_floating_point():
        raise ConfigError(
            f"x is {x.dtype} of shape {tuple(x.shape)}; give floats, a row for each of {edges.num_sources} sources"
        )
    if (reduce == "softmax" and weights is None) or (reduce == "max" and weights is not None):
        raise ConfigError(f"reduce={reduce!r} {'needs' if weights is None else 'takes no'} weights")
    if weights is None:
        return
    heads = weights.shape[1] if weights.dim() == 2 else 1
    width = x[0].numel() if x.shape[0] else 0
    if weights.dim() > 2 or weights.shape[0] != edges.num_edges or heads == 0 or width % heads:
        raise ConfigError(
            f"weights are of shape {tuple(weights.shape)}; give one for each of {edges.num_edges} edges and head"
        )


def _reductions(tensor: Tensor) -> ModuleType:
    """Return the module that reduces this tensor's rows: both have the same functions."""
    if rows.runs_in_core(tensor):
        return rows
    from hoploom.ops.kernels import aggregate as kernels  # imports Triton

    return kernels


def _native(tensor: Tensor) -> Tensor:
    """Return the tensor in a dtype that its reductions support."""
    return tensor if tensor.dtype in _reductions(tensor).NATIVE else tensor.float()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are summed."""
    return torch.promote_types(dtype, torch.float32)


def _weights(weights: Tensor, edges: InEdges, dtype: torch.dtype, reduce: Reduce) -> Tensor:
    """Return the weights in the dtype of sums; for softmax, calculate them from scores."""
    if reduce == "softmax":
        scores = weights if _wide(weights.dtype) == _wide(dtype) else weights.to(_wide(dtype))
        return _apply(_Softmax, _native(scores), edges)
    return weights.to(_wide(dtype))


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, edges: InEdges, mean: bool) -> Tensor:
        ctx.edges, ctx.mean = edges, mean
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weights)
        reduced: Tensor = _reductions(x).sum_rows(edges.indptr, edges.sources, None, x, weights, mean)
        return reduced

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        edges: InEdges = ctx.edges
        x, weights = ctx.saved_tensors
        share = 1 / edges.degrees.clamp(min=1).to(_wide(grad.dtype)) if ctx.mean else None  # [num_destinations]
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = _spread(grad, edges, weights, share)
        if ctx.needs_input_grad[1]:
            grad_weights = _reductions(x).dot_rows(
                edges.indptr, edges.sources, edges.destinations, x, grad, weights.shape[1]
            )
            if share is not None:
                grad_weights *= share[edges.destinations].unsqueeze(1)
        return grad_x, grad_weights, None, None


def _spread(grad: Tensor, edges: InEdges, weights: Tensor | None, share: Tensor | None) -> Tensor:
    """Return, for every source, the weighted sum of its destinations' gradients."""
    indptr, destinations, places = edges.transposed
    if share is not None and weights is None:
        weights, places = share.index_select(0, destinations).unsqueeze(1), None
    elif share is not None and weights is not None:
        weights = weights * share[edges.destinations].unsqueeze(1)
    out: Tensor = _reductions(grad).sum_rows(indptr, destinations, places, grad, weights, False)
    return out


class _Max(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, edges: InEdges) -> Tensor:
        ctx.edges = edges
        greatest: Tensor
        greatest, ctx.winners = _reductions(x).max_rows(edges.indptr, edges.sources, x)
        return greatest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        edges: InEdges = ctx.edges
        return _reductions(grad).max_rows_backward(*edges.transposed, edges.indptr, grad, ctx.winners), None


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, edges: InEdges) -> Tensor:
        weights: Tensor = _reductions(scores).softmax_lists(edges.indptr, scores, None)
        ctx.edges, ctx.dtype = edges, scores.dtype
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return _reductions(grad).softmax_lists(ctx.edges.indptr, weights, grad).to(ctx.dtype), None


class _Ends(Function):
    """Sum of both ends' rows, with gradients summed over lists: torch's indexing sums in no fixed order on a device."""

    @staticmethod
    def forward(ctx: Any, of_sources: Tensor, of_destinations: Tensor, edges: InEdges) -> Tensor:
        ctx.edges = edges
        return of_sources.index_select(0, edges.senders) + of_destinations.index_select(0, edges.destinations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        edges: InEdges = ctx.edges
        values, to_sources, to_destinations = _native(grad), None, None
        if ctx.needs_input_grad[0]:
            indptr, _, places = edges.transposed
            to_sources = _reductions(values).sum_rows(indptr, places, None, values, None, False).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            to_destinations = _reductions(values).sum_rows(edges.indptr, None, None, values, None, False)
            to_destinations = to_destinations.to(grad.dtype)
        return to_sources, to_destinations, None
