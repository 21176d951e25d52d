"""PyG's models for homogeneous graphs, with its arguments, calls and weights."""

import re
from collections.abc import Mapping
from typing import Any, Never

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.nn.layers import Aggr, check_counts, eager, views_of
from hoploom.nn.models import GNN, WIDTHS, Act, Jumping, Norm, Shape
from hoploom.nn.relational import module_name
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, Field, NodeType, Relation, Schema

NEUTRAL = {"act_first": False, "act_kwargs": None, "norm_kwargs": None}  # PyG's defaults: accepted, without effect


class GraphSAGE(GNN):
    """GraphSAGE for a homogeneous graph, with PyG's arguments. With `edge_dim`, it reads the edges' `edge_attr`.

    It also takes x and edge_index, as PyG's models do, and then computes the rows of all nodes in every layer.

    >>> model = GraphSAGE(100, hidden_channels=256, num_layers=3, out_channels=47, act="elu", jk="cat")
    >>> model(batch)[: batch.batch_size]
    >>> model(batch.x, batch.edge_index)[: batch.batch_size]
    """

    KIND = "sage"

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        dropout: float = 0.0,
        act: Act = "relu",
        *,
        norm: Norm = False,
        jk: Jumping | None = None,
        residual: bool = False,
        heads: int = 1,
        aggr: Aggr = "mean",
        edge_dim: int | None = None,
        **unknown: Never,
    ) -> None:
        others: Mapping[str, object] = unknown
        for name, value in others.items():
            if name in NEUTRAL and value == NEUTRAL[name]:
                continue
            cls = type(self).__name__
            way_out = f"leave it out, or take {cls} of torch_geometric.nn, which runs on the same batches"
            raise ConfigError(f"{cls} of hoploom.nn does not take {name}=; {way_out}")
        for name, count in (("hidden_channels", hidden_channels), ("out_channels", out_channels)):
            as_int(name, count, 1, "give a whole number of at least 1")
        check_counts(edge_dim=edge_dim)
        fields = {} if edge_dim is None else {"edge_attr": Field("float32", (edge_dim,))}
        given = (dropout, heads, norm, residual, aggr, act, jk)
        shape = Shape(hidden_channels, num_layers, out_channels, *given, edges=tuple(fields))
        as_int("in_channels", in_channels, 1, WIDTHS)
        node = NodeType(HOMOGENEOUS_TYPE, 0, {"x": Field("float32", (in_channels,))})
        schema = Schema((node,), (Relation(*HOMOGENEOUS_RELATION, 0, fields),), homogeneous=True)
        super().__init__(self.KIND, schema, shape)

    def forward(
        self,
        batch: Data | HeteroData | Tensor,
        edge_index: Tensor | None = None,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Return one row per seed of a batch or, of x and edge_index, one per node: [n, out_channels]."""
        named = {"edge_index": edge_index, "edge_weight": edge_weight, "edge_attr": edge_attr}
        given = {name: own for name, own in named.items() if own is not None}
        if isinstance(batch, Tensor):
            batch = self._graph(batch, given)
        elif given:
            way_out = "call model(batch), which reads them from the batch, or model(batch.x, batch.edge_index)"
            raise ConfigError(f"x is a {type(batch).__name__} beside {' and '.join(given)}; {way_out}")
        return super().forward(batch)  # type: ignore[no-any-return]

    @eager
    def _graph(self, x: Tensor, of_edges: Mapping[str, Tensor]) -> Data:
        """Return a batch of all nodes whose layers all have the same edges, with the fields `of_edges`."""
        if "edge_index" not in of_edges:
            raise ConfigError("x is given without edges; call model(batch) or model(batch.x, batch.edge_index)")
        features = [name for name in of_edges if name == "edge_attr"]
        if features and not self.edge_fields:
            raise ConfigError(f"{type(self).__name__} reads no edge_attr; make it with edge_dim=, or leave it out")
        weights = "edge_weight" if "edge_weight" in of_edges else None
        graph = Data(x=x, num_nodes=x.shape[0], **of_edges)
        return Data(x=x, views=views_of(graph, self.num_layers, features, weights))

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Load parameters under our names or under those of PyG's model."""
        if strict and any(re.search(r"norms\.\d+\.(module\.)?\w+$", name) for name in state if name.startswith(prefix)):
            errors = lists[-1]
            errors.append(
                "the norms of PyG's model are of the rows that a convolution returns, those of hoploom.nn of the rows "
                "that it is given: their weights cannot be loaded. Train this model anew, or take PyG's model, which "
                "runs on the same batches"
            )
        own = module_name(HOMOGENEOUS_RELATION)
        for name in [name for name in state if name.startswith(prefix)]:
            found = re.fullmatch(r"convs\.(\d+)\.(.+)", name[len(prefix) :])
            if found is not None:
                linear = re.sub(r"^nn\.lins\.(\d)\.", lambda n: f"nn.{2 * int(n[1])}.", found[2])  # of GIN
                state[f"{prefix}layers.{found[1]}.convs.{own}.{linear}"] = state.pop(name)
            elif name.startswith(f"{prefix}lin."):  # after jumping knowledge
                state[f"{prefix}output.{name[len(prefix) + 4 :]}"] = state.pop(name)
        super()._load_from_state_dict(state, prefix, metadata, strict, *lists)


class GCN(GraphSAGE):
    """A graph convolutional network for a homogeneous graph, with PyG's arguments."""

    KIND = "gcn"


class GAT(GraphSAGE):
    """A graph attention network for a homogeneous graph, with PyG's arguments, also `heads=` and `edge_dim=`."""

    KIND = "gat"


class GIN(GraphSAGE):
    """A graph isomorphism network for a homogeneous graph, with PyG's arguments."""

    KIND = "gin"
