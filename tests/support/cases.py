"""The cases of the same-batch table: loaders of every kind, and the graphs that they walk over."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom.load.loader import Loader
from hoploom.store import Store
from support.graphs import library, random_graph

MakeLoader = Callable[..., Loader]


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    make: MakeLoader  # (store, **options that a placement adds)
    attrs: Mapping[str, Any] = field(default_factory=dict)  # how the store is built
    heterogeneous: bool = False

    @property
    def graph(self) -> str:
        return "-".join(["library" if self.heterogeneous else "random", *self.attrs.values()])

    @property
    def store(self) -> Store:
        return _store(self.heterogeneous, tuple(self.attrs.items()))


@cache
def _store(heterogeneous: bool, attrs: tuple[tuple[str, str], ...]) -> Store:
    return store_of(heterogeneous, dict(attrs))


def store_of(heterogeneous: bool, attrs: Mapping[str, Any]) -> Store:
    return hoploom.from_pyg(library() if heterogeneous else random_graph(60, 500, seed=1), **attrs)


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
        given.setdefault("edge_label_index", links if store.schema.homogeneous else (hetero, None))
        return hoploom.LinkNeighborLoader(store, [3, 2], **given)

    return make


def _by_budget() -> MakeLoader:
    def make(store: Store, **more: Any) -> Loader:
        counts = {"author": [2, 2], "paper": [2, 1], "venue": [1, 0]}
        given = {"batch_size": 4, "shuffle": True, "seed": 3, **more}
        return hoploom.HGTLoader(store, counts, ("paper", torch.arange(10)), **given)

    return make


def _two_picks(layer: int, graph: Any, seeds: Any) -> Any:
    return graph.sample_neighbors(seeds, fanout=2)


def _drawn_by_the_hook(layer: int, graph: Any, seeds: Any) -> Any:
    """Half of the edges by numbers of their own, and the nodes that walks visit, with degrees as data."""
    found = graph.in_edges(seeds)
    found = found[graph.uniform(found.positions) < 0.5]
    visited = graph.most_visited(seeds, 2, num_walks=4, length=3, restart=0.3)
    more = graph.sample_neighbors(seeds.repeat(2), 1, independent=True)
    sources = torch.cat([found.sources, visited.sources, more.sources])
    ends = torch.cat([found.destinations, visited.destinations, more.destinations])
    data = {"degree": graph.in_degrees(sources), "drawn": graph.integers(9, ends)}
    return hoploom.Edges(sources, ends, None, data)


def _own_ids(batch: Any) -> Any:
    batch.seen = batch.n_id + 1
    return batch


WEIGHT, NODE_TIME, EDGE_TIME = {"weight_attr": "weight"}, {"time_attr": "node_time"}, {"time_attr": "edge_time"}
LINK_TIMES: dict[str, Any] = {**NODE_TIME, "edge_label_time": torch.arange(20) * 5}
ALL_EDGES: dict[str, Any] = {"edge_label_index": None, "batch_size": 90}
PAIRED = {"edge_label_index": (("author", "cites", "author"), torch.arange(14).view(2, 7) % 6)}
PAIRS = random_graph(60, 500, seed=1).edge_index[:, :20]
TWO = NegativeSampling("triplet", 2)
LISTED = torch.arange(100).view(20, 5) * 7 % 60
HOMOGENEOUS: dict[str, tuple[MakeLoader, dict[str, Any]]] = {
    "uniform": (_nodes(), {}),
    "all": (_nodes(num_neighbors=[-1, 2]), {}),
    "replace": (_nodes(replace=True), {}),
    "weighted": (_nodes(**WEIGHT), WEIGHT),
    "node times": (_nodes(**NODE_TIME), NODE_TIME),
    "node times, last": (_nodes(**NODE_TIME, temporal_strategy="last"), NODE_TIME),
    "edge times": (_nodes(**EDGE_TIME, input_nodes=torch.arange(40), input_time=torch.arange(40) * 2), EDGE_TIME),
    "node times, a window": (_nodes(**NODE_TIME, time_window=30), NODE_TIME),
    "node times, last of a window": (
        _nodes(**NODE_TIME, temporal_strategy="last", time_window=20, strictly_before=True),
        NODE_TIME,
    ),
    "labor": (_nodes(labor=True), {}),
    "disjoint": (_nodes(disjoint=True), {}),
    "induced": (_nodes(subgraph_type="induced"), {}),
    "induced, node times": (_nodes(**NODE_TIME, subgraph_type="induced"), NODE_TIME),
    "bidirectional": (_nodes(subgraph_type="bidirectional"), {}),
    "blocks": (_nodes(mode="blocks"), {}),
    "blocks, disjoint": (_nodes(mode="blocks", disjoint=True), {}),
    "blocks, a frontier hook": (_nodes(mode="blocks", sample_frontier=_two_picks), {}),
    "blocks, draws of a frontier hook": (_nodes(mode="blocks", sample_frontier=_drawn_by_the_hook), {}),
    "repeated seeds": (_nodes(input_nodes=torch.arange(40) % 7), {}),
    "a split": (_nodes(input_nodes="train"), {}),
    "a mask": (_nodes(input_nodes=torch.arange(60) % 3 == 0), {}),
    "input ids": (_nodes(input_id=torch.arange(60) * 3.5), {}),
    "a transform": (_nodes(transform=_own_ids), {}),
    "a sampler": (_nodes(shuffle=False, sampler=WeightedRandomSampler(torch.arange(60.0), 45)), {}),
    "no layers": (_nodes(num_neighbors=[]), {}),
    "a rank": (_nodes(rank=1, world_size=3, disjoint=True), {}),
    "aggregated": (_nodes(aggregate="mean"), {}),
    "aggregated, blocks": (_nodes(aggregate="sum", mode="blocks"), {}),
    "degrees": (_nodes(degrees=True), {}),
    "chosen fields": (_nodes(fields=["x"]), {}),
    "blocks, edge fields": (_nodes(mode="blocks", fields=["x", "weight", "edge_time"]), {}),
    "links": (_links(), {}),
    "links, binary": (_links(neg_sampling="binary"), {}),
    "links, triplet": (_links(neg_sampling=NegativeSampling("triplet", 2)), {}),
    "links, strict": (_links(neg_sampling="binary", strict_negatives=True), {}),
    "links, disjoint": (_links(neg_sampling="binary", disjoint=True), {}),
    "links, blocks": (_links(neg_sampling="binary", mode="blocks"), {}),
    "links, labels": (_links(edge_label=torch.arange(20.0)), {}),
    "links, relations": (_links(neg_sampling=NegativeSampling("triplet", 2), edge_label=torch.arange(20) % 3), {}),
    "links, input ids": (_links(input_id=torch.arange(20) * 2, neg_sampling="triplet"), {}),
    "links, weights": (
        _links(neg_sampling=NegativeSampling("binary", 1.5, torch.arange(60.0), torch.arange(60) % 7)),
        {},
    ),
    "links, joint": (_links(neg_sampling=TWO, candidates="joint", strict_negatives=True), {}),
    "links, historical": (_links(neg_sampling=TWO, candidates="historical"), {}),
    "links, historical by time": (
        _links(neg_sampling=TWO, candidates="historical", edge_label_time=torch.arange(20) * 5, time_attr="edge_time"),
        EDGE_TIME,
    ),
    "links, all": (_links(candidates="all", strict_negatives=True, known_links=LISTED[:, :2].t()), {}),
    "links, listed": (_links(candidates=LISTED, neg_sampling=TWO), {}),
    "links, listed in time": (_links(candidates=LISTED, **LINK_TIMES), NODE_TIME),
    "links, known": (_links(neg_sampling="binary", strict_negatives=True, known_links=PAIRS), {}),
    "links of the graph": (_links(**ALL_EDGES, neg_sampling="binary"), {}),  # excluded in both directions
    "links of the graph, a rank": (_links(**ALL_EDGES, rank=1, world_size=3, mode="blocks"), {}),
    "links of the graph, weighted": (_links(**ALL_EDGES, **WEIGHT, exclude="self"), WEIGHT),
    "links of the graph, labor": (_links(**ALL_EDGES, labor=True, exclude="reverse"), {}),
    "links of the graph, induced": (_links(**ALL_EDGES, subgraph_type="induced"), {}),
    "links of the graph, few": (_links(**ALL_EDGES, disjoint=True, replace=True, exclude_below=9), {}),
    "links of the graph, a hook": (_links(**ALL_EDGES, mode="blocks", sample_frontier=_drawn_by_the_hook), {}),
    "links, excluded": (_links(edge_label_index=PAIRS, exclude="both", batch_size=20), {}),
    "links, times": (_links(**LINK_TIMES), NODE_TIME),
    "links, times and a window": (
        _links(**LINK_TIMES, edge_label_index=PAIRS, exclude="both", time_window=40, strictly_before=True),
        NODE_TIME,
    ),
    "links, times and negatives": (_links(**LINK_TIMES, neg_sampling=NegativeSampling("binary", 2)), NODE_TIME),
}
HETEROGENEOUS: dict[str, tuple[MakeLoader, dict[str, Any]]] = {
    "uniform": (_nodes(), {}),
    "weighted": (_nodes(**WEIGHT), WEIGHT),
    "times": (_nodes(time_attr="year"), {"time_attr": "year"}),
    "disjoint": (_nodes(disjoint=True), {}),
    "induced": (_nodes(subgraph_type="induced"), {}),
    "induced, times": (_nodes(time_attr="year", subgraph_type="induced"), {"time_attr": "year"}),
    "HGT": (_by_budget(), {}),
    "labor": (_nodes(labor=True), {}),
    "blocks": (_nodes(mode="blocks"), {}),
    "blocks, edge fields": (_nodes(mode="blocks", fields=["x", "weight", "edge_attr"]), {}),
    "a split": (_nodes(input_nodes="train"), {}),
    "chosen fields": (_nodes(fields={"paper": ["x"], ("author", "writes", "paper"): ["edge_attr"]}), {}),
    "links": (_links(neg_sampling="binary"), {}),
    "links, disjoint": (_links(neg_sampling=NegativeSampling("triplet", 1), disjoint=True), {}),
    "links, relations": (_links(**PAIRED, neg_sampling="triplet", edge_label=torch.arange(7) % 3), {}),
    "links of a relation that is not there": (
        _links(**PAIRED, neg_sampling="triplet"),
        {},
    ),
    "links, times of one type": (
        _links(
            edge_label_index=(("author", "writes", "paper"), torch.tensor([[0, 1, 2, 3], [8, 7, 6, 5]])),
            edge_label_time=torch.full((4,), 2005),
            neg_sampling="binary",
            time_attr="year",
            batch_size=2,
        ),
        {"time_attr": "year"},
    ),
}
HOOKS = ("blocks, a frontier hook", "blocks, draws of a frontier hook", "links of the graph, a hook")
NOT_SENT = {  # to servers, and the beginning of the error
    **dict.fromkeys(HOOKS, "sample_frontier is a function, which cannot go to the servers"),
    "links, weights": "src_weight and dst_weight of neg_sampling are not sent to servers",
}
CASES = {name: Case(name, *case) for name, case in HOMOGENEOUS.items()}
CASES |= {f"heterogeneous {name}": Case(f"heterogeneous {name}", *case, True) for name, case in HETEROGENEOUS.items()}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
