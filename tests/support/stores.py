"""Graphs of every kind to store, and what it means for two stores to be the same."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from hoploom import Store
from hoploom.ops import Frontier
from hoploom.schema import NodeType, Relation, Schema, TypeKey
from hoploom.store import Draw, Wanted
from support.graphs import library, num_rows, random_graph, ring

NO_EDGES = torch.empty(2, 0, dtype=torch.int64)


class Graph(NamedTuple):
    """A graph, what it is built with, and a time that about half of its edges have."""

    make: Callable[[], Data | HeteroData]
    options: dict[str, str]
    until: int = 0


GRAPHS = {
    "ring": Graph(lambda: ring(12), {}),
    "weights": Graph(library, {"weight_attr": "weight"}),
    "node times": Graph(library, {"time_attr": "year"}, 2004),
    "edge times": Graph(lambda: random_graph(30, 200, 1), {"weight_attr": "weight", "time_attr": "edge_time"}, 50),
    "times of all nodes": Graph(lambda: random_graph(30, 200, 2), {"time_attr": "node_time"}, 50),
}
every_graph = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())


def fields_of(schema: Schema) -> list[tuple[TypeKey, str]]:
    owners: list[tuple[TypeKey, NodeType | Relation]] = [(t.name, t) for t in schema.node_types]
    owners += [(relation.key, relation) for relation in schema.relations]
    return [(owner, name) for owner, described in owners for name in described.fields]


def rows_of(store: Store, owner: TypeKey, field: str) -> Tensor:
    """All rows of a field, by node id or edge position."""
    (rows,) = store.features.gather([Wanted(owner, field, torch.arange(num_rows(store.schema, owner)))])
    return rows


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(-1).view(torch.uint8)


def picks_of(store: Store, draw: Draw, until: int | None = None) -> list[list[Tensor]]:
    """Per relation: the counts, sources and positions picked for every node."""
    frontiers: list[Frontier | None] = []
    for node_type in store.schema.node_types:
        nodes = torch.arange(node_type.num_nodes)
        trees, times = (None, None) if until is None else (nodes, torch.full_like(nodes, until))
        frontiers.append(Frontier(nodes, trees, times))
    return [list(picks) for picks in store.graph.sample(frontiers, draw) if picks is not None]


def assert_same(one: Store, other: Store, until: int = 0) -> None:
    assert one.schema.node_types == other.schema.node_types
    assert one.schema.relations == other.schema.relations
    for owner, field in fields_of(one.schema):
        rows, others = rows_of(one, owner, field), rows_of(other, owner, field)
        assert (rows.dtype, rows.shape) == (others.dtype, others.shape)
        assert torch.equal(bits(rows), bits(others)), (owner, field)
    for node_type in one.schema.node_types:
        for split in node_type.splits:
            assert torch.equal(one.split(split, node_type.name), other.split(split, node_type.name))
    num_relations = len(one.schema.relations)
    every, two = [-1] * num_relations, [2] * num_relations
    for draw in (Draw(1, 0, every), Draw(2, 0, two), Draw(3, 1, two, replace=True), Draw(4, 1, two, weighted=True)):
        for limit in (None, until):
            for picks, others_picks in zip(picks_of(one, draw, limit), picks_of(other, draw, limit), strict=True):
                assert all(map(torch.equal, picks, others_picks)), draw


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
