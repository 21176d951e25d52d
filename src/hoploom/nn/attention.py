"""PyG's attention layers: each head weights the sources of a destination by a softmax of scores.

A score depends on both ends of an edge and on its features. Edges have one number per head; there are no messages.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hoploom import ops
from hoploom.errors import ConfigError
from hoploom.nn.layers import Conv, Ends, Linear, check_counts, ends_of, plus_bias, refuse_weights
from hoploom.ops import InEdges
from hoploom.ops.compiled import looped_like, occupied, operator, with_occupied, with_used
from hoploom.ops.reductions import add_ends

FillValue = float | Literal["mean"]
SUM_COST = 16  # to sum up a source's row of any width takes as long as to project it to so many columns


class _Attention(Conv):
    """The base class of attention layers: self-loops, the softmax, heads, and the linear layer of a residual."""

    heads: int
    width: int  # of a head
    concat: bool
    dropout: float
    add_self_loops: bool
    fill_value: FillValue  # of the features of self-loops; "mean": the mean of their destination's edges
    res: nn.Linear | None
    bias: nn.Parameter | None

    def _complete(self, of_destination: int, bias: bool, residual: bool) -> None:
        """Add the parameters that all attention layers have after their own, and set first values."""
        if self.fill_value != "mean" and not isinstance(self.fill_value, int | float):
            raise ConfigError(f"fill_value is {self.fill_value!r:.80}; give 'mean' or a number")
        if self.edge_dim is not None:
            self.lin_edge = Linear(self.edge_dim, self.heads * self.width, bias=False)
        out = self.width * (self.heads if self.concat else 1)
        self.res = Linear(of_destination, out, bias=False) if residual else None
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None
        for linear in (module for module in self.children() if isinstance(module, nn.Linear)):
            nn.init.xavier_uniform_(linear.weight)
        bound = math.sqrt(6.0 / (self.heads + self.width))
        for att in (parameter for parameter in self.parameters(recurse=False) if parameter.dim() == 3):
            nn.init.uniform_(att, -bound, bound)

    def _entered(self, edges: InEdges, dtype: torch.dtype) -> tuple[InEdges, Tensor | None]:
        """Return the edges over which the layer attends, and their features, if it reads any."""
        refuse_weights(self, edges)
        features = None if self.edge_dim is None else self.features_of(edges, dtype)
        return with_loops(edges, features, self.fill_value) if self.add_self_loops else (edges, features)

    def _attended(self, rows: Tensor, edges: InEdges, scores: Tensor) -> Tensor:
        """Return the sums of the sources' rows by the softmax of scores."""
        if self.dropout and self.training:
            return ops.aggregate(rows, edges, "sum", self._weights(scores, edges))
        return ops.aggregate(rows, edges, "softmax", scores)

    def _weights(self, scores: Tensor, edges: InEdges) -> Tensor:
        """Return the weights of the sources: the softmax of scores, with dropout: [num_edges, heads]."""
        return F.dropout(ops.softmax(scores, edges), self.dropout, self.training)

    def _finished(self, out: Tensor, x_dst: Tensor, places: Tensor | None = None) -> Tensor:
        """Return the output rows from the sums [num_destinations, heads * width], or of the destinations `places`."""
        if not self.concat:
            out = out.view(-1, self.heads, self.width).mean(dim=1)
        if places is None:
            out = plus_bias(out, self.bias)
        else:  # adds to rows of zeros, or of the bias, in one pass
            first = out.new_zeros(()) if self.bias is None else self.bias.to(out.dtype)
            out = first.expand(len(x_dst), out.shape[1]).index_add(0, places, out)
        return out if self.res is None else out + self.res(x_dst)


def _with_loops_like(edges: InEdges, features: Tensor | None, _: FillValue) -> tuple[InEdges, Tensor | None]:
    looped = looped_like(edges)
    return looped, None if features is None else features.new_empty(looped.num_edges, features.shape[1])


@operator(_with_loops_like)
def with_loops(edges: InEdges, features: Tensor | None, fill_value: FillValue) -> tuple[InEdges, Tensor | None]:
    """Return the edges with a self-loop at every destination, and their features, if given."""
    looped = edges.with_loops
    if features is None:
        return looped, None
    if fill_value == "mean":
        others = features.masked_fill(edges.are_loops.unsqueeze(1), 0)
        counts = (looped.degrees - 1).clamp(min=1).unsqueeze(1)
        of_loops = ops.aggregate(others, edges.own_rows, "sum") / counts
    else:
        of_loops = features.new_full((edges.num_destinations, features.shape[1]), fill_value)
    assert looped.permutation is not None
    return looped, torch.cat([features, of_loops]).index_select(0, looped.permutation)


class GATConv(_Attention):
    """Graph attention: scores are the leaky ReLU of a sum of numbers for the source, the destination and the edge.

    The numbers are linear in x, so the matrix product that projects x computes them, too, as additional columns.

    >>> GATConv(100, 64, heads=4, edge_dim=8)(x, edge_index, edge_attr=edge_attr)
    """

    def __init__(
        self,
        in_channels: int | Ends,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: FillValue = "mean",
        bias: bool = True,
        residual: bool = False,
    ) -> None:
        super().__init__()
        check_counts(heads=heads, out_channels=out_channels, edge_dim=edge_dim)
        self.heads, self.width, self.concat = heads, out_channels, concat
        self.negative_slope, self.dropout = negative_slope, dropout
        self.add_self_loops, self.edge_dim, self.fill_value = add_self_loops, edge_dim, fill_value
        self.is_bipartite = isinstance(in_channels, tuple | list)
        self.in_channels, destination = ends_of(in_channels)
        if self.is_bipartite:
            self.lin_src = Linear(self.in_channels, heads * out_channels, bias=False)
            self.lin_dst = Linear(destination, heads * out_channels, bias=False)
        else:
            self.lin = Linear(self.in_channels, heads * out_channels, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        if edge_dim is not None:
            self.att_edge = nn.Parameter(torch.empty(1, heads, out_channels))
        self._complete(destination, bias, residual)

    def project(self, x: Tensor) -> Tensor:
        """Return the projected rows, with the heads' scores as last columns: [num_sources, heads * width + heads]."""
        weight = self.lin_src.weight if self.is_bipartite else self.lin.weight
        return ops.linear(x, torch.cat([weight, self._scorer(weight, self.att_src)]))

    def convolve(self, x: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        """Return the destinations' output rows; if few have edges, sum up the sources' rows, then project sums."""
        reached = edges if self.add_self_loops else occupied(edges)[0]
        if self.width * (edges.num_sources - reached.num_destinations) <= SUM_COST * edges.num_edges:
            return super().convolve(x, edges, x_dst, aggregated)
        edges, features = self._entered(edges, x.dtype)
        edges, own, places = with_occupied(edges, x_dst)
        edges, x = with_used(edges, x)
        weight = self.lin_src.weight if self.is_bipartite else self.lin.weight
        scores = self._scores(ops.linear(x, self._scorer(weight, self.att_src)), edges, features, own)
        sums = ops.sum_per_head(x, edges, self._weights(scores, edges)).view(-1, self.heads, x.shape[1])
        of_heads = weight.view(self.heads, self.width, -1)
        out = torch.cat([ops.linear(*both) for both in zip(sums.unbind(1), of_heads, strict=True)], dim=1)
        return self._finished(out, x_dst, places)

    def propagate(self, z: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        edges, features = self._entered(edges, z.dtype)
        edges, own, places = with_occupied(edges, x_dst)
        rows, of_sources = torch.split(z, [self.heads * self.width, self.heads], dim=1)
        sums = self._attended(rows, edges, self._scores(of_sources, edges, features, own))
        return self._finished(sums, x_dst, places)

    def _scores(self, of_sources: Tensor, edges: InEdges, features: Tensor | None, x_dst: Tensor) -> Tensor:
        """Return the scores of edges, [num_edges, heads], from the sources' shares in them [num_sources, heads]."""
        weight = self.lin_dst.weight if self.is_bipartite else self.lin.weight
        scores = add_ends(of_sources, ops.linear(x_dst, self._scorer(weight, self.att_dst)), edges)
        if features is not None:
            scores = scores + self._of_edges(features, edges)
        return F.leaky_relu(scores, self.negative_slope)

    def _of_edges(self, features: Tensor, edges: InEdges) -> Tensor:
        """Return the edges' shares of the scores, from their features: [num_edges, heads]."""
        return ops.linear(features, self._scorer(self.lin_edge.weight, self.att_edge))

    def _scorer(self, weight: Tensor, att: Tensor) -> Tensor:
        """Return the matrix that maps rows to the heads' scores: [heads, in_channels]."""
        return torch.einsum("hci,hc->hi", weight.view(self.heads, att.shape[2], -1), att[0])


class GATv2Conv(_Attention):
    """Graph attention whose scores are a linear function of the leaky ReLU of source + destination + edge features.

    >>> GATv2Conv(100, 64, heads=4, edge_dim=8)(x, edge_index, edge_attr=edge_attr)
    """

    def __init__(
        self,
        in_channels: int | Ends,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: FillValue = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
    ) -> None:
        super().__init__()
        check_counts(heads=heads, out_channels=out_channels, edge_dim=edge_dim)
        self.heads, self.width, self.concat = heads, out_channels, concat
        self.negative_slope, self.dropout = negative_slope, dropout
        self.add_self_loops, self.edge_dim, self.fill_value = add_self_loops, edge_dim, fill_value
        self.in_channels, destination = ends_of(in_channels)
        self.lin_l = Linear(self.in_channels, heads * out_channels, bias=bias)
        self.lin_r = self.lin_l if share_weights else Linear(destination, heads * out_channels, bias=bias)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels))
        self._complete(destination, bias, residual)

    def project(self, x: Tensor) -> Tensor:
        return self.lin_l(x)  # type: ignore[no-any-return]

    def propagate(self, z: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        edges, features = self._entered(edges, z.dtype)
        edges, own, places = with_occupied(edges, x_dst)
        term = None if features is None else ops.EdgeTerm(features, self.lin_edge.weight)
        scores = ops.pair_scores(z, self.lin_r(own), edges, self.att[0], self.negative_slope, term)
        return self._finished(self._attended(z, edges, scores), x_dst, places)
