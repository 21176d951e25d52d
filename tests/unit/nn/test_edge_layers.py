"""Layers that read edge weights and features equal PyG's, forward and backward, and refuse what they cannot read."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from support.graphs import random_graph
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import hoploom.nn as hnn
from hoploom import ConfigError, DataError, HoploomError, NeighborLoader
from hoploom.nn import views_of
from hoploom.nn.layers import with_own
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
    """Rows of 40 nodes, and edges in no order: some are self-loops, none is there twice, a node has none."""
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


def called(conv: Any, edge_index: Tensor, *names: str) -> Callable[..., Tensor]:
    """A call of the layer with the rows of its nodes, and those of its edges under these names."""
    return lambda x, *of_edges: conv(x, edge_index, **dict(zip(names, of_edges, strict=True)))


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
    of_edges = {"edge_attr": torch.randn(edge_index.shape[1], ours.edge_dim or 1, dtype=dtype)}
    if name in WEIGHTED:
        of_edges = {"edge_weight": torch.rand(edge_index.shape[1], dtype=dtype)}
    elif name in PLAIN:
        of_edges = {}
    found = [results(conv, called(conv, edge_index, *of_edges), x, *of_edges.values()) for conv in (ours, theirs)]
    assert_same(*found, tolerance)


def test_gine_without_edge_dim_takes_any_network() -> None:
    """Its features are as wide as x, so no width need be known."""
    ours, theirs = both(lambda of: of.GINEConv(nn.Sequential(nn.ReLU(), nn.Linear(8, 5))))
    x, edge_index = graph()
    edge_attr = torch.randn(edge_index.shape[1], 8).double()
    torch.testing.assert_close(ours(x, edge_index, edge_attr=edge_attr), theirs(x, edge_index, edge_attr))


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
        results(ours, lambda x, x_dst, f: ours((x, x_dst), edge_index, edge_attr=f), *given),
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
    ours = results(conv, called(conv, edge_index, "edge_attr"), x, edge_attr)
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
        results(conv, called(conv, edge_index, "edge_attr", "edge_weight"), *given),
        results(conv, formula, *given),
    )


def test_gin_takes_weights_below_zero() -> None:
    conv, (x, edge_index) = hnn.GINConv(nn.Linear(8, 5), eps=0.2).double(), graph()
    weights = torch.randn(edge_index.shape[1]).double()

    def formula(x: Tensor, weights: Tensor) -> Tensor:
        return conv.nn(1.2 * x + scatter(x[edge_index[0]] * weights.unsqueeze(1), edge_index[1], 0, 40))

    found = results(conv, called(conv, edge_index, "edge_weight"), x, weights)
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
    block = conv((x, x[:12]), edge_index[:, is_in_block], edge_attr=edge_attr[is_in_block])
    for part in (conv(x, head), block):
        torch.testing.assert_close(part, whole[:12], atol=1e-10, rtol=1e-10)


def weighted_graph() -> Data:
    data = random_graph(60, 400, 2)  # its edges have some loops
    data.x, data.edge_weight = torch.randn(60, 8), torch.rand(400)
    return data


def sums_of_weights(data: Data) -> Tensor:
    weights = data.edge_weight.masked_fill(data.edge_index[0] == data.edge_index[1], 0)
    return scatter(weights, data.edge_index[1], 0, data.num_nodes)


@pytest.mark.parametrize("edge_dim", [None, 4])
def test_gat_attends_only_where_there_are_edges(edge_dim: int | None) -> None:
    """Four of 500 destinations have edges: the others' rows are the bias."""
    ours, theirs = both(lambda of: of.GATConv((8, 8), 5, 2, add_self_loops=False, edge_dim=edge_dim), torch.float64)
    sources, edge_index = torch.randn(400, 8).double(), torch.tensor([[7, 9, 9, 3, 0], [3, 3, 0, 499, 77]])
    given = {} if edge_dim is None else {"edge_attr": torch.randn(5, 4).double()}
    found = []
    for conv in (ours, theirs):
        x, x_dst = sources.clone().requires_grad_(), torch.linspace(-1, 1, 4000).double().view(500, 8).requires_grad_()
        out = conv((x, x_dst), edge_index, **given)
        out.square().sum().backward()
        found.append([out, x.grad, x_dst.grad, *(one.grad for one in conv.parameters())])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)
    assert torch.equal(found[0][0][1], ours.bias)


@pytest.mark.parametrize("weighted", [False, True])
def test_gcn_without_self_loops_is_pygs_on_a_graph_that_has_none(weighted: bool) -> None:
    edge_index = torch.tensor([[0, 1, 2, 2, 3, 1], [1, 0, 0, 1, 2, 3]])  # of node 4, there are none
    conv, theirs = hnn.GCNConv(8, 5, add_self_loops=False), pyg.GCNConv(8, 5, add_self_loops=False)
    conv.load_state_dict(theirs.state_dict())
    x, weight = torch.randn(5, 8), torch.rand(6) if weighted else None
    wanted = theirs(x, edge_index, weight)
    torch.testing.assert_close(conv(x, edge_index, edge_weight=weight), wanted)
    looped = torch.cat([edge_index, torch.tensor([[1, 3], [1, 3]])], dim=1)  # they are left out
    weight = weight if weight is None else torch.cat([weight, torch.ones(2)])
    torch.testing.assert_close(conv(x, looped, edge_weight=weight), wanted)


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
def test_a_weighted_gcn_told_the_sums_of_weights_gives_what_the_whole_graph_gives(mode: str) -> None:
    data = weighted_graph()
    is_loop = data.edge_index[0] == data.edge_index[1]
    data.edge_weight[is_loop] = 1
    conv = hnn.GCNConv(8, 5)
    whole = conv(data.x, data.edge_index, edge_weight=data.edge_weight)
    for batch in NeighborLoader(data, [-1], batch_size=16, mode=mode, fields=["x", "edge_weight"]):
        batch.in_degree = sums_of_weights(data)[batch.n_id]
        edges = views_of(batch, 1, weights="edge_weight")[0].edges["node", "to", "node"]
        torch.testing.assert_close(conv(batch.x, edges), whole[batch.input_id], atol=1e-5, rtol=1e-5)


def test_a_sampled_subgraph_counts_the_weights_that_it_has() -> None:
    """As PyG's layer does on the subgraph, without the degrees in the whole graph."""
    data = weighted_graph()
    ours, theirs = both(WEIGHTED["gcn"], torch.float32)
    batch = next(iter(NeighborLoader(data, [3, 2], batch_size=9)))
    first, last = (view.edges["node", "to", "node"] for view in views_of(batch, 2, weights="edge_weight"))
    expected = theirs(batch.x, batch.edge_index, batch.edge_weight)
    torch.testing.assert_close(ours(batch.x, first), expected[: first.num_destinations], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(batch.x[: last.num_sources], last), expected[:9], atol=1e-5, rtol=1e-5)


def test_sums_of_weights_may_be_zero() -> None:
    x, edge_index = graph(torch.float32)
    ours, theirs = both(WEIGHTED["gcn"], torch.float32)
    weights = torch.zeros(edge_index.shape[1])
    out = ours(x, edge_index, edge_weight=weights)
    torch.testing.assert_close(out, theirs(x, edge_index, weights), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*LAYERS, *WEIGHTED, "sage"])
def test_results_have_the_same_bits_for_one_thread_and_two(name: str) -> None:
    torch.manual_seed(0)
    edge_index, x = torch.randint(500, (2, 60_000)), torch.randn(500, 8)
    conv = hnn.SAGEConv(8, 5, edge_dim=K) if name == "sage" else {**LAYERS, **WEIGHTED}[name](hnn)
    of_edges = torch.rand(60_000) if name in WEIGHTED else torch.randn(60_000, conv.edge_dim)
    given, found = "edge_weight" if name in WEIGHTED else "edge_attr", []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(results(conv, called(conv, edge_index, given), x, of_edges))
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key


@pytest.mark.parametrize("make", [hnn.GATConv, hnn.GATv2Conv])
def test_attention_drops_out_edges_only_while_it_trains(make: Make) -> None:
    (x, edge_index), conv = graph(torch.float32), make(8, 5, dropout=0.5, edge_dim=K)
    edge_attr = torch.randn(edge_index.shape[1], K)
    trained = torch.stack([conv(x, edge_index, edge_attr=edge_attr) for _ in range(400)])
    conv.eval()
    expected = conv(x, edge_index, edge_attr=edge_attr)
    assert torch.equal(conv(x, edge_index, edge_attr=edge_attr), expected)
    assert not torch.equal(trained[0], trained[1])
    assert bool(((trained.mean(0) - expected).abs() <= 5 * trained.std(0) / 20 + 1e-6).all())


@pytest.mark.parametrize(
    ("ends", "options"),
    [
        (6, {"edge_dim": K, "residual": True}),
        ((6, 5), {"add_self_loops": False, "concat": False}),
        (6, {"dropout": 0.4}),
    ],
)
def test_attention_of_few_destinations_projects_sums_instead_of_sources(ends: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    conv = hnn.GATConv(ends, 64, 3, **options).double()
    x, x_dst = torch.randn(200, 6).double(), torch.randn(4, 5 if isinstance(ends, tuple) else 6).double()
    edges = InEdges.of(torch.stack([torch.randint(200, (30,)), torch.randint(4, (30,))]), 200, 4)
    edges = edges.with_features(torch.randn(30, K).double())

    def projected_first(x: Tensor, x_dst: Tensor) -> Tensor:
        torch.manual_seed(1)
        return conv.propagate(conv.project(x), edges, x_dst)

    def as_called(x: Tensor, x_dst: Tensor) -> Tensor:
        torch.manual_seed(1)
        return conv((x, x_dst), edges)

    expected = results(conv, projected_first, x, x_dst)
    conv.project = None  # type: ignore[method-assign, assignment]
    assert_same(results(conv, as_called, x, x_dst), expected)


def edge_attr_of(width: int) -> dict[str, Tensor]:
    return {"edge_attr": torch.randn(2, width)}


@pytest.mark.parametrize(
    ("make", "given", "error", "words"),
    [
        (lambda: hnn.GATv2Conv(8, 5, edge_dim=3), {}, ConfigError, r"edge_dim=3.*none; pass edge_attr="),
        (lambda: hnn.GINEConv(nn.Linear(8, 5)), {}, ConfigError, r"edge_dim=8.*none; pass edge_attr="),
        (lambda: hnn.GATConv(8, 5), edge_attr_of(3), ConfigError, r"GATConv reads no edge_attr; give .* edge_dim="),
        (lambda: hnn.SAGEConv(8, 5), {"edge_weight": [1.0, 1.0]}, ConfigError, r"edge_weight is a list; give a tensor"),
        (lambda: hnn.GATConv(8, 5, edge_dim=1), {"edge_attr": [1.0, 1.0]}, ConfigError, r"edge_attr is a list; give"),
        (lambda: hnn.GCNConv(8, 5), edge_attr_of(3), ConfigError, r"GCNConv reads no edge_attr"),
        (lambda: hnn.GATConv(8, 5, edge_dim=3), edge_attr_of(4), ConfigError, r"4 wide; .*edge_attr.shape\[1\]"),
        (lambda: hnn.SAGEConv(8, 5, edge_dim=3), edge_attr_of(4), ConfigError, r"4 wide; .*edge_attr.shape\[1\]"),
        (lambda: hnn.GINEConv(nn.Linear(8, 5)), edge_attr_of(4), ConfigError, r"GINEConv .*edge_dim=8.*4 wide"),
        (lambda: hnn.GATv2Conv(8, 5, heads=0), {}, ConfigError, r"heads is 0; give a whole number"),
        *(
            (lambda make=make: make(edge_dim=-1), {}, ConfigError, r"edge_dim is -1; give a whole number")
            for make in (
                partial(hnn.GATConv, 8, 5),
                partial(hnn.SAGEConv, 8, 5),
                partial(hnn.GINEConv, nn.Linear(8, 5)),
            )
        ),
        (
            lambda: hnn.GINEConv(nn.ReLU(), edge_dim=4),
            {},
            ConfigError,
            r"nn begins with ReLU; .*linear.*or no edge_dim",
        ),
        (lambda: hnn.GINEConv(nn.ReLU()), edge_attr_of(4), ConfigError, r"give \[\d+, 8\], one per edge"),
        (lambda: hnn.GINEConv(nn.ReLU()), {}, ConfigError, r"edge_dim=None.*none; pass edge_attr="),
        (lambda: hnn.GATConv(8, 5, edge_dim=3, fill_value="max"), {}, ConfigError, r"fill_value is 'max'; give"),
        (lambda: hnn.SAGEConv(8, 5), {"edge_weight": torch.tensor([1, torch.nan])}, DataError, r"NaNs; replace"),
        (lambda: hnn.GCNConv(8, 5), {"edge_weight": torch.tensor([1, torch.nan])}, DataError, r"NaNs; replace"),
        (lambda: hnn.GCNConv(8, 5), {"edge_weight": torch.tensor([1, -0.5])}, DataError, r"at least 0 .*use SAGEConv"),
        (lambda: hnn.GCNConv(8, 5), {"edge_weight": torch.ones(2, 2)}, ConfigError, r"give one number per edge"),
        (lambda: hnn.SAGEConv(8, 5), {"edge_weight": torch.ones(3)}, ConfigError, r"give one for each edge"),
        (lambda: hnn.GATv2Conv(8, 5), {"edge_weight": torch.ones(2)}, ConfigError, r"takes no edge weights; use SAGE"),
    ],
)
def test_edges_that_a_layer_cannot_read_are_refused(
    make: Callable[[], Any], given: dict[str, Any], error: type[HoploomError], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()(torch.randn(3, 8), torch.tensor([[0, 1], [1, 2]]), **given)


@pytest.mark.parametrize(
    ("edge_index", "found"),
    [
        (torch.tensor([[0.7, 1], [1, 2]]), r"float32 \[2, 2\]"),
        (torch.tensor([[0, 1], [1, 2], [0, 2]]), r"int64 \[3, 2\]"),
        (torch.tensor([[0, 1, 1], [1, 2, 0]]).t(), r"int64 \[3, 2\]"),
        (torch.eye(2).to_sparse(), r"float32 \[2, 2\], torch.sparse_coo"),
    ],
)
def test_an_edge_index_of_another_form_is_refused(edge_index: Tensor, found: str) -> None:
    with pytest.raises(ConfigError, match=f"edge_index is torch.{found}.*; give a dense tensor"):
        hnn.SAGEConv(8, 5)(torch.randn(3, 8), edge_index)


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
def test_a_misspelt_field_of_edges_is_refused(mode: Any) -> None:
    batch = next(iter(NeighborLoader(weighted_graph(), [3], batch_size=9, mode=mode, fields=["edge_weight"])))
    with pytest.raises(ConfigError, match="no edges of the batch have a field 'edge_wieght'; check the name"):
        views_of(batch, 1, weights="edge_wieght")
    with pytest.raises(ConfigError, match="no edges of the batch have a field 'edge_atr'; check the name"):
        views_of(batch, 1, ["edge_atr"])


def test_weights_with_numbers_of_edges_are_refused() -> None:
    data = weighted_graph()
    batch = next(iter(NeighborLoader(data, [3], batch_size=9, degrees=True)))
    edges = views_of(batch, 1, weights="edge_weight")[0].edges["node", "to", "node"]
    with pytest.raises(ConfigError, match=r"sums of weights: set batch.in_degree .*without degrees="):
        hnn.GCNConv(8, 5)(batch.x, edges)


def test_self_loops_need_as_many_sources() -> None:
    with pytest.raises(ConfigError, match=r"2 sources cannot have self-loops at 3 .*add_self_loops=False"):
        hnn.GATConv((8, 6), 5)((torch.randn(2, 8), torch.randn(3, 6)), torch.tensor([[0, 1], [1, 2]]))


@pytest.mark.parametrize("conv", [hnn.SAGEConv(8, 5), hnn.GCNConv(8, 5), hnn.GATv2Conv(8, 5, edge_dim=8)])
def test_what_is_third_in_only_some_layers_of_pyg_goes_by_name(conv: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"Conv takes x and edge_index by position only; pass edge_attr= or"):
        conv(torch.randn(3, 8), torch.tensor([[0, 1], [1, 2]]), torch.randn(2, 8))


def test_features_of_one_number_may_be_a_list_of_numbers() -> None:
    (x, edge_index), conv = graph(torch.float32), hnn.GATv2Conv(8, 5, edge_dim=1)
    numbers = torch.arange(edge_index.shape[1])
    expected = conv(x, edge_index, edge_attr=numbers.float().view(-1, 1))
    assert torch.equal(conv(x, edge_index, edge_attr=numbers), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_mixed_precision_and_no_edges_at_all(name: str) -> None:
    conv, (x, edge_index) = both(LAYERS[name], torch.float32)[0], graph(torch.float32)
    edge_attr = torch.randn(edge_index.shape[1], conv.edge_dim)
    exact = conv(x, edge_index, edge_attr=edge_attr)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = conv(x, edge_index, edge_attr=edge_attr.bfloat16())
    mixed.float().sum().backward()
    assert ((mixed.float() - exact).norm() / exact.norm()).item() < 0.05
    assert conv(x, edge_index[:, :0], edge_attr=edge_attr[:0]).isfinite().all()
    assert conv(x[:0], edge_index[:, :0], edge_attr=edge_attr[:0]).shape == (0, exact.shape[1])


def test_the_gradient_of_the_destinations_rows_joins_that_of_all_rows_but_no_other() -> None:
    """The gradient of `shifts` is the tensor that all rows of x get, too."""

    def gradients(split: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x, table = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        shifts = table * 2
        every, own = split(x, 1, 2)
        loss = (every + shifts).square().sum() + every.sum() * 0 + (3 * own).sum()
        return torch.autograd.grad(loss, [x, table])

    torch.testing.assert_close(gradients(with_own), gradients(lambda x, first, count: (x, x[first : first + count])))
