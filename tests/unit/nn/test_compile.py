"""torch.compile on layers and models: one graph, the results of eager code, and one compilation for any size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.graphs import random_graph
from support.models import books, heterogeneous, homogeneous
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hoploom.nn as hnn
from hoploom import NeighborLoader, ops
from hoploom.ops import InEdges

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of torch about its own


@pytest.mark.parametrize(
    ("kind", "mode", "backend"),
    [
        ("sage", "subgraph", "aot_eager"),
        ("gcn", "subgraph", "eager"),
        ("gat", "subgraph", "eager"),
        ("gin", "blocks", "eager"),
    ],
)
def test_a_compiled_model_gives_what_the_model_gives(kind: str, mode: str, backend: str) -> None:
    data = random_graph(60, 400, 1)
    data.x = torch.randn(60, 8)
    torch._dynamo.reset()
    counters.clear()
    model = homogeneous(kind)
    compiled, graphs = torch.compile(model, backend=backend), []
    for batch_size in (7, 12, 20):
        batch = next(iter(NeighborLoader(data, [4, 3], batch_size=batch_size, mode=mode)))
        found = []
        for one in (model, compiled):
            model.zero_grad()
            out = one(batch)
            out.square().sum().backward()
            found.append([out, *(parameter.grad.clone() for parameter in model.parameters())])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == 1  # all layers, after the batch has been read
    assert graphs[1] == graphs[2]  # once for a size, once for any
    assert not counters["recompile_limit"]


def test_a_compiled_model_of_relations_gives_what_the_model_gives() -> None:
    data = books()
    torch._dynamo.reset()
    model = heterogeneous("rsage", data)
    batch = next(iter(NeighborLoader(data, [2, 2], input_nodes="paper", batch_size=2)))
    torch.testing.assert_close(torch.compile(model, backend="eager")(batch)["paper"], model(batch)["paper"])


LAYERS: dict[str, tuple[Callable[[], Any], str]] = {  # with the name of the edge field that the layer takes
    "SAGEConv": (lambda: hnn.SAGEConv(8, 4), ""),
    "SAGEConv, max": (lambda: hnn.SAGEConv(8, 4, aggr="max"), ""),
    "SAGEConv, weights": (lambda: hnn.SAGEConv(8, 4), "edge_weight"),
    "SAGEConv, features": (lambda: hnn.SAGEConv(8, 4, edge_dim=3), "edge_attr"),
    "GCNConv": (lambda: hnn.GCNConv(8, 4), ""),
    "GCNConv, weights": (lambda: hnn.GCNConv(8, 4), "edge_weight"),
    "GINConv": (lambda: hnn.GINConv(nn.Linear(8, 4)), ""),
    "GINEConv": (lambda: hnn.GINEConv(nn.Linear(8, 4), edge_dim=3), "edge_attr"),
    "GATConv": (lambda: hnn.GATConv(8, 4, heads=2), ""),
    "GATConv, features": (lambda: hnn.GATConv(8, 4, heads=2, edge_dim=3, residual=True), "edge_attr"),
    "GATv2Conv": (lambda: hnn.GATv2Conv(8, 4, heads=2, edge_dim=3), "edge_attr"),
    "PNAConv": (lambda: hnn.PNAConv(8, 4, ["mean", "max", "std"], ["identity", "linear"], torch.ones(9)), ""),
    "PNAConv, features": (lambda: hnn.PNAConv(8, 4, ["min", "var"], ["linear"], torch.ones(9), 3), "edge_attr"),
    "RGCNConv, bases": (lambda: hnn.RGCNConv(8, 4, num_relations=5, num_bases=2), "edge_type"),
    "RGCNConv, blocks": (lambda: hnn.RGCNConv(8, 4, num_relations=5, num_blocks=2), "edge_type"),
    "SimpleHGNConv": (lambda: hnn.SimpleHGNConv(8, 4, num_relations=5, heads=2), "edge_type"),
}


def compare(conv: Any, compiled: Any, x: Any, edges: Any, **fields: Tensor) -> None:
    """Compare a layer's output and gradients with those of the compiled layer."""
    leaves = [*(x.values() if isinstance(x, dict) else [x]), *conv.parameters(), *fields.values()]
    leaves, found = [one for one in leaves if one.is_floating_point()], []
    for leaf in leaves:
        leaf.requires_grad_()
    for one in (conv, compiled):
        out = one(x, edges, **fields)
        out = torch.cat(list(out.values())) if isinstance(out, dict) else out
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True, allow_unused=True)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def fields_of(name: str, num_edges: int) -> dict[str, Tensor]:
    made = {
        "edge_weight": torch.rand(num_edges),
        "edge_attr": torch.randn(num_edges, 3),
        "edge_type": torch.randint(5, (num_edges,)),
    }
    return {name: made[name]} if name else {}


@pytest.mark.parametrize("grouped", [False, True], ids=["edge_index", "InEdges"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_graph(name: str, grouped: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.clear()
    conv, field = LAYERS[name][0](), LAYERS[name][1]
    compiled, graphs = torch.compile(conv, backend="aot_eager", fullgraph=True), []
    for num_nodes in (20, 25, 30):
        edge_index = torch.randint(num_nodes, (2, 10 * num_nodes))
        edges = InEdges.of(edge_index, num_nodes, num_nodes) if grouped else edge_index
        compare(conv, compiled, torch.randn(num_nodes, 8), edges, **fields_of(field, 10 * num_nodes))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 2]  # once for a size, once for any


def test_a_layer_of_many_relations_is_one_graph() -> None:
    torch._dynamo.reset()
    counts, relations = {"a": 20, "b": 10}, [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a")]
    conv = hnn.HGTConv({"a": 8, "b": 6}, 8, (["a", "b"], relations), heads=2)
    x = {"a": torch.randn(20, 8), "b": torch.randn(10, 6)}
    edges = {
        key: torch.stack([torch.randint(counts[key[0]], (40,)), torch.randint(counts[key[2]], (40,))])
        for key in relations
    }
    compare(conv, torch.compile(conv, backend="aot_eager", fullgraph=True), x, edges)


def test_inductor_compiles_a_layer() -> None:
    torch._dynamo.reset()
    conv = hnn.GATConv(8, 4, heads=2, edge_dim=3)
    x, edges = torch.randn(20, 8), torch.randint(20, (2, 200))
    compare(conv, torch.compile(conv, fullgraph=True), x, edges, **fields_of("edge_attr", 200))


def test_edges_of_several_steps_are_transposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    conv = hnn.SAGEConv(8, 4)
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    edges = InEdges.of(torch.randint(20, (2, 200)), 20, 20)
    calls, build_csc = [], ops.edges.build_csc
    monkeypatch.setattr(ops.edges, "build_csc", lambda *ends: calls.append(ends) or build_csc(*ends))
    for _ in range(3):
        compiled(torch.randn(20, 8, requires_grad=True), edges).sum().backward()
    assert len(calls) == 1


def test_edges_that_were_written_in_place_are_transposed_again() -> None:
    """As by a caller who copies each batch into the same buffers."""
    torch._dynamo.reset()
    indptr, sources = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    compiled = torch.compile(lambda x: ops.aggregate(x, InEdges(indptr, sources, 4), "sum"), backend="aot_eager")

    def gradients() -> list[float]:
        x = torch.zeros(4, 1, requires_grad=True)
        compiled(x).backward(torch.tensor([[1.0], [10.0]]))
        return x.grad.flatten().tolist()  # type: ignore[union-attr]

    assert gradients() == [1, 1, 10, 10]
    sources.copy_(torch.tensor([3, 2, 1, 0]))
    assert gradients() == [10, 10, 1, 1]
    indptr[1] = 1
    assert gradients() == [10, 10, 10, 1]
