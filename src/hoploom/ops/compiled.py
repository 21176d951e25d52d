"""Functions of edges as operators of torch.compile, which passes them to the core or to kernels without tracing them.

An operator takes tensors, integers and a text that tells how arguments consist of them. That of a `differentiable`
function also returns what its backward pass reads. The backward pass of any other `operator` calls the function again,
with autograd: this takes one more forward pass, but needs no second list of formulas.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, wraps
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.library import custom_op
from torch.utils.weak import WeakTensorKeyDictionary

from hoploom.ops.edges import INT32_MAX, InEdges, state_of
from hoploom.ops.rows import runs_in_core

Operation = TypeVar("Operation", bound=Callable[..., Any])
Form = list[Any]  # a nested list that mirrors the arguments; see _pack

FIELDS = "indptr", "sources", "num_sources", "permutation", "first", "source_degrees", "whole", "weights", "features"
GIVEN = "Tensor[] tensors, SymInt[] numbers, str form"
_parsed = lru_cache(1024)(ast.literal_eval)
UNTRACKED = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView  # inside of operators

# Each operator makes its own InEdges of the same tensors. An entry is dropped with its tensor, `sources`, and keeps
# `indptr`, whose address would else be that of a later one.
_COMPUTED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@contextmanager
def _remembered(arguments: Sequence[Any]) -> Iterator[None]:
    """Give edges what an earlier operator has computed of them, and keep what this one computes."""
    edges = [one for one in arguments if isinstance(one, InEdges)]
    for one in edges:
        state, computed, _ = _COMPUTED.get(one.sources, (None, {}, None))  # type: ignore[no-untyped-call]
        if state == _state(one):
            one.__dict__.update(computed)
    yield
    for one in edges:
        computed = {name: one.__dict__[name] for name in ("transposed", "destinations") if name in one.__dict__}
        _COMPUTED[one.sources] = _state(one), computed, one.indptr


def _state(edges: InEdges) -> tuple[object, ...]:
    return *state_of(edges.indptr), *state_of(edges.sources), edges.num_sources


# --- autograd functions ---------------------------------------------------------------------


class _Context:
    """The `ctx` of an autograd function inside an operator: it has the function's arguments as attributes."""

    saved_tensors: tuple[Tensor | None, ...]

    def __init__(self, names: Sequence[str], arguments: Sequence[Any], wanted: Sequence[bool]) -> None:
        self.__dict__.update(zip(names, arguments, strict=True))
        self.needs_input_grad = wanted

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def differentiable(function: Any) -> Callable[..., Tensor]:
    """Return a function that applies a class of autograd, as an operator of its own while torch.compile traces.

    `function.like` returns its results without values, which `results` names: those of `forward`, then others that
    `forward` saves. `saved` names all that it saves, arguments or results. Attributes of `ctx` have arguments' names.
    """
    names = list(inspect.signature(function.forward).parameters)[1:]
    apply, num_outs = function.apply, function.num_outs
    kept = [name for name in function.results if name in function.saved]

    def run(tensors: Sequence[Tensor], numbers: Sequence[int], form: str) -> list[Tensor]:
        arguments = _unpacked(tensors, numbers, _parsed(form))
        ctx = _Context(names, arguments, [True] * len(names))
        with _remembered(arguments), torch.no_grad():
            out = function.forward(ctx, *arguments)
        outs = out if isinstance(out, tuple) else (out,)
        saved = dict(zip(function.saved, ctx.saved_tensors, strict=True))
        return _own(_packed((*outs, *(saved[name] for name in function.results[len(outs) :])))[0], tensors)

    def run_backward(
        grads: Sequence[Tensor],
        wanted: Sequence[int],
        results: Sequence[Tensor],
        tensors: Sequence[Tensor],
        numbers: Sequence[int],
        form: str,
    ) -> list[Tensor]:
        parts = _parsed(form)
        arguments, ends = _unpacked(tensors, numbers, parts), accumulate(map(_num_tensors, parts[1:]))
        places = {
            end - 1: place for place, (end, part) in enumerate(zip(ends, parts[1:], strict=True)) if part == TENSOR
        }
        needed = {places[n] for n in wanted}
        ctx = _Context(names, arguments, [place in needed for place in range(len(names))])
        known = dict(zip(names, arguments, strict=True)) | dict(zip(kept, results, strict=False))
        ctx.saved_tensors = tuple(known.get(name) for name in function.saved)
        with _remembered(arguments), torch.no_grad():
            found = function.backward(ctx, *grads)
        return _own([found[places[n]].to(tensors[n].dtype) for n in wanted], grads)

    def save(ctx: Any, inputs: tuple[Sequence[Tensor], Sequence[int], str], output: Sequence[Tensor]) -> None:
        tensors, ctx.numbers, ctx.form = inputs
        named = dict(zip(function.results, output, strict=False))
        ctx.num_tensors = len(tensors)
        ctx.save_for_backward(*tensors, *(named[name] for name in kept if name in named))

    def differentiate(ctx: Any, grads: Sequence[Tensor]) -> tuple[list[Tensor | None], Any, None]:
        needed: Sequence[bool] = ctx.needs_input_grad[0]
        wanted = [n for n, is_needed in enumerate(needed) if is_needed]
        tensors, results = ctx.saved_tensors[: ctx.num_tensors], ctx.saved_tensors[ctx.num_tensors :]
        given = list(results), list(tensors), ctx.numbers, ctx.form
        found = iter(backward(list(grads[:num_outs]), wanted, *given))
        none: Any = None if ctx.numbers else []  # torch takes an empty list for one of tensors, and asks for a list
        return [next(found) if is_needed else None for is_needed in needed], none, None

    name = f"hoploom::{function.__module__.split('.', 2)[2].replace('.', '_')}_{function.__name__.strip('_').lower()}"
    given = f"(Tensor[] grads, int[] wanted, Tensor[] results, {GIVEN}) -> Tensor[]"
    forward = custom_op(name, run, mutates_args=(), schema=f"({GIVEN}) -> Tensor[]")
    backward = custom_op(f"{name}_backward", run_backward, mutates_args=(), schema=given)
    forward.register_fake(
        lambda tensors, numbers, form: _packed(function.like(*_unpacked(tensors, numbers, _parsed(form))))[0]
    )
    backward.register_fake(
        lambda grads, wanted, results, tensors, *_: [tensors[n].new_empty(tensors[n].shape) for n in wanted]
    )
    forward.register_autograd(differentiate, setup_context=save)

    def call(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            return apply(*arguments)
        bare = tuple(InEdges(e.indptr, e.sources, e.num_sources) if isinstance(e, InEdges) else e for e in arguments)
        outs = forward(*_given(bare))[:num_outs]
        return outs[0] if num_outs == 1 else outs

    return call


def _num_tensors(form: Form) -> int:
    return int(form == TENSOR) + sum(_num_tensors(part) for part in form[1:] if isinstance(part, list))


# --- any functions --------------------------------------------------------------------------


def operator(like: Callable[..., Any]) -> Callable[[Operation], Operation]:
    """Return a decorator that makes a function one operator while torch.compile traces; else it is called as it is.

    Arguments and results are tensors, InEdges, numbers, strings or None, or tuples of these. `like` takes the same
    arguments and returns a result of the same shape without values: shapes depend on shapes only.
    """

    def decorate(function: Operation) -> Operation:
        made = _operator(f"hoploom::{function.__name__.strip('_')}", function, like)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if not torch.compiler.is_compiling():
                return function(*arguments)
            _, sizes, shape = _packed(like(*arguments))
            return _unpacked(made(*_given(arguments)), sizes, shape)

        return call  # type: ignore[return-value]

    return decorate


def _operator(name: str, function: Callable[..., Any], like: Callable[..., Any]) -> Any:
    """Register the operator of a function, and one for its backward pass."""

    def run(tensors: Sequence[Tensor], numbers: Sequence[int], form: str) -> list[Tensor]:
        arguments = _unpacked(tensors, numbers, _parsed(form))
        out, expected = (_packed(each(*arguments))[0] for each in (function, like))
        return _own([_padded(one, len(rows)) for one, rows in zip(out, expected, strict=True)], tensors)

    def run_backward(
        grads: Sequence[Tensor], wanted: Sequence[int], tensors: Sequence[Tensor], numbers: Sequence[int], form: str
    ) -> list[Tensor]:
        leaves = [one.detach().requires_grad_() if n in wanted else one for n, one in enumerate(tensors)]
        arguments = _unpacked(leaves, numbers, _parsed(form))
        with _remembered(arguments), ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for key in UNTRACKED:
                stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
            out, _, _ = _packed(function(*arguments))
            floats = zip([one for one in out if one.is_floating_point()], grads, strict=True)
            pairs = [(one, grad[: len(one)]) for one, grad in floats if one.requires_grad]
            inputs, found = [leaves[n] for n in wanted], [one for one, _ in pairs]
            made: Sequence[Tensor] = [torch.zeros_like(one) for one in inputs]
            if found:
                made = torch.autograd.grad(found, inputs, [grad for _, grad in pairs], materialize_grads=True)
        return _own(made, grads)

    schemas = f"({GIVEN}) -> Tensor[]", f"(Tensor[] grads, int[] wanted, {GIVEN}) -> Tensor[]"
    forward = custom_op(name, run, mutates_args=(), schema=schemas[0])
    backward = custom_op(f"{name}_backward", run_backward, mutates_args=(), schema=schemas[1])

    def differentiate(ctx: Any, grads: Sequence[Tensor]) -> tuple[list[Tensor | None], None, None]:
        needed: Sequence[bool] = ctx.needs_input_grad[0]
        of_floats = [grad for grad, is_float in zip(grads, ctx.are_floats, strict=True) if is_float]
        wanted = [n for n, is_needed in enumerate(needed) if is_needed]
        found = iter(backward(of_floats, wanted, list(ctx.saved_tensors), ctx.numbers, ctx.form))
        return [next(found) if is_needed else None for is_needed in needed], None, None

    def save(ctx: Any, inputs: tuple[Sequence[Tensor], Sequence[int], str], output: Sequence[Tensor]) -> None:
        tensors, ctx.numbers, ctx.form = inputs
        ctx.save_for_backward(*tensors)
        ctx.are_floats = [one.is_floating_point() for one in output]

    def fake(tensors: Sequence[Tensor], numbers: Sequence[int], form: str) -> list[Tensor]:
        return _packed(like(*_unpacked(tensors, numbers, _parsed(form))))[0]

    forward.register_fake(fake)
    backward.register_fake(lambda grads, wanted, tensors, *_: [tensors[n].new_empty(tensors[n].shape) for n in wanted])
    forward.register_autograd(differentiate, setup_context=save)
    return forward


def _own(out: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, contiguous and in memory of their own: operators must not return their arguments' memory."""
    known = {one.untyped_storage().data_ptr() for one in given}
    each = [one.detach().contiguous() for one in out]
    return [one.clone() if one.untyped_storage().data_ptr() in known else one for one in each]


def _padded(rows: Tensor, length: int) -> Tensor:
    return rows if len(rows) == length else F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, length - len(rows)])


TENSOR: Form = ["tensor"]


def _given(arguments: Any) -> tuple[list[Tensor], list[int], str]:
    """Return the arguments of the operator of a function with these arguments."""
    tensors, numbers, form = _packed(arguments)
    return tensors, numbers, repr(form)


def _packed(value: Any) -> tuple[list[Tensor], list[int], Form]:
    """Return the tensors and the integers in a value, and a form from which `_unpacked` makes the value again."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    return tensors, numbers, _pack(value, tensors, numbers)


def _pack(value: Any, tensors: list[Tensor], numbers: list[int]) -> Form:
    if isinstance(value, Tensor):
        tensors.append(value)
        return list(TENSOR)
    if isinstance(value, InEdges):
        return ["edges", *[_pack(getattr(value, name), tensors, numbers) for name in FIELDS]]
    if isinstance(value, tuple):
        return ["tuple", *[_pack(each, tensors, numbers) for each in value]]
    if value is None or isinstance(value, (bool, float, str)):  # torch 2.6 cannot trace a union
        return ["constant", value]
    numbers.append(value)  # may be a symbol
    return ["number"]


def _unpacked(tensors: Sequence[Tensor], numbers: Sequence[int], form: Form) -> Any:
    return _unpack(iter(tensors), iter(numbers), form)


def _unpack(tensors: Iterator[Tensor], numbers: Iterator[int], form: Form) -> Any:
    kind, *parts = form
    if kind == "tensor":
        return next(tensors)
    if kind == "number":
        return next(numbers)
    if kind == "constant":
        return parts[0]
    values = [_unpack(tensors, numbers, part) for part in parts]
    return InEdges(**dict(zip(FIELDS, values, strict=True))) if kind == "edges" else tuple(values)


# --- results without values -----------------------------------------------------------------


def rows_like(rows: Tensor, edges: InEdges, *others: object) -> Tensor:
    """Return a row for each destination, as wide as `rows`."""
    return rows.new_empty(edges.num_destinations, *rows.shape[1:])


class MessageResults:
    """The results of sums and maxima of messages, without values."""

    num_outs, results, saved = 1, ("out", "winners"), ("x", "rows", "weight", "winners")

    @staticmethod
    def like(x: Tensor, rows: Tensor, weight: Tensor | None, edges: InEdges, message: str, mean: bool) -> Any:
        out = rows_like(x, edges)
        return out, torch.empty_like(out, dtype=torch.int32) if message == "max" else None


class ScoreResults:
    """The scores of pair_scores, without values."""

    num_outs, results, saved = 1, ("out",), ("left", "right", "att", "rows", "weight")

    @staticmethod
    def like(left: Tensor, right: Tensor, att: Tensor, rows: Any, weight: Any, edges: InEdges, slope: float) -> Any:
        return (edge_rows_like(left, edges, att.shape[0]),)


def edge_rows_like(rows: Tensor, edges: InEdges, width: int) -> Tensor:
    """Return a row for each edge, in the dtype of sums of `rows`."""
    return rows.new_empty(edges.num_edges, width, dtype=torch.promote_types(rows.dtype, torch.float32))


def looped_like(edges: InEdges) -> InEdges:
    """Return edges with room for all edges and a self-loop of each destination."""
    most = edges.num_edges + edges.num_destinations
    ends, order = edges.sources.new_empty(most), edges.indptr.new_empty(most)
    return InEdges(torch.empty_like(edges.indptr), ends, edges.num_sources, order, edges.first)


# --- grouping -------------------------------------------------------------------------------


def _grouped_like(edge_index: Tensor, num_sources: int, num_destinations: int) -> InEdges:
    sources, num_edges = edge_index[0], edge_index.shape[1]
    narrow = edge_index.device.type == "cpu" and num_sources <= INT32_MAX
    ends = sources.new_empty(num_edges, dtype=torch.int32 if narrow else edge_index.dtype)
    indptr, order = (sources.new_empty(length, dtype=torch.int64) for length in (num_destinations + 1, num_edges))
    return InEdges(indptr, ends, num_sources, order)


@operator(_grouped_like)
def _grouped(edge_index: Tensor, num_sources: int, num_destinations: int) -> InEdges:
    """Return the edges, grouped, with a permutation in any case."""
    edges = InEdges.of(edge_index, num_sources, num_destinations)
    order = torch.arange(edges.num_edges, device=edge_index.device) if edges.permutation is None else edges.permutation
    return replace(edges, permutation=order)


def group(edge_index: Tensor, num_sources: int, num_destinations: int) -> InEdges:
    """Return the edges of edge_index [2, num_edges], grouped by destination."""
    of = _grouped if torch.compiler.is_compiling() else InEdges.of
    return of(edge_index, num_sources, num_destinations)


def occupied(edges: InEdges) -> tuple[InEdges, Tensor]:
    """Return the lists that have edges, and their destinations; all lists if torch.compile traces, without values."""
    if torch.compiler.is_compiling():
        return edges, torch.arange(edges.num_destinations, device=edges.indptr.device)
    return edges.occupied


def own_rows(edges: InEdges) -> InEdges:
    """Return lists of the same lengths with the edges as sources; if torch.compile traces, without a cache."""
    if torch.compiler.is_compiling():
        return InEdges(edges.indptr, torch.arange(edges.num_edges, device=edges.indptr.device), edges.num_edges)
    return edges.own_rows


def occupied_by_any(each: Sequence[InEdges], x: Tensor) -> Tensor | None:
    """Return the destinations x that have an edge of some relation: [n] int64; None: all, as on a GPU or compiled."""
    if torch.compiler.is_compiling() or not runs_in_core(x):
        return None
    degrees = torch.zeros(len(x), dtype=torch.int64)
    for edges in each:
        degrees += edges.degrees
    places = degrees.nonzero().view(-1)
    return None if len(places) == len(x) else places


def with_occupied(edges: InEdges, x: Tensor) -> tuple[InEdges, Tensor, Tensor | None]:
    """Return the lists that have edges, their destinations' rows of x, and these destinations; None: all."""
    lists, places = occupied(edges)
    return (edges, x, None) if len(places) == len(x) else (lists, x.index_select(0, places), places)


def with_used(edges: InEdges, x: Tensor) -> tuple[InEdges, Tensor]:
    """Return the edges, and the rows x of their sources, without sources that have no edge if these are many."""
    if torch.compiler.is_compiling():
        return edges, x
    least, used = edges.used
    return (least, x.index_select(0, used)) if 3 * len(used) < 2 * len(x) else (edges, x)
