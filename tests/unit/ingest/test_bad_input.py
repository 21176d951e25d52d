"""Wrong graphs are refused when they are read: what, which value, and the way out."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import Call, assert_refused, both_loaders, nodes, table
from torch_geometric.data import Data, HeteroData

from hoploom import LinkNeighborLoader, NeighborLoader, StoreError, from_pyg, from_tensors

X = torch.zeros(8, 2)
EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])
KEY = ("a", "r", "a")
SEEDS = torch.tensor([0])
WHEN, HEAVY = {"x": X, "when": torch.arange(8)}, {"edge_index": EDGES, "heavy": torch.ones(3)}
BOTH = {"edge_index": EDGES, "time": torch.arange(3)}
timed = partial(from_tensors, time_attr="time")
typed = partial(from_tensors, {"a": {"x": X}}, {KEY: EDGES})


def test_the_tensors_that_the_tables_damage_are_fine() -> None:
    assert from_tensors({"x": X}, EDGES).schema.relations[0].num_edges == 3
    assert typed().schema.relations[0].num_edges == 3


READ: dict[str, Callable[[Any], Any]] = {
    "edges": lambda given: from_tensors({"x": X}, given),
    "features": lambda given: from_tensors(given, EDGES),
    "weights": lambda given: from_tensors({"x": X}, {"edge_index": EDGES, "weight": given}, weight_attr="weight"),
    "times": lambda given: timed({"x": X}, {"edge_index": EDGES, "time": given}),
    "splits": lambda given: from_tensors({"x": X}, EDGES, splits={"train": given}),
    "types and names": lambda given: given(),
}
BAD: dict[str, dict[str, tuple[Any, ...]]] = {  # what is given, and what is said
    "edges": {
        "negative source": (torch.tensor([[0, -1], [1, 1]]), "-1", "[0, 8)", "edge 1"),
        "source too large": (torch.tensor([[0, 8], [1, 1]]), "8", "[0, 8)", "edge 1"),
        "destination too large": (torch.tensor([[0, 1], [80, 1]]), "80", "[0, 8)", "edge 0"),
        "least id": (torch.tensor([[-(2**63)], [0]]), str(-(2**63)), "[0, 8)"),
        "booleans": (EDGES.bool(), "bool"),
        "three rows": (torch.zeros(3, 2, dtype=torch.int64), "(3, 2)", "[2, e]"),
        "a list": ([[0], [1]], "edges of", "list", "give an edge_index tensor or a mapping"),
        "a list in a mapping": ({"edge_index": [[0], [1]]}, "list"),
        "on another device": (EDGES.to("meta"), "meta"),
        "no edges": ({"weight": torch.ones(3)}, "edge_index", "weight"),
    },
    "features": {
        "too few rows": ({"x": X, "y": torch.zeros(7)}, "node.y", "(7,)", "8 nodes"),
        "a list": ({"x": [[0.0, 0.0]] * 8}, "node.x", "list"),
        "an array": ({"x": X.numpy()}, "node.x", "ndarray"),
        "complex": ({"x": X.to(torch.complex64)}, "node.x", "complex64", "float32"),
        "sparse": ({"x": X.to_sparse()}, "node.x", "sparse"),
        "on another device": ({"x": X.to("meta")}, "node.x", "meta"),
        "none to tell the size": ({}, "'node'", "num_nodes"),
    },
    "weights": {
        "nan": (torch.tensor([1.0, float("nan"), 2.0]), "edge 1", "nan"),
        "negative": (torch.tensor([1.0, 2.0, -2.5]), "edge 2", "-2.5"),
        "too few": (torch.ones(2), "weight", "2", "3"),
        "two columns": (torch.ones(3, 2), "(3, 2)"),
        "booleans": (torch.ones(3, dtype=torch.bool), "bool"),
        "a list": ([1.0, 2.0, 3.0], "weight", "list"),
    },
    "times": {
        "floats": (torch.ones(3), "time", "float32"),
        "booleans": (torch.ones(3, dtype=torch.bool), "time", "bool"),
        "too few": (torch.ones(2, dtype=torch.int64), "time", "2", "3"),
        "a list": ([1, 2, 3], "time", "list"),
    },
    "splits": {
        "too large": (torch.tensor([0, 8]), "'train'", "8", "[0, 8)"),
        "negative": (torch.tensor([0, -1]), "'train'", "-1", "[0, 8)"),
        "floats": (torch.tensor([1.0]), "'train'", "float32"),
        "two dimensions": (torch.tensor([[1]]), "'train'", "(1, 1)"),
        "mask of another length": (torch.ones(7, dtype=torch.bool), "'train'", "7", "8"),
        "a list": ([0, 1], "train", "list"),
    },
    "types and names": {
        "relation to no type": (lambda: from_tensors({"a": {"x": X}}, {("a", "r", "b"): EDGES}), "'b'", "'a'"),
        "relation of two names": (lambda: from_tensors({"a": {"x": X}}, {("a", "a"): EDGES}), "('a', 'a')"),
        "relation of one name": (lambda: from_tensors({"a": {"x": X}}, {"r": EDGES}), "node.a", "dict"),
        "fields without a type": (lambda: from_tensors({"x": X}, {KEY: EDGES}), "'x'", "Tensor"),
        "fields are a tensor": (lambda: from_tensors(X, EDGES), "Tensor"),
        "split of no type": (lambda: typed(splits={"b": {"train": SEEDS}}), "'b'", "'a'"),
        "split without a type": (lambda: typed(splits={"train": SEEDS}), "'train'"),
        "split without a name": (lambda: from_tensors({"x": X}, EDGES, splits=SEEDS), "Tensor"),
        "size of an unknown type": (lambda: typed(num_nodes={"b": 3}), "'b'", "'a'"),
        "times of nodes": (lambda: timed({"x": X, "time": torch.ones(8)}, EDGES), "time", "float32"),
        "times of both": (lambda: timed({"x": X, "time": torch.arange(8)}, BOTH), "'time'", "both", "rename"),
        "weight nowhere": (lambda: from_tensors(WHEN, HEAVY, weight_attr="weight"), "'weight'", "heavy"),
        "weight of nodes": (lambda: from_tensors(WHEN, HEAVY, weight_attr="when"), "'when'", "heavy"),
        "time nowhere": (lambda: timed(WHEN, HEAVY), "'time'", "when", "heavy"),
    },
}


@table({f"{of}: {name}": (partial(READ[of], row[0]), *row[1:]) for of in BAD for name, row in BAD[of].items()})
def test_a_wrong_graph_is_refused(given: Call, said: tuple[str, ...]) -> None:
    assert_refused(given, *said)


@pytest.mark.parametrize("num_nodes", [9, -1, 4.5, "8", True, {"node": 8}])
def test_a_wrong_number_of_nodes_is_refused(num_nodes: Any) -> None:
    assert_refused(lambda: from_tensors({"x": X}, EDGES, num_nodes=num_nodes), re.sub(r"\W.*", "", str(num_nodes)))
    assert_refused(lambda: from_tensors({}, EDGES[:, :0], num_nodes=-1), "-1")


def test_weights_that_require_a_gradient_are_read_as_values() -> None:
    edges = {"edge_index": EDGES, "weight": torch.ones(3, requires_grad=True)}
    store = from_tensors({"x": X}, edges, weight_attr="weight")
    assert next(iter(nodes(store, weight_attr="weight", batch_size=8))).num_nodes == 8


def hetero(**values: Any) -> HeteroData:
    data = HeteroData()
    data["a"].x = X
    for name, value in values.items():
        data[KEY][name] = value
    return data


BAD_DATA: dict[str, tuple[Any, ...]] = {
    "id too large": (Data(x=X, edge_index=EDGES + 7), "8", "[0, 8)"),
    "float ids": (Data(x=X, edge_index=EDGES.float()), "float32"),
    "edges by row": (Data(x=X, edge_index=EDGES.t()), "(3, 2)", "[2, e]"),
    "no nodes at all": (Data(), "num_nodes"),
    "adj_t": (Data(x=X, adj_t=torch.eye(8).to_sparse()), "SparseTensor", "edge_index"),
    "field that is a list": (Data(x=X, edge_index=EDGES, names=["n"] * 8), "names", "list"),
    "sparse features": (Data(x=X.to_sparse(), edge_index=EDGES), "x", "sparse"),
    "id too large in a relation": (hetero(edge_index=EDGES + 7), "8", "[0, 8)"),
}


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@table(BAD_DATA)
def test_wrong_pyg_data_is_refused(given: Data | HeteroData, said: tuple[str, ...]) -> None:
    assert_refused(lambda: from_pyg(given), *said)
    assert_refused(lambda: nodes(given, input_nodes=None if isinstance(given, Data) else "a"), *said)


@both_loaders
@pytest.mark.parametrize(
    "data",
    [5, None, {}, pytest.param(object(), id="object"), torch.zeros(3), b"path", Data, [1, 2], (), (1, 2)],
    ids=repr,
)
def test_data_of_another_type_is_refused(data: Any, loader: Callable[..., Any]) -> None:
    arguments = {"num_neighbors": [2]}
    cls = NeighborLoader if loader is nodes else LinkNeighborLoader
    assert_refused(lambda: cls(data, **arguments), "data is a")


@both_loaders
def test_a_path_without_a_store_is_a_store_error(loader: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"{re.escape(str(tmp_path))} is no store"):
        loader(tmp_path)
    with pytest.raises(StoreError, match="nowhere does not exist"):
        loader(str(tmp_path / "nowhere"))
