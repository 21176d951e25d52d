"""Sums of messages, and scores, that depend on the edge, as Triton kernels: the functions of hoploom.ops.messages.

A term weight @ features is computed where it is added, so no kernel writes a row of full width per edge. Only the
gradients of features and weight take such rows, of some edges at a time. There are no atomics, so results are
reproducible. Like the sums of ops.kernels.aggregate, lists longer than a window take two more kernels.
"""
# mypy: disable-error-code="assignment, var-annotated"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hoploom.ops.compiled import MessageResults, ScoreResults, differentiable
from hoploom.ops.edges import InEdges
from hoploom.ops.kernels import reduce
from hoploom.ops.kernels.aggregate import Tiles, _language, _wide, max_rows, max_rows_backward, tiles_of, windows_of
from hoploom.ops.kernels.launch import blocks_of, launch
from hoploom.ops.kernels.reduce import at_entry, columns_of, long_list, scaled, term_of

TILE = 2048  # values of a program [edges, columns]
MOST_EDGES = 16  # that a program reads at once
SPREAD = 1 << 23  # values of gradients per edge that are in memory at a time

# Arguments that must not recompile a kernel when they become 1 or a multiple of 16.
SIZES = ["num_lists", "num_edges", "first", "steps", "share_units"]


@triton.jit
def message_of(
    base, x, x_at, term, weight, term_at, row_grad, grad_at, edge_grad, won, width, heads, num_features, columns, live,
    inside, ACT: tl.constexpr, SLOPE: tl.constexpr, BY_VALUE: tl.constexpr,
):  # fmt: skip
    """Return act(base + row of x + term) per edge [edges, columns]; with a gradient of it, that of its argument.

    With BY_VALUE, the latter is multiplied by the argument. What is not loaded counts as 0, so other edges get 0. For
    the gradient of a maximum, `won` are the columns that the edge has won.
    """
    mask = live & inside
    value = base
    if x is not None:
        value = value + tl.load(x + x_at * width + columns, mask=mask, other=0).to(base.dtype)
    if term is not None:
        value = value + term_of(value, term, weight, term_at, width, num_features, columns, live, inside)
    if row_grad is not None:
        grad = tl.load(row_grad + grad_at * width + columns, mask=mask, other=0).to(base.dtype)
    elif edge_grad is not None:
        at = term_at * heads + columns // (width // heads)
        grad = tl.load(edge_grad + at, mask=mask, other=0).to(base.dtype)
    if row_grad is None and edge_grad is None:
        if ACT == "relu":
            found = tl.where(value < 0, 0, value)
        elif ACT == "square":
            found = value * value
        else:
            found = tl.where(value > 0, value, value * SLOPE)
    elif won is not None:
        found = tl.where(won, grad, 0)
    elif ACT == "square":
        found = 2 * value * grad
    else:
        found = tl.where(value > 0, grad, 0 if ACT == "relu" else grad * SLOPE)
    return found * value if BY_VALUE else found


@triton.jit(do_not_specialize=SIZES)
def sum_messages(
    indptr, rows, places, own, x, term, weight, row_grad, edge_grad, out, num_lists, steps, window, heads,
    num_features, share_units, ACT: tl.constexpr, SLOPE: tl.constexpr, BY_VALUE: tl.constexpr, MEAN: tl.constexpr,
    IN_WINDOWS: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the sum or mean of messages of a list no longer than a window to out[list].

    With IN_WINDOWS, write the sum of a long list's messages in a window to `out`, placed as by `reduce.sum_windows`.
    """
    width = share_units * UNIT
    row = tl.program_id(0).to(tl.int64)
    if IN_WINDOWS:
        piece = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + row
        row, is_there, _, _, begin, end = long_list(indptr, num_lists, steps, window, tl.program_id(2) == 1)
    else:
        piece = row
        begin = tl.load(indptr + row)
        end = tl.load(indptr + row + 1)
        is_there = end - begin <= window
    if is_there:
        _head, columns, inside = columns_of(width, COLUMNS)
        base = tl.zeros([1, COLUMNS], SUM)
        if own is not None:
            base += tl.load(own + row * width + columns, mask=inside, other=0).to(SUM)
        total = tl.zeros([EDGES, COLUMNS], SUM)
        for first in range(begin, end, EDGES):
            entry = first + tl.arange(0, EDGES)[:, None]
            at = at_entry(rows, entry, end)
            total += message_of(
                base, x, at, term, weight, at_entry(places, entry, end), row_grad, at, edge_grad, None,
                width, heads, num_features, columns, entry < end, inside, ACT, SLOPE, BY_VALUE,
            )  # fmt: skip
        found = scaled(tl.sum(total, 0)[None, :], end - begin, MEAN)
        tl.store(out + piece * width + columns, found, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def each_message(
    indptr, sources, destinations, x, y, term, weight, row_grad, edge_grad, winners, att, out, num_lists, first,
    num_edges, heads, num_features, share_units, ACT: tl.constexpr, SLOPE: tl.constexpr, UNIT: tl.constexpr,
    SUM: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the messages of `num_edges` edges from `first` on to `out`; zeros after the last edge.

    With `att`, write out[edge, head] instead: the sum of att * message over the head's columns.
    """
    share = share_units * UNIT
    width = share * heads
    number = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)[:, None]
    edge = first + number
    head = tl.program_id(1)
    end = tl.minimum(tl.load(indptr + num_lists), first + num_edges)
    source = at_entry(sources, edge, end)
    destination = at_entry(destinations, edge, end)
    total = tl.zeros([EDGES, COLUMNS], SUM)
    for begin in range(0, share, COLUMNS):
        offset = begin + tl.arange(0, COLUMNS)[None, :]
        columns = head * share + offset
        inside = offset < share
        base = tl.zeros([EDGES, COLUMNS], SUM)
        if y is not None:
            base += tl.load(y + destination * width + columns, mask=(edge < end) & inside, other=0).to(SUM)
        won = None
        if winners is not None:
            taken = tl.load(winners + destination * width + columns, mask=(edge < end) & inside, other=-1)
            won = taken == edge - tl.load(indptr + destination, mask=edge < end, other=0)
        found = message_of(
            base, x, source, term, weight, edge, row_grad, destination, edge_grad, won, width, heads, num_features,
            columns, edge < end, inside, ACT, SLOPE, False,
        )  # fmt: skip
        if att is None:
            tl.store(out + number * width + columns, found, mask=(number < num_edges) & inside)
        else:
            total += tl.load(att + columns, mask=inside, other=0).to(SUM) * found
    if att is not None:
        tl.store(out + number * heads + head, tl.sum(total, 1)[:, None], mask=number < num_edges)


class EdgeMessage(NamedTuple):
    """The messages act(argument + term) of edges, or, with a gradient of them, the gradients of their arguments."""

    act: str  # relu, square or leaky, a leaky relu
    term: Tensor | None  # [num_edges, num_features]
    weight: Tensor | None  # [num_features, width]; None: num_features is the width
    slope: float = 0.0
    heads: int = 1
    row_grad: Tensor | None = None  # [num_destinations, width]
    edge_grad: Tensor | None = None  # [num_edges, heads]
    winners: Tensor | None = None  # [num_destinations, width]: the gradient is that of a maximum

    @property
    def arrays(self) -> tuple[Tensor | None, ...]:
        return self.term, self.weight, self.row_grad, self.edge_grad

    @property
    def sizes(self) -> tuple[int, int]:
        return self.heads, 0 if self.term is None else self.term.shape[1]

    def constants(self, tiles: Tiles, x: Tensor) -> dict[str, Any]:
        size = {"UNIT": tiles.unit, "EDGES": min(MOST_EDGES, TILE // tiles.columns), "COLUMNS": tiles.columns}
        return {"device": x.device, "ACT": self.act, "SLOPE": self.slope, "SUM": _language(x), **size}


def _term(rows: Tensor | None, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return None if rows is None else rows.contiguous(), None if weight is None else weight.t().contiguous()


def _sum(
    lists: Any,
    own: Tensor | None,
    x: Tensor | None,
    message: EdgeMessage,
    *,
    mean: bool = False,
    by_value: bool = False,
) -> Tensor:
    """Return the sum or mean over each of `lists` (indptr, rows, places) of the messages of own[list] + x[row]."""
    (indptr, rows, _), like = lists, own if x is None else x
    assert like is not None
    num_lists = indptr.numel() - 1
    out = like.new_empty(num_lists, like.shape[1])
    if out.numel() == 0:
        return out
    tiles, windows = tiles_of(1, out), windows_of(rows.numel(), num_lists)
    where, sizes = (num_lists, windows.steps, windows.length), (*message.sizes, tiles.share)
    arrays, given = (*lists, own, x, *message.arrays), {"BY_VALUE": by_value, **message.constants(tiles, out)}
    grid = (num_lists, tiles.blocks)
    launch(sum_messages, grid, *arrays, out, *where, *sizes, MEAN=mean, IN_WINDOWS=False, **given)
    if windows.number:
        pieces = torch.empty((2, windows.number, out.shape[1]), dtype=_wide(out), device=out.device)
        grid = (windows.number, tiles.blocks)
        launch(sum_messages, (*grid, 2), *arrays, pieces, *where, *sizes, MEAN=False, IN_WINDOWS=True, **given)
        launch(
            reduce.sum_pieces, grid, indptr, pieces, out, *where, 1, tiles.share,
            device=out.device, SUM=_language(out), MEAN=mean, **tiles.constants,
        )  # fmt: skip
    return out


def _each(
    edges: InEdges, ends: tuple[Tensor, Tensor | None], message: EdgeMessage, first: int, number: int,
    att: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the messages of `number` edges from `first` on, of the sum of both ends' rows; with `att`, the scores."""
    x = ends[0]
    out = torch.empty((number, x.shape[1] if att is None else message.heads), dtype=_wide(x), device=x.device)
    if x.shape[1] == 0:
        return out.zero_()
    tiles = tiles_of(message.heads, x)
    constants = message.constants(tiles, x)
    launch(
        each_message, (*blocks_of(number, constants["EDGES"]), message.heads),
        edges.indptr, edges.sources, edges.destinations, *ends, *message.arrays, message.winners, att, out,
        edges.num_destinations,
        first, number, *message.sizes, tiles.share, **constants,
    )  # fmt: skip
    return out


def _term_gradients(
    edges: InEdges,
    ends: tuple[Tensor, Tensor | None],
    message: EdgeMessage,
    factor: Tensor | None,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the term's rows and weight, if wanted. `factor` [width] multiplies those of arguments."""
    if message.term is None or not any(wanted):
        return None, None
    if message.weight is None:
        found = _each(edges, ends, message, 0, edges.num_edges)
        return (found if factor is None else found.mul_(factor)).to(message.term.dtype), None
    weight = message.weight.to(_wide(ends[0]))
    given = weight if factor is None else weight * factor
    are_edges = torch.arange(edges.num_edges, device=weight.device) < edges.indptr[-1]
    features = message.term.masked_fill(~are_edges.unsqueeze(1), 0)
    to_rows, to_weight = torch.empty_like(features), torch.zeros_like(weight)
    most = max(1, SPREAD // max(1, weight.shape[1]))
    for first in range(0, edges.num_edges, most):
        own = slice(first, min(first + most, edges.num_edges))
        found = _each(edges, ends, message, first, own.stop - first)
        if wanted[0]:
            to_rows[own] = found @ given.t()
        if wanted[1]:
            to_weight += features[own].to(weight.dtype).t() @ found
    return to_rows, (to_weight if factor is None else to_weight * factor).t().to(features.dtype)


class Messages(MessageResults, Function):
    """Sums or means of act(source's row + edge's term) on a device, or maxima of source's row + edge's term."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, weight: Tensor | None, edges: InEdges, message: str, mean: bool
    ) -> Tensor:
        ctx.edges, ctx.message, ctx.mean, winners = edges, message, mean, None
        lists, term = (edges.indptr, edges.sources, None), _term(rows, weight)
        if message == "max":
            out, winners = max_rows(*lists[:2], x, None, term)
        else:
            out = _sum(lists, None, x.contiguous(), EdgeMessage(message, *term), mean=mean)
        ctx.save_for_backward(x, rows, weight, winners)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edges: InEdges = ctx.edges
        x, *term, winners = ctx.saved_tensors
        x, to_x = x.contiguous(), None
        if ctx.mean:
            grad = grad / edges.degrees.clamp(min=1).unsqueeze(1)
        found = EdgeMessage(ctx.message, *_term(*term), row_grad=grad.contiguous(), winners=winners)
        if ctx.needs_input_grad[0] and winners is not None:
            to_x = max_rows_backward(edges.transposed, edges.indptr, grad, None, winners)
        elif ctx.needs_input_grad[0]:
            to_x = _sum(edges.transposed, x, None, found)
        to_term = _term_gradients(edges, (x, None), found, None, ctx.needs_input_grad[1:3])
        return to_x, *to_term, None, None, None


aggregate_messages = differentiable(Messages)


class Scores(ScoreResults, Function):
    """GATv2's scores on a device."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, att: Tensor, rows: Any, weight: Any, edges: InEdges, slope: float
    ) -> Tensor:
        ctx.edges, ctx.slope = edges, slope
        ctx.save_for_backward(left, right, att, rows, weight)
        message = EdgeMessage("leaky", *_term(rows, weight), slope, att.shape[0])
        ends = left.contiguous(), right.contiguous()
        return _each(edges, ends, message, 0, edges.num_edges, att.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edges: InEdges = ctx.edges
        left, right, att, *term = ctx.saved_tensors
        left, right, factor, wanted = left.contiguous(), right.contiguous(), att.flatten(), ctx.needs_input_grad
        message = EdgeMessage("leaky", *_term(*term), ctx.slope, att.shape[0], edge_grad=grad.contiguous())
        lists = edges.indptr, edges.sources, None
        to_left = _sum(edges.transposed, left, right, message).mul_(factor) if wanted[0] else None
        to_right = _sum(lists, right, left, message).mul_(factor) if wanted[1] else None
        to_att = _sum(lists, right, left, message, by_value=True).sum(0).view_as(att) if wanted[2] else None
        to_term = _term_gradients(edges, (left, right), message, factor, wanted[3:5])
        return to_left, to_right, to_att, *to_term, None, None


pair_scores = differentiable(Scores)
