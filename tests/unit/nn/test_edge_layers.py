"""Layers that read edge weights and features equal PyG's, forward and backward, and refuse what they cannot read."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from support.graphs import random_graph
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import hoploom
import hoploom.nn as hnn
from hoploom import ConfigError, DataError, HoploomError, NeighborLoader
from hoploom.ops import InEdges

K = 3  # edge features
Make = Callable[[Any], Any]


def _mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 5))


LAYERS: dict[str, Make] = {  # of either library, with edge features
    "gine": lambda of: of.GINEConv(_mlp(), edge_dim=K),
    "gine_trained": lambda of: of.GINEConv(nn.Linear(8, 5), eps=0.3, train_eps=True, edge_dim=K),
    "gine_wide": lambda of: of.GINEConv(_mlp()),
    "gat": lambda of: of.GATConv(8, 5, edge_dim=K),
    "gat_heads": lambda of: of.GATConv(8, 5, 3, edge_dim=K, residual=True),
    "gat_mean": lambda of: of.GATConv(8, 5, 3, False, 0.1, 0.0, False, K, "mean", True, True),
    "gat_filled": lambda of: of.GATConv(8, 5, 2, edge_dim=K, fill_value=0.7, bias=False),
    "gatv2": lambda of: of.GATv2Conv(8, 5, edge_dim=K),
    "gatv2_heads": lambda of: of.GATv2Conv(8, 5, 3, edge_dim=K, residual=True),
    "gatv2_mean": lambda of: of.GATv2Conv(8, 5, 3, False, 0.1, 0.0, False, K, "mean", True, True, True),
    "gatv2_shared": lambda of: of.GATv2Conv(8, 5, 2, edge_dim=K, share_weights=True, bias=False, fill_value=1.0),
}
PLAIN: dict[str, Make] = {  # without
    "gatv2_plain": lambda of: of.GATv2Conv(8, 5, 2),
    "gatv2_plain_mean": lambda of: of.GATv2Conv(8, 5, 2, concat=False, add_self_loops=False, share_weights=True),
    "gat_residual": lambda of: of.GATConv(8, 5, 2, concat=False, residual=True),
}
WEIGHTED: dict[str, Make] = {"gcn": lambda of: of.GCNConv(8, 5), "gcn_plain": lambda of: of.GCNConv(8, 5, bias=False)}


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def graph(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Rows of 40 nodes, and edges in no order: some are self-loops, no two have both ends in common, a node has none."""
    torch.manual_seed(3)
    edge_index = torch.randint(39, (2, 300))
    edge_index[:, ::50] = torch.arange(6)
    edge_index = edge_index.unique(dim=1)
    return torch.randn(40, 8, dtype=dtype), edge_index[:, torch.randperm(edge_index.shape[1])]


def both(make: Make, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """Our layer and PyG's, with the same parameters."""
    torch.manual_seed(0)
    ours, theirs = make(hnn).to(dtype), make(pyg).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def results(conv: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of all inputs and parameters."""
    conv.zero_grad()
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    out = compute(*leaves)
    (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in conv.named_parameters()}
    return {"out": out.detach(), **grads, **{str(number): leaf.grad for number, leaf in enumerate(leaves)}}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(ours[name] / scale, expected / scale, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", [*LAYERS, *PLAIN, *WEIGHTED])
def test_a_layer_is_pygs_with_its_gradients(name: str, dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = both({**LAYERS, **PLAIN, **WEIGHTED}[name], dtype)
    x, edge_index = graph(dtype)
    given = "edge_weight" if name in WEIGHTED else "edge_attr"
    width = () if name in WEIGHTED else (8 if name == "gine_wide" else K,)
    of_edges = [] if name in PLAIN else [torch.rand(edge_index.shape[1], *width, dtype=dtype) - (name in LAYERS) / 2]
    found = [
        results(conv, lambda x, *rest: conv(x, edge_index, **{given: one for one in rest}), x, *of_edges)  # noqa: B023
        for conv in (ours, theirs)
    ]
    assert_same(*found, tolerance)


@pytest.mark.parametrize("name", ["gat", "gatv2", "gine"])
def test_a_layer_between_two_types_is_pygs(name: str) -> None:
    make: Make = {
        "gat": lambda of: of.GATConv((8, 6), 5, 2, add_self_loops=False, edge_dim=K, residual=True),
        "gatv2": lambda of: of.GATv2Conv((8, 6), 5, 2, add_self_loops=False, edge_dim=K, residual=True),
        "gine": lambda of: of.GINEConv(_mlp(), edge_dim=K),
    }[name]
    ours, theirs = both(make)
    x, x_dst = torch.randn(9, 8).double(), torch.randn(14, 8 if name == "gine" else 6).double()
    edge_index = torch.stack([torch.randint(9, (60,)), torch.randint(14, (60,))])
    given = (x, x_dst, torch.randn(60, K).double())
    assert_same(
        results(ours, lambda x, x_dst, f: ours(x, edge_index, x_dst, edge_attr=f), *given),
        results(theirs, lambda x, x_dst, f: theirs((x, x_dst), edge_index, f), *given),
    )


@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
def test_sage_with_edge_features_is_sage_over_joined_rows(aggr: str) -> None:
    """Each edge is a source of its own, with the row of its source and its features."""
    conv, joined = hnn.SAGEConv(8, 5, aggr, edge_dim=K).double(), pyg.SAGEConv((8 + K, 8), 5, aggr).double()
    with torch.no_grad():
        joined.lin_l.weight.copy_(torch.cat([conv.lin_l.weight, conv.lin_edge.weight], 1))
        joined.lin_l.bias.copy_(conv.lin_l.bias)
        joined.lin_r.weight.copy_(conv.lin_r.weight)
    x, edge_index = graph()
    edge_attr = torch.randn(edge_index.shape[1], K).double()
    of_edges = torch.stack([torch.arange(edge_index.shape[1]), edge_index[1]])
    ours = results(conv, lambda x, f: conv(x, edge_index, edge_attr=f), x, edge_attr)
    theirs = results(joined, lambda x, f: joined((torch.cat([x[edge_index[0]], f], 1), x), of_edges), x, edge_attr)
    weight = theirs.pop("lin_l.weight")
    assert_same(ours, theirs | {"lin_l.weight": weight[:, :8], "lin_edge.weight": weight[:, 8:]})


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_weights_multiply_the_rows_and_the_features_that_sage_aggregates(aggr: str) -> None:
    conv = hnn.SAGEConv(8, 5, aggr, edge_dim=K).double()
    x, (sources, destinations) = graph()
    given = x, torch.randn(len(sources), K).double(), torch.randn(len(sources)).double()

    def formula(x: Tensor, features: Tensor, weights: Tensor) -> Tensor:
        rows = torch.cat([x[sources], features], 1) * weights.unsqueeze(1)
        of_sources, of_edges = scatter(rows, destinations, 0, 40, aggr).split([8, K], 1)
        return conv.lin_l(of_sources) + conv.lin_edge(of_edges) + conv.lin_r(x)

    edge_index = torch.stack([sources, destinations])
    assert_same(
        results(conv, lambda x, f, w: conv(x, edge_index, edge_weight=w, edge_attr=f), *given),
        results(conv, formula, *given),
    )


def test_gin_takes_weights_below_zero() -> None:
    conv, (x, edge_index) = hnn.GINConv(nn.Linear(8, 5), eps=0.2).double(), graph()
    weights = torch.randn(edge_index.shape[1]).double()

    def formula(x: Tensor, weights: Tensor) -> Tensor:
        return conv.nn(1.2 * x + scatter(x[edge_index[0]] * weights.unsqueeze(1), edge_index[1], 0, 40))

    found = results(conv, lambda x, w: conv(x, edge_index, edge_weight=w), x, weights)
    assert_same(found, results(conv, formula, x, weights), 1e-7)  # eps is a float32


@pytest.mark.parametrize("name", [*LAYERS, "sage"])
def test_a_layer_on_a_part_gives_what_it_gives_on_the_whole_graph(name: str) -> None:
    """A block has the in-edges of its destinations; the head of a grouped subgraph has those of its first nodes."""
    conv = hnn.SAGEConv(8, 5, edge_dim=K).double() if name == "sage" else both(LAYERS[name])[0]
    x, edge_index = graph()
    edge_attr = torch.randn(edge_index.shape[1], conv.edge_dim).double()
    whole = conv(x, edge_index, edge_attr=edge_attr)
    head = InEdges.of(edge_index, 40, 40).with_features(edge_attr).head(12, 40)
    is_in_block = edge_index[1] < 12
    block = conv(x, edge_index[:, is_in_block], x[:12], edge_attr=edge_attr[is_in_block])
    for part in (conv(x, head), block):
        torch.testing.assert_close(part, whole[:12], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", [*LAYERS, *WEIGHTED, "sage"])
def test_results_have_the_same_bits_for_one_thread_and_two(name: str) -> None:
    torch.manual_seed(0)
    edge_index, x = torch.randint(500, (2, 60_000)), torch.randn(500, 8)
    conv = hnn.SAGEConv(8, 5, edge_dim=K) if name == "sage" else {**LAYERS, **WEIGHTED}[name](hnn)
    of_edges = torch.rand(60_000) if name in WEIGHTED else torch.randn(60_000, conv.edge_dim)
    given, found = "edge_weight" if name in WEIGHTED else "edge_attr", []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(results(conv, lambda x, rows: conv(x, edge_index, **{given: rows}), x, of_edges))
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key
