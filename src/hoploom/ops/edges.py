"""Group one relation's in-edges by destination; differentiable sums, means, maxima and attention over these groups.

Grouping takes one pass if edges are sorted by destination, like those of our loaders, else a counting sort. GPU edges
are sorted again unless a loader has noted that they are sorted (`note_grouped`). The host never waits for values on a
GPU: output shapes depend on input shapes only, so edge arrays may be longer than the number of edges.

No tensor of messages is made: the core (CPU) or kernels (GPU) add up rows directly. Half-precision rows are summed in
float32; kernels convert them after reading, and so does the core for sums of bfloat16. For its other reductions, they
are converted in memory first. Results do not depend on the number of threads, nor on the order in which a device runs
its programs. Second derivatives are not supported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from hoploom import _core
from hoploom.errors import ConfigError, DataError
from hoploom.ops import rows
from hoploom.ops.rows import tensor_of
from hoploom.system import num_cores

Reduce = Literal["sum", "mean", "max", "softmax"]

INT32_MAX = 2**31 - 1
EDGES_PER_THREAD = 1 << 15  # below this, starting a thread takes longer than sorting


class Csc(NamedTuple):
    indptr: Tensor  # [num_destinations + 1] int64
    indices: Tensor  # [num_edges] int32 while ids fit, else int64
    permutation: Tensor | None  # [num_edges] int64 input positions; None if the input was in order


def build_csc(
    edge_index: Tensor,
    num_sources: int,
    num_destinations: int,
    *,
    edge_time: Tensor | None = None,
    source_time: Tensor | None = None,
) -> Csc:
    """Return the edges of edge_index [2, num_edges] sorted by destination, then by time if times are given."""
    sources, destinations = edge_index.to(torch.int64).contiguous()
    try:
        indptr, indices, permutation, wide = _core.build_csc(
            sources.numpy(),
            destinations.numpy(),
            num_sources,
            num_destinations,
            min(num_cores(), 1 + sources.numel() // EDGES_PER_THREAD),
            None if edge_time is None else edge_time.numpy(),
            None if source_time is None else source_time.numpy(),
        )
    except IndexError as error:
        raise DataError(f"edge_index: {error}; check num_nodes, or drop the edge") from error
    except RuntimeError as error:
        raise DataError(f"edge_index: {error}; let no other thread write to it meanwhile") from error
    return Csc(
        tensor_of(indptr),
        tensor_of(indices, torch.int64 if wide else torch.int32),
        None if permutation is None else tensor_of(permutation),
    )


class OutEdges(NamedTuple):
    """Edges grouped by source. There are indptr[-1] edges; later entries of the arrays are ignored."""

    indptr: Tensor  # [num_sources + 1] int64
    destinations: Tensor  # [num_edges] int32 or int64
    places: Tensor | None  # [num_edges] int64: each edge's index in the InEdges; None if both have one order


@dataclass(frozen=True, eq=False)
class InEdges:
    """Edges grouped by destination. If both ends have the same node type, destination d is source `first` + d.

    There are indptr[-1] edges; later entries of `sources` are ignored, and their weights get gradient zero.

    >>> edges = InEdges.of(torch.tensor([[1, 2], [0, 0]]), num_sources=3, num_destinations=1)
    >>> ops.aggregate(x, edges, "mean")
    """

    indptr: Tensor  # [num_destinations + 1] int64
    sources: Tensor  # [num_edges] int32 or int64
    num_sources: int
    permutation: Tensor | None = None  # [num_edges] int64: the input index of each edge; None: sorted input
    first: int = 0
    source_degrees: Tensor | None = None  # [num_sources] int64 in-degrees in the whole graph; None: count these edges
    whole: "InEdges | None" = None  # the edges of which these are a prefix
    num_edges_below: Mapping[int, int] | None = None  # n -> number of edges of the first n destinations, if known
    weights: Tensor | None = None  # [num_edges] or [num_edges, heads]: for layers, which pass them to ops.aggregate
    features: Tensor | None = None  # [num_edges, k]

    def __post_init__(self) -> None:
        """Drop all entries of `sources` if there are no source nodes or no destination nodes."""
        if self.num_edges and not (self.num_sources and self.num_destinations):
            object.__setattr__(self, "sources", self.sources[:0])

    @staticmethod
    def of(edge_index: Tensor, num_sources: int, num_destinations: int) -> "InEdges":
        """Return the edges of edge_index [2, num_edges] (row 0: sources, row 1: destinations), grouped."""
        if rows.runs_in_core(edge_index):
            indptr, sources, permutation = build_csc(edge_index, num_sources, num_destinations)
            return InEdges(indptr, sources, num_sources, permutation)
        sources, destinations = edge_index
        is_there = (edge_index.amin(0) >= 0) & (sources < num_sources) & (destinations < num_destinations)
        known = noted(edge_index)
        if known is not None:
            is_there[1:].logical_and_(destinations[1:] >= destinations[:-1])
        # an error stops the device; the host does not wait
        torch._assert_async(is_there.all(), "edge_index: an end is out of range, or was changed through .data")
        if known is not None:
            indptr = _offsets(destinations, num_destinations)
            return InEdges(indptr, sources.clone(), num_sources, num_edges_below=known)
        indptr, order = _sorted(destinations, num_destinations)
        return InEdges(indptr, sources.index_select(0, order), num_sources, order)

    def weighted(self, weights: Tensor) -> "InEdges":
        """Return the edges with `weights`, one per edge in the order of the edge_index that was passed to `of`.

        NaN weights raise an error on a CPU only: on a GPU, the check would wait for the device. Compiled code has none.
        """
        if rows.runs_in_core(weights) and not torch.compiler.is_compiling() and bool(weights.isnan().any()):
            raise DataError("weights of edges have NaNs; replace them, or drop these edges")
        return replace(self, weights=self._in_order("weights", weights))

    def with_features(self, features: Tensor) -> "InEdges":
        """Return the edges with `features` [num_edges, k], in the order of the edge_index that was passed to `of`."""
        if features.dim() != 2:
            raise ConfigError(f"features have shape {tuple(features.shape)}; give a row per edge: features.view(-1, 1)")
        return replace(self, features=self._in_order("features", features))

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        if rows.shape[:1] != (self.num_edges,):
            raise ConfigError(
                f"{name} have shape {tuple(rows.shape)} for {self.num_edges} edges; give one for each edge"
            )
        return rows if self.permutation is None else rows.index_select(0, self.permutation)

    @property
    def num_destinations(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Length of `sources`, including the entries that are ignored."""
        return self.sources.numel()

    @cached_property
    def degrees(self) -> Tensor:
        """In-degree of every destination: [num_destinations] int64."""
        return self.indptr[1:] - self.indptr[:-1]

    @cached_property
    def destinations(self) -> Tensor:
        """Destination of every edge: [num_edges] int64; arbitrary beyond the last edge."""
        if not rows.runs_in_core(self.indptr):
            places = torch.arange(self.num_edges, device=self.indptr.device)
            return torch.searchsorted(self.indptr[1:], places, right=True).clamp_(max=self.num_destinations - 1)
        lists, length = torch.arange(self.num_destinations), int(self.indptr[-1])
        found = torch.repeat_interleave(lists, self.degrees, output_size=length)
        return found if length == self.num_edges else torch.cat([found, found.new_zeros(self.num_edges - length)])

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """The edges in the form that functions of ops.rows take: indptr, sources, destinations."""
        return self.indptr, self.sources, self.destinations

    @cached_property
    def senders(self) -> Tensor:
        """`sources`, with 0 (a valid index) in the entries after the last edge: [num_edges] int32 or int64."""
        return self.sources if self._are_edges is None else self.sources.masked_fill(~self._are_edges, 0)

    @cached_property
    def are_loops(self) -> Tensor:
        """Mask of self-loops: [num_edges] bool."""
        loops = self.sources == self.destinations + self.first
        return loops if self._are_edges is None else loops & self._are_edges

    @cached_property
    def transposed(self) -> OutEdges:
        """The edges grouped by source, cached for the backward pass."""
        if rows.runs_in_core(self.indptr):
            length = int(self.indptr[-1])
            flipped = torch.stack([self.destinations[:length], self.sources[:length].to(torch.int64)])
            return OutEdges(*build_csc(flipped, self.num_destinations, self.num_sources))
        assert self._are_edges is not None
        indptr, order = _sorted(self.sources.masked_fill(~self._are_edges, self.num_sources), self.num_sources)
        return OutEdges(indptr, self.destinations.index_select(0, order), order)

    def head(self, num_destinations: int, num_sources: int) -> "InEdges":
        """Return the edges of the first `num_destinations` destinations, without a copy.

        On a GPU, the host does not wait for the number of these edges. Unless `num_edges_below` tells the number, all
        entries of `sources` are kept.
        """
        if num_destinations == self.num_destinations and num_sources == self.num_sources:
            return self
        indptr = self.indptr[: num_destinations + 1]
        num_edges = self._num_edges_of(indptr)
        by_edge = {"permutation": self.permutation, "weights": self.weights, "features": self.features}
        kept: dict[str, Any] = {name: rows[:num_edges] for name, rows in by_edge.items() if rows is not None}
        whole = self.whole or self
        return InEdges(indptr, self.sources[:num_edges], num_sources, first=self.first, whole=whole, **kept)

    def _num_edges_of(self, indptr: Tensor) -> int:
        """Return how many entries of `sources` the lists with the offsets `indptr` have; all entries if unknown."""
        if rows.runs_in_core(indptr):
            return int(indptr[-1])
        known = (self.num_edges_below or {}).get(indptr.numel() - 1)
        if known is None:
            return self.num_edges
        torch._assert_async(indptr[-1] == known, "edge_index was changed through .data")
        return known

    @cached_property
    def in_degrees_of_sources(self) -> Tensor:
        """In-degree of each source without self-loops: [num_sources] int64; 0 for sources that are no destination."""
        if self.source_degrees is not None:
            return self.source_degrees
        if self.whole is not None:
            return self.whole.in_degrees_of_sources[: self.num_sources]
        degrees = torch.zeros(self.num_sources, dtype=torch.int64, device=self.indptr.device)
        degrees[self.first : self.first + self.num_destinations] = self._kept_before[self.indptr].diff()
        return degrees

    @cached_property
    def with_loops(self) -> "InEdges":
        """The edges without existing self-loops, and with one self-loop as the last edge of every destination.

        `permutation` has the index of each edge among these; it is num_edges + d for the loop of destination d.
        """
        num_lists, most = self.num_destinations, self.num_edges + self.num_destinations
        if num_lists + self.first > self.num_sources:
            raise ConfigError(
                f"{self.num_sources} sources cannot have self-loops at {num_lists} destinations; give the layer "
                "add_self_loops=False"
            )
        lists = torch.arange(num_lists + 1, device=self.indptr.device)
        indptr = self._kept_before[self.indptr] + lists
        places = (self._kept_before[:-1] + self.destinations).masked_fill(~self._are_kept, most)
        places = torch.cat([places, indptr[1:] - 1])
        order = places.new_full((most + 1,), most - 1)  # the last entry takes edges that are dropped
        order.scatter_(0, places, torch.arange(most, device=self.indptr.device))
        order = order[: int(indptr[-1]) if rows.runs_in_core(indptr) else most]
        ends = torch.cat([self.sources, (lists[:-1] + self.first).to(self.sources.dtype)])
        return InEdges(indptr, ends.index_select(0, order), self.num_sources, order, self.first)

    @cached_property
    def occupied(self) -> tuple["InEdges", Tensor]:
        """The lists that have edges, and their destinations [num_lists] int64; all on a GPU: the host does not wait."""
        if not rows.runs_in_core(self.indptr):
            return self, torch.arange(self.num_destinations, device=self.indptr.device)
        places = self.degrees.nonzero().view(-1)
        return self.lists_of(places), places

    def lists_of(self, places: Tensor) -> "InEdges":
        """Return the lists of the destinations `places` [n] int64, ascending; no other destination has edges."""
        indptr = torch.cat([self.indptr[:1], self.indptr[1:].index_select(0, places)])
        return InEdges(indptr, self.sources, self.num_sources, weights=self.weights, features=self.features)

    @cached_property
    def used(self) -> tuple["InEdges", Tensor]:
        """Lists over only the sources that have edges, and these sources [n] int64; all on a GPU, as above."""
        if not rows.runs_in_core(self.indptr):
            return self, torch.arange(self.num_sources, device=self.indptr.device)
        indptr, destinations, places = self.transposed
        used = indptr.diff().nonzero().view(-1)
        numbers = self.sources.new_zeros(self.num_sources)
        numbers[used] = torch.arange(len(used), dtype=numbers.dtype)
        senders = numbers.index_select(0, self.senders)
        edges = InEdges(self.indptr, senders, len(used), weights=self.weights, features=self.features)
        edges.__dict__["transposed"] = OutEdges(indptr.index_select(0, F.pad(used + 1, (1, 0))), destinations, places)
        return edges, used

    @cached_property
    def own_rows(self) -> "InEdges":
        """Lists of the same lengths, with the edges themselves as sources: they aggregate a row per edge."""
        places = torch.arange(self.num_edges + 1, device=self.indptr.device)
        own = InEdges(self.indptr, places[:-1], self.num_edges)
        own.__dict__["transposed"] = OutEdges(places.minimum(self.indptr[-1]), self.destinations, None)
        return own

    @cached_property
    def _are_edges(self) -> Tensor | None:
        """Mask of the entries of `sources` that are edges, not padding: [num_edges] bool; None without padding."""
        if rows.runs_in_core(self.indptr) and int(self.indptr[-1]) == self.num_edges:
            return None
        return torch.arange(self.num_edges, device=self.indptr.device) < self.indptr[-1]

    @cached_property
    def _are_kept(self) -> Tensor:
        """Mask of edges that are no self-loops: [num_edges] bool."""
        return ~self.are_loops if self._are_edges is None else ~self.are_loops & self._are_edges

    @cached_property
    def _kept_before(self) -> Tensor:
        """For each entry, the number of earlier edges that are no self-loops: [num_edges + 1] int64."""
        before = torch.zeros(self.num_edges + 1, dtype=torch.int64, device=self.indptr.device)
        torch.cumsum(self._are_kept, 0, out=before[1:])
        return before


def _sorted(keys: Tensor, num_lists: int) -> tuple[Tensor, Tensor]:
    """Sort `keys`; return the index at which each key begins, and the permutation. Keys >= num_lists come last."""
    narrow = torch.int32 if num_lists < INT32_MAX else torch.int64
    ordered, order = torch.sort(keys.to(narrow), stable=True)
    return _offsets(ordered, num_lists), order


def _offsets(ordered: Tensor, num_lists: int) -> Tensor:
    """Return, for each k from 0 to num_lists, the index of the first key >= k in the ascending `ordered`: int64."""
    return torch.searchsorted(ordered, torch.arange(num_lists + 1, dtype=ordered.dtype, device=ordered.device))


class _Note(NamedTuple):
    state: tuple[object, ...]  # of the tensor at the time of the note
    num_edges_below: Mapping[int, int]


# Module-level, because layers receive edge_index but not its loader. An entry is dropped with its tensor, and is valid
# while the tensor is unchanged: torch's writes raise _version, `tensor.data = other` changes data_ptr. Writes that do
# neither (through .data, or by foreign kernels) are found by assertions of InEdges on the device.
_NOTES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def note_grouped(edge_index: Tensor, num_edges_below: Mapping[int, int]) -> None:
    """Note that edge_index is sorted by destination; `num_edges_below` maps n to the number of edges to nodes < n."""
    if not edge_index.is_inference():  # has no version
        _NOTES[edge_index] = _Note(_state(edge_index), num_edges_below)


def noted(edge_index: Tensor) -> Mapping[int, int] | None:
    """Return the `num_edges_below` that was noted for edge_index; None if edge_index may be in any order."""
    note: _Note | None = _NOTES.get(edge_index)  # type: ignore[no-untyped-call]
    return note.num_edges_below if note is not None and note.state == _state(edge_index) else None


def _state(tensor: Tensor) -> tuple[object, ...]:
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride()


def aggregate(x: Tensor, edges: InEdges, reduce: Reduce = "sum", weights: Tensor | None = None) -> Tensor:
    """Return, for each destination, the aggregate of its sources' rows: [num_destinations, ...]; zeros without edges.

    `x` is [num_sources, heads * width] or [num_sources, heads, width]. `weights` [num_edges] or [num_edges, heads], in
    the order of `edges`, multiply the rows. With "softmax" they are scores; a softmax per destination gives weights.
    """
    _check(x, edges, reduce, weights)
    values = x.flatten(1)
    if reduce == "max" or x.dtype not in _reductions(x).SUMMED:
        values = _native(values)
    if weights is not None:
        weights = _weights(weights.unsqueeze(1) if weights.dim() == 1 else weights, edges, values.dtype, reduce)
    if reduce == "max":
        out = _apply(_Max, values, weights, edges)
    else:
        out = _apply(_Sum, values, weights, edges, reduce == "mean")
    return out.to(x.dtype).view(edges.num_destinations, *x.shape[1:])


def softmax(scores: Tensor, edges: InEdges) -> Tensor:
    """Return the softmax of scores [num_edges, heads] over the in-edges of each destination: [num_edges, heads]."""
    return _apply(_Softmax, _native(scores), edges).to(scores.dtype)


def add_ends(of_sources: Tensor, of_destinations: Tensor | None, edges: InEdges) -> Tensor:
    """Return, for every edge, its source's row plus its destination's row, if given: [num_edges, width]."""
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
    if weights is None:
        if reduce == "softmax":
            raise ConfigError("reduce='softmax' needs weights")
        return
    heads = weights.shape[1] if weights.dim() == 2 else 1
    width = x[0].numel() if x.shape[0] else 0
    if weights.dim() > 2 or weights.shape[0] != edges.num_edges or heads == 0 or width % heads:
        raise ConfigError(
            f"weights are of shape {tuple(weights.shape)}; give one for each of {edges.num_edges} edges and head"
        )


def _reductions(tensor: Tensor) -> ModuleType:
    """Return the module that reduces rows on the tensor's device: ops.rows, or kernels.aggregate, which mirrors it."""
    if rows.runs_in_core(tensor):
        return rows
    from hoploom.ops.kernels import aggregate as kernels  # imports Triton

    return kernels


def _native(tensor: Tensor) -> Tensor:
    """Return the tensor, converted to float32 if reductions on its device do not support its dtype."""
    return tensor if tensor.dtype in _reductions(tensor).NATIVE else tensor.float()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _weights(weights: Tensor, edges: InEdges, dtype: torch.dtype, reduce: Reduce) -> Tensor:
    """Return `weights` in the dtype of sums. For "softmax" they are scores: return their softmax per destination."""
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
            heads = weights.shape[1]
            grad_weights = _reductions(x).dot_rows(edges.lists, _native(x), _native(grad), heads, None)
            if share is not None:
                grad_weights *= share[edges.destinations].unsqueeze(1)
        return grad_x, grad_weights, None, None


def _spread(grad: Tensor, edges: InEdges, weights: Tensor | None, share: Tensor | None) -> Tensor:
    """Return, per source, the sum of its destinations' rows of `grad`, each times edge weight and `share`, if given."""
    indptr, destinations, places = edges.transposed
    if share is not None and weights is None:
        weights, places = share.index_select(0, destinations).unsqueeze(1), None
    elif share is not None and weights is not None:
        weights = weights * share[edges.destinations].unsqueeze(1)
    out: Tensor = _reductions(grad).sum_rows(indptr, destinations, places, grad, weights, False)
    return out


class _Max(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, edges: InEdges) -> Tensor:
        greatest: Tensor
        greatest, winners = _reductions(x).max_rows(edges.indptr, edges.sources, x, weights)
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
            grad_x = _reductions(grad).max_rows_backward(edges.transposed, edges.indptr, grad, weights, winners)
        if ctx.needs_input_grad[1]:
            grad_weights = _reductions(grad).dot_rows(edges.lists, x, grad, weights.shape[1], winners)
        return grad_x, grad_weights, None


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
    """Sum of the rows at both ends of every edge. Its gradients are reproducible; those of torch's indexing are not."""

    @staticmethod
    def forward(ctx: Any, of_sources: Tensor, of_destinations: Tensor | None, edges: InEdges) -> Tensor:
        ctx.edges = edges
        sent = of_sources.index_select(0, edges.senders)
        return sent if of_destinations is None else sent + of_destinations.index_select(0, edges.destinations)

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
