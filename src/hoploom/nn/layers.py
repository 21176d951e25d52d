"""PyG's convolutions, built on `ops.aggregate`, with PyG's arguments and parameters; and a layer's view of a batch.

A view has the edges that one layer reads, whether the batch has blocks, a sampled subgraph or a whole graph. A
convolution has two halves: `project` maps the row of each source, and `propagate` aggregates these rows by destination.
No messages are stored. A view's edges have the features and weights that the model reads.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from hoploom import ops
from hoploom.batch import EDGE_WEIGHT, Block
from hoploom.config.values import as_int
from hoploom.errors import ConfigError, DataError
from hoploom.ops import InEdges
from hoploom.ops.compiled import group, looped_like, operator, rows_like
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName

Ends = tuple[int, int]  # channels of sources and destinations
Aggr = Literal["sum", "add", "mean", "max"]
REDUCES: dict[str, ops.Reduce] = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max"}  # by PyG's `aggr`
Function = TypeVar("Function", bound=Callable[..., Any])


class ReadEdges(NamedTuple):
    """The names of the edge fields that a model reads."""

    features: Sequence[str] = ()
    weights: str | None = None

    @property
    def names(self) -> list[str]:
        return [*self.features, *([] if self.weights is None else [self.weights])]


@dataclass(frozen=True)
class LayerView:
    """The edges of one layer: from the first `num_sources` nodes of each type to its first `num_destinations` nodes."""

    edges: Mapping[RelationName, InEdges]
    num_sources: Mapping[str, int]
    num_destinations: Mapping[str, int]


def by_type(batch: Data | HeteroData, name: str) -> dict[str, Any]:
    """Return a node field by node type, for the types that have it."""
    if isinstance(batch, Data):
        return {HOMOGENEOUS_TYPE: batch[name]} if name in batch else {}
    return {node_type: batch[node_type][name] for node_type in batch.node_types if name in batch[node_type]}


def by_relation(batch: Data | HeteroData, name: str) -> dict[RelationName, Any]:
    """Return an edge field by relation, for the relations that have it."""
    if isinstance(batch, Data):
        return {HOMOGENEOUS_RELATION: batch[name]} if name in batch else {}
    return {key: batch[key][name] for key in batch.edge_types if name in batch[key]}


def views_of(
    batch: Data | HeteroData, num_layers: int, features: Sequence[str] = (), weights: str | None = None
) -> list[LayerView]:
    """Return a view of the batch's edges for each layer, the input layer first.

    The edges have those of the edge fields `features` that their relation has, side by side, and the field `weights`.

    >>> for view in views_of(batch, 3, ["edge_attr"]): ...
    """
    edge_index, counts = by_relation(batch, "edge_index"), by_type(batch, "num_sampled_nodes")
    data, read = dict[RelationName, dict[str, Tensor]](), ReadEdges(features, weights)
    if "views" not in batch:
        _check_names(batch, read)
    for name in read.names:
        for key, rows in by_relation(batch, name).items():
            data.setdefault(key, {})[name] = rows
    if "views" in batch:  # set by the maker of a padded batch
        views = list(one_per_layer(batch.views, num_layers))
    elif "blocks" in batch:
        views = [_of_block(block, read) for block in one_per_layer(batch.blocks, num_layers)]
    elif counts:
        one_per_layer(next(iter(counts.values()))[1:], num_layers)
        running = {name: list(accumulate(map(int, hops))) for name, hops in counts.items()}
        totals = {name: own[-1] for name, own in running.items()}
        views = _of_subgraph(_grouped(read, edge_index, totals, totals, data), running, num_layers)
    else:
        nodes = (
            {HOMOGENEOUS_TYPE: batch} if isinstance(batch, Data) else {name: batch[name] for name in batch.node_types}
        )
        num_nodes = {name: int(storage.num_nodes or 0) for name, storage in nodes.items()}
        return [LayerView(_grouped(read, edge_index, num_nodes, num_nodes, data), num_nodes, num_nodes)] * num_layers
    degrees = batch.in_degree if isinstance(batch, Data) and "in_degree" in batch else None
    if degrees is None:
        return views
    return [
        replace(view, edges={key: replace(e, source_degrees=degrees[: e.num_sources]) for key, e in view.edges.items()})
        for view in views
    ]


def _check_names(batch: Data | HeteroData, read: ReadEdges) -> None:
    """Raise ConfigError unless some edges of the batch have each of the fields."""
    of_blocks = [
        block.data if isinstance(block.edge_index, Mapping) else {HOMOGENEOUS_RELATION: block.data}
        for block in (batch.blocks if "blocks" in batch else ())
    ]
    there = {name for data in of_blocks for fields in data.values() for name in fields}
    for name in read.names:
        if name not in there and not by_relation(batch, name):
            way_out = "check the name, and give it to the loader, as fields=model.fields does"
            raise ConfigError(f"no edges of the batch have a field {name!r}; {way_out}")


def one_per_layer(hops: Sequence[Any], num_layers: int) -> Sequence[Any]:
    """Return `hops`, one entry per hop of the batch, unchanged; raise ConfigError unless there are `num_layers`."""
    if len(hops) != num_layers:
        raise ConfigError(
            f"the batch was sampled with {len(hops)} fanouts, the model has {num_layers} layers; give num_neighbors "
            "one fanout per layer, that of the hop at the seeds first"
        )
    return hops


def _grouped(
    read: ReadEdges,
    edge_index: Mapping[RelationName, Any],
    num_sources: Mapping[str, int],
    num_destinations: Mapping[str, int],
    data: Mapping[RelationName, Mapping[str, Tensor]],
    weighted: Collection[RelationName] = (),
) -> dict[RelationName, InEdges]:
    edges = {key: InEdges.of(own, num_sources[key[0]], num_destinations[key[2]]) for key, own in edge_index.items()}
    reads = {key: read if read.weights or key not in weighted else read._replace(weights=EDGE_WEIGHT) for key in edges}
    return {key: with_fields(own, data.get(key, {}), *reads[key]) for key, own in edges.items()}


def with_fields(edges: InEdges, fields: Mapping[str, Tensor], features: Sequence[str], weights: str | None) -> InEdges:
    """Return the edges with those of `fields` that are named: features, side by side, and weights, as floats."""
    columns = [_floats(name, fields[name]) for name in features if name in fields]
    if columns:
        rows = [own if own.dim() == 2 else own.reshape(len(own), math.prod(own.shape[1:])) for own in columns]
        edges = edges.with_features(torch.cat(rows, dim=1) if len(rows) > 1 else rows[0])
    if weights is None or weights not in fields:
        return edges
    return edges.weighted(_one_per_edge(f"weights={weights!r}", _floats(weights, fields[weights])))


def _one_per_edge(name: str, weights: Tensor) -> Tensor:
    """Return the weights [num_edges], which may be given as a column."""
    if weights.dim() != 1 and weights.shape[1:] != (1,):
        raise ConfigError(f"{name} has shape {list(weights.shape)}; give one number per edge")
    return weights.flatten()


def _floats(name: str, field: Tensor) -> Tensor:
    if not isinstance(field, Tensor):
        raise ConfigError(f"the batch has {name!r} of edges as a {type(field).__name__}; give a tensor, a row per edge")
    return field if field.is_floating_point() else field.to(torch.float32)


def _of_block(block: Block, read: ReadEdges) -> LayerView:
    given: list[Any] = [block.edge_index, block.num_sources, block.num_destinations, block.data]
    if not isinstance(block.edge_index, Mapping):
        owners = HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, HOMOGENEOUS_TYPE, HOMOGENEOUS_RELATION
        given = [{owner: value} for owner, value in zip(owners, given, strict=True)]
    return LayerView(_grouped(read, *[*given, block.weighted]), given[1], given[2])


def _of_subgraph(
    grouped: Mapping[RelationName, InEdges], running: Mapping[str, list[int]], num_layers: int
) -> list[LayerView]:
    """Return one view per layer of a sampled subgraph, whose edges are grouped by destination once.

    Each layer takes the edges to its destinations, which are the first nodes.
    `running` has, by node type, the number of nodes within 0, 1, ... hops.
    """
    within = [
        {name: counts[min(hops, len(counts) - 1)] for name, counts in running.items()}
        for hops in range(num_layers, -1, -1)
    ]
    views = []
    for sources, destinations in pairwise(within):
        edges = {key: one.head(destinations[key[2]], sources[key[0]]) for key, one in grouped.items()}
        views.append(LayerView(edges, sources, destinations))
    return views


# --- convolutions ---------------------------------------------------------------------------


def eager(function: Function) -> Function:
    """Exclude a function from torch.compile, which makes two graphs of the code around it."""
    excluded: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return excluded


@operator(rows_like)
def aggregate_features(features: Tensor, edges: InEdges, reduce: ops.Reduce) -> Tensor:
    """Return the aggregate of the rows of each destination's edges: [num_destinations, k]."""
    return ops.aggregate(features, edges.own_rows, reduce, edges.weights)


class _WithOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        ctx.own = slice(first, first + count)
        return rows.view_as(rows), rows[ctx.own]

    @staticmethod
    def backward(ctx: Any, of_all: Tensor, of_own: Tensor) -> tuple[Tensor, None, None]:
        # In place only if no other node of the graph has this tensor; torch 2.6 cannot tell.
        if getattr(of_all, "_use_count", lambda: 2)() > 1 or not of_all.is_contiguous():
            of_all = of_all.clone(memory_format=torch.contiguous_format)
        of_all[ctx.own] += of_own
        return of_all, None, None


def with_own(rows: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return all rows, and `count` of them from `first` on, whose gradient then takes no pass over all rows."""
    if torch.compiler.is_compiling():
        return rows, rows[first : first + count]
    return _WithOwn.apply(rows, first, count)  # type: ignore[no-untyped-call, no-any-return]


class Linear(nn.Linear):
    """A linear layer on `ops.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Conv(nn.Module):
    """The base class of convolutions. Implement `propagate`; override `project` to change rows before aggregation."""

    reduce: ops.Reduce | None = None  # of `propagate`; None if `propagate` cannot take aggregated rows
    needs_degrees = False  # uses the sources' in-degrees in the whole graph if they are given
    in_channels: int | None = None  # of sources, if known
    edge_dim: int | None = None  # width of the edge features that it reads; 0: that of x; None: it reads none

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edges: InEdges | Tensor,
        *others: object,
        aggregated: Tensor | None = None,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Return the destinations' rows [num_destinations, out_channels] from the sources x [num_sources, in_channels].

        `edges` may be an edge_index of PyG: then all nodes are destinations. The destinations' own rows are in x, too,
        or are the second of a pair of tensors. `aggregated` [num_destinations, in_channels], if given, is used
        instead of aggregating x. `edge_weight` [num_edges] or [num_edges, 1], in the order of edge_index, multiplies
        the rows before they are summed; a mean still divides by the number of edges. `edge_attr` [num_edges, edge_dim]
        are edge features, in this order, too.
        """
        if others:
            raise ConfigError(
                f"{type(self).__name__} takes x and edge_index by position only; pass edge_attr= or edge_weight= by "
                "name, and the rows of destinations as a pair, (x, x_dst)"
            )
        x, x_dst = x if isinstance(x, tuple) else (x, None)
        if x.is_floating_point() and self.in_channels not in (None, x.shape[-1]):
            raise ConfigError(f"{type(self).__name__} has in_channels={self.in_channels}, x has rows of {x.shape[-1]}")
        if not isinstance(edges, (Tensor, InEdges)):
            raise ConfigError(
                f"{type(self).__name__} takes an edge_index [2, n], not a {type(edges).__name__}; of a block, it is "
                "layer((x, x[: block.num_destinations]), block.edge_index)"
            )
        if isinstance(edges, Tensor):
            edges = group(edges, x.shape[0], x.shape[0] if x_dst is None else x_dst.shape[0])
        for name, given in (("edge_weight", edge_weight), ("edge_attr", edge_attr)):
            if given is not None and not isinstance(given, Tensor):
                raise ConfigError(f"{name} is a {type(given).__name__}; give a tensor: torch.tensor({name})")
        if edge_weight is not None:
            edges = edges.weighted(_one_per_edge("edge_weight", edge_weight))
        if edge_attr is not None:
            if self.edge_dim is None:
                raise ConfigError(
                    f"{type(self).__name__} reads no edge_attr; give a SAGEConv, GATConv or GATv2Conv edge_dim=, take "
                    "GINEConv, or leave edge_attr out"
                )
            edges = edges.with_features(edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr)
        if x_dst is None:
            x, x_dst = with_own(x, edges.first, edges.num_destinations)
        return self.convolve(x, edges, x_dst, aggregated)

    def convolve(self, x: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        """Return the destinations' output rows from the rows x of the sources: project them, then propagate."""
        return self.propagate(x if aggregated is not None else self.project(x), edges, x_dst, aggregated)

    def features_of(self, edges: InEdges, dtype: torch.dtype) -> Tensor:
        """Return the features of the edges in a dtype; raise ConfigError unless they are `edge_dim` wide."""
        features, width = edges.features, self.edge_dim or None
        reads = f"{type(self).__name__} reads edge features (edge_dim={width})"
        if features is None:
            raise ConfigError(f"{reads}, but the edges have none; pass edge_attr=, or load batches with edge_attr")
        if width not in (None, features.shape[1]):
            raise ConfigError(
                f"{reads}, but those of the edges are {features.shape[1]} wide; make the layer with "
                "edge_dim=edge_attr.shape[1]"
            )
        return features.to(dtype)

    @property
    def projects(self) -> bool:
        """Whether `project` is overridden, so that it changes the sources' rows before they are aggregated."""
        return type(self).project is not Conv.project

    def project(self, x: Tensor) -> Tensor:
        """Return, for each source, the row that `propagate` aggregates; by default, its row in x."""
        return x

    def propagate(self, z: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        """Return the destinations' output rows. Each aggregates its sources' rows in z, which `project` returned."""
        raise NotImplementedError


def ends_of(in_channels: int | Ends) -> Ends:
    ends = tuple(in_channels) if isinstance(in_channels, tuple | list) else (in_channels,) * 2
    if len(ends) != 2:
        raise ConfigError(f"in_channels is {in_channels!r:.80}; give one width, or those of sources and destinations")
    way_out = "layers have their width from the start: give x.shape[1]"
    source, destination = (as_int("in_channels", channels, 1, way_out) for channels in ends)
    return source, destination


def check_counts(**counts: int | None) -> None:
    """Raise ConfigError unless arguments of a layer, by name, are whole numbers of at least 1, or None."""
    for name, count in counts.items():
        if count is not None:
            as_int(name, count, 1, "give a whole number of at least 1")


def _plus_linear(out: Tensor, linear: nn.Linear, x: Tensor) -> Tensor:
    """Return out + linear(x), in the memory of `out`. torch adds a product without a bias to it in the same pass."""
    if linear.bias is not None or ops.has_fast_product(x, linear.weight):
        return out.add_(linear(x))
    added: Tensor = out.addmm_(x.to(out.dtype), linear.weight.t().to(out.dtype))  # the dtype that autocast chose
    return added


def plus_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    """Return out + bias in the dtype of `out`."""
    return out if bias is None else out + bias.to(out.dtype)


def refuse_weights(conv: Conv, edges: InEdges) -> None:
    if edges.weights is not None:
        raise ConfigError(
            f"{type(conv).__name__} takes no edge weights; use SAGEConv, GCNConv or GINConv, or leave them out (data "
            f"of sample_frontier with the name {EDGE_WEIGHT!r} are weights, too)"
        )


class SAGEConv(Conv):
    """GraphSAGE: `lin_l(aggregated sources) + lin_r(destination)`.

    With `edge_dim`, which PyG's layer does not have, `+ lin_edge(aggregated edge features)`: the layer is then a
    GraphSAGE whose sources' rows are joined with the features of the edge.

    >>> conv = SAGEConv(100, 256)
    >>> conv.load_state_dict(torch_geometric.nn.SAGEConv(100, 256).state_dict())
    """

    def __init__(
        self,
        in_channels: int | Ends,
        out_channels: int,
        aggr: Aggr = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        bias: bool = True,
        edge_dim: int | None = None,
    ) -> None:
        super().__init__()
        source, destination = ends_of(in_channels)
        check_counts(edge_dim=edge_dim)
        self.in_channels, self.edge_dim = source, edge_dim
        if aggr not in REDUCES:
            raise ConfigError(f"aggr is {aggr!r}; choose one of {list(REDUCES)}")
        self.reduce = REDUCES[aggr]
        self.normalize = normalize
        self.lin_l = Linear(source, out_channels, bias=bias)
        self.lin_r = Linear(destination, out_channels, bias=False) if root_weight else None
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, out_channels, bias=False)

    def propagate(self, z: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        assert self.reduce is not None
        out: Tensor = self.lin_l(
            ops.aggregate(z, edges, self.reduce, edges.weights) if aggregated is None else aggregated
        )
        if self.lin_edge is not None:
            features = self.features_of(edges, z.dtype)
            out = _plus_linear(out, self.lin_edge, aggregate_features(features, edges, self.reduce))
        if self.lin_r is not None:
            out = _plus_linear(out, self.lin_r, x_dst)
        return F.normalize(out, dim=-1) if self.normalize else out


class GCNConv(Conv):
    """Graph convolution, normalised by the square roots of the degrees of both ends, with a self-loop at every node.

    With `add_self_loops=False`, no node has a self-loop, and those of the graph are left out.
    With edge weights, which are at least 0, degrees are sums of weights; a self-loop weighs 1 unless the edges have it.
    If the batch has the degrees in the whole graph, the weight of a sampled edge is divided by the share of its
    destination's edges that were sampled. With uniform sampling, the expected result is then that of the whole graph.
    """

    needs_degrees = True

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True, add_self_loops: bool = True) -> None:
        super().__init__()
        self.add_self_loops = add_self_loops
        if isinstance(in_channels, tuple | list):
            raise ConfigError(f"in_channels is {in_channels!r:.80}; GCNConv has one width for both ends: give a number")
        self.in_channels, _ = ends_of(in_channels)
        self.lin = Linear(self.in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        nn.init.xavier_uniform_(self.lin.weight)

    def project(self, x: Tensor) -> Tensor:
        return self.lin(x)  # type: ignore[no-any-return]

    def propagate(self, z: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        looped, weights = _normalised(edges, self.add_self_loops)
        return plus_bias(ops.aggregate(z, looped, "sum", weights), self.bias)


def _normalised_like(edges: InEdges, adds_loops: bool) -> tuple[InEdges, Tensor]:
    looped, weights = looped_like(edges), edges.indptr if edges.weights is None else edges.weights
    return looped, weights.new_empty(looped.num_edges, dtype=torch.promote_types(weights.dtype, torch.float32))


@operator(_normalised_like)
def _normalised(edges: InEdges, adds_loops: bool) -> tuple[InEdges, Tensor]:
    """Return the edges with a self-loop at every node, and the weight of each edge: 0 of loops unless `adds_loops`."""
    looped, own = edges.with_loops, slice(edges.first, edges.first + edges.num_destinations)
    rows = None  # weights of the edges, then those of loops
    if edges.weights is None:
        degrees, drawn = edges.in_degrees_of_sources, looped.degrees - 1
        root = (degrees + int(adds_loops)).to(torch.float32).rsqrt()
    else:
        whole = edges.whole or edges
        others = (whole.first, whole.num_sources - whole.num_destinations - whole.first)
        found = [F.pad(each, others, value=n)[: edges.num_sources] for n, each in enumerate(weighted_degrees(whole))]
        drawn = found[0][own]
        degrees, loops = found if edges.source_degrees is None else _checked_sums(edges.source_degrees, found[1])
        root, rows = (degrees + loops * adds_loops).rsqrt(), torch.cat([edges.weights, loops[own]])
    root = root.masked_fill(root.isinf(), 0)
    scaled = root[own] * (degrees[own] / drawn.masked_fill(drawn == 0, 1))
    weights = root.index_select(0, looped.sources) * scaled.index_select(0, looped.destinations)
    weights[looped.indptr[1:] - 1] = root[own].square() * adds_loops  # the loops are not sampled
    assert looped.permutation is not None
    return looped, weights if rows is None else weights * rows.index_select(0, looped.permutation)


def weighted_degrees(edges: InEdges) -> tuple[Tensor, Tensor]:
    """Return, for each destination, the sum of its in-edges' weights without loops, and its loop's weight, else 1."""
    weights = edges.weights
    assert weights is not None
    if weights.dim() != 1 or (weights.device.type == "cpu" and bool((weights < 0).any())):
        raise DataError("GCNConv takes one weight of at least 0 per edge; use SAGEConv or GINConv for other weights")
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    places = torch.arange(edges.num_edges, device=weights.device).masked_fill(~edges.are_loops, -1)
    last = places.new_full((edges.num_destinations,), -1).scatter_reduce(0, edges.destinations, places, "amax")
    loops = torch.cat([weights, weights.new_ones(1)])[last]  # -1: none
    sums = ops.aggregate(weights.masked_fill(edges.are_loops, 0).unsqueeze(1), edges.own_rows, "sum").squeeze(1)
    return sums, loops


def _checked_sums(degrees: Tensor, loops: Tensor) -> Sequence[Tensor]:
    """Return sums of weights, and loops' weights if a second column has them, else `loops`."""
    if not degrees.is_floating_point():
        raise ConfigError(
            "in_degree has numbers of edges; with edge weights, GCNConv needs sums of weights: set batch.in_degree to "
            "float32 sums over the in-edges of each node in the whole graph, or load batches without degrees="
        )
    return degrees.unbind(1) if degrees.dim() == 2 else (degrees, loops)


class GINConv(Conv):
    """Graph isomorphism: a network applied to (1 + eps) destination + sum of sources."""

    reduce: ops.Reduce | None = "sum"

    def __init__(self, nn: nn.Module, eps: float = 0.0, train_eps: bool = False) -> None:
        super().__init__()
        self.nn = nn
        if train_eps:
            self.eps = torch.nn.Parameter(torch.tensor([float(eps)]))
        else:
            self.register_buffer("eps", torch.tensor([float(eps)]))

    def propagate(self, z: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        total = ops.aggregate(z, edges, "sum", edges.weights) if aggregated is None else aggregated
        return self.nn(torch.addcmul(total, x_dst, (1 + self.eps).to(x_dst.dtype)))  # type: ignore[no-any-return]


class GINEConv(GINConv):
    """Graph isomorphism with edge features: a network applied to (1 + eps) destination + sum of relu(source + feature).

    With `edge_dim`, a linear layer maps features to the width of x. `nn` must then begin with a linear layer, which
    tells that width.

    >>> GINEConv(torch.nn.Linear(100, 256), edge_dim=4)(x, edge_index, edge_attr=edge_attr)
    """

    reduce = None

    def __init__(self, nn: nn.Module, eps: float = 0.0, train_eps: bool = False, edge_dim: int | None = None) -> None:
        super().__init__(nn, eps, train_eps)
        check_counts(edge_dim=edge_dim)
        first = nn[0] if isinstance(nn, torch.nn.Sequential) else nn
        width: Any = getattr(first, "in_features", getattr(first, "in_channels", None))
        if edge_dim is not None and not isinstance(width, int):
            way_out = "GINEConv needs a linear layer there, or no edge_dim"
            raise ConfigError(f"nn begins with {type(first).__name__}; {way_out}")
        self.in_channels, self.edge_dim = width, edge_dim or width or 0
        self.lin = None if edge_dim is None else Linear(edge_dim, width)

    def propagate(self, z: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        refuse_weights(self, edges)
        term = ops.EdgeTerm(self.features_of(edges, z.dtype))
        if self.lin is not None:  # the bias is the weight of a column of ones
            weight = torch.cat([self.lin.weight, self.lin.bias.unsqueeze(1)], dim=1)
            term = ops.EdgeTerm(F.pad(term.rows, (0, 1), value=1), weight)
        return super().propagate(z, edges, x_dst, ops.aggregate_messages(z, edges, "sum", term, "relu"))
