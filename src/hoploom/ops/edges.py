"""Group one relation's in-edges by destination.

Grouping takes one pass if edges are sorted by destination, like those of our loaders, else a counting sort. GPU edges
are sorted again unless a loader has noted that they are sorted (`note_grouped`). The host never waits for values on a
GPU: output shapes depend on input shapes only, so edge arrays may be longer than the number of edges.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hoploom import _core
from hoploom.errors import ConfigError, DataError
from hoploom.ops import rows
from hoploom.ops.rows import tensor_of
from hoploom.system import num_cores

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
        has_rows = edge_index.layout == torch.strided and edge_index.dim() == 2 and edge_index.shape[0] == 2
        if not has_rows or edge_index.dtype not in (torch.int64, torch.int32):
            found = f"{edge_index.dtype} {list(edge_index.shape)}, {edge_index.layout}"
            raise ConfigError(
                f"edge_index is {found}; give a dense tensor [2, num_edges] of int64: sources, destinations"
            )
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
    _NOTES[edge_index] = _Note(state_of(edge_index), num_edges_below)


def noted(edge_index: Tensor) -> Mapping[int, int] | None:
    """Return the `num_edges_below` that was noted for edge_index; None if edge_index may be in any order."""
    note: _Note | None = _NOTES.get(edge_index)  # type: ignore[no-untyped-call]
    return note.num_edges_below if note is not None and note.state == state_of(edge_index) else None


def state_of(tensor: Tensor) -> tuple[object, ...]:
    """Return values that are the same again only while nothing writes to the tensor, or gives it other memory."""
    version = object() if tensor.is_inference() else tensor._version  # a tensor of inference mode has no version
    return version, tensor.data_ptr(), tensor.shape, tensor.stride()
