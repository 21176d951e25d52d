"""DGL graphs become the stores of the same PyG graphs; what is no graph is refused."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.graphs import library, ring
from support.refusals import assert_raises
from support.stores import assert_same
from torch import Tensor

import hoploom
from hoploom import ConfigError, DataError
from hoploom.ingest.formats import from_dgl

pytestmark = pytest.mark.usefixtures("one_thread", "no_sync")

Name = tuple[str, str, str]


@dataclass
class Frame:
    """What `graph.nodes[name]` and `graph.edges[key]` give."""

    data: Mapping[str, Tensor]


@dataclass
class Edges:
    """DGL's edge view: called for the ends, indexed for the fields."""

    ends: Mapping[Name, Tensor]
    fields: Mapping[Name, Mapping[str, Tensor]]

    def __getitem__(self, key: Name) -> Frame:
        return Frame(self.fields.get(key, {}))

    def __call__(self, form: str = "uv", order: str = "eid", etype: Name | None = None) -> Iterator[Tensor]:
        assert (form, order) == ("uv", "eid"), "ends without order are no edge list"
        return iter(self.ends[etype])


@dataclass
class StandIn:
    """A graph with the part of dgl.DGLGraph's public interface that from_dgl is written to."""

    sizes: Mapping[str, int]
    node_fields: Mapping[str, Mapping[str, Tensor]]
    edges: Edges
    is_block: bool = False
    ntypes: list[str] = field(init=False)
    canonical_etypes: list[Name] = field(init=False)
    nodes: Mapping[str, Frame] = field(init=False)

    def __post_init__(self) -> None:
        self.ntypes, self.canonical_etypes = list(self.sizes), list(self.edges.ends)
        self.nodes = {name: Frame(self.node_fields.get(name, {})) for name in self.sizes}

    def num_nodes(self, ntype: str) -> int:
        return self.sizes[ntype]


def dgl_ring(num_nodes: int = 12) -> StandIn:
    """The ring as DGL's datasets have it: types _N and _E, features `feat`, labels `label`, ids int32."""
    data = ring(num_nodes)
    masks = {name: data[name] for name in ("train_mask", "val_mask", "test_mask")}
    fields = {"feat": data.x, "label": data.y, **masks}
    key = ("_N", "_E", "_N")
    edges = Edges({key: data.edge_index.to(torch.int32)}, {key: {"edge_attr": data.edge_attr}})
    return StandIn({"_N": num_nodes}, {"_N": fields}, edges)


def dgl_library() -> StandIn:
    data = library()
    nodes = {name: {k: v for k, v in data[name].items() if k != "num_nodes"} for name in data.node_types}
    fields = {key: {k: v for k, v in data[key].items() if k != "edge_index"} for key in data.edge_types}
    sizes = {name: data[name].num_nodes for name in data.node_types}
    return StandIn(sizes, nodes, Edges({key: data[key].edge_index for key in data.edge_types}, fields))


def test_a_dgl_graph_of_one_type_is_the_store_of_the_same_pyg_graph() -> None:
    assert_same(from_dgl(dgl_ring()), hoploom.from_pyg(ring(12)))


def test_a_dgl_graph_of_several_types_keeps_their_names(tmp_path: Path) -> None:
    store, data = from_dgl(dgl_library(), weight_attr="weight", time_attr="year"), library()
    assert_same(store, hoploom.from_pyg(data, weight_attr="weight", time_attr="year"), until=2004)
    assert_same(store.save(tmp_path / "out"), store, until=2004)


def test_features_keep_their_name_where_x_is_taken() -> None:
    graph = dgl_ring()
    graph.nodes["_N"].data = {"x": torch.zeros(12, 1), "feat": torch.ones(12, 1)}
    assert list(from_dgl(graph).schema.node_types[0].fields) == ["x", "feat"]


def test_what_is_no_graph_is_refused() -> None:
    assert_raises(ConfigError, r"graph is a Data; give a dgl\.DGLGraph", lambda: from_dgl(ring(12)))
    graph = dgl_ring()
    graph.is_block = True
    assert_raises(ConfigError, "graph is a block of a message-flow graph", from_dgl, graph)
    graph = dgl_ring()
    graph.nodes["_N"].data = {"name": ["a"] * 12}  # type: ignore[dict-item]
    assert_raises(DataError, r"node\.name is a list; Hoploom gathers tensors", from_dgl, graph)
