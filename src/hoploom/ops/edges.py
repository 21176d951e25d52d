"""The in-edges of one relation, grouped by destination: what layers aggregate over.

Grouping costs one pass where edges come sorted, as our loaders yield them, and a counting sort where they do not.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hoploom.ops.csc import build_csc


class OutEdges(NamedTuple):
    """The same edges grouped by source."""

    indptr: Tensor  # [num_sources + 1] int64
    destinations: Tensor  # [num_edges] int32 or int64
    places: Tensor | None  # [num_edges] int64: where each stands among the in-edges; None: there


@dataclass(frozen=True, eq=False)
class InEdges:
    """Edges by destination. Where both ends are of one type, destination d is source `first` + d.

    >>> edges = InEdges.of(torch.tensor([[1, 2], [0, 0]]), num_sources=3, num_destinations=1)
    >>> ops.aggregate(x, edges, "mean")
    """

    indptr: Tensor  # [num_destinations + 1] int64
    sources: Tensor  # [num_edges] int32 or int64
    num_sources: int
    permutation: Tensor | None = None  # [num_edges] int64: where each edge stood before; None: there
    first: int = 0
    source_degrees: Tensor | None = None  # [num_sources] int64 in-degrees in the whole graph; None: by these edges
    whole: "InEdges | None" = None  # of which these are the head

    @staticmethod
    def of(edge_index: Tensor, num_sources: int, num_destinations: int) -> "InEdges":
        """Group edge_index [2, num_edges], sources above destinations, in whatever order."""
        if edge_index.is_cuda:
            return _grouped_by_torch(edge_index, num_sources, num_destinations)
        indptr, sources, permutation = build_csc(edge_index, num_sources, num_destinations)
        return InEdges(indptr, sources, num_sources, permutation)

    @property
    def num_destinations(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.sources.numel()

    @cached_property
    def degrees(self) -> Tensor:
        """The length of every list: [num_destinations] int64."""
        return self.indptr[1:] - self.indptr[:-1]

    @cached_property
    def destinations(self) -> Tensor:
        """The destination of every edge: [num_edges] int64."""
        lists = torch.arange(self.num_destinations, device=self.indptr.device)
        return torch.repeat_interleave(lists, self.degrees, output_size=self.num_edges)

    @cached_property
    def are_loops(self) -> Tensor:
        """Which edges lead from a node to itself: [num_edges] bool."""
        return self.sources == self.destinations + self.first

    @cached_property
    def transposed(self) -> OutEdges:
        """Grouped by source; made once, for the backward pass."""
        flipped = torch.stack([self.destinations, self.sources.to(torch.int64)])
        if flipped.is_cuda:
            grouped = _grouped_by_torch(flipped, self.num_destinations, self.num_sources)
            return OutEdges(grouped.indptr, grouped.sources, grouped.permutation)
        return OutEdges(*build_csc(flipped, self.num_destinations, self.num_sources))

    def head(self, num_destinations: int, num_sources: int) -> "InEdges":
        """The lists of the first destinations alone; no copy."""
        if num_destinations == self.num_destinations and num_sources == self.num_sources:
            return self
        indptr = self.indptr[: num_destinations + 1]
        num_edges = int(indptr[-1])
        permutation = None if self.permutation is None else self.permutation[:num_edges]
        whole = self.whole or self
        return InEdges(indptr, self.sources[:num_edges], num_sources, permutation, self.first, whole=whole)

    @cached_property
    def in_degrees_of_sources(self) -> Tensor:
        """How many edges lead to each source, loops not counted: [num_sources] int64; 0 where it is no destination."""
        if self.source_degrees is not None:
            return self.source_degrees
        if self.whole is not None:
            return self.whole.in_degrees_of_sources[: self.num_sources]
        degrees = torch.zeros(self.num_sources, dtype=torch.int64, device=self.indptr.device)
        degrees[self.first : self.first + self.num_destinations] = self.degrees - self._num_loops
        return degrees

    @cached_property
    def _num_loops(self) -> Tensor:
        return torch.zeros_like(self.degrees).index_add_(0, self.destinations, self.are_loops.to(torch.int64))

    @cached_property
    def with_loops(self) -> "InEdges":
        """One loop at the end of every list, in place of those that are there."""
        kept = ~self.are_loops
        indptr = torch.zeros_like(self.indptr)
        torch.cumsum(self.degrees - self._num_loops + 1, 0, out=indptr[1:])
        own = torch.arange(self.first, self.first + self.num_destinations, device=self.indptr.device)
        sources = torch.empty(int(indptr[-1]), dtype=self.sources.dtype, device=self.indptr.device)
        is_loop = torch.zeros(sources.numel(), dtype=torch.bool, device=self.indptr.device)
        is_loop[indptr[1:] - 1] = True
        sources[is_loop] = own.to(sources.dtype)
        sources[~is_loop] = self.sources[kept]
        return InEdges(indptr, sources, self.num_sources, None, self.first)


def _grouped_by_torch(edge_index: Tensor, num_sources: int, num_destinations: int) -> InEdges:
    destinations, permutation = torch.sort(edge_index[1], stable=True)
    indptr = torch.zeros(num_destinations + 1, dtype=torch.int64, device=edge_index.device)
    torch.cumsum(torch.bincount(destinations, minlength=num_destinations), 0, out=indptr[1:])
    return InEdges(indptr, edge_index[0][permutation], num_sources, permutation)
