"""The same-batch matrix: loaders of every kind, and the graphs that they walk over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom.load.loader import Loader
from hoploom.store import Store
from support.graphs import library, random_graph

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
every_case = pytest.mark.parametrize(("heterogeneous", "make", "attrs"), CASES)


def store_of(heterogeneous: bool, attrs: dict[str, Any]) -> Store:
    return hoploom.from_pyg(library() if heterogeneous else random_graph(60, 500, seed=1), **attrs)
