"""Padded views: the seeds' outputs and all gradients are those of the batch, whatever stands beyond it."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from support.graphs import random_graph
from support.models import books, heterogeneous, homogeneous
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

import hoploom
from hoploom import NeighborLoader
from hoploom.gpu.device_hops import NO_PICKS
from hoploom.gpu.whole_steps import PaddedEdges, padded_views
from hoploom.nn import GNN, Shape, views_of
from hoploom.nn.layers import by_relation, by_type

HUGE = 1e6  # finite: zero times infinity is no zero, and gradients of unused rows are products with zero
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "residual": {"norm": True, "residual": True}}


def padded(batch: Data | HeteroData, num_layers: int, spare: int = 3) -> Data | HeteroData:
    """The same batch with room for `spare` more nodes and edges at every hop."""
    nodes = {name: list(accumulate(map(int, hops))) for name, hops in by_type(batch, "num_sampled_nodes").items()}
    picks = {key: list(accumulate(map(int, hops))) for key, hops in by_relation(batch, "num_sampled_edges").items()}
    most_nodes = {name: [total + spare * hop for hop, total in enumerate(totals)] for name, totals in nodes.items()}
    most_edges = {key: [total + spare * hop for hop, total in enumerate(totals, 1)] for key, totals in picks.items()}
    hops = [
        {
            key: PaddedEdges(
                *arrays_of(index, nodes[key[2]][-2], most_nodes[key[2]][-1], most_edges[key][-1]),
                torch.tensor(picks[key][hop]),
                most_edges[key][hop],
            )
            for key, index in by_relation(batch, "edge_index").items()
        }
        for hop in range(len(next(iter(picks.values()))))
    ]
    out = batch.__class__()
    out.views = padded_views(hops, most_nodes, num_layers)
    for name in ("x", "n_id", "in_degree"):
        for node_type, own in by_type(batch, name).items():
            storage = out if isinstance(out, Data) else out[node_type]
            storage[name] = filled(own, most_nodes[node_type][-1])
    return out


def arrays_of(edge_index: Tensor, expanded: int, most_nodes: int, most_edges: int) -> tuple[Tensor, Tensor]:
    """Sources and indptr. `expanded` destinations have been asked for picks, those behind them not."""
    indptr = torch.full((most_nodes + 1,), NO_PICKS)
    indptr[:expanded] = torch.searchsorted(edge_index[1].contiguous(), torch.arange(expanded))
    sources = torch.full((most_edges,), 10**12)
    sources[: edge_index.shape[1]] = edge_index[0]
    return sources, indptr


def filled(rows: Tensor, most: int) -> Tensor:
    """Rows beyond the batch's own hold large numbers; ids some other node's."""
    out = torch.full((most, *rows.shape[1:]), HUGE if rows.is_floating_point() else 0, dtype=rows.dtype)
    out[: rows.shape[0]] = rows
    return out


def found(model: nn.Module, batch: Any, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The seeds' rows, and the gradients of something that hangs on each of them differently."""
    model.zero_grad()
    out = model(batch)
    rows = (out if isinstance(out, Tensor) else out["paper"])[:count]
    (rows.square() * torch.arange(1.0, count + 1).unsqueeze(1)).sum().backward()
    return rows.detach().clone(), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def assert_padding_changes_nothing(model: nn.Module, batch: Any, count: int, spare: int = 3) -> None:
    rows, gradients = found(model, batch, count)
    padded_rows, padded_gradients = found(model, padded(batch, 2, spare), count)
    torch.testing.assert_close(padded_rows, rows, rtol=1e-5, atol=1e-6)
    assert padded_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(padded_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def graph() -> Data:
    """With loops, repeated edges, and nodes without any."""
    data = random_graph(60, 300, 2)
    data.x = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    return data


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["sage", "gcn", "gat", "gin"])
def test_padding_changes_no_output_and_no_gradient(kind: str, options: dict[str, Any]) -> None:
    model = homogeneous(kind, **options)
    batches = iter(NeighborLoader(graph(), [4, -1], batch_size=7, shuffle=True))
    for spare, batch in zip((0, 3, 40), batches, strict=False):
        assert_padding_changes_nothing(model, batch, 7, spare)


def test_degrees_in_the_whole_graph_are_taken_along() -> None:
    for batch in list(NeighborLoader(graph(), [4, 3], batch_size=7, degrees=True))[:2]:
        assert_padding_changes_nothing(homogeneous("gcn"), batch, 7)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["rsage", "rgcn", "rgat"])
def test_padding_changes_nothing_between_types(kind: str, options: dict[str, Any]) -> None:
    data = books()
    torch.manual_seed(0)
    model = GNN(kind, hoploom.from_pyg(data).schema, Shape(hidden=12, num_layers=2, out=5, **options), ["paper"])
    for batch in list(NeighborLoader(data, [2, 2], input_nodes="paper", batch_size=3))[:3]:
        assert_padding_changes_nothing(model, batch, 3)


def test_a_relation_that_is_left_out_brings_nothing() -> None:
    data = books()
    fanouts = {key: [0, 2] if key[1] == "writes" else [2, 0] for key in data.edge_types}
    batch = next(iter(NeighborLoader(data, fanouts, input_nodes="paper", batch_size=3)))
    assert_padding_changes_nothing(heterogeneous("rsage", data), batch, 3)


def test_a_layer_has_the_edges_of_the_batch_s_own_views() -> None:
    batch = next(iter(NeighborLoader(graph(), [4, 3], batch_size=7)))
    for own, wide in zip(views_of(batch, 2), views_of(padded(batch, 2), 2), strict=True):
        (edges,), (room,) = own.edges.values(), wide.edges.values()
        assert torch.equal(room.indptr[: edges.num_destinations + 1], edges.indptr)
        assert torch.equal(room.sources[: edges.num_edges], edges.sources)
        assert (room.indptr[edges.num_destinations :] == edges.num_edges).all()


def test_views_for_another_number_of_layers_are_refused() -> None:
    batch = next(iter(NeighborLoader(graph(), [4, 3], batch_size=7)))
    with pytest.raises(hoploom.ConfigError, match="with 2 fanouts, the model has 3 layers"):
        views_of(padded(batch, 2), 3)
