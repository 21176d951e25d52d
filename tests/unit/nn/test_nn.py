"""Layers equal PyG's with the same weights; models see no more of a batch than they need, and lose nothing by it."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from support import TESTS
from support.graphs import library, random_graph
from support.models import books, heterogeneous, homogeneous
from torch import Tensor, nn
from torch_geometric.data import Data

import hoploom
import hoploom.nn as hnn
from hoploom import NeighborLoader, Store
from hoploom.nn import GNN, Shape, views_of

CONVS: dict[str, Callable[[Any], Any]] = {  # of either library
    "sage": lambda of: of.SAGEConv(8, 5),
    "sage_max": lambda of: of.SAGEConv(8, 5, aggr="max"),
    "sage_add": lambda of: of.SAGEConv(8, 5, aggr="add", normalize=True, root_weight=False, bias=False),
    "gcn": lambda of: of.GCNConv(8, 5),
    "gcn_plain": lambda of: of.GCNConv(8, 5, bias=False),
    "gat": lambda of: of.GATConv(8, 5),
    "gat_heads": lambda of: of.GATConv(8, 5, heads=3),
    "gat_mean": lambda of: of.GATConv(8, 5, heads=3, concat=False, negative_slope=0.1, add_self_loops=False),
    "gin": lambda of: of.GINConv(nn.Linear(8, 5), eps=0.3),
    "gin_trained": lambda of: of.GINConv(nn.Linear(8, 5), train_eps=True),
}


def graph_with_loops() -> tuple[Tensor, Tensor]:
    """40 nodes, edges in no order, some from a node to itself, one node without any."""
    torch.manual_seed(3)
    edge_index = torch.randint(39, (2, 300))
    edge_index[:, ::50] = torch.arange(6)
    return torch.randn(40, 8), edge_index.unique(dim=1)[:, torch.randperm(edge_index.unique(dim=1).shape[1])]


@pytest.mark.parametrize("name", CONVS)
def test_a_layer_is_pygs_with_the_same_weights(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = (CONVS[name](library) for library in (hnn, pyg))
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x, edge_index = graph_with_loops()
    outs, grads = [], []
    for conv in (ours, theirs):
        given = x.clone().requires_grad_()
        out = conv(given, edge_index)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        outs.append(out.detach())
        grads.append([given.grad, *(parameter.grad for parameter in conv.parameters())])
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_between_two_types_is_pygs(heads: int) -> None:
    torch.manual_seed(0)
    ours = hnn.GATConv((8, 6), 5, heads=heads, add_self_loops=False)
    theirs = pyg.GATConv((8, 6), 5, heads=heads, add_self_loops=False)
    ours.load_state_dict(theirs.state_dict())
    x, x_dst = torch.randn(20, 8), torch.randn(11, 6)
    edge_index = torch.stack([torch.randint(20, (60,)), torch.randint(11, (60,))])
    torch.testing.assert_close(ours((x, x_dst), edge_index), theirs((x, x_dst), edge_index), atol=1e-5, rtol=1e-5)


def test_attention_drops_out_edges_only_while_it_trains() -> None:
    x, edge_index = graph_with_loops()
    conv = hnn.GATConv(8, 5, dropout=0.5)
    assert not torch.equal(conv(x, edge_index), conv(x, edge_index))
    conv.eval()
    assert torch.equal(conv(x, edge_index), conv(x, edge_index))


def test_attention_has_the_same_gradients_every_time_with_several_threads() -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    edge_index, x = torch.randint(500, (2, 60_000)), torch.randn(500, 8)
    conv, found = hnn.GATConv(8, 16, heads=4), []
    for _ in range(4):
        conv.zero_grad()
        conv(x, edge_index).square().sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in conv.parameters()]))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_unknown_aggregation_is_refused() -> None:
    with pytest.raises(hoploom.ConfigError, match="choose one of"):
        hnn.SAGEConv(8, 5, aggr="median")


@pytest.mark.parametrize(
    ("act", "jk"), [("relu", None), ("elu", "last"), (torch.tanh, "cat"), (nn.LeakyReLU(0.3), "max"), (None, None)]
)
@pytest.mark.parametrize("name", ["GraphSAGE", "GCN", "GAT"])
def test_a_model_is_pygs_on_a_sampled_batch_though_it_computes_less(name: str, act: Any, jk: Any) -> None:
    data = random_graph(60, 400, 1)
    data.x = torch.randn(60, 8)
    batch = next(iter(NeighborLoader(data, [4, 3, 2], batch_size=7)))
    options = {"heads": 2} if name == "GAT" else {}
    ours = getattr(hnn, name)(8, 12, 3, 5, act=act, jk=jk, **options)
    theirs = getattr(pyg, name)(8, 12, 3, 5, act=act, jk=jk, **options)
    for mine, conv in zip(ours.layers, theirs.convs, strict=True):
        conv.load_state_dict(mine.conv(("node", "to", "node")).state_dict())
    if jk is not None:
        theirs.lin.load_state_dict(ours.output.state_dict())
    torch.testing.assert_close(ours(batch), theirs(batch.x, batch.edge_index)[:7], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("edge_dim", [1, 6])
def test_gat_reads_edge_attr_as_pygs_does(edge_dim: int) -> None:
    data = random_graph(60, 400, 1)
    data.x, data.edge_attr = torch.randn(60, 8), torch.randn(400, edge_dim)
    batch = next(iter(NeighborLoader(data, [4, 3], batch_size=7)))
    ours, theirs = (of.GAT(8, 12, 2, 5, heads=2, edge_dim=edge_dim) for of in (hnn, pyg))
    for mine, conv in zip(ours.layers, theirs.convs, strict=True):
        conv.load_state_dict(mine.conv(("node", "to", "node")).state_dict())
    expected = theirs(batch.x, batch.edge_index, edge_attr=batch.edge_attr)
    torch.testing.assert_close(ours(batch), expected[:7], atol=1e-5, rtol=1e-5)
    with pytest.raises(hoploom.ConfigError, match="no edges of the batch have a field 'edge_attr'"):
        ours(Data(x=data.x, edge_index=data.edge_index))


def test_graphsage_reads_edge_attr_and_gcn_has_no_use_for_it() -> None:
    data = random_graph(60, 400, 1)
    data.x, data.edge_attr = torch.randn(60, 8), torch.randn(400, 6)
    model = hnn.GraphSAGE(8, 12, 2, 5, edge_dim=6)
    first, second = (model.stage(depth).conv(("node", "to", "node")) for depth in range(2))
    hidden = first(data.x, data.edge_index, edge_attr=data.edge_attr).relu()
    torch.testing.assert_close(model(data), second(hidden, data.edge_index, edge_attr=data.edge_attr))
    for kind in (hnn.GCN, hnn.GIN):
        with pytest.raises(hoploom.ConfigError, match="reads no edge features; leave edges="):
            kind(8, 12, 2, 5, edge_dim=6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"act": "swoosh"}, ["act is 'swoosh'", "module or None"]),
        ({"act": 3}, ["act is 3", "module or None"]),
        ({"jk": "lstm"}, ["jk is 'lstm'", "'cat' or 'max'"]),
        ({"norm": "batch_norm"}, ["norm is 'batch_norm'", "norm"]),
        ({"act": "elu", "residual": True}, ["act='elu'", "residual=True"]),
        ({"normalize": True}, ["does not take normalize=", "GraphSAGE of torch_geometric.nn"]),
        ({"edge_dim": 0}, ["edge_dim is 0", "at least 1"]),
        ({"act_first": True}, ["does not take act_first="]),
        ({"act": "threshold"}, ["act is 'threshold'", "module or None"]),
        ({"act": "glu"}, ["act is 'glu'", "changes the shape"]),
        ({"act": nn.Linear(3, 3)}, ["act is Linear", "fails on rows of 12"]),
        ({"act": int}, ["act is <class 'int'>"]),
        ({"hidden_channels": 0}, ["hidden_channels is 0"]),
        ({"num_layers": 0}, ["num_layers is 0"]),
        ({"out_channels": None}, ["out_channels is None"]),
        ({"dropout": 2.0}, ["dropout is 2.0", "from 0 to 1"]),
        ({"dropout": None}, ["dropout is None", "from 0 to 1"]),
    ],
)
def test_an_option_of_pygs_models_works_or_says_what_does(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(hoploom.ConfigError) as error:
        hnn.GraphSAGE(**{"in_channels": 8, "hidden_channels": 12, "num_layers": 2, "out_channels": 5} | options)
    assert all(word in str(error.value) for word in words)


def test_pygs_neutral_defaults_change_nothing() -> None:
    model = hnn.GraphSAGE(8, 12, 2, 5, norm=None, act_first=False, act_kwargs=None, norm_kwargs=None)
    assert list(model.state_dict()) == list(hnn.GraphSAGE(8, 12, 2, 5).state_dict())


def test_widths_may_be_integers_of_numpy_and_pairs_lists() -> None:
    eight = np.int64(8)
    for conv in (hnn.SAGEConv(eight, 5), hnn.GCNConv(eight, 5), hnn.GATConv(eight, 5)):
        assert conv(torch.zeros(3, 8), torch.tensor([[0], [1]])).shape == (3, 5)
    assert hnn.SAGEConv([8, 4], 5).lin_r.in_features == 4
    for wrong, words in ((lambda: hnn.GCNConv((8, 8), 5), "one width"), (lambda: hnn.SAGEConv(None, 5), "is None")):
        with pytest.raises(hoploom.ConfigError, match=f"in_channels is .*{words}|in_channels {words}"):
            wrong()


@pytest.mark.parametrize("new", [lambda: hnn.GIN(-1, 12, 2, 5), lambda: hnn.GCNConv(-1, 5), lambda: hnn.SAGEConv(0, 5)])
def test_widths_are_given_when_a_model_is_made(new: Callable[[], Any]) -> None:
    with pytest.raises(hoploom.ConfigError, match=r"in_channels is (-1|0); .*x.shape\[1\]"):
        new()


@pytest.mark.parametrize(
    "options", [{}, {"norm": True}, {"jk": "max"}, {"residual": True}, {"norm": True, "residual": True}]
)
@pytest.mark.parametrize("kind", ["sage", "gat", "gin"])
def test_all_neighbours_in_blocks_or_a_subgraph_give_what_the_whole_graph_gives(
    kind: str, options: dict[str, Any]
) -> None:
    data = random_graph(60, 400, 2)
    data.x = torch.randn(60, 8)
    model = homogeneous(kind, **options)
    whole = model(Data(x=data.x, edge_index=data.edge_index))
    for mode in ("blocks", "subgraph"):
        for batch in NeighborLoader(data, [-1, -1], batch_size=16, mode=mode):
            expected = whole[batch.input_id]
            torch.testing.assert_close(model(batch)[: batch.batch_size], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"norm": True, "residual": True}])
@pytest.mark.parametrize("kind", ["sage", "rsage", "rgcn", "rgat", "hgt"])
def test_heterogeneous_batches_give_what_the_whole_graph_gives(kind: str, options: dict[str, Any]) -> None:
    data = books()
    model = heterogeneous(kind, data, **options)
    node_type = "paper"
    whole = model(data)[node_type]
    for mode in ("blocks", "subgraph"):
        for batch in NeighborLoader(data, [-1, -1], input_nodes=node_type, batch_size=3, mode=mode):
            out = model(batch)[node_type][: batch[node_type].batch_size]
            torch.testing.assert_close(out, whole[batch[node_type].input_id], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"residual": True}, {"jk": "cat"}])
@pytest.mark.parametrize("kind", ["rsage", "rgcn", "rgat", "hgt"])
def test_every_parameter_has_a_use(kind: str, options: dict[str, Any]) -> None:
    """Otherwise, ranks would wait for its gradient."""
    model = heterogeneous(kind, books(), **options)
    sum(rows.square().sum() for rows in model(books()).values()).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


ORDER = """
for kind in ("rsage", "rgcn", "rgat", "hgt"):
    torch.manual_seed(0)
    model = heterogeneous(kind, books())
    names = [name for name, _ in model.named_parameters()]
    print(kind, names, sum(p.sum().item() for p in model.parameters()))
"""


@pytest.mark.slow
def test_parameters_have_one_order_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    """In this one and in another, each with its own order of sets."""
    begin = "import gc, sys, torch; gc.disable(); sys.path.insert(0, sys.argv[1])\n"
    begin += "from support.models import books, heterogeneous"
    command = [sys.executable, "-c", f"{begin}{ORDER}gc.freeze()", str(TESTS)]
    seed = _seed_of_another_order()
    other = subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
    exec(ORDER, {"torch": torch, "heterogeneous": heterogeneous, "books": books})
    here = capsys.readouterr().out
    assert len(here.splitlines()) == 4
    assert other.communicate(timeout=60)[0] == here


def _seed_of_another_order() -> str:
    """A hash seed by which the set of node types comes in another order than here."""
    code = f"print(*{set(books().node_types)})"
    here = " ".join(set(books().node_types))
    for seed in map(str, range(100)):
        variables = os.environ | {"PYTHONHASHSEED": seed}
        if subprocess.check_output([sys.executable, "-S", "-c", code], env=variables, text=True).strip() != here:
            return seed
    raise AssertionError("every seed gives this order")


def test_relations_are_summed_as_pygs_hetero_conv_does() -> None:
    data = books()
    model = GNN("rsage", hoploom.from_pyg(data).schema, Shape(hidden=12, num_layers=1, out=5))
    convs = {}
    for key in data.edge_types:
        ends = (data[key[0]].x.shape[1], data[key[2]].x.shape[1])
        convs[key] = pyg.SAGEConv(ends, 5)
        convs[key].load_state_dict(model.stage(0).conv(key).state_dict())
    with warnings.catch_warnings(action="ignore"):  # authors have no in-edges
        hetero = pyg.HeteroConv(convs, aggr="sum")
        expected = hetero(data.x_dict, data.edge_index_dict)
    found = model(data)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)


def test_a_type_without_features_has_learned_rows() -> None:
    data = books()
    del data["author"].x
    data["author"].num_nodes = 7
    with pytest.raises(
        hoploom.ConfigError, match=r"'author' has no features x.*hoploom.Embedding\(store, 'author', dim=\d+\).store"
    ):
        heterogeneous("rsage", data)
    learned = hoploom.Embedding(hoploom.from_pyg(data), "author", dim=6)
    model = GNN("rsage", learned.store.schema, Shape(hidden=12, num_layers=2, out=5))
    for store in (learned.store, hoploom.from_pyg(data)):
        batch = next(iter(NeighborLoader(store, [-1, -1], input_nodes="paper", batch_size=4)))
        if store.learned:
            before = learned.rows.clone()
            model(batch)["paper"].sum().backward()
            learned.step()
            touched = (learned.rows != before).any(1).nonzero().view(-1)
            assert set(touched.tolist()) <= set(batch["author"].n_id.tolist())
            assert touched.numel()
        else:
            with pytest.raises(hoploom.ConfigError, match=r"no x of 'author'.*from the store of its hoploom.Embedding"):
                model(batch)


def test_a_layer_gets_only_what_later_layers_see() -> None:
    data = random_graph(200, 800, 4)
    batch = next(iter(NeighborLoader(data, [3, 3, 3], batch_size=5)))
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    views = views_of(batch, 3)
    key = ("node", "to", "node")
    assert [view.num_destinations["node"] for view in views] == [sum(nodes[:3]), sum(nodes[:2]), nodes[0]]
    assert [view.edges[key].num_edges for view in views] == [sum(edges), sum(edges[:2]), edges[0]]
    assert [view.edges[key].num_sources for view in views] == [sum(nodes), sum(nodes[:3]), sum(nodes[:2])]


def _with_edge_data(data: Any) -> Any:
    """The graph whose edges tell their ends: `stars` is 100 * source, `age` [n, 2] the destination and twice it.

    Weights are the sum of the ends.
    """
    for storage in data.edge_stores:
        source, destination = storage.edge_index
        storage.stars, storage.age = 100 * source, torch.stack([destination, 2 * destination], dim=1).to(torch.float16)
        storage.cost = (source + destination).double()
    return data


@pytest.mark.parametrize("options", [{}, {"mode": "blocks"}, {"disjoint": True}, {"subgraph_type": "induced"}, None])
@pytest.mark.parametrize("graph", ["random", "library"])
def test_each_layers_edges_have_their_own_data(options: dict[str, Any] | None, graph: str) -> None:
    data = _with_edge_data(random_graph(60, 500, 1) if graph == "random" else library())
    hetero = {} if graph == "random" else {"input_nodes": ("paper", None)}
    loader = NeighborLoader(data, [3, 2], batch_size=7, fields=["stars", "age", "cost"], **hetero, **(options or {}))
    for batch in [data] if options is None else loader:
        for view in views_of(batch, 2, ["stars", "age"], "cost"):
            assert sum(edges.num_edges for edges in view.edges.values())
            for key, edges in view.edges.items():
                nodes = {name: getattr(own, "n_id", torch.arange(own.num_nodes)) for name, own in _node_stores(batch)}
                sources, destinations = nodes[key[0]][edges.sources.long()], nodes[key[2]][edges.destinations]
                ends = torch.stack([100 * sources, destinations, 2 * destinations], dim=1).view(-1, 3)
                assert torch.equal(edges.features, ends.float())
                assert torch.equal(edges.weights, (sources + destinations).double())
    assert all(edges.features is edges.weights is None for view in views_of(batch, 2) for edges in view.edges.values())


def _node_stores(batch: Any) -> list[tuple[str, Any]]:
    return [("node", batch)] if isinstance(batch, Data) else [(name, batch[name]) for name in batch.node_types]


def test_mixed_precision_runs_forward_and_backward() -> None:
    data = random_graph(60, 400, 1)
    data.x = torch.randn(60, 8)
    batch = next(iter(NeighborLoader(data, [4, 3], batch_size=7)))
    for kind in ("sage", "gcn", "gat", "gin"):
        model = homogeneous(kind)
        exact = model(batch)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch)
        out.float().sum().backward()
        torch.testing.assert_close(out.float(), exact, atol=0.1, rtol=0.1)
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: heterogeneous("gcn", books()), "use 'rgcn'"),
        (lambda: heterogeneous("sagee", books()), "choose one of"),
        (lambda: GNN("sage", books(), Shape(8, 2, 3)), "schema is a HeteroData; give store.schema"),
        (lambda: heterogeneous("gin", books()), "residual=True"),
        (lambda: heterogeneous("pna", books()), "PNA has one width .* use residual=True"),
        (lambda: heterogeneous("hgt", books(), heads=5), "out_channels=12 does not divide by heads=5"),
        (lambda: homogeneous("gat", heads=5), "does not divide by heads"),
        (lambda: homogeneous("sage", heads=4), "'sage' has no attention heads; leave heads=4 out"),
        (lambda: homogeneous("gcn", heads=4), "'gcn' has no attention heads; leave heads=4 out"),
        (lambda: heterogeneous("rgcn", books(), heads=4), "'rgcn' has no attention heads; leave heads=4 out"),
    ],
)
def test_a_model_that_cannot_be_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(hoploom.ConfigError, match=message):
        make()


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
@pytest.mark.parametrize("fanouts", [[3], [3, 3, 3]])
def test_other_fanouts_than_layers_are_refused(fanouts: list[int], mode: str) -> None:
    data = random_graph(60, 400, 1)
    data.x = torch.randn(60, 8)
    batch = next(iter(NeighborLoader(data, fanouts, batch_size=4, mode=mode)))
    with pytest.raises(hoploom.ConfigError, match=f"with {len(fanouts)} fanouts, the model has 2 layers"):
        homogeneous("sage")(batch)


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
def test_a_gcn_told_the_degrees_gives_what_the_whole_graph_gives(mode: str) -> None:
    data = random_graph(60, 400, 2)
    data.x = torch.randn(60, 8)  # its edges hold some loops
    assert (data.edge_index[0] == data.edge_index[1]).sum() > 3
    model = homogeneous("gcn")
    assert model.needs_degrees
    assert not homogeneous("gat").needs_degrees
    whole = model(Data(x=data.x, edge_index=data.edge_index))
    for batch in NeighborLoader(data, [-1, -1], batch_size=16, mode=mode, degrees=True):
        torch.testing.assert_close(model(batch)[: batch.batch_size], whole[batch.input_id], atol=1e-5, rtol=1e-5)


def test_a_sampled_gcn_is_right_on_average() -> None:
    data = random_graph(30, 400, 2)
    data.x = torch.randn(30, 8).abs()
    assert (data.edge_index[0] == data.edge_index[1]).any()
    conv = hnn.GCN(8, 5, 1, 5)
    whole = conv(Data(x=data.x, edge_index=data.edge_index))
    loader, outs = NeighborLoader(data, [3], batch_size=30, degrees=True), []
    for epoch in range(100):
        loader.set_epoch(epoch)
        outs += [conv(batch) for batch in loader]
    deviation = torch.stack(outs).std(0) / 10
    assert bool(((torch.stack(outs).mean(0) - whole).abs() <= 5 * deviation + 1e-6).all())


def test_a_gcn_on_blocks_asks_for_the_degrees() -> None:
    batch = next(iter(NeighborLoader(random_graph(60, 400, 1), [2, 2], mode="blocks")))
    with pytest.raises(hoploom.ConfigError, match="degrees=True"):
        hnn.GCN(5, 4, 2, 3)(batch)


def test_degrees_out_of_reach_are_refused_not_made_up() -> None:
    memory = hoploom.from_pyg(random_graph(60, 400, 1))
    elsewhere = Store(memory.schema, memory.graph, memory.features)
    with pytest.raises(hoploom.ConfigError, match="not in reach"):
        elsewhere.in_degrees(("node", "to", "node"), torch.arange(5))


def test_degrees_are_for_one_relation() -> None:
    with pytest.raises(hoploom.ConfigError, match="one node type and relation"):
        NeighborLoader(library(), [2], input_nodes="paper", degrees=True)
