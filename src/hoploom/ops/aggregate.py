"""Sums, means, maxima and attention over the in-edges of every destination, differentiable.

Messages are never made: the core walks the lists and adds rows where they are. Results do not depend on the number of
threads. There is no second derivative.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hoploom import _core
from hoploom.errors import ConfigError
from hoploom.ops.buffers import empty
from hoploom.ops.edges import InEdges

Reduce = Literal["sum", "mean", "max", "softmax"]


def aggregate(x: Tensor, edges: InEdges, reduce: Reduce = "sum", weights: Tensor | None = None) -> Tensor:
    """One row per destination out of the rows of its sources: [num_destinations, ...]. Empty lists give zeros.

    `x` is [num_sources, heads * width] or [num_sources, heads, width]. `weights` [num_edges] or [num_edges, heads], in
    the order of `edges`, multiply the rows; with "softmax" they are scores, and each list's weights sum to one.
    """
    _check(x, edges, reduce, weights)
    rows = x.flatten(1)
    if weights is not None and weights.dim() == 1:
        weights = weights.unsqueeze(1)
    dtype = rows.dtype
    if dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    if weights is not None and weights.dtype != rows.dtype:
        weights = weights.to(rows.dtype)
    if rows.is_cuda:
        out = _aggregate_by_torch(rows, edges, reduce, weights)
    elif reduce == "max":
        out = _apply(_Max, rows, edges)
    else:
        if reduce == "softmax":
            weights = softmax(weights, edges)  # type: ignore[arg-type]
        out = _apply(_Sum, rows, weights, edges, reduce == "mean")
    return out.to(dtype).view(edges.num_destinations, *x.shape[1:])


def softmax(scores: Tensor, edges: InEdges) -> Tensor:
    """Scores [num_edges, heads] to weights that sum to one within every list, per head."""
    dtype = scores.dtype
    wide = scores.float() if dtype in (torch.float16, torch.bfloat16) else scores
    return (_softmax_by_torch(wide, edges) if wide.is_cuda else _apply(_Softmax, wide, edges)).to(dtype)


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


def _rows(tensor: Tensor) -> Any:
    """For the core: columns beside each other, rows as far apart as they are."""
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        tensor = tensor.contiguous()
    return tensor.detach().numpy()


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, edges: InEdges, mean: bool) -> Tensor:
        ctx.edges, ctx.mean = edges, mean
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weights)
        out = empty((edges.num_destinations, x.shape[1]), x.dtype)
        given = None if weights is None else weights.detach().contiguous().numpy()
        lists = (edges.indptr.numpy(), edges.sources.numpy(), None)
        _core.sum_rows(*lists, _rows(x), given, mean, torch.get_num_threads(), out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        edges: InEdges = ctx.edges
        x, weights = ctx.saved_tensors
        share = 1 / edges.degrees.clamp(min=1).to(grad.dtype) if ctx.mean else None  # [num_destinations]
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = _spread(grad, edges, weights, share)
        if ctx.needs_input_grad[1]:
            grad_weights = _dots(x, grad, edges, weights.shape[1])
            if share is not None:
                grad_weights *= share[edges.destinations].unsqueeze(1)
        return grad_x, grad_weights, None, None


def _spread(grad: Tensor, edges: InEdges, weights: Tensor | None, share: Tensor | None) -> Tensor:
    """To every source the weighted sum of its destinations' gradients."""
    out_edges = edges.transposed
    places = out_edges.places
    if share is not None:
        by_edge = share[edges.destinations].unsqueeze(1)
        weights = by_edge if weights is None else weights * by_edge
    out = empty((edges.num_sources, grad.shape[1]), grad.dtype)
    given = None if weights is None else weights.detach().contiguous().numpy()
    at = None if places is None else places.numpy()
    lists = (out_edges.indptr.numpy(), out_edges.destinations.numpy(), at)
    _core.sum_rows(*lists, _rows(grad), given, False, torch.get_num_threads(), out.numpy())
    return out


def _dots(x: Tensor, grad: Tensor, edges: InEdges, heads: int) -> Tensor:
    """For every edge and head, the dot product of its source's row and its destination's gradient."""
    out = empty((edges.num_edges, heads), x.dtype)
    lists = (edges.indptr.numpy(), edges.sources.numpy())
    _core.dot_rows(*lists, _rows(x), _rows(grad), torch.get_num_threads(), out.numpy())
    return out


class _Max(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, edges: InEdges) -> Tensor:
        out = empty((edges.num_destinations, x.shape[1]), x.dtype)
        winners = empty((edges.num_destinations, x.shape[1]), torch.int32)
        lists = (edges.indptr.numpy(), edges.sources.numpy())
        _core.max_rows(*lists, _rows(x), torch.get_num_threads(), out.numpy(), winners.numpy())
        ctx.edges, ctx.winners = edges, winners
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        edges: InEdges = ctx.edges
        out_edges = edges.transposed
        out = empty((edges.num_sources, grad.shape[1]), grad.dtype)
        at = None if out_edges.places is None else out_edges.places.numpy()
        lists = (out_edges.indptr.numpy(), out_edges.destinations.numpy(), at, edges.indptr.numpy())
        _core.max_rows_backward(*lists, _rows(grad), ctx.winners.numpy(), torch.get_num_threads(), out.numpy())
        return out, None


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, edges: InEdges) -> Tensor:
        out = empty(tuple(scores.shape), scores.dtype)
        given = scores.detach().contiguous().numpy()
        _core.softmax_lists(edges.indptr.numpy(), given, None, torch.get_num_threads(), out.numpy())
        ctx.edges = edges
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (softmax,) = ctx.saved_tensors
        out = empty(tuple(softmax.shape), softmax.dtype)
        indptr, given = ctx.edges.indptr.numpy(), grad.contiguous().numpy()
        _core.softmax_lists(indptr, softmax.numpy(), given, torch.get_num_threads(), out.numpy())
        return out, None


def _aggregate_by_torch(rows: Tensor, edges: InEdges, reduce: Reduce, weights: Tensor | None) -> Tensor:
    """The same by torch's own operations, which make every message: the way on a device without a kernel."""
    destinations = edges.destinations
    out = rows.new_zeros(edges.num_destinations, rows.shape[1])
    if reduce == "softmax" and weights is not None:
        weights = _softmax_by_torch(weights, edges)
    messages = rows[edges.sources.to(torch.int64)]
    if weights is not None:
        messages = messages * weights.repeat_interleave(rows.shape[1] // weights.shape[1], dim=1)
    if reduce == "max":
        index = destinations.unsqueeze(1).expand_as(messages)
        return out.scatter_reduce(0, index, messages, "amax", include_self=False)
    out = out.index_add(0, destinations, messages.to(out.dtype))
    return out / edges.degrees.clamp(min=1).unsqueeze(1).to(out.dtype) if reduce == "mean" else out


def _softmax_by_torch(scores: Tensor, edges: InEdges) -> Tensor:
    destinations = edges.destinations
    index = destinations.unsqueeze(1).expand_as(scores)
    greatest = scores.new_full((edges.num_destinations, scores.shape[1]), -torch.inf)
    greatest = greatest.scatter_reduce(0, index, scores.detach(), "amax")
    weights = (scores - greatest[destinations]).exp()
    return weights / torch.zeros_like(greatest).index_add(0, destinations, weights)[destinations]
