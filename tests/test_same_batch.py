"""Invariant 1: a batch is the same wherever it is made."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import assert_same_batches, with_reference
from graphs import cut, library, random_graph, save_in_parts
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom import ops
from hoploom.load.loader import Loader
from hoploom.store import Store, assemble

MakeLoader = Callable[..., Loader]


def _nodes(**options: Any) -> MakeLoader:
    def make(store: Store, **more: Any) -> Loader:
        hetero = {"input_nodes": ("paper", torch.arange(10))} if not store.schema.homogeneous else {}
        given = {"batch_size": 7, "shuffle": True, "seed": 3, **hetero, **options, **more}
        return hoploom.NeighborLoader(store, given.pop("num_neighbors", [3, 2]), **given)

    return make


def _links(**options: Any) -> MakeLoader:
    def make(store: Store, **more: Any) -> Loader:
        links = torch.stack([torch.arange(20), torch.arange(20).flip(0)])
        hetero = ("author", "writes", "paper")
        given = {"batch_size": 6, "shuffle": True, "seed": 3, **options, **more}
        return hoploom.LinkNeighborLoader(store, [3, 2], links if store.schema.homogeneous else (hetero, None), **given)

    return make


SPLIT_BY_TYPE = {"seed": 1}
HOMOGENEOUS: dict[str, tuple[MakeLoader, dict[str, Any]]] = {
    "uniform": (_nodes(), {}),
    "all": (_nodes(num_neighbors=[-1, 2]), {}),
    "replace": (_nodes(replace=True), {}),
    "weighted": (_nodes(weight_attr="weight"), {"weight_attr": "weight"}),
    "weighted with replacement": (_nodes(weight_attr="weight", replace=True), {"weight_attr": "weight"}),
    "node times": (_nodes(time_attr="node_time"), {"time_attr": "node_time"}),
    "node times, last": (_nodes(time_attr="node_time", temporal_strategy="last"), {"time_attr": "node_time"}),
    "edge times": (
        _nodes(time_attr="edge_time", input_nodes=torch.arange(40), input_time=torch.arange(40) * 2),
        {"time_attr": "edge_time"},
    ),
    "labor": (_nodes(labor=True), {}),
    "disjoint": (_nodes(disjoint=True), {}),
    "induced": (_nodes(subgraph_type="induced"), {}),
    "bidirectional": (_nodes(subgraph_type="bidirectional"), {}),
    "blocks": (_nodes(mode="blocks"), {}),
    "blocks, disjoint": (_nodes(mode="blocks", disjoint=True), {}),
    "repeated seeds": (_nodes(input_nodes=torch.arange(40) % 7), {}),
    "a split": (_nodes(input_nodes="train"), {}),
    "links": (_links(), {}),
    "links, binary": (_links(neg_sampling="binary"), {}),
    "links, triplet": (_links(neg_sampling=NegativeSampling("triplet", 2)), {}),
    "links, strict": (_links(neg_sampling="binary", strict_negatives=True), {}),
    "links, disjoint": (_links(neg_sampling="binary", disjoint=True), {}),
}
HETEROGENEOUS: dict[str, tuple[MakeLoader, dict[str, Any]]] = {
    "uniform": (_nodes(), {}),
    "weighted": (_nodes(weight_attr="weight"), {"weight_attr": "weight"}),
    "times": (_nodes(time_attr="year"), {"time_attr": "year"}),
    "disjoint": (_nodes(disjoint=True), {}),
    "induced": (_nodes(subgraph_type="induced"), {}),
    "labor": (_nodes(labor=True), {}),
    "blocks": (_nodes(mode="blocks"), {}),
    "a split": (_nodes(input_nodes="train"), {}),
    "links": (_links(neg_sampling="binary"), {}),
    "links, disjoint": (_links(neg_sampling=NegativeSampling("triplet", 1), disjoint=True), {}),
}
CASES = [pytest.param(False, *case, id=name) for name, case in HOMOGENEOUS.items()]
CASES += [pytest.param(True, *case, id=f"heterogeneous {name}") for name, case in HETEROGENEOUS.items()]


def _store(heterogeneous: bool, attrs: dict[str, Any]) -> Store:
    return hoploom.from_pyg(library() if heterogeneous else random_graph(60, 500, seed=1), **attrs)


@pytest.mark.parametrize(("heterogeneous", "make", "attrs"), CASES)
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_threads_change_nothing(heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any], num_workers: int) -> None:
    store = _store(heterogeneous, attrs)
    assert_same_batches(make(store), make(store, num_workers=num_workers))


@pytest.mark.parametrize(("heterogeneous", "make", "attrs"), CASES)
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_disk_and_parts_change_nothing(
    heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any], num_parts: int, tmp_path: Path
) -> None:
    store = _store(heterogeneous, attrs)
    saved = save_in_parts(store, tmp_path / "store", num_parts)
    assert_same_batches(_in_store_order(make(store)), _in_store_order(make(saved)))


@pytest.mark.parametrize(("heterogeneous", "make", "attrs"), CASES)
def test_parts_in_memory_change_nothing(heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any]) -> None:
    store = _store(heterogeneous, attrs)
    assert_same_batches(make(store), make(assemble(store.schema, cut(store, 4))))


@pytest.mark.parametrize(("heterogeneous", "make", "attrs"), CASES)
def test_the_core_equals_the_reference(heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any]) -> None:
    store = _store(heterogeneous, attrs)
    assert_same_batches(make(store), make(with_reference(store)))


@pytest.mark.parametrize(("heterogeneous", "make", "attrs"), CASES)
def test_a_restored_loader_continues_with_the_same_batches(
    heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any]
) -> None:
    store = _store(heterogeneous, attrs)
    whole = list(make(store))
    for step in range(1, len(whole)):
        loader = make(store)
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        fresh = make(store, num_workers=2)
        fresh.load_state_dict(loader.state_dict())
        assert_same_batches(whole[step:], fresh)


@pytest.mark.parametrize(("heterogeneous", "make", "attrs"), CASES)
def test_a_hashed_node_map_changes_nothing(
    heterogeneous: bool, make: MakeLoader, attrs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(heterogeneous, attrs)
    direct = list(make(store))
    monkeypatch.setattr(ops.NodeMap.__init__, "__defaults__", (0,))
    assert_same_batches(direct, make(store))


def test_the_users_own_data_gives_the_batches_of_its_store() -> None:
    data = random_graph(60, 500, seed=1)
    own = hoploom.NeighborLoader(data, [3, 2], batch_size=7, shuffle=True)
    stored = hoploom.NeighborLoader(hoploom.from_pyg(data), [3, 2], batch_size=7, shuffle=True)
    assert_same_batches(_in_store_order(own), _in_store_order(stored))


def _in_store_order(batches: Any) -> list[Any]:
    """Fields sorted by name: the order of a user's own fields is his."""
    found = []
    for batch in batches:
        for storage in batch.stores:
            storage._mapping = dict(sorted(storage._mapping.items()))
        found.append(batch)
    return found
