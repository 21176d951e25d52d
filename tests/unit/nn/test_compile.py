"""torch.compile on the built-in models: the same results and gradients, and not compiled for every size of a batch."""

from typing import Any

import pytest
import torch
from support.graphs import random_graph
from support.models import books, heterogeneous, homogeneous
from torch import nn
from torch._dynamo.utils import counters

import hoploom.nn as hnn
from hoploom import NeighborLoader

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
    assert graphs[0] > 1  # layers are compiled, not skipped
    assert graphs[1] == graphs[2]  # once for a size, once for any
    assert not counters["recompile_limit"]


def test_a_compiled_model_of_relations_gives_what_the_model_gives() -> None:
    data = books()
    torch._dynamo.reset()
    model = heterogeneous("rsage", data)
    batch = next(iter(NeighborLoader(data, [2, 2], input_nodes="paper", batch_size=2)))
    torch.testing.assert_close(torch.compile(model, backend="eager")(batch)["paper"], model(batch)["paper"])


@pytest.mark.parametrize(
    "conv",
    [
        hnn.GATConv(8, 4, heads=2, edge_dim=3, residual=True),
        hnn.GATv2Conv(8, 4, heads=2, edge_dim=3),
        hnn.GINEConv(nn.Linear(8, 4), edge_dim=3),
        hnn.SAGEConv(8, 4, edge_dim=3),
    ],
    ids=lambda conv: type(conv).__name__,
)
def test_a_layer_with_edge_features_is_compiled_but_for_its_kernels(conv: Any) -> None:
    torch._dynamo.reset()
    x, edge_index, edge_attr = torch.randn(30, 8), torch.randint(30, (2, 200)), torch.randn(200, 3)
    compiled = torch.compile(conv, backend="eager")(x, edge_index, edge_attr=edge_attr)
    torch.testing.assert_close(compiled, conv(x, edge_index, edge_attr=edge_attr))
    torch._dynamo.reset()
    breaks = torch._dynamo.explain(conv)(x, edge_index, edge_attr=edge_attr).break_reasons
    assert breaks
    assert all("torch.compiler.disable" in one.reason for one in breaks), breaks
