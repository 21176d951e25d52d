"""A batch is what PyG makes of the same sample: its fields, dtypes, order and values; and a GNN cannot tell the two.

PyG's own NodeLoader, given our picks, joins features with PyG's own code: that is the expectation here. What
PyG's NeighborSampler returns (seen with PyG 2.8.1 and torch-sparse 0.6.18) stands as facts about a ring.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import Replayed, assert_same_batches
from support.graphs import dated_library, library, random_graph, ring
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.sampler import NumNeighbors
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.utils import trim_to_layer

from hoploom import NeighborLoader

Options = dict[str, Any]
WRITES = ("author", "writes", "paper")
PAPERS = torch.tensor([3, 9, 3, 0, 5, 8])
ADDED = ["n_id", "e_id", "num_sampled_nodes", "num_sampled_edges", "input_id", "batch_size"]


def every_kind() -> Data:
    """A ring with a field of every kind that PyG filters, and of those it leaves alone."""
    data = ring(12)
    data.half = torch.arange(36).view(12, 3).bfloat16()
    data.flags = torch.arange(24).view(12, 2) % 3 == 0
    data.cube = torch.arange(72.0, dtype=torch.float64).view(12, 2, 3)
    data.columns = torch.arange(36).view(3, 12).t()  # not contiguous
    data.counts = np.arange(12)
    data.edge_counts = np.arange(48.0).reshape(24, 2)
    data.edge_flag = torch.arange(24) % 5 == 0
    data.classes = torch.tensor([0.5, 0.25, 0.25])
    data.version = torch.tensor(3)
    data.name, data.scale, data.notes = "ring", 2.5, {"drawn": "by hand"}
    data.num_nodes = 12
    return data


def catalogue() -> HeteroData:
    """The library with random features for every type, and with a relation back to the authors."""
    data, generator = library(), torch.Generator().manual_seed(0)
    for node_type in data.node_types:
        data[node_type].x = torch.randn(data[node_type].num_nodes, 5, generator=generator)
    data["paper", "rev_writes", "author"].edge_index = data[WRITES].edge_index.flip(0)
    data["paper"].kind, data.title = "a constant", "catalogue"
    return data


def with_own_ids(data: Data | HeteroData) -> Data | HeteroData:
    """Fields that have the names of those PyG adds."""
    nodes, edges = (data, data) if isinstance(data, Data) else (data["paper"], data[WRITES])
    nodes.n_id = 100 + torch.arange(nodes.num_nodes)
    nodes.batch = torch.zeros(nodes.num_nodes, dtype=torch.int64)
    nodes.input_id = torch.arange(nodes.num_nodes)
    edges.e_id = 100 + torch.arange(edges.num_edges)
    return data


bare = Data(edge_index=ring(12).edge_index)
counted = Data(edge_index=ring(12).edge_index, num_nodes=13)
no_edges = Data(x=torch.eye(3), edge_index=torch.empty(2, 0, dtype=torch.int64), edge_attr=torch.empty(0, 4))
square = Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), edge_attr=-torch.eye(3))
square.y = torch.arange(3)
dated = random_graph(30, 200, 0)
some, some_times = torch.arange(9), 10 * torch.arange(9)
CASES: dict[str, tuple[Any, ...]] = {  # data, input_nodes, options of the sampler, of the loader
    "every kind": (every_kind(), None),
    "a mask": (every_kind(), every_kind().train_mask),
    "int32 ids": (ring(12), torch.tensor([5, 2], dtype=torch.int32)),
    "own input ids": (ring(12), torch.tensor([3, 4]), {}, {"input_id": torch.tensor([30, 40])}),
    "no fields": (bare, None),
    "only num_nodes": (counted, None),
    "no edges": (no_edges, None),
    "as many edges as nodes": (square, None),
    "names that PyG adds": (with_own_ids(ring(12)), None),
    "replacement": (every_kind(), None, {"replace": True}),
    "disjoint": (every_kind(), None, {"disjoint": True}),
    "bidirectional": (every_kind(), None, {"subgraph_type": "bidirectional"}),
    "induced": (every_kind(), None, {"subgraph_type": SubgraphType.induced}),
    "induced, times": (dated, some, {"time_attr": "node_time", "subgraph_type": "induced"}, {"input_time": some_times}),
    "weights": (dated, None, {"weight_attr": "weight"}),
    "node times": (dated, None, {"time_attr": "node_time"}),
    "last": (dated, None, {"time_attr": "node_time", "temporal_strategy": "last"}),
    "edge times": (dated, some, {"time_attr": "edge_time"}, {"input_time": some_times}),
    "a type": (catalogue(), "author"),
    "a type and None": (catalogue(), ("venue", None)),
    "a type and a mask": (catalogue(), ("paper", library()["paper"].train_mask)),
    "a type and ids": (library(), ("paper", PAPERS)),
    "types, disjoint": (catalogue(), ("paper", PAPERS), {"disjoint": True}),
    "types, induced": (catalogue(), ("paper", PAPERS), {"subgraph_type": "induced"}),
    "types, induced, times": (dated_library(), "paper", {"time_attr": "time", "subgraph_type": "induced"}),
    "types, bidirectional": (catalogue(), ("paper", PAPERS), {"subgraph_type": "bidirectional"}),
    "types, names that PyG adds": (with_own_ids(library()), "paper"),
    "types, input times": (dated_library(), "venue", {"time_attr": "time"}, {"input_time": torch.tensor([2, 5, 8])}),
}


def by_pyg(data: Any, num_neighbors: Any, input_nodes: Any, options: Options | None = None, **more: Any) -> NodeLoader:
    picks = NeighborLoader(data, num_neighbors, input_nodes, fields=[], **(options or {}), **more)
    return NodeLoader(data, Replayed(picks), input_nodes, **more)


@pytest.mark.filterwarnings("ignore:relation", "ignore:Unable to accurately infer")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_batch_is_what_pygs_node_loader_makes_of_the_same_sample(case: tuple[Any, ...]) -> None:
    data, input_nodes, options, more = (*case, {}, {})[:4]
    ours = NeighborLoader(data, [2, 2], input_nodes, batch_size=4, **options, **more)
    assert_same_batches(ours, by_pyg(data, [2, 2], input_nodes, options, batch_size=4, **more))


def test_a_batch_of_the_ring_is_the_one_of_pygs_neighbor_loader() -> None:
    data = ring(12)
    (batch,) = NeighborLoader(data, [-1, -1], torch.tensor([3, 3, 5]), batch_size=4)
    assert list(batch._store) == [*data._store, *ADDED]
    assert batch.n_id.tolist() == [3, 3, 5, 4, 6, 7, 8, 9]  # the seeds, then node by node what they see first
    assert batch.edge_index[1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]  # both copies of 3 have their edges
    assert data.edge_index[:, batch.e_id].tolist() == batch.n_id[batch.edge_index].tolist()
    assert (batch.input_id.tolist(), batch.batch_size) == ([0, 1, 2], 3)
    assert (batch.num_sampled_nodes, batch.num_sampled_edges) == ([3, 3, 2], [6, 6])
    assert all(batch[name].dtype == torch.int64 for name in ("n_id", "e_id", "edge_index", "input_id"))


def test_edges_of_every_type_are_those_that_the_batch_names() -> None:
    data = catalogue()
    for batch in NeighborLoader(data, [2, 2], "paper", batch_size=4):
        assert (batch.node_types, batch.edge_types) == (data.node_types, data.edge_types)
        for node_type in data.node_types:
            assert torch.equal(batch[node_type].x, data[node_type].x[batch[node_type].n_id])
        for key in data.edge_types:
            ends = [batch[end].n_id[row] for end, row in zip((key[0], key[2]), batch[key].edge_index, strict=True)]
            assert torch.equal(torch.stack(ends), data[key].edge_index[:, batch[key].e_id])


@pytest.mark.parametrize("data", [ring(12), library()], ids=["one type", "types"])
def test_sampling_leaves_the_users_data_as_it_was(data: Data | HeteroData) -> None:
    before = copy.deepcopy(data)
    list(NeighborLoader(data, [2, 2], None if isinstance(data, Data) else "paper", batch_size=4))
    assert_same_batches([data], [before])


@pytest.mark.parametrize("num_seeds", [1, 7, 8, 9])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_is_as_long_as_pygs(num_seeds: int, drop_last: bool) -> None:
    data, more = ring(12), {"drop_last": drop_last}
    loader = NeighborLoader(data, [1], torch.arange(num_seeds), batch_size=4, **more)
    assert len(loader) == len(list(loader)) == len(by_pyg(data, [1], torch.arange(num_seeds), batch_size=4, **more))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_may_return_anything(num_workers: int) -> None:
    def pair(batch: Data) -> tuple[int, Tensor]:
        return batch.batch_size, batch.x[: batch.batch_size, 0]

    loader = NeighborLoader(ring(12), [2], batch_size=5, transform=pair, num_workers=num_workers)
    assert [(size, x.tolist()) for size, x in loader] == [(5, [0, 1, 2, 3, 4]), (5, [5, 6, 7, 8, 9]), (2, [10, 11])]


SYNONYMS: list[tuple[Options, Options]] = [
    ({"filter_per_worker": True}, {}),
    ({"filter_per_worker": False, "is_sorted": False, "persistent_workers": True}, {}),
    ({"directed": False}, {"subgraph_type": "induced"}),
]


@pytest.mark.parametrize(("options", "plainly"), SYNONYMS, ids=lambda options: "-".join(options))
def test_arguments_that_only_pyg_needs_are_accepted(options: Options, plainly: Options) -> None:
    loaders = [NeighborLoader(every_kind(), [2, 2], batch_size=4, **given) for given in (options, plainly)]
    assert_same_batches(*loaders)


@pytest.mark.parametrize("as_object", [False, True], ids=["dict", "NumNeighbors"])
def test_every_relation_may_have_fanouts_of_its_own(as_object: bool) -> None:
    data = library()
    given: Any = {key: [-1, 2] if key[1] == "cites" else [1, 0] for key in data.edge_types}
    if as_object:
        given = NumNeighbors({("paper", "cites", "paper"): [-1, 2]}, default=[1, 0])
    (batch,) = NeighborLoader(data, given, ("paper", torch.tensor([5])), batch_size=4)
    counts = {key[1]: batch[key].num_sampled_edges for key in data.edge_types}
    # Papers 6, 7 and 8 cite paper 5; of these, 7 and 8 cite 6 and 8 cites 7.
    assert counts == {"writes": [1, 0], "reviews": [1, 0], "cites": [3, 3], "appears_in": [0, 0], "prints": [1, 0]}


class Layers(nn.Module):
    """Layers over many types with a nonlinearity between them; trims as PyG does if told the counts."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any, edge_index: Any, counts: tuple[Any, Any] | None = None) -> Any:
        for number, layer in enumerate(self.layers):
            if counts is not None:
                x, edge_index, _ = trim_to_layer(number, *counts, x, edge_index)
            x = {name: rows.tanh() for name, rows in layer(x, edge_index).items()}
        return x


@pytest.mark.parametrize("fanouts", [[-1, -1], [2, 1]])
def test_of_all_types_the_seeds_have_what_the_full_graph_gives_also_if_trimmed(fanouts: list[int]) -> None:
    data = catalogue()
    torch.manual_seed(0)
    model = Layers([HeteroConv({key: SAGEConv((w, w), 8) for key in data.edge_types}) for w in (5, 8)])
    full = model(data.x_dict, data.edge_index_dict)
    for node_type in ("paper", "author", "venue"):
        for batch in NeighborLoader(data, fanouts, node_type, batch_size=4):
            size, counts = batch[node_type].batch_size, (batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict)
            found = model(batch.x_dict, batch.edge_index_dict)[node_type][:size]
            if fanouts[0] == -1:
                assert torch.allclose(found, full[node_type][batch[node_type].n_id[:size]], atol=1e-5)
            trimmed = model(batch.x_dict, batch.edge_index_dict, counts)[node_type][:size]
            assert torch.allclose(trimmed, found, atol=1e-5)
