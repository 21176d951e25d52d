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
from hoploom.gpu.capacity import Capacity, plan_hops
from hoploom.gpu.device_hops import NO_PICKS, make_buffers
from hoploom.gpu.whole_steps import padded_views
from hoploom.nn import GNN, Shape, views_of
from hoploom.nn.layers import by_relation, by_type

HUGE = 1e6  # finite: zero times infinity is no zero, and gradients of unused rows are products with zero
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "residual": {"norm": True, "residual": True}}


def padded(loader: NeighborLoader, batch: Data | HeteroData, spare: int = 3) -> Data | HeteroData:
    """A batch of the loader in buffers with room for `spare` more nodes and edges at every hop."""
    schema, maker = loader.store.schema, loader.maker
    plan = plan_hops(schema, maker.sampler.sampling, [schema.type_index[maker.node_type]], with_indptr=True)
    nodes = {name: list(accumulate(map(int, hops))) for name, hops in by_type(batch, "num_sampled_nodes").items()}
    picks = {key: list(accumulate(map(int, hops))) for key, hops in by_relation(batch, "num_sampled_edges").items()}
    most_nodes = {name: [total + spare * hop for hop, total in enumerate(totals)] for name, totals in nodes.items()}
    most_edges = [tuple(total + spare * hop for hop, total in enumerate(picks[r.key], 1)) for r in schema.relations]
    capacity = Capacity(tuple(tuple(most_nodes[of.name]) for of in schema.node_types), tuple(most_edges), (), ())
    on = make_buffers(plan, capacity, torch.device("cpu"))
    edge_index = by_relation(batch, "edge_index")
    for relation, edges, spans in zip(schema.relations, on.layers[0], plan.picks, strict=True):
        own, expanded = edge_index[relation.key], nodes[relation.destination][-2]
        edges.edge_index.fill_(10**12)[:, : own.shape[1]] = own
        assert edges.indptr is not None  # destinations behind those expanded have not been asked for picks
        edges.indptr.fill_(NO_PICKS)[:expanded] = torch.searchsorted(own[1].contiguous(), torch.arange(expanded))
        for (_, end), total in zip(spans, picks[relation.key], strict=True):
            on.totals[end, 0] = total
    out = batch.__class__()
    out.views = padded_views(on)
    for name in ("x", "n_id", "in_degree"):
        for node_type, rows in by_type(batch, name).items():
            storage = out if isinstance(out, Data) else out[node_type]
            storage[name] = filled(rows, most_nodes[node_type][-1])
    return out


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


def assert_padding_changes_nothing(
    model: nn.Module, loader: NeighborLoader, batch: Any, count: int, spare: int = 3
) -> None:
    rows, gradients = found(model, batch, count)
    padded_rows, padded_gradients = found(model, padded(loader, batch, spare), count)
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
    loader = NeighborLoader(graph(), [4, -1], batch_size=7, shuffle=True)
    for spare, batch in zip((0, 3, 40), loader, strict=False):
        assert_padding_changes_nothing(model, loader, batch, 7, spare)


def test_degrees_in_the_whole_graph_are_taken_along() -> None:
    loader = NeighborLoader(graph(), [4, 3], batch_size=7, degrees=True)
    for batch in list(loader)[:2]:
        assert_padding_changes_nothing(homogeneous("gcn"), loader, batch, 7)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["rsage", "rgcn", "rgat"])
def test_padding_changes_nothing_between_types(kind: str, options: dict[str, Any]) -> None:
    data = books()
    torch.manual_seed(0)
    model = GNN(kind, hoploom.from_pyg(data).schema, Shape(hidden=12, num_layers=2, out=5, **options), ["paper"])
    loader = NeighborLoader(data, [2, 2], input_nodes="paper", batch_size=3)
    for batch in list(loader)[:3]:
        assert_padding_changes_nothing(model, loader, batch, 3)


def test_a_relation_that_is_left_out_brings_nothing() -> None:
    data = books()
    fanouts = {key: [0, 2] if key[1] == "writes" else [2, 0] for key in data.edge_types}
    loader = NeighborLoader(data, fanouts, input_nodes="paper", batch_size=3)
    assert_padding_changes_nothing(heterogeneous("rsage", data), loader, next(iter(loader)), 3)


def test_a_layer_has_the_edges_of_the_batch_s_own_views() -> None:
    loader = NeighborLoader(graph(), [4, 2, 1], batch_size=2)
    batch = next(iter(loader))
    for own, wide in zip(views_of(batch, 3), views_of(padded(loader, batch), 3), strict=True):
        (edges,), (room,) = own.edges.values(), wide.edges.values()
        assert torch.equal(room.indptr[: edges.num_destinations + 1], edges.indptr)
        assert torch.equal(room.sources[: edges.num_edges], edges.sources)
        assert (room.indptr[edges.num_destinations :] == edges.num_edges).all()


def test_views_for_another_number_of_layers_are_refused() -> None:
    loader = NeighborLoader(graph(), [4, 3], batch_size=7)
    with pytest.raises(hoploom.ConfigError, match="with 2 fanouts, the model has 3 layers"):
        views_of(padded(loader, next(iter(loader))), 3)
