"""Aggregate messages that depend on the edge, and score edges by their ends; forward and backward.

On a CPU, the core adds up messages as it makes them. On a GPU, there is a tensor [num_edges, width] of them. Results do
not depend on the number of threads. Second derivatives are not supported.
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hoploom.errors import ConfigError
from hoploom.ops import edges as _edges
from hoploom.ops.edges import InEdges, aggregate

Act = Literal["relu", "square"]
MessageReduce = Literal["sum", "mean", "max"]


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
    _check_rows("x", x, "source", edges.num_sources)
    values = _edges._native(x)
    added = _checked(added, edges, values)
    messages = _edges.add_ends(values, None, edges) + added.projected
    if act is not None:
        messages = messages.relu() if act == "relu" else messages.square()
    return aggregate(messages, edges.own_rows, reduce).to(x.dtype)


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
    left = _edges._native(left)
    total = _edges.add_ends(left, right.to(left.dtype), edges)
    if added is not None:
        total = total + _checked(added, edges, left).projected
    return (F.leaky_relu(total, slope).view(-1, heads, width) * att.to(left.dtype)).sum(dim=2)


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
    left = _edges._native(left)
    return _edges._apply(_Dots, left, right.to(left.dtype), edges, heads)


def attend(x: Tensor, edges: InEdges, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the sources' rows by a softmax of scores [num_edges, heads], and the logarithms of its totals.

    `x` is [num_sources, heads * width]. The second result, log(sum(exp(scores))) [num_destinations, heads], joins
    softmaxes over several relations' edges to one; it is -inf for a destination without edges.

    >>> out, log_totals = ops.attend(values, edges, ops.dot_ends(keys, queries, edges, heads) / width**0.5)
    """
    _edges._check(x, edges, "softmax", scores)
    values = _edges._native(x)
    scores = _edges._native(scores.to(_edges._wide(values.dtype)))
    weights, log_totals = _edges._apply(_Softened, scores, edges)
    return aggregate(values, edges, "sum", weights).to(x.dtype), log_totals


def _check_rows(name: str, rows: Tensor, end: str, number: int) -> None:
    if rows.dim() != 2 or rows.shape[0] != number or not rows.is_floating_point():
        raise ConfigError(
            f"{name} is {rows.dtype} of shape {tuple(rows.shape)}; give floats, a row for each of {number} {end}s"
        )


def _checked(added: EdgeTerm, edges: InEdges, x: Tensor) -> EdgeTerm:
    """Return the term in the dtype of x; raise ConfigError unless it has a row per edge, and x's width."""
    rows, weight = added
    width = x.shape[1]
    if rows.dim() != 2 or rows.shape[0] != edges.num_edges or (weight is None and rows.shape[1] != width):
        columns = "k" if weight is not None else width
        raise ConfigError(
            f"added.rows have shape {tuple(rows.shape)}; give [{edges.num_edges}, {columns}], one per edge"
        )
    if weight is not None and weight.shape != (width, rows.shape[1]):
        raise ConfigError(f"added.weight has shape {tuple(weight.shape)}; give [{width}, {rows.shape[1]}]")
    return EdgeTerm(rows.to(x.dtype), None if weight is None else weight.to(x.dtype))


class _Dots(Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, edges: InEdges, heads: int) -> Tensor:
        ctx.edges = edges
        ctx.save_for_backward(left, right)
        dots: Tensor = _edges._reductions(left).dot_rows(
            edges.indptr, edges.sources, edges.destinations, left, right, heads
        )
        return dots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        edges: InEdges = ctx.edges
        left, right = ctx.saved_tensors
        to_left = to_right = None
        if ctx.needs_input_grad[0]:
            to_left = _edges._spread(right, edges, grad, None)
        if ctx.needs_input_grad[1]:
            to_right = _edges._reductions(left).sum_rows(edges.indptr, edges.sources, None, left, grad, False)
        return to_left, to_right, None, None


class _Softened(Function):
    """The softmax over each destination's in-edges, and the logarithms of its totals."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, edges: InEdges) -> tuple[Tensor, Tensor]:
        reductions, places = _edges._reductions(scores), torch.arange(edges.num_edges, device=scores.device)
        weights: Tensor = reductions.softmax_lists(edges.indptr, scores, None)
        greatest, _ = reductions.max_rows(edges.indptr, places, scores)
        share, _ = reductions.max_rows(edges.indptr, places, weights)  # exp(greatest) / total
        ctx.edges = edges
        ctx.save_for_backward(weights)
        return weights, (greatest - share.log()).masked_fill_((edges.degrees == 0).unsqueeze(1), -torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_totals: Tensor) -> tuple[Tensor, None]:
        edges: InEdges = ctx.edges
        (weights,) = ctx.saved_tensors
        found: Tensor = _edges._reductions(weights).softmax_lists(edges.indptr, weights, grad)
        return found.addcmul_(weights, grad_totals.index_select(0, edges.destinations)), None
