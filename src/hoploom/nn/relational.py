"""Convolutions over several relations: one per relation, HGT, and R-GCN and SimpleHGN on edges with a type.

Matrices of relations are applied to destinations' rows, not to sources or edges, since a batch has fewer of them. A
softmax over all relations joins a softmax per relation, so edge lists are not merged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch_geometric.nn import HeteroDictLinear, HeteroLinear
from torch_geometric.nn.inits import glorot
from torch_geometric.nn.parameter_dict import ParameterDict

from hoploom import ops
from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.nn.attention import GATConv
from hoploom.nn.layers import (
    REDUCES,
    Conv,
    Ends,
    Linear,
    check_counts,
    ends_of,
    plus_bias,
    refuse_weights,
    with_own,
)
from hoploom.ops import InEdges
from hoploom.ops.compiled import group, occupied, occupied_by_any, operator
from hoploom.ops.deadline import on_host
from hoploom.schema import RelationName

Rows = Mapping[str, Tensor]  # by node type: [num_nodes, channels]


def module_name(name: str | RelationName) -> str:
    """Return the key of a node type or a relation in a ModuleDict, which allows no dots."""
    return ("__".join(name) if isinstance(name, tuple) else name).replace(".", "_")


class RelationLayer(nn.Module):
    """One convolution per relation, with the results summed per destination type."""

    def __init__(self, convs: Mapping[RelationName, Conv], roots: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.relations = tuple(convs)
        self.convs = nn.ModuleDict({module_name(key): conv for key, conv in convs.items()})
        self.roots = nn.ModuleDict({module_name(name): root for name, root in roots.items()})

    def conv(self, key: RelationName) -> Conv:
        return self.convs[module_name(key)]  # type: ignore[return-value]

    def project(self, key: RelationName, x: Tensor) -> Tensor:
        """Return the projected rows of a relation's sources, which `propagate` aggregates."""
        return self.conv(key).project(x)

    def propagate(
        self, z: Mapping[RelationName, Tensor], x_dst: Rows, edges: Mapping[RelationName, InEdges]
    ) -> dict[str, Tensor]:
        """Return the output rows of the destinations by node type, without types that no relation leads to."""
        return self._summed(x_dst, edges, lambda key: self.conv(key).propagate(z[key], edges[key], x_dst[key[2]]))

    def convolve(
        self,
        x: Rows,
        x_dst: Rows,
        edges: Mapping[RelationName, InEdges],
        aggregated: Mapping[RelationName, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return the output rows of `propagate` from the rows x of the sources, which may be projected or not."""
        given = aggregated or {}
        return self._summed(
            x_dst, edges, lambda key: self.conv(key).convolve(x[key[0]], edges[key], x_dst[key[2]], given.get(key))
        )

    def _summed(
        self, x_dst: Rows, edges: Mapping[RelationName, InEdges], rows_of: Callable[[RelationName], Tensor]
    ) -> dict[str, Tensor]:
        """Return the sums of the relations' output rows, and of the roots', by destination type."""
        out = {name: self.roots[module_name(name)](x) for name, x in x_dst.items() if module_name(name) in self.roots}
        for key in self.relations:
            if key in edges and key[2] in x_dst:
                rows = rows_of(key)
                out[key[2]] = out[key[2]] + rows if key[2] in out else rows
        return out


class HGTConv(Conv):
    """Heterogeneous graph transformer: one attention over all relations that lead to a node type.

    >>> conv = HGTConv(64, 64, data.metadata(), heads=4)
    >>> conv(data.x_dict, data.edge_index_dict)["paper"]
    """

    def __init__(
        self,
        in_channels: int | Mapping[str, int],
        out_channels: int,
        metadata: tuple[Sequence[str], Sequence[RelationName]],
        heads: int = 1,
    ) -> None:
        super().__init__()
        node_types, self.relations = metadata[0], tuple(metadata[1])
        check_counts(heads=heads, out_channels=out_channels)
        if out_channels % heads:
            raise ConfigError(f"out_channels={out_channels} does not divide by heads={heads}; give a multiple")
        unknown = {end for key in self.relations for end in (key[0], key[2])} - set(node_types)
        if unknown:
            raise ConfigError(f"metadata has relations of {sorted(unknown)}, which are none of its node types")
        given = in_channels if isinstance(in_channels, Mapping) else dict.fromkeys(node_types, in_channels)
        if missing := set(node_types) - set(given):
            raise ConfigError(f"in_channels has no width for {sorted(missing)}; give one for each node type")
        widths = {module_name(t): as_int("in_channels", given[t], 1, "give x_dict[t].shape[1]") for t in node_types}
        self.heads, self.out_channels, self.width = heads, out_channels, out_channels // heads
        self.destinations = {key[2] for key in self.relations}
        self.kqv_lin = HeteroDictLinear(widths, 3 * out_channels)
        self.out_lin = HeteroDictLinear(out_channels, out_channels, types=list(widths))
        self.k_rel, self.v_rel = (
            HeteroLinear(self.width, self.width, heads * len(self.relations), bias=False) for _ in range(2)
        )
        self.skip = ParameterDict({name: nn.Parameter(torch.ones(1)) for name in widths})
        self.p_rel = ParameterDict({"__".join(key): nn.Parameter(torch.ones(1, heads)) for key in self.relations})

    def forward(  # type: ignore[override]
        self, x_dict: Rows, edge_index_dict: Mapping[RelationName, InEdges | Tensor]
    ) -> dict[str, Tensor]:
        """Return the rows of the destinations, by node type, of all types that some relation of the metadata leads to.

        The edges of a relation are an edge_index, or the InEdges of a layer's view.
        """
        edges = {}
        for key, given in edge_index_dict.items():
            if key not in self.relations:
                raise ConfigError(f"edge_index_dict has {key}, which is not in the metadata: {list(self.relations)}")
            if missing := {key[0], key[2]} - set(x_dict):
                raise ConfigError(f"x_dict has no rows of {sorted(missing)}, which {key} reads; add them")
            for name in {key[0], key[2]}:
                width = int(self.kqv_lin.lins[module_name(name)].in_channels)
                if x_dict[name].shape[-1] != width:
                    raise ConfigError(f"x_dict has rows of {x_dict[name].shape[-1]} for {name!r}, not of {width}")
            num_ends = x_dict[key[0]].shape[0], x_dict[key[2]].shape[0]
            edges[key] = group(given, *num_ends) if isinstance(given, Tensor) else given
        counts = {name: x.shape[0] for name, x in x_dict.items()} | {
            key[2]: e.num_destinations for key, e in edges.items()
        }
        x = dict(x_dict)
        x_dst: dict[str, Tensor] = {}
        for name in x_dict:
            if name in self.destinations:
                x[name], x_dst[name] = with_own(x_dict[name], 0, counts[name])
        return self.convolve({key[0]: x[key[0]] for key in edges}, x_dst, edges)

    def conv(self, key: RelationName) -> Conv:
        """Return the layer of a relation: one layer has all."""
        return self

    def convolve(  # type: ignore[override]
        self,
        x: Rows,
        x_dst: Rows,
        edges: Mapping[RelationName, InEdges],
        aggregated: object = None,
    ) -> dict[str, Tensor]:
        """Return the rows of the destinations; relations of one source type share its projected rows."""
        relations = {key[0]: key for key in self.relations if key[0] in x}
        made = {name: self.project(key, x[name]) for name, key in relations.items()}
        return self.propagate({key: made[key[0]] for key in self.relations if key[0] in made}, x_dst, edges)

    def project(self, key: RelationName, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the keys and values of a relation's sources: [num_sources, 2 * out_channels]."""
        of_keys, _, of_values = self._kqv(key[0])
        return ops.linear(x, *(torch.cat(both) for both in zip(of_keys, of_values, strict=True)))

    def _kqv(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """Return the weight and bias that make a node type's keys, those of its queries, and those of its values."""
        linear = self.kqv_lin.lins[module_name(name)]
        return list(zip(linear.weight.split(self.out_channels), linear.bias.split(self.out_channels), strict=True))

    def propagate(  # type: ignore[override]
        self,
        z: Mapping[RelationName, Tensor],
        x_dst: Rows,
        edges: Mapping[RelationName, InEdges],
    ) -> dict[str, Tensor]:
        """Return the rows of the destinations; `z` are the sources' keys and values, which `project` returned."""
        out, halves = {}, {id(rows): torch.split(rows, self.out_channels, dim=1) for rows in z.values()}
        for name, x in x_dst.items():
            if name not in self.destinations:
                continue
            lists = {key: edges[key] for key in self.relations if key[2] == name and key in edges}
            places = occupied_by_any(list(lists.values()), x)
            if places is not None:
                lists = {key: one.lists_of(places) for key, one in lists.items()}
            asking = x if places is None else x.index_select(0, places)
            query = ops.linear(asking, *self._kqv(name)[1]).view(-1, self.heads, self.width)
            each = [self._attended(key, halves[id(z[key])], query, one) for key, one in lists.items()]
            out[name] = self._finished(name, F.gelu(_joined(each, query)), x, places)
        return out

    def _finished(self, name: str, sums: Tensor, x: Tensor, places: Tensor | None) -> Tensor:
        """Return a type's output rows from the sums of attention, which are zeros except at `places`, if given."""
        last = self.out_lin.lins[module_name(name)]
        rows = ops.linear(sums, last.weight, last.bias if places is None else None)
        x = x.to(rows.dtype)  # in mixed precision, rows may be narrower
        share = self.skip[module_name(name)].sigmoid().to(rows.dtype) if self.out_channels == x.shape[1] else None
        if places is None:
            return rows if share is None else torch.lerp(x, rows, share)
        others: Tensor = last.bias.to(rows.dtype).expand(len(x), -1)
        if share is None:
            return others.index_add(0, places, rows)
        return torch.lerp(x, others, share).index_add_(0, places, rows * share)

    def _attended(self, key: RelationName, of_sources: Sequence[Tensor], query: Tensor, edges: InEdges) -> "_Attended":
        """Return the sums over one relation, of the destinations that have its edges.

        A matrix on all keys is the transposed matrix on the query, and one on all values is one on their sum.
        """
        keys, values = of_sources
        number, heads = self.relations.index(key), (self.heads, -1, self.width, self.width)
        edges, places = occupied(edges)
        query = query if len(places) == len(query) else query.index_select(0, places)
        asked = torch.einsum("nhd,hed->nhe", query, self.k_rel.weight.view(heads)[:, number])
        asked = asked * (self.p_rel["__".join(key)] / self.width**0.5).unsqueeze(2)
        out, totals = ops.attend(values, edges, ops.dot_ends(keys, asked.flatten(1), edges, self.heads))
        sums = out.view(-1, self.heads, self.width)
        rows = torch.einsum("nhe,hed->nhd", sums, self.v_rel.weight.view(heads)[:, number]).flatten(1)
        return _Attended(places, rows, totals)


class _Attended(NamedTuple):
    """The attention of some destinations over one relation."""

    places: Tensor  # [n] int64: the destinations
    rows: Tensor  # [n, heads * width]
    totals: Tensor  # [n, heads]: logarithms of the softmax's totals


def hgt_without_unused(
    channels: Mapping[str, int], relations: Sequence[RelationName], out_channels: int, heads: int
) -> HGTConv:
    """Return an HGTConv without the parameters that never get a gradient; DDP would wait for them."""
    ends = {end for key in relations for end in (key[0], key[2])}
    widths = {name: width for name, width in channels.items() if name in ends}
    layer = HGTConv(widths, out_channels, (list(widths), relations), heads)
    for name, width in widths.items():
        if name not in layer.destinations:
            del layer.out_lin.lins[module_name(name)]
        if name not in layer.destinations or width != out_channels:
            del layer.skip[module_name(name)]
    return layer


def _joined(each: Sequence[_Attended], query: Tensor) -> Tensor:
    """Return the sums of a softmax over several relations, from those over each: [num_destinations, heads * width].

    They are the sums of a softmax over the relations of a destination, whose scores are the totals.
    """
    if not each:
        return torch.zeros_like(query).flatten(1)
    places, rows, totals = (torch.cat(parts) for parts in zip(*each, strict=True))
    pairs = group(torch.stack([torch.arange(len(places), device=places.device), places]), len(places), len(query))
    # A destination without any edges has -inf only: the least finite number makes equal shares of zeros, not NaN.
    pairs = pairs.with_features(totals.clamp(min=torch.finfo(totals.dtype).min))
    return ops.aggregate(rows, pairs, "softmax", pairs.features)


class RGCNConv(Conv):
    """Relational graph convolution: a matrix per edge type on the aggregate of the sources along edges of this type.

    Types share `num_bases` matrices in proportions of their own, or have `num_blocks` blocks on their diagonal.

    >>> conv = RGCNConv(16, 32, num_relations=90, num_bases=30)
    >>> conv(data.x, data.edge_index, data.edge_type)
    """

    def __init__(
        self,
        in_channels: int | Ends,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: Literal["mean", "add", "sum", "max"] = "mean",
        root_weight: bool = True,
        is_sorted: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        source, destination = ends_of(in_channels)
        check_counts(num_relations=num_relations, num_bases=num_bases, num_blocks=num_blocks)
        if num_bases is not None and num_blocks is not None:
            raise ConfigError(f"num_bases={num_bases} and num_blocks={num_blocks} exclude each other; give one of them")
        if num_blocks and (source % num_blocks or out_channels % num_blocks):
            raise ConfigError(
                f"in_channels={source} and out_channels={out_channels} do not both divide by num_blocks={num_blocks}"
            )
        if aggr not in REDUCES:
            raise ConfigError(f"aggr is {aggr!r}; choose one of {list(REDUCES)}")
        self.in_channels, self.num_relations, self.num_blocks = source, num_relations, num_blocks
        self.reduce_of_relation, self.edge_dim = REDUCES[aggr], 1  # the only feature is the type
        shape = [num_bases or num_relations, source, out_channels]
        if num_blocks:
            shape = [num_relations, num_blocks, source // num_blocks, out_channels // num_blocks]
        self.weight = nn.Parameter(torch.empty(shape))
        self.comp = nn.Parameter(torch.empty(num_relations, num_bases)) if num_bases else None
        self.root = nn.Parameter(torch.empty(destination, out_channels)) if root_weight else None
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        for parameter in (self.weight, self.comp, self.root):
            glorot(parameter)

    def forward(  # type: ignore[override]
        self, x: Tensor | tuple[Tensor, Tensor] | None, edges: InEdges | Tensor, edge_type: Tensor | None = None
    ) -> Tensor:
        """Return the destinations' rows [num_destinations, out_channels] from the sources x [num_sources, in_channels].

        `edge_type` [num_edges] are numbers below num_relations in the order of edge_index, by default the features of
        `edges`. Nodes without features have an x of integers below in_channels [num_sources], or x=None for all.
        """
        if x is None:
            x = torch.arange(self.in_channels or 0, device=self.weight.device)
        return super().forward(x, edges, edge_attr=edge_type)

    def propagate(self, z: Tensor, edges: InEdges, x_dst: Tensor, aggregated: Tensor | None = None) -> Tensor:
        refuse_weights(self, edges)
        out = _sums_by_relation(z, edges, self.weight, self.comp, self.reduce_of_relation)
        if self.root is not None:
            out = out + (x_dst @ self.root if z.is_floating_point() else F.embedding(x_dst, self.root))
        return plus_bias(out, self.bias)


def _sums_like(z: Tensor, edges: InEdges, weight: Tensor, *others: object) -> Tensor:
    width = weight.shape[-1] * (weight.shape[1] if weight.dim() == 4 else 1)
    return (z if z.is_floating_point() else weight).new_empty(edges.num_destinations, width)


@operator(_sums_like)
def _sums_by_relation(z: Tensor, edges: InEdges, weight: Tensor, comp: Tensor | None, reduce: ops.Reduce) -> Tensor:
    """Return the sums of an RGCNConv's products: of the aggregate along edges of each type, and the type's matrix."""
    pairs = _pairs_of(edges, len(weight if comp is None else comp))
    if z.is_floating_point():
        return _multiplied(ops.aggregate(z, pairs.lists, reduce), pairs, weight, comp)
    if weight.dim() == 4:
        raise ConfigError(f"num_blocks={weight.shape[1]} splits features, but x has integers; take num_bases")
    matrices = _matrices(weight, comp)
    rows = matrices.flatten(0, 1)  # a row for each relation and integer
    rows = ops.aggregate(rows, _shifted(pairs, z, matrices.shape[1], rows), reduce)
    return ops.aggregate(rows, pairs.ends, "sum")


def _matrices(weight: Tensor, comp: Tensor | None) -> Tensor:
    """Return the matrices of all relations: [num_relations, in_channels, out_channels]."""
    return weight if comp is None else (comp @ weight.flatten(1)).view(-1, *weight.shape[1:])


def _multiplied(rows: Tensor, pairs: "_Pairs", weight: Tensor, comp: Tensor | None) -> Tensor:
    """Return the destinations' sums of the product of each pair's row and its relation's matrix."""
    num_bases = 0 if comp is None else weight.shape[0]
    with_bases = num_bases * pairs.ends.num_destinations  # number of products of a row and a matrix
    if comp is not None and with_bases < num_bases * comp.shape[0] + rows.shape[0]:
        shares = F.embedding(pairs.relations[pairs.ends.sources], comp).unbind(1)
        sums = [ops.aggregate(rows, pairs.ends, "sum", share) for share in shares]
        return torch.cat(sums, dim=1) @ weight.flatten(0, 1).to(rows.dtype)
    parts, matrices = torch.split(rows, pairs.counts), _matrices(weight, comp).to(rows.dtype)
    if weight.dim() == 4:
        blocks = [part.view(len(part), *of_blocks.shape[:2]) for part, of_blocks in zip(parts, matrices, strict=True)]
        found = [torch.einsum("nbc,bcd->nbd", *both).flatten(1) for both in zip(blocks, matrices, strict=True)]
    else:
        found = [part @ matrix for part, matrix in zip(parts, matrices, strict=True)]
    return ops.aggregate(torch.cat(found), pairs.ends, "sum")


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a relation and a destination that have edges, by relation; each has a list of sources."""

    lists: InEdges  # from sources to pairs
    ends: InEdges  # from pairs to destinations
    counts: list[int]  # number of pairs by relation

    @property
    def relations(self) -> Tensor:
        """The relation of each pair: [num_pairs] int64."""
        counts = torch.tensor(self.counts, device=self.lists.indptr.device)
        return torch.arange(len(self.counts), device=counts.device).repeat_interleave(counts)


def _types_of(edges: InEdges, num_relations: int) -> Tensor:
    """Return the types of edges, which are their features: [num_edges] int64. On a GPU, the host waits for them."""
    if edges.features is None or edges.features.shape[1] != 1:
        raise ConfigError("the edges have no types; give edge_type, a number for each edge")
    num_edges = int(on_host(edges.indptr[-1], "counted the edges"))  # later reads are of little more work
    given = edges.features[:num_edges, 0]
    types = given.to(torch.int64)
    if not on_host((types == given).all(), "read the types of edges"):
        raise ConfigError("edge_type has numbers with a fraction; give whole numbers")
    low, high = map(int, torch.aminmax(types)) if types.numel() else (0, 0)
    if low < 0 or high >= num_relations:
        known = f"0 to num_relations - 1 = {num_relations - 1}"
        raise ConfigError(f"edge_type has numbers from {low} to {high}; give {known}")
    return types


@operator(lambda edges, _: edges.indptr.new_empty(edges.num_edges))
def _types_of_all(edges: InEdges, num_relations: int) -> Tensor:
    """Return the types of edges, and 0 for the entries after the last edge."""
    types = _types_of(edges, num_relations)
    return F.pad(types, (0, edges.num_edges - types.numel()))


def _pairs_of(edges: InEdges, num_relations: int) -> _Pairs:
    """Return the pairs of edges whose features are their relations. On a GPU, the host waits for their number."""
    types = _types_of(edges, num_relations)
    num_edges = types.numel()
    by_relation = InEdges.of(
        torch.stack([torch.arange(num_edges, device=types.device), types]), num_edges, num_relations
    )
    order = by_relation.sources.to(torch.int64)
    destinations = edges.destinations[:num_edges].index_select(0, order)
    begins = torch.ones(num_edges, dtype=torch.bool, device=types.device)
    begins[1:] = destinations[1:] != destinations[:-1]
    begins[by_relation.indptr[:-1][by_relation.degrees > 0]] = True
    first = begins.nonzero().view(-1)
    indptr = torch.cat([first, by_relation.indptr[-1:]])
    lists = InEdges(indptr, edges.sources[:num_edges].index_select(0, order), edges.num_sources)
    pairs = torch.arange(first.numel(), device=first.device)
    ends = InEdges.of(torch.stack([pairs, destinations[first]]), first.numel(), edges.num_destinations)
    return _Pairs(lists, ends, torch.searchsorted(first, by_relation.indptr).diff().tolist())


def _shifted(pairs: _Pairs, numbers: Tensor, count: int, rows: Tensor) -> InEdges:
    """Return the lists of the pairs with row relation * count + number instead of each source with this number."""
    lists = pairs.lists
    relations = pairs.relations.repeat_interleave(lists.degrees)
    low, high = map(int, torch.aminmax(numbers)) if numbers.numel() else (0, 0)
    if low < 0 or high >= count:
        raise ConfigError(f"x has integers from {low} to {high}; give 0 to in_channels - 1 = {count - 1}")
    sources = relations * count + numbers.index_select(0, lists.sources)
    return replace(lists, sources=sources, num_sources=rows.shape[0])


class SimpleHGNConv(GATConv):
    """SimpleHGN's graph attention, where a score also depends on a learned vector of the edge's type.

    >>> conv = SimpleHGNConv(64, 16, num_relations=8, heads=4)
    >>> conv(x, edge_index, edge_type)
    """

    def __init__(
        self,
        in_channels: int | Ends,
        out_channels: int,
        num_relations: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        edge_dim: int = 64,
        bias: bool = True,
        residual: bool = True,
    ) -> None:
        options = {"add_self_loops": False, "bias": bias, "residual": residual}
        super().__init__(in_channels, out_channels, heads, concat, negative_slope, dropout, **options)
        self.num_relations, self.edge_dim = num_relations, 1  # the only feature is the type
        self.edge_emb = nn.Parameter(torch.empty(num_relations, edge_dim))
        self.lin_edge = Linear(edge_dim, heads * edge_dim, bias=False)
        self.att_edge = nn.Parameter(torch.empty(1, heads, edge_dim))
        for parameter in (self.edge_emb, self.lin_edge.weight, self.att_edge):
            glorot(parameter)

    def forward(  # type: ignore[override]
        self, x: Tensor | tuple[Tensor, Tensor], edges: InEdges | Tensor, edge_type: Tensor | None = None
    ) -> Tensor:
        """Return the destinations' rows; `edge_type` has numbers below num_relations, in the order of edge_index."""
        return Conv.forward(self, x, edges, edge_attr=edge_type)

    def _of_edges(self, features: Tensor, edges: InEdges) -> Tensor:
        by_type = ops.linear(self.edge_emb, self._scorer(self.lin_edge.weight, self.att_edge))
        return F.embedding(_types_of_all(edges, self.num_relations), by_type)
