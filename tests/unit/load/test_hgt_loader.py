"""HGTLoader: nodes join by budget as in the reference, all edges between them are there, the rest is PyG's."""

from typing import Any

import pytest
import torch
from support import reference
from support.batches import Replayed, assert_same_batches
from support.graphs import library, ring
from support.refusals import assert_refused, table
from torch.nn import functional as F  # noqa: N812
from torch_geometric.data import HeteroData
from torch_geometric.loader import NodeLoader

import hoploom
from hoploom import HGTLoader
from hoploom.keys import batch_key

WRITES, CITES, HAS = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "has", "topic")


def papers(seed: int, num_papers: int = 120) -> HeteroData:
    """Papers of three classes, which their authors, citations and topics mostly keep; edges repeat, and the first paper
    has 70 authors and 80 citations."""
    generator = torch.Generator().manual_seed(seed)
    data, sizes = HeteroData(), {"author": 80, "paper": num_papers, "topic": 6}
    for name, size in sizes.items():
        data[name].x = F.one_hot(torch.arange(size) % 3, 4) + 0.5 * torch.randn(size, 4, generator=generator)
    data["paper"].y = torch.arange(num_papers) % 3
    data["paper"].train_mask = torch.arange(num_papers) < num_papers // 2
    for source, name, end in (WRITES, CITES, HAS, ("topic", "rev_has", "paper"), ("paper", "rev_writes", "author")):
        many = 70 if source == "author" else 80
        ends = torch.cat([torch.randint(sizes[end], (4 * num_papers,), generator=generator), torch.zeros(many)]).long()
        others = 3 * torch.randint(10**6, (ends.numel(),), generator=generator) + ends % 3
        data[source, name, end].edge_index = torch.stack([others % (sizes[source] // 3 * 3), ends])
    return data


def batches(data: HeteroData, num_samples: Any = (4, 3), **options: Any) -> HGTLoader:
    given = {"input_nodes": ("paper", data["paper"].train_mask), "batch_size": 7, "shuffle": True, **options}
    return HGTLoader(data, list(num_samples) if isinstance(num_samples, tuple) else num_samples, **given)


def n_ids(batch: HeteroData) -> list[list[int]]:
    return [batch[name].n_id.tolist() for name in batch.node_types]


@pytest.mark.parametrize("seed", range(3))
def test_the_nodes_of_a_batch_are_those_that_the_reference_draws(seed: int) -> None:
    data, counts = papers(seed), {"author": [9, 0, 4], "topic": [1, 2, 9], "paper": [5, 6, 7]}
    loader = batches(data, counts, seed=seed)
    schema = loader.store.schema
    lists = [(one.indptr.tolist(), one.indices.tolist()) for one in loader.store.parts[0].lists]
    relations = [(*ends, *one) for *ends, one in zip(schema.sources, schema.destinations, lists, strict=True)]
    layers = list(zip(*(counts[name] for name in data.node_types), strict=True))
    for step, batch in enumerate(loader):
        seeds = batch["paper"].n_id[: batch["paper"].batch_size].tolist()
        expected = reference.hgt_nodes(3, relations, (1, seeds), layers, batch_key(seed, 0, step))
        assert n_ids(batch) == expected


def test_a_batch_has_all_edges_between_its_nodes_and_each_node_once() -> None:
    data = papers(3)
    for batch in batches(data, [9, 9]):
        for name in data.node_types:
            held = batch[name].n_id
            assert held.unique().numel() == held.numel()
            assert held.numel() - 7 * (name == "paper") <= 18
            assert torch.equal(batch[name].x, data[name].x[held])
        for source, name, end in data.edge_types:
            edge_index, found = data[source, name, end].edge_index, batch[source, name, end]
            inside = torch.isin(edge_index[0], batch[source].n_id) & torch.isin(edge_index[1], batch[end].n_id)
            assert torch.equal(found.e_id.sort().values, inside.nonzero().view(-1))
            named = torch.stack([batch[source].n_id[found.edge_index[0]], batch[end].n_id[found.edge_index[1]]])
            assert torch.equal(named, edge_index[:, found.e_id])


def test_a_node_is_drawn_in_proportion_to_its_squared_budget() -> None:
    """Authors 0, 1, 2 write paper 0, author 0 alone paper 1: budgets 4/3, 1/3, 1/3. Author 3 is out of reach."""
    data = HeteroData()
    data["author"].num_nodes, data["paper"].num_nodes = 4, 10
    data[WRITES].edge_index = torch.tensor([[0, 1, 2, 0, 3], [0, 0, 0, 1, 9]])
    loader = HGTLoader(data, {"author": [1, 1], "paper": [0, 0]}, ("paper", [0, 1]), batch_size=2)
    drawn = torch.tensor([next(iter(loader))["author"].n_id.tolist() for _ in range(600)])
    first, second = (torch.bincount(column, minlength=4).tolist() for column in drawn.t())
    assert first[3] == second[3] == 0
    assert 494 < first[0] < 572  # 16/18 of 600, within five standard deviations
    assert 210 < (drawn == torch.tensor([0, 1])).all(dim=1).sum() < 325  # half of these


def test_of_a_long_list_a_budget_has_fifty_picks() -> None:
    data = HeteroData()
    data["author"].num_nodes, data["paper"].num_nodes = 300, 1
    data[WRITES].edge_index = torch.stack([torch.arange(300), torch.zeros(300, dtype=torch.int64)])
    for batch in HGTLoader(data, {"author": [200, 200], "paper": [0, 0]}, "paper"):
        assert batch["author"].num_nodes == batch[WRITES].num_edges == 50


def test_no_budget_no_nodes_and_repeated_seeds_stay() -> None:
    batch = HGTLoader(library(), [3, 3], ("paper", [9, 9]), batch_size=2)([0, 1])  # paper 9 has no edges
    assert n_ids(batch) == [[], [9, 9], []]
    batch = HGTLoader(library(), [2], ("paper", [4, 4, 6]), batch_size=3)([0, 1, 2])
    assert (batch["paper"].n_id[:3].tolist(), batch["paper"].num_nodes) == ([4, 4, 6], 5)
    assert HGTLoader(library(), [10**30], "paper", batch_size=10)(list(range(10)))["author"].n_id.numel() == 6


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@pytest.mark.parametrize("seeds", [("paper", library()["paper"].train_mask), "author", ("venue", [2, 0])])
def test_a_batch_has_the_fields_of_pygs(seeds: Any) -> None:
    data = library()
    ours = list(HGTLoader(data, [2, 2], seeds, is_sorted=True, filter_per_worker=True, batch_size=4))
    assert_same_batches(ours, NodeLoader(data, Replayed(ours), seeds, batch_size=4))


BAD: dict[str, tuple[Any, ...]] = {
    "a misspelt type": ({"num_samples": {"author": [2], "papers": [2], "venue": [2]}}, "'papers'", "'paper'", "venue"),
    "a relation": ({"num_samples": {WRITES: [2]}}, "writes", "'author'"),
    "a type left out": ({"num_samples": {"author": [2], "paper": [2]}}, "'venue'", "[0, ...]"),
    "unequal lengths": ({"num_samples": {"author": [2], "paper": [2, 2], "venue": [2]}}, "[1, 2] entries"),
    "no layers": ({"num_samples": []}, "[0] entries"),
    "a count of -1": ({"num_samples": [4, -1]}, "num_samples of 'author'", "-1", "count"),
    "one number": ({"num_samples": 5}, "5", "[512, 512]"),
    "a graph of one type": ({"data": ring(8), "input_nodes": None}, "NeighborLoader"),
    "no seeds": ({"input_nodes": ("paper", [])}, "input_nodes is empty"),
    "seeds of no type": ({"input_nodes": torch.arange(3)}, "name the node type"),
    "a type that is not there": ({"input_nodes": "reader"}, "reader"),
    "transform as text": ({"transform": "x"}, "transform", "function"),
    "transform_sampler_output": ({"transform_sampler_output": print}, "transform="),
    "collate_fn": ({"collate_fn": list}, "HGTLoader", "collate_fn"),
}


@table(BAD)
def test_wrong_arguments_are_refused(given: dict[str, Any], said: tuple[str, ...]) -> None:
    given = {"data": library(), "num_samples": [2, 2], "input_nodes": "paper", **given}
    assert_refused(lambda: HGTLoader(**given), *said)


def test_an_argument_of_hops_is_unexpected_and_the_loader_is_shown() -> None:
    with pytest.raises(TypeError, match=r"HGTLoader\(\) got an unexpected argument 'num_neighbors'"):
        HGTLoader(library(), [2], "paper", num_neighbors=[2])
    assert "num_samples [2, 3]" in repr(HGTLoader(library(), [2, 3], "paper"))
    assert "author [1]; paper [0]; venue [2]" in repr(
        HGTLoader(library(), {"paper": [0], "venue": [2], "author": [1]}, "paper")
    )
    assert hoploom.HGTLoader is HGTLoader
