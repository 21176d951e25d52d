"""Models read fields of edges: as features, as weights and as categories; in blocks, subgraphs and whole graphs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.graphs import library, marked, random_graph
from torch import Tensor
from torch_geometric.data import HeteroData

import hoploom
from hoploom import ConfigError, NeighborLoader
from hoploom.nn import GNN, Shape

FEATURES = ["sage", "gat", "gatv2", "gine"]
OF_SEVERAL = ["rsage", "rgcn", "rgat", "rgatv2"]
BOTH: dict[str, Any] = {"edges": ["stars", "kind"], "categories": {"kind": 3}}


def _graph(data: Any) -> Any:
    """The graph with fields of every kind on its edges: two numbers, a category, and a weight."""
    torch.manual_seed(5)
    for storage in data.node_stores:
        storage.x = torch.randn(storage.num_nodes, 6)
    for storage in data.edge_stores:
        count = storage.edge_index.shape[1]
        storage.stars, storage.kind = torch.randn(count, 2).to(torch.float16), torch.randint(3, (count,))
        storage.cost = torch.rand(count, dtype=torch.float64)
    return data


def _model(kind: str, data: Any, **options: Any) -> GNN:
    torch.manual_seed(1)
    return GNN(kind, hoploom.from_pyg(data).schema, Shape(12, 2, 4, **options))


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"edges": "stars"}) for kind in FEATURES),
        *((kind, BOTH) for kind in FEATURES),
        *((kind, BOTH) for kind in OF_SEVERAL),
        *((kind, {"weights": "cost"}) for kind in ("sage", "gin", "rsage", "rgcn")),
        ("sage", BOTH | {"weights": "cost", "aggr": "sum"}),
        ("gcn", {"weights": "cost"}),
    ],
)
def test_all_neighbours_give_what_the_whole_graph_gives(kind: str, options: dict[str, Any], mode: str) -> None:
    data = _graph(library() if kind in OF_SEVERAL else random_graph(60, 400, 1))
    model = _model(kind, data, **options)
    owner = "paper" if kind in OF_SEVERAL else None
    expected = model(data)
    expected = expected if owner is None else expected[owner]
    if (kind, mode) == ("gcn", "blocks"):
        with pytest.raises(ConfigError, match=r"'gcn' with edge weights needs whole subgraphs; .*mode='subgraph'"):
            model(next(iter(NeighborLoader(data, [-1, -1], mode=mode, fields=model.fields, batch_size=10))))
        return
    hops = [-1, -1, -1] if kind == "gcn" else [-1, -1]  # GCN needs the weights of its sources' in-edges, too
    seeds = {} if owner is None else {"input_nodes": (owner, None)}
    for batch in NeighborLoader(data, hops[:2], mode=mode, fields=model.fields, batch_size=60, **seeds):
        out = model(batch) if owner is None else model(batch)[owner]
        size = batch.batch_size if owner is None else batch[owner].batch_size
        ids = batch.n_id if owner is None else batch[owner].n_id
        torch.testing.assert_close(out[:size], expected[ids[:size]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
@pytest.mark.parametrize("kind", FEATURES)
def test_a_field_named_weight_is_weights_only_if_the_model_says_so(kind: str, mode: str) -> None:
    data = random_graph(60, 400, 1)
    data.x, data.weight = torch.randn(60, 6), torch.rand(400)
    model = _model(kind, data, edges="weight")
    plain, weighted = _model("sage", data), _model("sage", data, weights="weight")
    for batch in NeighborLoader(data, [-1, -1], mode=mode, fields=["x", "weight"], batch_size=60):
        for each in (model, plain, weighted):
            torch.testing.assert_close(each(batch)[:60], each(data), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [*FEATURES, "gin"])
def test_edge_data_changes_what_a_model_computes(kind: str) -> None:
    data = _graph(random_graph(60, 400, 1))
    model = _model(kind, data, **({"weights": "cost"} if kind == "gin" else BOTH))
    before = model(data)
    for name in model.read_of(("node", "to", "node")).names:
        changed = data.clone()
        changed[name] = (changed[name] + 1) % 3
        assert not torch.allclose(before, model(changed))


@pytest.mark.parametrize(
    ("kind", "options", "learns"),
    [
        *((kind, {"edges": "edge_attr"}, True) for kind in ("gat", "gatv2", "gine")),
        ("gat", {"edges": "kind", "categories": {"kind": 2}}, True),
        ("sage", {"weights": "weight"}, True),
        *((kind, {}, False) for kind in ("gat", "gatv2", "sage")),
    ],
)
def test_only_a_model_that_reads_edges_learns_what_only_edges_tell(
    kind: str, options: dict[str, Any], *, learns: bool
) -> None:
    data = marked(200)
    model = _model(kind, data, **options)
    fields = {**model.fields, "node": ["x", "y"]}
    loader = NeighborLoader(data, [-1, -1], torch.arange(400, 600), batch_size=100, mode="blocks", fields=fields)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        for batch in loader:
            loss = F.cross_entropy(model(batch), batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = (model(data)[400:].argmax(dim=1) == data.y[400:]).float().mean()
    assert found > 0.95 if learns else found < 0.7


def test_shapes_have_hashes() -> None:
    one, other = (Shape(8, 2, 3, edges="kind", categories={"kind": 5}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


def _text(data: Any) -> Any:
    data.empty = torch.zeros(data.edge_index.shape[1], 0)
    data.edge_attr = torch.zeros(data.edge_index.shape[1], 8, dtype=torch.uint8)
    return data


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gcn", {"edges": "stars"}, r"model 'gcn' reads no edge features; leave edges=.*or take one of \['sage', "),
        ("gat", {"weights": "cost"}, r"model 'gat' reads no edge weights; leave weights='cost' out"),
        (
            "gat",
            {"edges": ["starts"]},
            r"no edges that the model reads have a field 'starts'; the fields are .*'stars'",
        ),
        ("gat", {"edges": "kind"}, r"'kind' of .* holds integers, which are categories, here 0; .*\{'kind': n\}"),
        ("sage", {"weights": "stars"}, r"'stars' of .* is float16 \[2\]; weights are one number per edge"),
        ("gat", {"edges": "edge_attr"}, "'edge_attr' of .* is text"),
        ("sage", {"edges": "stars", "weights": "stars"}, r"'stars' of .* is float16 \[2\]; weights are one number"),
        ("sage", {"edges": ["stars", "empty"]}, r"'empty' of .* has no columns; leave it out"),
        ("sage", {"edges": ["stars", "stars"]}, r"edges is \['stars', 'stars'\]; name .* each once"),
        ("sage", {"edges": 3}, "edges is 3; name one field of edges"),
        ("sage", {"weights": ["cost"]}, r"weights is \['cost'\]; name one field of edges"),
        ("sage", {"edges": "kind", "categories": {"kind": "5"}}, r"categories\['kind'\] is '5'; give the number"),
        (
            "sage",
            {"edges": "stars", "categories": {"kind": 5}},
            r"categories has 'kind', and edges=\['stars'\] has not",
        ),
        ("gine", {}, r"model 'gine' reads edge features, and no field .* of \('node', 'to', 'node'\)"),
    ],
)
def test_fields_that_a_model_cannot_read_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _model(kind, _text(_graph(random_graph(60, 400, 1))), **options)


def test_relations_without_the_field_have_no_features_and_gine_names_them() -> None:
    data = _graph(library())
    del data["paper", "cites", "paper"].stars
    model = _model("rgat", data, edges="stars")
    assert model.edge_dim(("author", "writes", "paper")) == 2
    assert model.edge_dim(("paper", "cites", "paper")) is None
    assert model(data)["paper"].shape == (10, 4)
    with pytest.raises(ConfigError, match=r"'gine'.* no field .*'stars'.* of \('paper', 'cites', 'paper'\)"):
        _model("gine", data, edges="stars", residual=True)


@pytest.mark.parametrize("options", [{"edges": "stars"}, {"weights": "cost"}])
def test_a_field_that_is_a_list_is_named(options: dict[str, Any]) -> None:
    data = _graph(random_graph(60, 400, 1))
    model, (name,) = _model("sage", data, **options), options.values()
    data[name] = data[name].tolist()
    with pytest.raises(ConfigError, match=f"the batch has '{name}' of edges as a list; give a tensor, a row per edge"):
        model(data)


def test_a_batch_that_lacks_a_field_or_has_another_category_is_one_error() -> None:
    data = _graph(random_graph(60, 400, 1))
    model = _model("gat", data, **BOTH)
    for fields in (["x"], ["x", "kind"]):
        with pytest.raises(ConfigError, match=r"no edges of the batch have a field 'stars'; .*fields=model.fields"):
            model(next(iter(NeighborLoader(data, [2, 2], fields=fields))))
    data.kind[:] = 3
    with pytest.raises(ConfigError, match=r"'kind' of the edges .* has a category outside 0 to 2"):
        model(data)


def test_a_model_without_edge_fields_is_what_it_was() -> None:
    data = _graph(random_graph(60, 400, 1))
    model = _model("sage", data)
    assert model.fields == {"node": ["x"]}
    assert not model.edge_fields
    assert model.first_reduce == "mean"
    assert _model("sage", data, weights="cost").first_reduce is None


def test_categories_are_learned() -> None:
    data: HeteroData = _graph(library())
    model = _model("rgat", data, edges="kind", categories={"kind": 3})
    model(data)["paper"].sum().backward()
    grads: list[Tensor] = [p.grad for name, p in model.named_parameters() if name.startswith("edge_fields")]
    assert len(grads) == len(data.edge_types)
    assert any(bool(grad.any()) for grad in grads)
