"""Models by kernels give what they give by the core, forward and backward; mixed precision stays narrow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.graphs import random_graph
from support.models import books, heterogeneous, homogeneous
from torch import Tensor, nn

import hoploom.nn as hnn
from hoploom import NeighborLoader, ops
from hoploom.ops import InEdges
from hoploom.ops.kernels import aggregate as kernels


def trained(module: nn.Module, batch: Any) -> list[Tensor]:
    module.zero_grad()
    out = module(batch)
    rows = torch.cat([value.flatten() for value in (out.values() if isinstance(out, dict) else [out])])
    (rows * torch.arange(rows.numel(), device=rows.device).cos()).sum().backward()
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [value.detach().cpu() for value in (rows, *grads)]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((kind, mode) for mode in ("subgraph", "blocks") for kind in ("sage", "gcn", "gat", "gin")),
        *((kind, "subgraph") for kind in ("rsage", "rgcn", "rgat", "hgt")),
    ],
)
def test_a_model_by_kernels_is_the_model_by_the_core(
    kind: str, mode: str, device: torch.device, by_kernels: Callable[[], None]
) -> None:
    if kind.startswith(("r", "h")):
        data: Any = books()
        model: nn.Module = heterogeneous(kind, data)
        loader = NeighborLoader(data, [2, 2], input_nodes="paper", batch_size=2)
    else:
        data, model = random_graph(30, 120, 1), homogeneous(kind)
        data.x = torch.randn(30, 8)
        loader = NeighborLoader(data, [3, 2], batch_size=4, mode=mode, degrees=kind == "gcn")
    batch = next(iter(loader))
    expected = trained(model, batch)
    by_kernels()
    for ours, theirs in zip(trained(model.to(device), batch.to(device)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat", "gin"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_kernels_read_half_precision(
    kind: str, dtype: torch.dtype, device: torch.device, by_kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_graph(30, 120, 1)
    data.x = torch.randn(30, 8).to(dtype)
    batch, model = next(iter(NeighborLoader(data, [3, 2], batch_size=4))), homogeneous(kind)
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


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: hnn.GATConv(8, 4, heads=2, edge_dim=3), "edge_attr"),
        (lambda: hnn.GATv2Conv(8, 4, heads=2, edge_dim=3), "edge_attr"),
        (lambda: hnn.GINEConv(nn.Linear(8, 4), edge_dim=3), "edge_attr"),
        (lambda: hnn.SAGEConv(8, 4, edge_dim=3), "edge_attr"),
        (lambda: hnn.GCNConv(8, 4), "edge_weight"),
    ],
)
def test_a_layer_reads_edges_by_kernels_as_by_the_core(
    make: Callable[[], Any], given: str, device: torch.device, by_kernels: Callable[[], None]
) -> None:
    torch.manual_seed(0)
    conv, x, edge_index = make(), torch.randn(9, 8), torch.randint(9, (2, 40))
    rows, found = torch.rand(40, 3) if given == "edge_attr" else torch.rand(40), []
    for place in (torch.device("cpu"), device):
        conv.to(place).zero_grad()
        leaves = [one.detach().to(place).requires_grad_() for one in (x, rows)]
        edges = InEdges.of(edge_index.to(place), 9, 9)
        edges = edges.with_features(leaves[1]) if given == "edge_attr" else edges.weighted(leaves[1])
        # kernels keep entries after the last edge of the head
        out = torch.cat([conv(leaves[0], edges), conv(leaves[0], edges.head(4, 9))])
        out.square().sum().backward()
        grads = [leaf.grad for leaf in [*leaves, *conv.parameters()]]
        found.append([value.detach().cpu().clone() for value in (out, *grads)])
        by_kernels()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
