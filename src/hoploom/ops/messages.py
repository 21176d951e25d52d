"""Aggregate messages that depend on the edge, and score edges by their ends; forward and backward.

The core (CPU) or kernels (GPU) aggregate messages as they make them. Results do not depend on the number of threads.
Second derivatives are not supported.
"""

from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hoploom import _core
from hoploom.errors import ConfigError
from hoploom.ops import rows as _rows
from hoploom.ops.compiled import (
    MessageResults,
    ScoreResults,
    differentiable,
    edge_rows_like,
    own_rows,
    rows_like,
)
from hoploom.ops.edges import InEdges
from hoploom.ops.reductions import aggregate, check_sources, described, native, reductions, spread, wide
from hoploom.ops.rows import _matrix, empty, max_rows_backward

Act = Literal["relu", "square"]
MessageReduce = Literal["sum", "mean", "max"]

MOST_FUSED = 64  # columns of features that the core multiplies by the weight; a matrix product is faster for more
MESSAGES = {"relu": 0, "square": 1, "max": 2}  # numbered as in csrc/messages.h


class EdgeTerm(NamedTuple):
    """A row per edge that is added to the row of its source: weight @ features, or rows of full width.

    >>> ops.EdgeTerm(edges.features, lin_edge.weight)
    """

    rows: Tensor  # [num_edges, k], in the order of the InEdges
    weight: Tensor | None = None  # [width, k]; None: k is width

    @property
    def projected(self) -> Tensor:
        """The rows that are added: [num_edges, width]."""
        return self.rows if self.weight is None else F.linear(self.rows, self.weight)


def aggregate_messages(
    x: Tensor, edges: InEdges, reduce: MessageReduce, added: EdgeTerm, act: Act | None = None
) -> Tensor:
    """Return the aggregate of act(source's row + edge's term) for each destination: [num_destinations, width].

    `x` is [num_sources, width]; a destination without edges gets zeros.

    >>> ops.aggregate_messages(x, edges, "sum", ops.EdgeTerm(edges.features, lin.weight), "relu")
    """
    if reduce not in get_args(MessageReduce) or act not in (None, *get_args(Act)):
        raise ConfigError(
            f"reduce is {reduce!r} and act is {act!r}; choose one of {list(get_args(MessageReduce))}, and None or one "
            f"of {list(get_args(Act))}"
        )
    if reduce == "max" and act == "square":
        raise ConfigError('a maximum takes act=None or "relu"; the greatest square is that of the maximum or minimum')
    _check_rows("x", x, "source", edges.num_sources)
    values = native(x)
    added = _checked(added, edges, values)
    if act is None and reduce != "max":
        of_edges = aggregate(added.rows, own_rows(edges), reduce)
        if added.weight is not None:
            of_edges = F.linear(of_edges, added.weight)
        return (aggregate(values, edges, reduce) + of_edges).to(x.dtype)
    messages, of = (
        _messages if _rows.runs_in_core(values) else _kernels().aggregate_messages,
        "max" if reduce == "max" else act,
    )
    out = messages(values, *_fused(added), edges, of, reduce == "mean")
    return (out.relu() if of == "max" and act else out).to(x.dtype)


def pair_scores(
    left: Tensor, right: Tensor, edges: InEdges, att: Tensor, slope: float, added: EdgeTerm | None = None
) -> Tensor:
    """Return GATv2's scores, att * leaky_relu(left of source + right of destination + term), summed for each head.

    `left` [num_sources, heads * width] and `right` [num_destinations, heads * width]; `att` [heads, width]. Scores are
    [num_edges, heads], float32 or wider.
    """
    _check_rows("left", left, "source", edges.num_sources)
    _check_rows("right", right, "destination", edges.num_destinations)
    heads, width = att.shape if att.dim() == 2 else (0, 0)
    if not heads or not left.shape[1] == right.shape[1] == heads * width:
        raise ConfigError(
            f"left, right and att have shapes {tuple(left.shape)}, {tuple(right.shape)} and {tuple(att.shape)}; with "
            "att [heads, width], the others have heads * width columns"
        )
    left = native(left)
    right, att = right.to(left.dtype), att.to(left.dtype)
    added = None if added is None else _checked(added, edges, left)
    term = (None, None) if added is None else _fused(added)
    scores = _scores if _rows.runs_in_core(left) else _kernels().pair_scores
    return scores(left, right, att, *term, edges, slope)


def _kernels() -> ModuleType:
    from hoploom.ops.kernels import messages as kernels  # imports Triton

    return kernels


def dot_ends(left: Tensor, right: Tensor, edges: InEdges, heads: int) -> Tensor:
    """Return, per edge and head, the dot product of the source's row of left and the destination's row of right.

    `left` [num_sources, heads * width] and `right` [num_destinations, heads * width]. Products are [num_edges, heads],
    float32 or wider.
    """
    _check_rows("left", left, "source", edges.num_sources)
    _check_rows("right", right, "destination", edges.num_destinations)
    if heads < 1 or left.shape[1] != right.shape[1] or left.shape[1] % heads:
        raise ConfigError(
            f"left and right have {left.shape[1]} and {right.shape[1]} columns for {heads} heads; give heads * width"
        )
    left = native(left)
    return _dots(left, right.to(left.dtype), edges, heads)


def attend(x: Tensor, edges: InEdges, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the sources' rows by a softmax of scores [num_edges, heads], and the logarithms of its totals.

    `x` is [num_sources, heads * width]. The second result, log(sum(exp(scores))) [num_destinations, heads], joins
    softmaxes over several relations' edges to one; it is -inf for a destination without edges.

    >>> out, log_totals = ops.attend(values, edges, ops.dot_ends(keys, queries, edges, heads) / width**0.5)
    """
    check_sources(x, edges, scores)
    values = native(x)
    scores = native(scores.to(wide(values.dtype)))
    weights, log_totals = _softened(scores, edges)
    return aggregate(values, edges, "sum", weights).to(x.dtype), log_totals


def sum_per_head(x: Tensor, edges: InEdges, weights: Tensor) -> Tensor:
    """Return, for each destination and head, the sum of its sources' whole rows times the head's weights.

    `x` is [num_sources, width], and `weights` [num_edges, heads]. Sums are [num_destinations, heads * width].
    """
    _check_rows("x", x, "source", edges.num_sources)
    _check_rows("weights", weights, "edge", edges.num_edges)
    if not weights.shape[1]:
        raise ConfigError("weights have no columns; give one for each head")
    if not _rows.runs_in_core(x):
        return torch.cat([aggregate(x, edges, "sum", of_head) for of_head in weights.unbind(1)], dim=1)
    values = native(x)
    return _head_sums(values, weights.to(values.dtype), edges).to(x.dtype)


def _check_rows(name: str, rows: Tensor, end: str, number: int) -> None:
    is_tensor = isinstance(rows, Tensor)
    if not is_tensor or rows.dim() != 2 or rows.shape[0] != number or not rows.is_floating_point():
        raise ConfigError(f"{name} is {described(rows)}; give floats, a row for each of {number} {end}s")


def _checked(added: EdgeTerm, edges: InEdges, x: Tensor) -> EdgeTerm:
    """Return the term in the dtype of x; raise ConfigError unless it has a row per edge, and x's width."""
    rows, weight = added
    width = x.shape[1]
    if (
        rows.dim() != 2
        or rows.shape[0] != edges.num_edges
        or not rows.shape[1]
        or (weight is None and rows.shape[1] != width)
    ):
        columns = "k" if weight is not None else width
        raise ConfigError(
            f"added.rows have shape {tuple(rows.shape)}; give [{edges.num_edges}, {columns}], one per edge"
        )
    if weight is not None and weight.shape != (width, rows.shape[1]):
        raise ConfigError(f"added.weight has shape {tuple(weight.shape)}; give [{width}, {rows.shape[1]}]")
    return EdgeTerm(rows.to(x.dtype), None if weight is None else weight.to(x.dtype))


def _fused(added: EdgeTerm) -> EdgeTerm:
    """Return the term for the core; project features that are too wide for it."""
    return added if added.weight is None or added.weight.shape[1] <= MOST_FUSED else EdgeTerm(added.projected)


class _Call(NamedTuple):
    """Arguments of the core: the edges that are there, without the entries behind them."""

    edges: InEdges
    rows: Tensor | None
    weight: Tensor | None

    @property
    def length(self) -> int:
        return int(self.edges.indptr[-1])

    @property
    def lists(self) -> tuple[Any, Any]:
        return self.edges.indptr.numpy(), self.edges.sources[: self.length].numpy()

    @property
    def transposed(self) -> tuple[Any, Any, Any]:
        indptr, destinations, places = self.edges.transposed
        return indptr.numpy(), destinations.numpy(), _array(places)

    @property
    def term(self) -> tuple[Any, Any]:
        return _array(None if self.rows is None else self.rows[: self.length]), _array(self.weight)

    def gradients(self, wanted: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        """Return arrays for the gradients of rows and weight. Entries behind the edges get zeros."""
        of_rows = of_weight = None
        if self.rows is not None and wanted[0]:
            of_rows = empty(tuple(self.rows.shape), self.rows.dtype)
            of_rows[self.length :] = 0
        if self.weight is not None and wanted[1]:
            of_weight = empty(tuple(self.weight.shape), self.weight.dtype)
        return of_rows, of_weight


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().contiguous().numpy()


class _Messages(MessageResults, Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, weight: Tensor | None, edges: InEdges, message: str, mean: bool
    ) -> Tensor:
        call, shape = _Call(edges, rows, weight), (edges.num_destinations, x.shape[1])
        out, winners = empty(shape, x.dtype), empty(shape, torch.int32) if message == "max" else None
        given, threads = (*call.lists, _matrix(x), *call.term), torch.get_num_threads()
        _core.message_rows(*given, MESSAGES[message], mean, threads, out.numpy(), _array(winners))
        ctx.edges, ctx.message, ctx.mean = edges, message, mean
        ctx.save_for_backward(x, rows, weight, winners)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edges: InEdges = ctx.edges
        threads = torch.get_num_threads()
        x, *term, winners = ctx.saved_tensors
        call = _Call(edges, *term)
        if ctx.mean:
            grad = grad / edges.degrees.clamp(min=1).unsqueeze(1)
        x_, grad_ = _matrix(x), _matrix(grad)
        to_x = None
        if ctx.needs_input_grad[0] and winners is not None:
            to_x = max_rows_backward(edges.transposed, edges.indptr, grad, None, winners)
        elif ctx.needs_input_grad[0]:
            to_x = empty(tuple(x.shape), x.dtype)
            lists = call.transposed
            _core.message_rows_backward(*lists, x_, *call.term, MESSAGES[ctx.message], grad_, threads, to_x.numpy())
        to_rows, to_weight = call.gradients(ctx.needs_input_grad[1:3])
        if to_rows is not None or to_weight is not None:
            outs = None if to_rows is None else to_rows[: call.length].numpy(), _array(to_weight)
            _core.message_terms_backward(
                *call.lists, x_, *call.term, MESSAGES[ctx.message], grad_, _array(winners), threads, *outs
            )
        return to_x, to_rows, to_weight, None, None, None


_messages = differentiable(_Messages)


class _HeadSums(Function):
    num_outs, results, saved = 1, ("out",), ("x", "weights")

    @staticmethod
    def like(x: Tensor, weights: Tensor, edges: InEdges) -> Any:
        return (x.new_empty(edges.num_destinations, x.shape[1] * weights.shape[1]),)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, edges: InEdges) -> Tensor:
        call, out = _Call(edges, weights, None), empty((edges.num_destinations, x.shape[1] * weights.shape[1]), x.dtype)
        _core.sum_rows(*call.lists, None, _matrix(x), call.term[0], False, torch.get_num_threads(), out.numpy())
        ctx.edges = edges
        ctx.save_for_backward(x, weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        call, threads, to_x = _Call(ctx.edges, weights, None), torch.get_num_threads(), None
        if ctx.needs_input_grad[0]:
            to_x = empty(tuple(x.shape), x.dtype)
            _core.sum_rows(*call.transposed, _matrix(grad), call.term[0], False, threads, to_x.numpy())
        to_weights, _ = call.gradients((*ctx.needs_input_grad[1:2], False))
        if to_weights is not None:
            _core.dot_rows(*call.lists, _matrix(x), _matrix(grad), None, threads, to_weights[: call.length].numpy())
        return to_x, to_weights, None


_head_sums = differentiable(_HeadSums)


_Ends = tuple[Any, Any, Any, Any, Any, Any]  # left, right, the term's rows and weight, att, slope


class _Scores(ScoreResults, Function):
    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        att: Tensor,
        rows: Tensor | None,
        weight: Tensor | None,
        edges: InEdges,
        slope: float,
    ) -> Tensor:
        call, out = _Call(edges, rows, weight), empty((edges.num_edges, att.shape[0]), left.dtype)
        ends: _Ends = _matrix(left), _matrix(right), *call.term, _array(att), slope
        _core.pair_scores(*call.lists, *ends, torch.get_num_threads(), out[: call.length].numpy())
        out[call.length :] = 0
        ctx.edges, ctx.slope = edges, slope
        ctx.save_for_backward(left, right, att, rows, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, att, *term = ctx.saved_tensors
        call, threads = _Call(ctx.edges, *term), torch.get_num_threads()
        ends: _Ends = _matrix(left), _matrix(right), *call.term, _array(att), ctx.slope
        sent = _array(grad[: call.length])
        to_left = None
        if ctx.needs_input_grad[0]:
            to_left = empty(tuple(left.shape), left.dtype)
            _core.pair_scores_backward_left(*call.transposed, *ends, sent, threads, to_left.numpy())
        to_right, to_att = empty(tuple(right.shape), right.dtype), empty(tuple(att.shape), att.dtype)
        to_rows, to_weight = call.gradients(ctx.needs_input_grad[3:5])
        outs = None if to_rows is None else to_rows[: call.length].numpy(), _array(to_weight)
        arrays: tuple[Any, Any, Any, Any] = to_right.numpy(), to_att.numpy(), *outs
        _core.pair_scores_backward_right(*call.lists, *ends, sent, threads, *arrays)
        return to_left, to_right, to_att, to_rows, to_weight, None, None


_scores = differentiable(_Scores)


class _Dots(Function):
    num_outs, results, saved = 1, ("out",), ("left", "right")

    @staticmethod
    def like(left: Tensor, right: Tensor, edges: InEdges, heads: int) -> Any:
        return (edge_rows_like(left, edges, heads),)

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, edges: InEdges, heads: int) -> Tensor:
        ctx.edges = edges
        ctx.save_for_backward(left, right)
        dots: Tensor = reductions(left).dot_rows(edges.lists, left, right, heads, None)
        return dots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        edges: InEdges = ctx.edges
        left, right = ctx.saved_tensors
        to_left = to_right = None
        if ctx.needs_input_grad[0]:
            to_left = spread(right, edges, grad, None)
        if ctx.needs_input_grad[1]:
            to_right = reductions(left).sum_rows(edges.indptr, edges.sources, None, left, grad, False)
        return to_left, to_right, None, None


_dots = differentiable(_Dots)


class _Softened(Function):
    """The softmax over each destination's in-edges, and the logarithms of its totals."""

    num_outs, results, saved = 2, ("weights", "totals"), ("weights",)

    @staticmethod
    def like(scores: Tensor, edges: InEdges) -> Any:
        return edge_rows_like(scores, edges, scores.shape[1]), rows_like(scores, edges)

    @staticmethod
    def forward(ctx: Any, scores: Tensor, edges: InEdges) -> tuple[Tensor, Tensor]:
        module, places = reductions(scores), torch.arange(edges.num_edges, device=scores.device)
        weights: Tensor = module.softmax_lists(edges.indptr, scores, None)
        greatest, _ = module.max_rows(edges.indptr, places, scores, None)
        share, _ = module.max_rows(edges.indptr, places, weights, None)  # exp(greatest) / total
        ctx.edges = edges
        ctx.save_for_backward(weights)
        return weights, (greatest - share.log()).masked_fill_((edges.degrees == 0).unsqueeze(1), -torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_totals: Tensor) -> tuple[Tensor, None]:
        edges: InEdges = ctx.edges
        (weights,) = ctx.saved_tensors
        found: Tensor = reductions(weights).softmax_lists(edges.indptr, weights, grad)
        return found.addcmul_(weights, grad_totals.index_select(0, edges.destinations)), None


_softened = differentiable(_Softened)
