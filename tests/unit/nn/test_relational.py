"""Layers over several relations equal PyG's with the same weights, on whole graphs, blocks and parts of subgraphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from support.layer_gradients import assert_same, outputs_and_gradients, same_weights
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import softmax as pyg_softmax

import hoploom
import hoploom.nn as hnn
from hoploom import ConfigError, NeighborLoader
from hoploom.nn import views_of


def shops(*, empty: bool = False) -> HeteroData:
    """Three node types, five relations, edges in no order; no edges lead to some nodes."""
    torch.manual_seed(5)
    data = HeteroData()
    for name, (count, width) in {"user": (50, 8), "item": (40, 6), "shop": (7, 4)}.items():
        data[name].x = torch.randn(count, width)
    ends = [("user", "buys", "item"), ("item", "by", "user"), ("user", "knows", "user"), ("shop", "sells", "item")]
    for source, name, destination in [*ends, ("user", "likes", "item")]:
        count = 0 if empty and name == "likes" else 200
        sources, most = data[source].num_nodes, data[destination].num_nodes - 4
        data[source, name, destination].edge_index = torch.stack(
            [torch.randint(sources, (count,)), torch.randint(most, (count,))]
        )
    return data


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("out", "heads"), [(12, 1), (8, 4)])  # 8 is the users' width: a residual with learned share
def test_hgt_is_pygs_with_the_same_weights(out: int, heads: int, empty: bool) -> None:
    data = shops(empty=empty)
    widths = {name: x.shape[1] for name, x in data.x_dict.items()}
    ours, theirs = (of.HGTConv(widths, out, data.metadata(), heads) for of in (hnn, pyg))
    same_weights(ours, theirs)
    found, expected = (
        outputs_and_gradients(conv, data.x_dict, lambda x, conv=conv: conv(x, data.edge_index_dict))
        for conv in (ours, theirs)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("occupied", [3, 20])
@pytest.mark.parametrize("out", [8, 16])  # 8 has a residual
def test_hgt_in_mixed_precision_has_one_dtype_whichever_destinations_have_edges(out: int, occupied: int) -> None:
    torch.manual_seed(0)
    x, relation = torch.randn(20, 8), ("a", "to", "a")
    edge_index = torch.stack([torch.randint(20, (40,)), torch.arange(40) % occupied])
    conv = hnn.HGTConv(8, out, (["a"], [relation]), heads=2)
    again = hnn.HGTConv(out, out, (["a"], [relation]), heads=2)
    exact = again(conv({"a": x}, {relation: edge_index}), {relation: edge_index})["a"]
    with torch.autocast("cpu", torch.bfloat16):
        found = again(conv({"a": x}, {relation: edge_index}), {relation: edge_index})["a"]
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    torch.testing.assert_close(found.float(), exact, atol=0.05, rtol=0.05)


RGCN: dict[str, dict[str, Any]] = {
    "plain": {},
    "add": {"aggr": "add", "root_weight": False, "bias": False},
    "max": {"aggr": "max"},
    "bases": {"num_bases": 2},
    "bases_of_many": {"num_bases": 2, "num_relations": 300},
    "bases_of_few": {"num_bases": 4},
    "bases_max": {"num_bases": 4, "aggr": "max"},
    "blocks": {"num_blocks": 2},
    "blocks_max": {"num_blocks": 4, "aggr": "max", "is_sorted": True},
}


def typed_graph(num_relations: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """x, edge_index and edge_type of 40 nodes; two relations have no edges, and three nodes."""
    torch.manual_seed(2)
    types = torch.randint(num_relations - 2, (300,))
    return torch.randn(40, 8), torch.randint(37, (2, 300)), types + (types > 1).long()


@pytest.mark.parametrize("name", RGCN)
def test_rgcn_is_pygs_with_the_same_weights(name: str) -> None:
    options = {"num_relations": 5} | RGCN[name]
    ours, theirs = (of.RGCNConv(8, 12, **options) for of in (hnn, pyg))
    same_weights(ours, theirs)
    x, edge_index, edge_type = typed_graph(options["num_relations"])
    edge_index, edge_type = sorted_by(edge_type, edge_index) if options.get("is_sorted") else (edge_index, edge_type)
    found, expected = (
        outputs_and_gradients(conv, {"node": x}, lambda x, conv=conv: {"node": conv(x["node"], edge_index, edge_type)})
        for conv in (ours, theirs)
    )
    assert_same(found, expected)


def sorted_by(edge_type: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    order = edge_type.argsort(stable=True)
    return edge_index[:, order], edge_type[order]


@pytest.mark.parametrize("given", ["none", "integers"])
@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"aggr": "max"}])
def test_rgcn_without_features_is_pygs(options: dict[str, Any], given: str) -> None:
    _, edge_index, edge_type = typed_graph()
    x = None if given == "none" else torch.randint(40, (40,))
    ours, theirs = (of.RGCNConv(40, 12, 5, **options) for of in (hnn, pyg))
    same_weights(ours, theirs)
    found, expected = (
        outputs_and_gradients(conv, {}, lambda _, conv=conv: {"node": conv(x, edge_index, edge_type)})
        for conv in (ours, theirs)
    )
    assert_same(found, expected)


def test_rgcn_between_two_types_is_pygs() -> None:
    _, edge_index, edge_type = typed_graph()
    x, x_dst = torch.randn(40, 8), torch.randn(39, 6)
    ours, theirs = (of.RGCNConv((8, 6), 12, 5) for of in (hnn, pyg))
    same_weights(ours, theirs)
    torch.testing.assert_close(
        ours((x, x_dst), edge_index, edge_type), theirs((x, x_dst), edge_index, edge_type), atol=1e-5, rtol=1e-5
    )


def test_simple_hgn_of_few_destinations_is_that_of_all() -> None:
    x, edge_index, edge_type = typed_graph()
    conv, own = hnn.SimpleHGNConv(8, 64, num_relations=5), edge_index[1] < 2
    expected = conv(x, edge_index, edge_type)[:2]
    torch.testing.assert_close(conv((x, x[:2]), edge_index[:, own], edge_type[own]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "concat"), [(1, True), (3, True), (3, False)])
def test_simple_hgn_is_its_formula(heads: int, concat: bool) -> None:
    x, edge_index, edge_type = typed_graph()
    conv = hnn.SimpleHGNConv(8, 4, num_relations=5, heads=heads, concat=concat, edge_dim=6)
    torch.nn.init.normal_(conv.bias)

    def formula(x: Tensor) -> Tensor:
        sources, destinations = edge_index
        rows = conv.lin(x).view(-1, heads, 4)
        of_types = conv.lin_edge(conv.edge_emb).view(5, heads, 6)
        ends = (rows * conv.att_src).sum(2)[sources] + (rows * conv.att_dst).sum(2)[destinations]
        scores = torch.nn.functional.leaky_relu(ends + (of_types * conv.att_edge).sum(2)[edge_type], 0.2)
        weights = pyg_softmax(scores, destinations, num_nodes=40)
        out = torch.zeros(40, heads, 4).index_add(0, destinations, weights.unsqueeze(2) * rows[sources])
        return (out.flatten(1) if concat else out.mean(1)) + conv.res(x) + conv.bias

    found, expected = (
        outputs_and_gradients(conv, {"node": x}, lambda given, call=call: {"node": call(given["node"])})
        for call in (lambda x: conv(x, edge_index, edge_type), formula)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
def test_hgt_on_the_views_of_a_batch_gives_what_the_whole_graph_gives(mode: str) -> None:
    data = shops()
    torch.manual_seed(0)
    second = hnn.HGTConv(8, 12, data.metadata(), heads=3)
    data["shop"].x = torch.randn(7, 8)  # no relation leads to shops: the second layer has their features again
    first = hnn.HGTConv({"user": 8, "item": 6, "shop": 8}, 8, data.metadata(), heads=2)
    hidden = first(data.x_dict, data.edge_index_dict) | {"shop": data["shop"].x}
    whole = second(hidden, data.edge_index_dict)["item"]
    for batch in NeighborLoader(data, [-1, -1], input_nodes="item", batch_size=9, mode=mode):
        one, two = views_of(batch, 2)
        x = {name: rows[: one.num_sources[name]] for name, rows in batch.x_dict.items()}
        hidden = first(x, one.edges) | {"shop": x["shop"][: two.num_sources["shop"]]}
        out = second(hidden, two.edges)["item"][: batch["item"].batch_size]
        torch.testing.assert_close(out, whole[batch["item"].input_id], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("numbers", [[0, 8], [-1, 3]])
def test_integers_of_nodes_have_rows_in_the_matrices_of_relations(numbers: list[int]) -> None:
    """Otherwise, 8 would be the number 0 of the next relation."""
    with pytest.raises(ConfigError, match=rf"x has integers from {min(numbers)} to .*in_channels - 1 = 7"):
        hnn.RGCNConv(8, 4, 3, root_weight=False)(
            torch.tensor(numbers), torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1])
        )


TYPED: dict[str, Callable[[int], hnn.Conv]] = {
    "rgcn": lambda width: hnn.RGCNConv(width, 8, 5),
    "rgcn_bases": lambda width: hnn.RGCNConv(width, 8, 5, num_bases=2, aggr="max"),
    "simple_hgn": lambda width: hnn.SimpleHGNConv(width, 4, 5, heads=2),
}


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
@pytest.mark.parametrize("name", TYPED)
def test_typed_edges_in_the_views_of_a_batch_give_what_the_whole_graph_gives(name: str, mode: str) -> None:
    x, edge_index, edge_type = typed_graph()
    data = Data(x=x, edge_index=edge_index, edge_type=edge_type)
    torch.manual_seed(0)
    first, second = TYPED[name](8), TYPED[name](8)
    whole = second(first(x, edge_index, edge_type), edge_index, edge_type)
    for batch in NeighborLoader(data, [-1, -1], batch_size=9, mode=mode, fields={"edge_type", "x"}):
        one, two = views_of(batch, 2, ["edge_type"])
        key = ("node", "to", "node")
        out = second(first(batch.x[: one.num_sources["node"]], one.edges[key]), two.edges[key])
        torch.testing.assert_close(out[: batch.batch_size], whole[batch.input_id], atol=1e-5, rtol=1e-5)


def test_layers_over_relations_have_the_same_bits_with_any_number_of_threads() -> None:
    torch.manual_seed(0)
    edge_index, edge_type = torch.randint(500, (2, 60_000)), torch.randint(5, (60_000,))
    x, found = torch.randn(500, 8), dict[str, list[Tensor]]()
    hgt = hnn.HGTConv(8, 16, (["a", "b"], [("a", "to", "b"), ("b", "to", "b")]), heads=4)
    ends = {key: edge_index[:, index::2] for index, key in enumerate(hgt.relations)}
    calls = {
        name: (conv, lambda x, conv=conv: conv(x, edge_index, edge_type))
        for name, conv in {name: make(8) for name, make in TYPED.items()}.items()
    }
    calls["hgt"] = hgt, lambda x: hgt({"a": x, "b": x}, ends)["b"]
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, (conv, call) in calls.items():
            given = x.clone().requires_grad_()
            conv.zero_grad()
            out = call(given)
            out.square().sum().backward()
            grads = [p.grad.flatten() for p in conv.parameters() if p.grad is not None]
            found.setdefault(name, []).append(torch.cat([out.detach().flatten(), given.grad.flatten(), *grads]))
    torch.set_num_threads(before)
    assert not [name for name, (one, two) in found.items() if not torch.equal(one, two)]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "type of simple hgn": (lambda: hnn.SimpleHGNConv(8, 6, 3)(*typed_graph()), "numbers from 0 to 3; give 0 to"),
    "two decompositions": (lambda: hnn.RGCNConv(8, 8, 3, num_bases=2, num_blocks=2), "exclude each other"),
    "blocks": (lambda: hnn.RGCNConv(8, 6, 3, num_blocks=4), "out_channels=6 do not both divide by num_blocks=4"),
    "aggr": (lambda: hnn.RGCNConv(8, 6, 3, aggr="median"), "aggr is 'median'; choose one of"),
    "type": (lambda: hnn.RGCNConv(8, 6, 3)(*typed_graph()), "numbers from 0 to 3; give 0 to num_relations - 1 = 2"),
    "a fraction": (
        lambda: hnn.RGCNConv(8, 6, 5)(*typed_graph()[:2], typed_graph()[2] + 0.7),
        "numbers with a fraction; give whole",
    ),
    "types": (lambda: hnn.RGCNConv(8, 6, 5)(*typed_graph()[:2]), "no types; give edge_type"),
    "fewer types": (lambda: hnn.RGCNConv(8, 6, 5)(*typed_graph()[:2], torch.zeros(7)), "shape .* for 300 edges"),
    "integers": (lambda: hnn.RGCNConv(8, 8, 5, num_blocks=2)(torch.arange(40), *typed_graph()[1:]), "take num_bases"),
    "heads": (lambda: hnn.HGTConv(8, 10, shops().metadata(), heads=4), "out_channels=10 does not divide by heads=4"),
    "no heads": (lambda: hnn.HGTConv(8, 10, shops().metadata(), heads=0), "heads is 0; give a whole number of at"),
    "no types": (lambda: hnn.RGCNConv(8, 4, 0), "num_relations is 0; give a whole number of at least 1"),
    "width of x": (
        lambda: hnn.HGTConv(5, 8, shops().metadata())(shops().x_dict, shops().edge_index_dict),
        r"x_dict has rows of \d for '\w+', not of 5",
    ),
    "metadata": (lambda: hnn.HGTConv(8, 8, (["user"], [("user", "buys", "item")])), r"relations of \['item'\]"),
    "width of a type": (lambda: hnn.HGTConv({"user": 8}, 8, shops().metadata()), r"no width for \['item', 'shop'\]"),
    "width": (lambda: hnn.HGTConv(-1, 8, shops().metadata()), "in_channels is -1"),
    "relation": (
        lambda: hnn.HGTConv(8, 8, (["user"], []))(shops().x_dict, shops().edge_index_dict),
        r"has \('user', 'buys', 'item'\), which is not in the metadata",
    ),
    "rows": (
        lambda: hnn.HGTConv(8, 8, shops().metadata())({"user": torch.zeros(50, 8)}, shops().edge_index_dict),
        r"no rows of \['item'\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_the_way_out(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(hoploom.ConfigError, match=message):
        call()
