"""Loaders without layers, graphs without edges, and links of a relation that the graph does not have, as in PyG."""

from typing import Any

import pytest
import torch
from support.graphs import library, ring
from support.refusals import assert_refused
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling

from hoploom import LinkNeighborLoader, NeighborLoader

PAIRS = torch.tensor([[5, 1, 5], [2, 2, 7]])
BURNS = ("author", "burns", "paper")


@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"replace": True}, {"labor": True}], ids=str)
def test_without_layers_a_batch_is_its_seeds(options: Any) -> None:
    (batch,) = NeighborLoader(ring(8), [], input_nodes=[6, 2], batch_size=2, **options)
    assert (batch.n_id.tolist(), batch.x[:, 0].tolist()) == ([6, 2], [6.0, 2.0])
    assert batch.edge_index.shape == (2, 0)
    assert (batch.num_sampled_nodes, batch.num_sampled_edges) == ([2], [])


@pytest.mark.parametrize("subgraph_type", ["induced", "bidirectional"])
def test_without_layers_the_seeds_own_edges_are_in_an_induced_batch(subgraph_type: str) -> None:
    (batch,) = NeighborLoader(ring(8), [], [6, 5, 2], batch_size=3, subgraph_type=subgraph_type)
    edges = batch.n_id[batch.edge_index].t().tolist()
    assert edges == ([[6, 5]] if subgraph_type == "induced" else [])


@pytest.mark.parametrize("edges", [{}, {"edge_index": torch.empty(2, 0, dtype=torch.int64)}], ids=["none", "empty"])
@pytest.mark.parametrize("num_neighbors", [[], [-1, 3]], ids=str)
def test_links_are_seeds_of_a_graph_without_edges(edges: Any, num_neighbors: Any) -> None:
    loader = LinkNeighborLoader(Data(num_nodes=9, **edges), num_neighbors, PAIRS, batch_size=3)
    (batch,) = loader
    assert batch.n_id.tolist() == [1, 2, 5, 7]
    assert torch.equal(batch.n_id[batch.edge_label_index], PAIRS)


@pytest.mark.parametrize("num_neighbors", [[], [-1], {}], ids=str)
def test_links_are_seeds_of_a_heterogeneous_graph_without_relations(num_neighbors: Any) -> None:
    data = HeteroData(paper={"num_nodes": 9, "x": torch.arange(9.0)})
    (batch,) = LinkNeighborLoader(data, num_neighbors, (("paper", "paper"), PAIRS), batch_size=3)
    links = batch["paper", "to", "paper"].edge_label_index
    assert torch.equal(batch["paper"].x.long()[links], PAIRS)


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("negatives", [None, "binary", NegativeSampling("triplet", 2, dst_weight=torch.arange(10))])
def test_links_of_a_relation_that_the_graph_does_not_have(disjoint: bool, negatives: Any) -> None:
    data = library()
    loader = LinkNeighborLoader(
        data, [2, 2], (BURNS, PAIRS), batch_size=3, neg_sampling=negatives, disjoint=disjoint, edge_label=None
    )
    (batch,) = loader
    assert batch.edge_types == [*data.edge_types, BURNS]
    author, paper = batch["author"].x[:, 0].long(), batch["paper"].x[:, 0].long()
    if isinstance(negatives, NegativeSampling):
        assert torch.equal(author[batch["author"].src_index], PAIRS[0])
        assert torch.equal(paper[batch["paper"].dst_pos_index], PAIRS[1])
        assert batch["paper"].dst_neg_index.shape == (3, 2)
        return
    sources, destinations = batch[BURNS].edge_label_index[:, :3]
    assert torch.equal(torch.stack([author[sources], paper[destinations]]), PAIRS)
    assert batch[BURNS].edge_label_index.shape == (2, 6 if negatives else 3)
    assert batch[BURNS].input_id.tolist() == [0, 1, 2]


WRONG: dict[str, Any] = {
    "its edges": (lambda: LinkNeighborLoader(library(), [2], BURNS), "burns", "writes"),
    "its edges, said otherwise": (lambda: LinkNeighborLoader(library(), [2], (BURNS, None)), "burns", "writes"),
    "strict negatives": (
        lambda: LinkNeighborLoader(
            library(), [2], (BURNS, PAIRS), neg_sampling="binary", strict_negatives=True
        ),
        "strict_negatives",
        "burns",
    ),
    "no links": (lambda: LinkNeighborLoader(Data(num_nodes=3), [2]), "edge_label_index is empty"),
    "blocks": (lambda: NeighborLoader(ring(8), [], mode="blocks"), "blocks", "layers"),
    "aggregated": (lambda: NeighborLoader(ring(8), [], aggregate="mean"), "aggregate", "num_neighbors"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "said"), [(row[0], row[1:]) for row in WRONG.values()], ids=WRONG)
def test_what_needs_edges_or_layers_is_refused(make: Any, said: tuple[str, ...]) -> None:
    assert_refused(make, *said)
