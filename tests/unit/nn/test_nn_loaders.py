"""What loaders do for models: layer one aggregated, only the parameters that the output needs, fields left out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import library, random_graph, save_in_parts
from support.models import books, heterogeneous, homogeneous
from torch_geometric import nn as pyg

import hoploom
from hoploom import ConfigError, NeighborLoader, Store
from hoploom.nn import GAT, GNN, GraphSAGE, SAGEConv, Shape
from hoploom.ops import InEdges
from hoploom.store import Wanted


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_the_loader_aggregates_is_what_layer_one_would(mode: str, dtype: str) -> None:
    data = random_graph(60, 400, 1)
    data.x = torch.randn(60, 8).to(getattr(torch, dtype))
    store = hoploom.from_pyg(data)
    for kind in ("sage", "gin"):
        model = homogeneous(kind)
        options: dict[str, Any] = {"batch_size": 7, "mode": mode, "shuffle": True}
        plain = NeighborLoader(store, [4, 3], **options)
        fused = NeighborLoader(store, [4, 3], aggregate=model.first_reduce, **options)
        for batch, other in zip(plain, fused, strict=True):
            assert other.x.shape[0] < batch.x.shape[0]
            torch.testing.assert_close(model(other), model(batch), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_aggregates_have_the_same_bits_wherever_the_rows_lie(reduce: Any, dtype: str, tmp_path: Path) -> None:
    data = random_graph(60, 400, 1)
    data.x = (torch.randn(60, 9) * 10.0 ** torch.randint(-9, 5, (60, 9))).to(getattr(torch, dtype))
    data.x[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    memory = hoploom.from_pyg(data)
    elsewhere = Store(memory.schema, memory.graph, memory.features)
    stores = [memory, save_in_parts(memory, tmp_path / "store", 3), elsewhere]
    edges = InEdges.of(torch.randint(50, (2, 200)), 50, 50)
    want = Wanted("node", "x", torch.randperm(60)[:50])
    found = [store.aggregate(want, edges, reduce).view(torch.int32) for store in stores]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
def test_relations_arrive_aggregated_each(mode: str) -> None:
    data = books()
    model = heterogeneous("rsage", data)
    options: dict[str, Any] = {"input_nodes": "paper", "batch_size": 3, "mode": mode}
    plain = NeighborLoader(data, [2, 2], **options)
    fused = NeighborLoader(data, [2, 2], aggregate=model.first_reduce, **options)
    for batch, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(model(other)["paper"], model(batch)["paper"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "reduce"),
    [
        ("sage", {}, "mean"),
        ("gin", {}, "sum"),
        ("gcn", {}, None),
        ("gat", {}, None),
        ("sage", {"norm": True}, None),
        ("sage", {"residual": True}, None),
    ],
)
def test_a_model_says_how_its_first_layer_aggregates(kind: str, options: dict[str, Any], reduce: str | None) -> None:
    assert homogeneous(kind, **options).first_reduce == reduce


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregate": "max"}, "choose 'sum' or 'mean'"),
        ({"aggregate": "mean", "subgraph_type": "induced"}, "does not go with"),
    ],
)
def test_an_aggregate_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hoploom.ConfigError, match=message):
        NeighborLoader(random_graph(60, 400, 1), [2, 2], **options)
    with pytest.raises(hoploom.ConfigError, match="needs rows of floats"):
        NeighborLoader(library(), [2, 2], input_nodes="paper", aggregate="mean")


@pytest.mark.parametrize("options", [{}, {"norm": True, "residual": True}])
@pytest.mark.parametrize("kind", ["rsage", "rgcn", "rgat"])
def test_a_model_for_one_type_has_no_parameter_without_a_gradient(kind: str, options: dict[str, Any]) -> None:
    data = books()
    torch.manual_seed(0)
    schema, shape = hoploom.from_pyg(data).schema, Shape(hidden=12, num_layers=2, out=5, **options)
    model, whole = GNN(kind, schema, shape, ["paper"]), GNN(kind, schema, shape)
    kept = model.state_dict()
    assert set(kept) < set(whole.state_dict())
    whole.load_state_dict(kept, strict=False)
    for mode in ("blocks", "subgraph"):
        batch = next(iter(NeighborLoader(data, [2, 2], input_nodes="paper", batch_size=3, mode=mode)))
        out = model(batch)
        assert list(out) == ["paper"]
        torch.testing.assert_close(out["paper"][:3], whole(batch)["paper"][:3])
        model.zero_grad()
        out["paper"].sum().backward()
        assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_a_type_that_no_layer_reaches_cannot_come_out() -> None:
    with pytest.raises(hoploom.ConfigError, match=r"\['author'\] has no rows after 2 layers"):
        GNN("rsage", hoploom.from_pyg(books()).schema, Shape(hidden=12, num_layers=2, out=5), ["author"])


def test_a_model_whose_loader_leaves_the_features_out_says_so() -> None:
    data = random_graph(60, 400, 1)
    batch = next(iter(NeighborLoader(data, [4, 3], fields=[])))
    with pytest.raises(ConfigError, match="no x of 'node', which the model reads; add it to the loader's fields="):
        GNN("sage", hoploom.from_pyg(data).schema, Shape(hidden=12, num_layers=2, out=5))(batch)
    data = books()
    batch = next(iter(NeighborLoader(data, [4, 3], "paper", fields={"paper": ["x"]})))
    with pytest.raises(ConfigError, match="no x of 'author'"):
        heterogeneous("rsage", data)(batch)


def test_a_type_that_the_model_does_not_read_needs_no_features() -> None:
    data = library()
    del data["author"].x
    data["author"].num_nodes, data["venue"].x = 7, torch.randn(3, 2)
    model = GNN("rsage", hoploom.from_pyg(data).schema, Shape(hidden=12, num_layers=1, out=5), ["venue"])
    batch = next(iter(NeighborLoader(data, [4], "venue", batch_size=3, fields={"paper": ["x"], "venue": ["x"]})))
    assert model(batch)["venue"].shape == (3, 5)


@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_a_model_of_sage_layers_aggregates_as_it_is_told(aggr: Any) -> None:
    data = random_graph(60, 400, 1)
    model, layer = GraphSAGE(5, 12, num_layers=1, out_channels=4, aggr=aggr), SAGEConv(5, 4, aggr)
    layer.load_state_dict(model.stage(0).conv(("node", "to", "node")).state_dict())
    torch.testing.assert_close(model(data), layer(data.x, data.edge_index))
    batch = next(iter(NeighborLoader(data, [-1], batch_size=60, aggregate=model.first_reduce)))
    torch.testing.assert_close(model(batch), model(data))


def test_a_model_with_its_own_aggregation_takes_no_other() -> None:
    with pytest.raises(ConfigError, match="model 'gat' has an aggregation of its own; leave aggr='sum' out"):
        GAT(5, 12, num_layers=1, out_channels=4, aggr="sum")


@pytest.mark.parametrize("edges_are_sorted", [True, False])
def test_as_many_weights_as_edges_are_needed(edges_are_sorted: bool) -> None:
    data = random_graph(60, 300, 1)
    edge_index = data.edge_index[:, data.edge_index[1].argsort()] if edges_are_sorted else data.edge_index
    with pytest.raises(ConfigError, match=r"weights have shape \(5000,\) for 300 edges"):
        SAGEConv(5, 4)(data.x, edge_index, edge_weight=torch.rand(5000))


def test_blocks_given_to_a_layer_of_pyg_or_ours_name_the_edges_of_a_block() -> None:
    data = random_graph(30, 200, 1)
    batch = next(iter(NeighborLoader(data, [2, 2], mode="blocks", batch_size=5)))
    with pytest.raises(ConfigError, match=r"mode='blocks', .*block\.edge_index"):
        pyg.SAGEConv(5, 4)(batch.x, batch.edge_index)
    with pytest.raises(ConfigError, match=r"SAGEConv takes .*, not a Block; .*block\.edge_index"):
        SAGEConv(5, 4)(batch.x, batch.blocks[0])
    of_types = next(iter(NeighborLoader(library(), [2], "paper", mode="blocks", batch_size=5)))
    with pytest.raises(ConfigError, match=r"mode='blocks', .*block\.edge_index"):
        assert of_types.edge_index_dict
    batch.edge_index = batch.blocks[0].edge_index
    assert batch.edge_index is batch.blocks[0].edge_index
