"""Differentiable sums, means, maxima and attention over the in-edges of each destination.

No tensor of messages is made: the core (CPU) or kernels (GPU) add up rows directly. Half-precision rows are summed in
float32; kernels convert them after reading, and so does the core for sums of bfloat16. For its other reductions, they
are converted in memory first. Results do not depend on the number of threads, nor on the order in which a device runs
its programs. Second derivatives are not supported.
"""

import math
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hoploom.errors import ConfigError
from hoploom.ops import rows
from hoploom.ops.compiled import differentiable, edge_rows_like, rows_like
from hoploom.ops.edges import InEdges

Reduce = Literal["sum", "mean", "max", "softmax"]
REDUCES = get_args(Reduce)


def aggregate(x: Tensor, edges: InEdges, reduce: Reduce = "sum", weights: Tensor | None = None) -> Tensor:
    """Return, for each destination, the aggregate of its sources' rows: [num_destinations, ...]; zeros without edges.

    `x` is [num_sources, heads * width] or [num_sources, heads, width]. `weights` [num_edges] or [num_edges, heads], in
    the order of `edges`, multiply the rows. With "softmax" they are scores; a softmax per destination gives weights.
    """
    if reduce not in REDUCES:
        raise ConfigError(f"reduce is {reduce!r}; choose one of {list(REDUCES)}")
    check_sources(x, edges, weights)
    if reduce == "softmax" and weights is None:
        raise ConfigError("reduce='softmax' needs weights")
    values = x.flatten(1)
    if reduce == "max" or x.dtype not in reductions(x).SUMMED:
        values = native(values)
    if weights is not None:
        weights = _weights(weights.unsqueeze(1) if weights.dim() == 1 else weights, edges, values.dtype, reduce)
    out = _maxima(values, weights, edges) if reduce == "max" else _sums(values, weights, edges, reduce == "mean")
    return out.to(x.dtype).view(edges.num_destinations, *x.shape[1:])


def softmax(scores: Tensor, edges: InEdges) -> Tensor:
    """Return the softmax of scores [num_edges, heads] over the in-edges of each destination: [num_edges, heads]."""
    return _softmax(native(scores), edges).to(scores.dtype)


def add_ends(of_sources: Tensor, of_destinations: Tensor | None, edges: InEdges) -> Tensor:
    """Return, for every edge, its source's row plus its destination's row, if given: [num_edges, width]."""
    return _ends(of_sources, of_destinations, edges)


def check_sources(x: Tensor, edges: InEdges, weights: Tensor | None) -> None:
    """Raise ConfigError unless x has a row per source, and weights, if given, a row per edge that fits x."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[0] != edges.num_sources or not x.is_floating_point():
        raise ConfigError(f"x is {described(x)}; give floats, a row for each of {edges.num_sources} sources")
    if weights is None:
        return
    shape = weights.shape[1:] if isinstance(weights, Tensor) else None
    heads = 0 if shape is None or len(shape) > 1 else shape[0] if shape else 1
    if not heads or weights.shape[0] != edges.num_edges or math.prod(x.shape[1:]) % heads:
        raise ConfigError(f"weights are {described(weights)}; give one for each of {edges.num_edges} edges and head")


def described(value: object) -> str:
    """Return the dtype and shape of a tensor, or the type of another value, for messages."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def reductions(tensor: Tensor) -> ModuleType:
    """Return the module that reduces rows on the tensor's device: ops.rows, or kernels.aggregate, which mirrors it."""
    if rows.runs_in_core(tensor):
        return rows
    from hoploom.ops.kernels import aggregate as kernels  # imports Triton

    return kernels


def native(tensor: Tensor) -> Tensor:
    """Return the tensor, converted to float32 if reductions on its device do not support its dtype."""
    return tensor if tensor.dtype in reductions(tensor).NATIVE else tensor.float()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _weights(weights: Tensor, edges: InEdges, dtype: torch.dtype, reduce: Reduce) -> Tensor:
    """Return `weights` in the dtype of sums. For "softmax" they are scores: return their softmax per destination."""
    if reduce == "softmax":
        scores = weights if wide(weights.dtype) == wide(dtype) else weights.to(wide(dtype))
        return _softmax(native(scores), edges)
    return weights.to(wide(dtype))


class _Sum(Function):
    num_outs, results, saved = 1, ("out",), ("x", "weights")

    @staticmethod
    def like(x: Tensor, weights: Any, edges: InEdges, mean: bool) -> Any:
        return (rows_like(x, edges),)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, edges: InEdges, mean: bool) -> Tensor:
        ctx.edges, ctx.mean = edges, mean
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weights)
        reduced: Tensor = reductions(x).sum_rows(edges.indptr, edges.sources, None, x, weights, mean)
        return reduced

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        edges: InEdges = ctx.edges
        x, weights = ctx.saved_tensors
        share = 1 / edges.degrees.clamp(min=1).to(wide(grad.dtype)) if ctx.mean else None  # [num_destinations]
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = spread(grad, edges, weights, share)
        if ctx.needs_input_grad[1]:
            heads = weights.shape[1]
            grad_weights = reductions(x).dot_rows(edges.lists, native(x), native(grad), heads, None)
            if share is not None:
                grad_weights *= share[edges.destinations].unsqueeze(1)
        return grad_x, grad_weights, None, None


_sums = differentiable(_Sum)


def spread(grad: Tensor, edges: InEdges, weights: Tensor | None, share: Tensor | None) -> Tensor:
    """Return, per source, the sum of its destinations' rows of `grad`, each times edge weight and `share`, if given."""
    indptr, destinations, places = edges.transposed
    if share is not None and weights is None:
        weights, places = share.index_select(0, destinations).unsqueeze(1), None
    elif share is not None and weights is not None:
        weights = weights * share[edges.destinations].unsqueeze(1)
    out: Tensor = reductions(grad).sum_rows(indptr, destinations, places, grad, weights, False)
    return out


class _Max(Function):
    num_outs, results, saved = 1, ("out", "winners"), ("x", "weights", "winners")

    @staticmethod
    def like(x: Tensor, weights: Any, edges: InEdges) -> Any:
        return rows_like(x, edges), rows_like(x, edges).to(torch.int32)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, edges: InEdges) -> Tensor:
        greatest: Tensor
        greatest, winners = reductions(x).max_rows(edges.indptr, edges.sources, x, weights)
        ctx.edges = edges
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weights, winners)
        return greatest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        edges: InEdges = ctx.edges
        x, weights, winners = ctx.saved_tensors
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = reductions(grad).max_rows_backward(edges.transposed, edges.indptr, grad, weights, winners)
        if ctx.needs_input_grad[1]:
            grad_weights = reductions(grad).dot_rows(edges.lists, x, grad, weights.shape[1], winners)
        return grad_x, grad_weights, None


_maxima = differentiable(_Max)


class _Softmax(Function):
    num_outs, results, saved = 1, ("weights",), ("weights",)

    @staticmethod
    def like(scores: Tensor, edges: InEdges) -> Any:
        return (edge_rows_like(scores, edges, scores.shape[1]),)

    @staticmethod
    def forward(ctx: Any, scores: Tensor, edges: InEdges) -> Tensor:
        weights: Tensor = reductions(scores).softmax_lists(edges.indptr, scores, None)
        ctx.edges = edges
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return reductions(grad).softmax_lists(ctx.edges.indptr, weights, grad), None


_softmax = differentiable(_Softmax)


class _Ends(Function):
    """Sum of the rows at both ends of every edge. Its gradients are reproducible; those of torch's indexing are not."""

    num_outs, results, saved = 1, ("out",), ()

    @staticmethod
    def like(of_sources: Tensor, of_destinations: Any, edges: InEdges) -> Any:
        return (of_sources.new_empty(edges.num_edges, of_sources.shape[1]),)

    @staticmethod
    def forward(ctx: Any, of_sources: Tensor, of_destinations: Tensor | None, edges: InEdges) -> Tensor:
        ctx.edges = edges
        ctx.save_for_backward()
        sent = of_sources.index_select(0, edges.senders)
        return sent if of_destinations is None else sent + of_destinations.index_select(0, edges.destinations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        edges: InEdges = ctx.edges
        values, to_sources, to_destinations = native(grad), None, None
        if ctx.needs_input_grad[0]:
            indptr, _, places = edges.transposed
            to_sources = reductions(values).sum_rows(indptr, places, None, values, None, False).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            to_destinations = reductions(values).sum_rows(edges.indptr, None, None, values, None, False)
            to_destinations = to_destinations.to(grad.dtype)
        return to_sources, to_destinations, None


_ends = differentiable(_Ends)
