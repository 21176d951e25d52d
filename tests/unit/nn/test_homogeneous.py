"""Models with PyG's names take its arguments, its calls and its weights, and return its rows."""

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from support.graphs import random_graph
from torch_geometric.data import Data

import hoploom.nn as hnn
from hoploom import ConfigError, NeighborLoader

MODELS: dict[str, dict[str, Any]] = {
    "GraphSAGE": {"aggr": "max"},
    "GCN": {"jk": "last"},
    "GAT": {"heads": 2, "edge_dim": 3},
    "GIN": {"jk": "cat", "act": "elu"},
}


def pair(name: str) -> tuple[Any, Any]:
    """Our model, with the weights of PyG's, and PyG's."""
    torch.manual_seed(0)
    ours, theirs = (getattr(of, name)(6, 8, 3, 4, **MODELS[name]) for of in (hnn, pyg))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_pygs_weights_returns_its_rows(name: str) -> None:
    """Of a whole graph, with edge fields where the model reads them, and of a sampled subgraph."""
    ours, theirs = pair(name)
    data = random_graph(60, 400, 1)
    data.x, data.edge_attr = torch.randn(60, 6), torch.randn(400, 3)
    given = {"GCN": {"edge_weight": torch.rand(400)}, "GAT": {"edge_attr": data.edge_attr}}.get(name, {})
    out = ours(data.x, data.edge_index, **given)
    torch.testing.assert_close(out, theirs(data.x, data.edge_index, **given), atol=1e-5, rtol=1e-5)
    batch = next(iter(NeighborLoader(data, [3, 3, 3], batch_size=9)))
    given = {"edge_attr": batch.edge_attr} if name == "GAT" else {}
    out = ours(batch.x, batch.edge_index, **given)
    torch.testing.assert_close(out, theirs(batch.x, batch.edge_index, **given), atol=1e-5, rtol=1e-5)
    if name != "GCN":  # whose degrees are those of the edges that it is given
        torch.testing.assert_close(ours(batch)[:9], out[:9], atol=1e-5, rtol=1e-5)


def test_a_model_in_a_module_loads_pygs_weights() -> None:
    ours, theirs = pair("GAT")
    torch.nn.ModuleDict({"gnn": hnn.GAT(6, 8, 3, 4, heads=2, edge_dim=3)}).load_state_dict(
        torch.nn.ModuleDict({"gnn": theirs}).state_dict()
    )
    ours.load_state_dict(ours.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"layers\.3\."):
        ours.load_state_dict(pyg.GAT(6, 8, 4, 4, heads=2, edge_dim=3).state_dict())


def test_a_column_of_weights_is_one_weight_per_edge() -> None:
    x, edge_index, weight = torch.randn(3, 6), torch.tensor([[0, 1], [1, 2]]), torch.rand(2)
    model, conv = pair("GCN")[0], hnn.SAGEConv(6, 4)
    for layer in (model, conv):
        column = layer(x, edge_index, edge_weight=weight.view(2, 1))
        assert torch.equal(column, layer(x, edge_index, edge_weight=weight))


@pytest.mark.parametrize("name", ["edge_index", "edge_weight", "edge_attr"])
def test_arguments_beside_a_batch_are_refused(name: str) -> None:
    batch = Data(x=torch.randn(3, 6), edge_index=torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ConfigError, match=rf"x is a Data beside {name}; call model\(batch\), which reads them"):
        pair("GraphSAGE")[0](batch, **{name: torch.ones(2, 2)})


@pytest.mark.parametrize(("name", "norm"), [("GraphSAGE", "batch"), ("GraphSAGE", "layer"), ("GIN", "batch")])
def test_norms_of_pygs_models_are_not_loaded(name: str, norm: str) -> None:
    ours, theirs = (getattr(of, name)(6, 8, 3, 4, norm=norm) for of in (hnn, pyg))
    with pytest.raises(RuntimeError, match=r"norms of PyG's model .* their weights cannot be loaded"):
        ours.load_state_dict(theirs.state_dict())
    ours.load_state_dict(ours.state_dict())


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("GraphSAGE", {}, r"without edges; call model\(batch\) or model\(batch.x, batch.edge_index\)"),
        ("GIN", {"edge_attr": torch.ones(2, 3)}, "GIN reads no edge_attr; make it with edge_dim="),
        ("GAT", {"edge_attr": torch.ones(2, 3), "edge_weight": torch.ones(2)}, "takes no edge weights; use SAGE"),
        ("GAT", {"edge_attr": torch.ones(2, 4)}, "features of width 3, and the batch has width 4"),
        ("GCN", {"edge_weight": torch.ones(2, 2)}, r"shape \[2, 2\]; give one number per edge"),
    ],
)
def test_edges_that_a_model_cannot_read_are_refused(name: str, given: dict[str, Any], words: str) -> None:
    edges = {"edge_index": torch.tensor([[0, 1], [1, 2]])} if given else {}
    with pytest.raises(ConfigError, match=words):
        pair(name)[0](torch.randn(3, 6), **edges, **given)
