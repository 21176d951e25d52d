"""Models for homogeneous and heterogeneous graphs: stacks of layers, with one convolution per relation."""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.resolver import activation_resolver

from hoploom import ops
from hoploom.config.values import as_int, as_number
from hoploom.errors import ConfigError
from hoploom.nn.attention import GATConv, GATv2Conv
from hoploom.nn.batch_norm import NORMS, BatchNorms, Shares, shares_of
from hoploom.nn.edge_fields import edge_fields
from hoploom.nn.layers import (
    Aggr,
    Conv,
    Ends,
    GCNConv,
    GINConv,
    GINEConv,
    LayerView,
    Linear,
    ReadEdges,
    SAGEConv,
    by_relation,
    by_type,
    eager,
    views_of,
    with_own,
)
from hoploom.nn.pna import PNAConv
from hoploom.nn.relational import RelationLayer, Rows, hgt_without_unused, module_name
from hoploom.ops import InEdges
from hoploom.schema import (
    FEATURES,
    HOMOGENEOUS_TYPE,
    NodeType,
    RelationName,
    Schema,
    TypeKey,
)

Act = str | Callable[[Tensor], Tensor] | None  # an activation by name or as a function; None: no activation
Norm = Literal["layer", "batch", "graph"] | bool | None
Jumping = Literal["last", "cat", "max"]  # how jumping knowledge joins the layers' rows
OTHER_ACT = "name one of torch.nn's activations, or give a module or None"


@dataclass(frozen=True)
class Shape:
    """The size of a model, and the operations between its layers."""

    hidden: int
    num_layers: int
    out: int
    dropout: float = 0.0
    heads: int = 1  # attention only
    norm: Norm = False  # of each convolution's input: True is a layer norm, as is "layer"
    residual: bool = False  # layers add to their input; a linear layer at both ends
    aggr: Aggr = "mean"  # of "sage", "rsage" and "rgcn"; "sum" for edge weights that sum to one
    act: Act = "relu"  # between layers, by PyG's names; residual models use GELU
    jk: Jumping | None = None  # combine all layers' rows before a last linear layer
    edges: str | Sequence[str] = ()  # the edge fields that layers read as features, such as "edge_attr"
    weights: str | None = None  # the edge field by which sums and means are weighted
    categories: Mapping[str, int] = field(default_factory=dict, hash=False)  # numbers of values of integer edge fields

    def __post_init__(self) -> None:
        names = [self.edges] if isinstance(self.edges, str) else self.edges
        are_names = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
        if not are_names or len(set(names)) < len(names):
            raise ConfigError(f"edges is {self.edges!r:.80}; name one field of edges, or several, each once")
        if not isinstance(self.weights, str | None):
            raise ConfigError(f"weights is {self.weights!r:.80}; name one field of edges")
        object.__setattr__(self, "edges", tuple(names))
        for name, count in self.categories.items():
            as_int(f"categories[{name!r}]", count, 1, "give the number of values, 1 + the largest")
            if name not in names:
                raise ConfigError(f"categories has {name!r}, and edges={list(names)} has not; name the field in both")
        for name in ("hidden", "num_layers", "out", "heads"):
            as_int(name, getattr(self, name), 1, "give a whole number of at least 1")
        if as_number("dropout", self.dropout, "give a share from 0 to 1") > 1:
            raise ConfigError(f"dropout is {self.dropout}; give a share from 0 to 1")
        if self.jk not in (None, *get_args(Jumping)):
            raise ConfigError(f"jk is {self.jk!r}; give 'last', 'cat' or 'max', or take PyG's model for another")
        if not isinstance(self.norm, bool | None) and self.norm not in ("layer", *NORMS):
            way_out = "before each convolution, or take PyG's model for another"
            raise ConfigError(f"norm is {self.norm!r}; give 'layer' (or True), 'batch' or 'graph', {way_out}")
        if self.residual and (self.jk is not None or self.act != "relu"):
            given = f"act={self.act!r}" if self.jk is None else f"jk={self.jk!r}"
            raise ConfigError(
                f"{given} does not go with residual=True, which adds layers up after GELU; drop one of them"
            )

    @property
    def has_output(self) -> bool:
        """Whether a linear layer follows the last convolution."""
        return self.residual or self.jk is not None


class _Applied(nn.Module):
    """An activation function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def activation(act: Act) -> nn.Module:
    """Return an activation as a module, from PyG's name for it, a module or a function; None gives the identity."""
    if act is None:
        return nn.Identity()
    if act == "relu":
        return nn.ReLU(inplace=True)
    try:
        found = activation_resolver(act)
        found = found() if isinstance(found, type) else found
    except (ValueError, TypeError) as error:  # unknown, or one that needs arguments
        raise ConfigError(f"act is {act!r}; {OTHER_ACT}") from error
    if not callable(found):
        raise ConfigError(f"act is {act!r}; {OTHER_ACT}")
    return found if isinstance(found, nn.Module) else _Applied(found)


def check_activation(act: Act, module: nn.Module, width: int) -> None:
    """Raise ConfigError unless the activation keeps the width of rows."""
    tried = copy.deepcopy(module).eval()  # a copy: a call may change its state
    rows = torch.zeros(2, width)
    try:
        with torch.no_grad():
            out = tried(rows.to(next(tried.parameters(), rows).device))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"act is {act!r}, which fails on rows of {width}: {error}; {OTHER_ACT}") from error
    if not isinstance(out, Tensor) or out.shape != rows.shape:
        raise ConfigError(f"act is {act!r}, which changes the shape of rows of {width}; {OTHER_ACT}")


def _sage(ends: Ends, out: int, shape: Shape, is_last: bool, edge_dim: int | None, **options: bool) -> Conv:
    return SAGEConv(ends, out, shape.aggr, edge_dim=edge_dim, **options)


def _gin(ends: Ends, out: int, shape: Shape, is_last: bool, edge_dim: int | None) -> Conv:
    if ends[0] != ends[1]:
        raise ConfigError(f"GIN adds sources of {ends[0]} channels to destinations of {ends[1]}; use residual=True")
    between = nn.ReLU() if shape.act == "relu" else activation(shape.act)
    network = nn.Sequential(Linear(ends[0], out), between, Linear(out, out))
    return GINConv(network) if edge_dim is None else GINEConv(network, edge_dim=edge_dim)


def _attention(
    make: Callable[..., Conv], ends: int | Ends, out: int, shape: Shape, is_last: bool, edge_dim: int | None
) -> Conv:
    """Return a layer that concatenates its heads or, if it is the output layer, averages them."""
    if is_last and not shape.has_output:
        return make(ends, out, shape.heads, concat=False, edge_dim=edge_dim)
    if out % shape.heads:
        raise ConfigError(f"hidden={out} does not divide by heads={shape.heads}; give a multiple")
    return make(ends, out // shape.heads, shape.heads, edge_dim=edge_dim)


def _pna(ends: Ends, out: int, shape: Shape, is_last: bool, edge_dim: int | None) -> Conv:
    if ends[0] != ends[1]:
        raise ConfigError(f"PNA has one width for sources ({ends[0]}) and destinations ({ends[1]}); use residual=True")
    scalers: list[Any] = ["identity", "amplification", "attenuation"]
    return PNAConv(ends[0], out, ["mean", "min", "max", "std"], scalers, torch.tensor([0, 1]), edge_dim)


def _hgt(widths: Mapping[str, int], relations: Sequence[RelationName], out: int, shape: Shape, is_last: bool) -> Conv:
    is_output = is_last and not shape.has_output
    return hgt_without_unused(widths, relations, out, math.gcd(out, shape.heads) if is_output else shape.heads)


@dataclass(frozen=True)
class Kind:
    """A family of models, such as "sage": how its convolutions are made, and which options it supports."""

    # (relation's channels, output channels, shape, is last layer, width of edge features): a convolution
    make: Callable[..., Any]
    is_joint: bool = False  # `make` takes the channels of all types, and all relations: one layer has them all
    has_root: bool = False  # has a linear layer for the destination
    any_relations: bool = True  # works between different node types
    any_aggr: bool = False  # uses the `aggr` of its shape
    has_heads: bool = False  # of attention
    reads: tuple[str, ...] = ("features", "weights")  # of edges
    needs_features: bool = False


ATTENTION: dict[str, Any] = {"has_heads": True, "reads": ("features",)}
KINDS: dict[str, Kind] = {
    "sage": Kind(_sage, any_aggr=True),
    "gcn": Kind(lambda ends, out, *_: GCNConv(ends[0], out), any_relations=False, reads=("weights",)),
    "gat": Kind(lambda ends, *rest: _attention(GATConv, ends[0], *rest), any_relations=False, **ATTENTION),
    "gatv2": Kind(lambda ends, *rest: _attention(GATv2Conv, ends[0], *rest), any_relations=False, **ATTENTION),
    "gin": Kind(_gin, reads=("weights",)),
    "gine": Kind(_gin, reads=("features",), needs_features=True),
    "rsage": Kind(_sage, any_aggr=True),
    "rgcn": Kind(partial(_sage, root_weight=False, bias=False), has_root=True, any_aggr=True),
    "rgat": Kind(partial(_attention, partial(GATConv, add_self_loops=False)), has_root=True, **ATTENTION),
    "rgatv2": Kind(partial(_attention, partial(GATv2Conv, add_self_loops=False)), has_root=True, **ATTENTION),
    "pna": Kind(_pna, reads=("features",)),
    "hgt": Kind(_hgt, is_joint=True, has_heads=True, reads=()),
}


# --- models -----------------------------------------------------------------------------------

WIDTHS = "make it with in_channels=x.shape[1], or as GNN(kind, store.schema, ...)"


class GNN(nn.Module):
    """A model for any graph, of one type or several. It takes blocks, sampled subgraphs and whole graphs.

    All node types that it reads have features `x`, if need be learned ones (`hoploom.Embedding`). With `out_types`, the
    model has only the parameters that outputs of these node types need. It returns one row per seed (for a whole graph,
    one per node): a tensor for a homogeneous graph, else a mapping by node type.

    >>> model = GNN("sage", store.schema, Shape(hidden=256, num_layers=3, out=47))
    >>> model(batch)[: batch.batch_size]
    """

    def __init__(self, kind: str, schema: Schema, shape: Shape, out_types: Collection[str] | None = None) -> None:
        super().__init__()
        if not isinstance(schema, Schema):
            raise ConfigError(f"schema is a {type(schema).__name__}; give store.schema")
        if kind not in KINDS:
            raise ConfigError(f"model is {kind!r}; choose one of {list(KINDS)}")
        if len(schema.relations) > 1 and not KINDS[kind].any_relations:
            raise ConfigError(f"model {kind!r} is for one node type and relation; use 'r{kind}'")
        if shape.aggr != "mean" and not KINDS[kind].any_aggr:
            raise ConfigError(f"model {kind!r} has an aggregation of its own; leave aggr={shape.aggr!r} out")
        if shape.heads != 1 and not KINDS[kind].has_heads:
            raise ConfigError(f"model {kind!r} has no attention heads; leave heads={shape.heads} out")
        _check_reads(kind, shape)
        self.schema, self.shape = schema, shape
        self.types = types_by_layer(schema, shape, out_types)
        hops = [(set(before), set(after)) for before, after in pairwise(self.types)]
        used = [r for r in schema.relations if any(r.source in before and r.destination in to for before, to in hops)]
        made = edge_fields(used, ReadEdges(shape.edges, shape.weights), shape.categories)
        self.edge_fields = nn.ModuleDict({module_name(key): own for key, own in made.items()})
        for relation in used if KINDS[kind].needs_features else ():
            if self.edge_dim(relation.key) is None:
                way_out = f"name an edge field in edges=, or take 'gin'; the fields are {sorted(relation.fields)}"
                reads = f"model {kind!r} reads edge features, and no field of edges={list(shape.edges)}"
                raise ConfigError(f"{reads} is there of {relation.key}; {way_out}")
        channels = {name: width_of(schema.node_type(name), shape.hidden) for name in self.types[0]}
        self._widths = channels
        self.inputs = nn.ModuleDict()
        if shape.residual:
            self.inputs.update({module_name(t): Linear(count, shape.hidden) for t, count in channels.items()})
            channels = dict.fromkeys(channels, shape.hidden)
        self.layers = nn.ModuleList()
        self.norms = nn.ModuleList()
        for depth in range(shape.num_layers):
            normed = channels if shape.norm else {}
            layer_norms = {module_name(name): nn.LayerNorm(count) for name, count in normed.items()}
            self.norms.append(
                BatchNorms(normed, NORMS[shape.norm]) if shape.norm in NORMS else nn.ModuleDict(layer_norms)
            )
            channels = self._add_layer(KINDS[kind], channels, depth)
        self.act = activation(shape.act)
        check_activation(shape.act, self.act, shape.hidden)
        joined = shape.hidden * (shape.num_layers if shape.jk == "cat" else 1)
        self.output = Linear(joined, shape.out) if shape.has_output else None

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def out_channels(self) -> int:
        """Width of the output rows."""
        return self.shape.out

    def _add_layer(self, kind: Kind, channels: Mapping[str, int], depth: int) -> dict[str, int]:
        is_last, kept = depth == self.num_layers - 1, self.types[depth + 1]
        out = self.shape.out if is_last and not self.shape.has_output else self.shape.hidden
        keys = [r.key for r in self.schema.relations if r.source in channels and r.destination in kept]
        if kind.is_joint:
            self.layers.append(kind.make(channels, keys, out, self.shape, is_last))
            return dict.fromkeys(kept, out)
        convs = {
            key: kind.make((channels[key[0]], channels[key[2]]), out, self.shape, is_last, self.edge_dim(key))
            for key in keys
        }
        for key in keys:
            if isinstance(convs[key], PNAConv):
                num_nodes = max(1, self.schema.node_type(key[2]).num_nodes)
                convs[key].set_average_degree(self.schema.relation(key).num_edges / num_nodes)
        reached = dict.fromkeys(
            key[2] for key in keys
        )  # in the order of the schema, which the order of parameters follows
        roots = {name: Linear(channels[name], out) for name in reached} if kind.has_root else {}
        self.layers.append(RelationLayer(convs, roots))
        return dict.fromkeys(kept, out)

    def read_of(self, key: RelationName) -> ReadEdges:
        """Return the names of the fields of a relation's edges that the model reads."""
        name = module_name(key)
        return self.edge_fields[name].read if name in self.edge_fields else ReadEdges()  # type: ignore[return-value]

    def edge_dim(self, key: RelationName) -> int | None:
        """Return the width of the features that layers get of a relation's edges; None: they get none."""
        name = module_name(key)
        return self.edge_fields[name].width if name in self.edge_fields else None  # type: ignore[return-value]

    def encode(self, edges: Mapping[RelationName, InEdges]) -> dict[RelationName, InEdges]:
        """Return the edges with the features that layers get, made from the fields that the model reads."""
        dtype, made = next(self.parameters()).dtype, dict(edges)
        for key, own in edges.items() if self.edge_fields else ():
            if (name := module_name(key)) in self.edge_fields:
                made[key] = self.edge_fields[name](own, dtype)
        return made

    @property
    def fields(self) -> dict[TypeKey, list[str]]:
        """The value for the loader's `fields=`: the names of the fields that the model reads. Add those of labels."""
        fields: dict[TypeKey, list[str]] = {name: [FEATURES] for name in self.types[0]}
        return fields | {r.key: names for r in self.schema.relations if (names := self.read_of(r.key).names)}

    @property
    def first_reduce(self) -> ops.Reduce | None:
        """The value for the loader's `aggregate=`: the sum or mean that layer one takes of raw features; else None."""
        convs = [self.stage(0).conv(key) for key in self.stage(0).relations]
        reduces = {None if conv.projects or conv.reduce == "max" else conv.reduce for conv in convs}
        bare = not (self.shape.norm or self.shape.residual or self.edge_fields)
        return reduces.pop() if bare and len(reduces) == 1 else None

    @property
    def needs_degrees(self) -> bool:
        """The value for the loader's `degrees=`: whether the model uses in-degrees in the whole graph."""
        return self.shape.weights is None and self._is_gcn

    @property
    def _is_gcn(self) -> bool:
        stages = map(self.stage, range(self.num_layers))
        return any(stage.conv(key).needs_degrees for stage in stages for key in stage.relations)

    def forward(self, batch: Data | HeteroData) -> Any:
        """Return one row per seed (for a whole graph, per node): [n, out], or a dict of such tensors by node type."""
        views, given, aggregated = self._read(batch)
        x, shares = self.prepare(given), self._shares(batch, views)
        for depth, view in enumerate(views):
            stage = self.stage(depth)
            entered, own = _split(self.enter(depth, x, shares[depth]), view.num_destinations)
            rows = stage.convolve(entered, own, view.edges, aggregated)
            x = self.close(depth, rows, _heads_of(x, view.num_destinations))
            aggregated = None
        out = self.finish(x)
        return out[HOMOGENEOUS_TYPE] if self.schema.homogeneous else out

    @eager
    def _read(self, batch: Data | HeteroData) -> tuple[list[LayerView], Rows, Mapping[RelationName, Tensor] | None]:
        """Return the view of each layer, the features, and the rows that the loader has aggregated."""
        if self.needs_degrees and "blocks" in batch and "in_degree" not in batch:
            raise ConfigError("GCN on blocks needs the nodes' in-degrees; give the loader degrees=True")
        if "blocks" in batch and self.shape.weights is not None and self._is_gcn:
            raise ConfigError("model 'gcn' with edge weights needs whole subgraphs; give the loader mode='subgraph'")
        views = views_of(batch, self.num_layers, self.shape.edges, self.shape.weights)
        if self.edge_fields:  # once for all layers that have one view
            encoded = {id(view): replace(view, edges=self.encode(view.edges)) for view in views}
            views = [encoded[id(view)] for view in views]
        x = _heads_of(by_type(batch, FEATURES), views[0].num_sources)
        for name in self.types[0]:
            if views[0].num_sources.get(name) and name not in x:
                way_out = "add it to the loader's fields=, or make the loader from the store of its hoploom.Embedding"
                raise ConfigError(f"the batch has no x of {name!r}, which the model reads; {way_out}")
        return views, x, by_relation(batch, "aggregated")

    @eager
    def _shares(self, batch: Data | HeteroData, views: Sequence[LayerView]) -> Sequence[Shares]:
        """Return how much each node counts in the batch norm of each layer if several ranks train; else nothing."""
        norms = self.norms[0]
        if not isinstance(norms, BatchNorms) or norms.context is None or not self.training or by_type(batch, "batch"):
            return [{}] * len(views)  # a batch of trees, each with nodes of its own
        n_id = {name: ids for name, ids in by_type(batch, "n_id").items() if name in norms.types}
        return shares_of(n_id, [view.num_sources for view in views], norms.context)

    def prepare(self, x: Rows) -> dict[str, Tensor]:
        """Return the input rows by node type, made from the features `x`."""
        dtype = next(self.parameters()).dtype
        known = {name: value for name, value in x.items() if name in self.types[0]}
        for name, value in known.items():
            if value.shape[-1] != self._widths[name]:
                raise ConfigError(
                    f"x of {name!r} has {value.shape[-1]} features, but the model expects "
                    f"{self._widths[name]}; {WIDTHS}"
                )
        rows = {name: value if _is_fit(value, dtype) else value.to(dtype) for name, value in known.items()}
        for name in rows if self.inputs else ():
            rows[name] = self._dropped(F.gelu(self.inputs[module_name(name)](rows[name])))
        return rows

    def stage(self, depth: int) -> RelationLayer:
        """Return the convolutions of layer `depth`, counted from 0 at the input."""
        return self.layers[depth]  # type: ignore[return-value]

    def enter(self, depth: int, x: Rows, shares: Shares | None = None) -> Rows:
        """Return the input of a layer's convolutions: the last layer's columns of x, normalised if there are norms."""
        if self.shape.jk is not None and depth:
            x = {name: rows[:, -self.shape.hidden :] for name, rows in x.items()}
        norms: Any = self.norms[depth]
        if isinstance(norms, BatchNorms):
            return norms.normed(x, shares or {})
        return {name: norms[module_name(name)](rows) for name, rows in x.items()} if norms else x

    def close(self, depth: int, rows: Rows, own: Rows) -> dict[str, Tensor]:
        """Return a layer's output from its convolutions' `rows`; `own` are the destinations' rows before the layer."""
        if self.shape.residual:
            added = {name: self._dropped(F.gelu(value)) for name, value in rows.items()}
            kept = {name: value for name, value in own.items() if name in self.types[depth + 1]}
            return {name: value + added[name] if name in added else value for name, value in kept.items()}
        if depth == self.num_layers - 1 and self.shape.jk is None:
            return dict(rows)
        done = {name: self._dropped(self.act(value)) for name, value in rows.items()}
        done = self._join(done, own) if depth else done
        if self.shape.jk == "max" and depth == self.num_layers - 1:  # the last layer's own rows are not needed
            return {name: value[:, : self.shape.hidden] for name, value in done.items()}
        return done

    def _join(self, rows: Mapping[str, Tensor], own: Rows) -> dict[str, Tensor]:
        """Return a layer's rows, with earlier layers' rows ("cat") or the maximum so far ("max") in front."""
        if self.shape.jk == "cat":
            return {name: torch.cat([own[name], value], dim=1) for name, value in rows.items()}
        if self.shape.jk == "max":
            most = {name: torch.maximum(own[name][:, : self.shape.hidden], value) for name, value in rows.items()}
            return {name: torch.cat([most[name], value], dim=1) for name, value in rows.items()}
        return dict(rows)

    def finish(self, x: Rows) -> dict[str, Tensor]:
        """Return the model's output rows: x, or the final linear layer of x if the model has one."""
        return dict(x) if self.output is None else {name: self.output(rows) for name, rows in x.items()}

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.shape.dropout, self.training) if self.shape.dropout else x


def _check_reads(kind: str, shape: Shape) -> None:
    """Raise ConfigError if models of a kind do not read the data of edges that the shape names."""
    for given, name, reads in ((shape.edges, "edges", "features"), (shape.weights, "weights", "weights")):
        if given and reads not in KINDS[kind].reads:
            able = [name for name, other in KINDS.items() if reads in other.reads]
            raise ConfigError(
                f"model {kind!r} reads no edge {reads}; leave {name}={given!r} out, or take one of {able}"
            )


def width_of(node_type: NodeType, hidden: int) -> int:
    """Return the width of a type's features; raise ConfigError if it has none that models can read."""
    name = node_type.name
    if FEATURES not in node_type.fields:
        way_out = f"learn some: store = hoploom.Embedding(store, {name!r}, dim={hidden}).store"
        raise ConfigError(f"{name!r} has no features x, which the model reads; {way_out}")
    shape = node_type.fields[FEATURES].shape
    if len(shape) != 1 or not shape[0]:
        raise ConfigError(f"x of {name!r} has rows of shape {list(shape)}; models need one dimension, of 1 or more")
    return shape[0]


def types_by_layer(schema: Schema, shape: Shape, out_types: Collection[str] | None) -> list[list[str]]:
    """Return the node types that each layer needs as input, then the output types, all in the schema's order."""
    relations = [(r.source, r.destination) for r in schema.relations]
    there = [{t.name for t in schema.node_types}]  # available types, from the input on
    for _ in range(shape.num_layers):
        reached = {destination for source, destination in relations if {source, destination} <= there[-1]}
        there.append(there[-1] if shape.residual else reached)
    wanted = there[-1] if out_types is None else {name for name in out_types if schema.node_type(name)}
    if not wanted or not wanted <= there[-1]:
        raise ConfigError(
            f"{sorted(wanted - there[-1]) or 'every type'} has no rows after {shape.num_layers} layers: too few "
            "relations lead there; use residual=True, or add reverse relations"
        )
    needed = [wanted]  # needed types, from the output back
    for before in reversed(there[:-1]):
        ends = {end for pair in relations if set(pair) <= before and pair[1] in needed[0] for end in pair}
        needed.insert(0, ends | (needed[0] if shape.residual else set()))
    return [[t.name for t in schema.node_types if t.name in names] for names in needed]


def _is_fit(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether layers accept x as it is: its dtype must be `dtype`, that of the parameters, or autocast's."""
    device = x.device.type
    return x.dtype == dtype or (torch.is_autocast_enabled(device) and x.dtype == torch.get_autocast_dtype(device))


def _split(x: Rows, counts: Mapping[str, int]) -> tuple[Rows, Rows]:
    """Return all rows, and the first `counts` of each type."""
    split = {name: with_own(rows, 0, counts[name]) for name, rows in x.items()}
    return {name: both[0] for name, both in split.items()}, {name: both[1] for name, both in split.items()}


def _heads_of(x: Rows, counts: Mapping[str, int]) -> Rows:
    """Return the first `counts` rows of each type; a slice of all rows would copy their gradient."""
    return {name: rows if rows.shape[0] == counts[name] else rows[: counts[name]] for name, rows in x.items()}
