"""Layers and models by kernels give what they give by the core, forward and backward; mixed precision stays narrow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.graphs import random_graph
from support.models import books, heterogeneous, homogeneous
from torch import Tensor, nn

import hoploom.nn as hnn
from hoploom import NeighborLoader, ops
from hoploom.ops import InEdges, rows
from hoploom.ops.kernels import aggregate as kernels

CONVS: dict[str, Callable[[], hnn.Conv]] = {
    "sage": lambda: hnn.SAGEConv(8, 5),
    "sage_max": lambda: hnn.SAGEConv(8, 5, aggr="max"),
    "sage_add": lambda: hnn.SAGEConv(8, 5, aggr="add", normalize=True),
    "gcn": lambda: hnn.GCNConv(8, 5),
    "gat": lambda: hnn.GATConv(8, 5, heads=3),
    "gat_mean": lambda: hnn.GATConv(8, 4, heads=2, concat=False, add_self_loops=False),
    "gat_ends": lambda: hnn.GATConv((8, 8), 5, add_self_loops=False),
    "gin": lambda: hnn.GINConv(nn.Linear(8, 5), train_eps=True),
}


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on tensors on the CPU go to the kernels too."""
    return lambda: monkeypatch.setattr(rows, "runs_in_core", lambda tensor: False)


def trained(module: nn.Module, *arguments: Any, x: Tensor | None = None) -> list[Tensor]:
    """What comes out, and the gradients of all parameters and of x."""
    module.zero_grad()
    out = module(*arguments)
    rows = torch.cat([value.flatten() for value in (out.values() if isinstance(out, dict) else [out])])
    (rows * torch.arange(rows.numel(), device=rows.device).cos()).sum().backward()
    grads = [parameter.grad.clone() for parameter in module.parameters()]
    return [value.detach().cpu() for value in (rows, *grads, *([] if x is None else [x.grad]))]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CONVS)
def test_a_layer_by_kernels_is_the_layer_by_the_core(
    name: str, device: torch.device, by_kernels: Callable[[], None]
) -> None:
    torch.manual_seed(0)
    conv = CONVS[name]()
    rows, edge_index = torch.randn(9, 8), torch.randint(8, (2, 30))
    edge_index[:, ::9] = torch.arange(4)  # loops
    found = []
    for on in ("cpu", device):
        x = rows.to(on, copy=True).requires_grad_()
        found.append(trained(conv.to(on), x, edge_index.to(on), x=x))
        by_kernels()
    assert_close(found[1], found[0])


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat", "gin"])
@pytest.mark.parametrize("mode", ["subgraph", "blocks"])
def test_a_model_by_kernels_is_the_model_by_the_core(
    kind: str, mode: str, device: torch.device, by_kernels: Callable[[], None]
) -> None:
    data = random_graph(30, 120, 1)
    data.x = torch.randn(30, 8)
    batch = next(iter(NeighborLoader(data, [3, 2], batch_size=4, mode=mode, degrees=kind == "gcn")))
    model = homogeneous(kind)
    expected = trained(model, batch)
    by_kernels()
    assert_close(trained(model.to(device), batch.to(device)), expected)


@pytest.mark.parametrize("kind", ["rsage", "rgcn", "rgat"])
def test_a_model_of_relations_by_kernels_is_the_one_by_the_core(
    kind: str, device: torch.device, by_kernels: Callable[[], None]
) -> None:
    data = books()
    batch = next(iter(NeighborLoader(data, [2, 2], input_nodes="paper", batch_size=2)))
    model = heterogeneous(kind, data)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    expected = _of_papers(model, batch)
    by_kernels()
    assert_close(_of_papers(model.to(device), batch.to(device)), expected)


def _of_papers(model: nn.Module, batch: Any) -> list[Tensor]:
    out = model(batch)["paper"]
    for parameter in model.parameters():
        parameter.grad = None
    out.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [value.detach().cpu() for value in (out, *grads)]


@pytest.mark.parametrize("heads", [0, 2])
def test_a_layer_takes_edges_with_room_behind_them(
    heads: int, device: torch.device, by_kernels: Callable[[], None]
) -> None:
    torch.manual_seed(0)
    conv = hnn.GATConv(8, 4, heads=heads, add_self_loops=False) if heads else hnn.GCNConv(8, 4)
    edges = InEdges.of(torch.randint(9, (2, 30)), 9, 9)
    x = torch.randn(9, 8)
    expected = trained(conv, x, edges)
    by_kernels()
    room = torch.cat([edges.sources, torch.full((7,), 10**6, dtype=edges.sources.dtype)])
    padded = InEdges(edges.indptr.to(device), room.to(device), 9)
    assert_close(trained(conv.to(device), x.to(device), padded), expected)


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat", "gin"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_kernels_read_half_precision(
    kind: str, dtype: torch.dtype, device: torch.device, by_kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_graph(30, 120, 1)
    data.x = torch.randn(30, 8).to(dtype)
    batch = next(iter(NeighborLoader(data, [3, 2], batch_size=4)))
    model = homogeneous(kind)
    exact = model(batch)
    by_kernels()
    read: list[torch.dtype] = []
    sum_rows = kernels.sum_rows
    monkeypatch.setattr(kernels, "sum_rows", lambda *arguments: read.append(arguments[3].dtype) or sum_rows(*arguments))
    with torch.autocast(device.type, torch.bfloat16):
        out = model.to(device)(batch.to(device))
    torch.testing.assert_close(out.float().cpu(), exact, atol=0.1, rtol=0.1)
    out.float().sum().backward()
    assert all(parameter.grad.dtype == parameter.dtype for parameter in model.parameters())
    aggregates_features = kind in ("sage", "gin")
    assert set(read[1:]) == {torch.bfloat16} or kind == "gat"  # sums of scores' gradients are of their own type
    assert read[0] == (dtype if aggregates_features else torch.bfloat16)


def test_a_model_of_half_precision_throughout_works(device: torch.device, by_kernels: Callable[[], None]) -> None:
    by_kernels()
    data = random_graph(30, 120, 1)
    data.x = torch.randn(30, 8)
    batch = next(iter(NeighborLoader(data, [3, 2], batch_size=4))).to(device)
    for kind in ("sage", "gcn", "gat", "gin"):
        out = homogeneous(kind).to(device).bfloat16()(batch)
        assert out.dtype == torch.bfloat16
        out.sum().backward()


def test_attention_drops_out_weights_by_kernels_too(device: torch.device, by_kernels: Callable[[], None]) -> None:
    by_kernels()
    conv = hnn.GATConv(8, 4, heads=2, dropout=0.5).to(device)
    x, edge_index = torch.randn(9, 8, device=device), torch.randint(9, (2, 30), device=device)
    assert not torch.equal(conv(x, edge_index), conv(x, edge_index))
    assert ops.softmax(torch.ones(30, 1, device=device).half(), InEdges.of(edge_index, 9, 9)).dtype == torch.float16
