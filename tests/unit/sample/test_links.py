"""Links as seeds: PyG's fields, where the ends stand in the batch, and negatives that are what was asked for.

PyG's own LinkLoader, given our sampler, fills batches with PyG's own code: that is the expectation for fields.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.batches import Replayed, assert_same_batches
from support.graphs import dated_library, library, random_graph, ring
from support.proportions import assert_in_proportion
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader
from torch_geometric.sampler import NegativeSampling

from hoploom import DataError, LinkNeighborLoader

Options = dict[str, Any]
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
BINARY, TRIPLET = NegativeSampling("binary"), NegativeSampling("triplet")
BOTH = ["binary", "triplet"]


def loops(num_nodes: int) -> Data:
    """A link from every node to itself: positives whose ends say which link they are."""
    return Data(edge_index=torch.arange(num_nodes).repeat(2, 1), num_nodes=num_nodes)


def dense(num_nodes: int, share: float) -> Data:
    """Every possible edge with this probability."""
    chosen = torch.rand(num_nodes, num_nodes, generator=torch.Generator().manual_seed(0)) < share
    return Data(edge_index=chosen.nonzero().t().contiguous(), num_nodes=num_nodes)


def links_of(batch: Any, key: Any = None) -> Tensor:
    """The links of a batch [2, n] in global ids; of triplets each source with its one negative after the positives."""
    source, link, destination = (batch,) * 3 if key is None else (batch[key[0]], batch[key], batch[key[2]])
    if "edge_label_index" in link:
        places = link.edge_label_index
    else:
        negatives = destination.dst_neg_index.view(source.src_index.numel(), -1).t().reshape(-1)
        repeats = 1 + negatives.numel() // source.src_index.numel()
        places = torch.stack([source.src_index.repeat(repeats), torch.cat([destination.dst_pos_index, negatives])])
    assert places.dtype == torch.int64
    return torch.stack([source.n_id[places[0]], destination.n_id[places[1]]])


def negatives_of(data: Data, negatives: NegativeSampling, **options: Any) -> Tensor:
    """The negatives [2, n] of one batch with all links."""
    (batch,) = LinkNeighborLoader(data, [0], neg_sampling=negatives, batch_size=10**6, **options)
    return links_of(batch)[:, batch.input_id.numel() :]


labels = torch.arange(24) % 3
given = ring(12).edge_index[:, 3:13]
timed = {"edge_label_time": torch.arange(24) * 4 + 10}
dated = Data(x=torch.eye(12), time=torch.arange(12) * 9, edge_index=ring(12).edge_index)
split = ring(12)
split.edge_label_index, split.edge_label, split.edge_label_time = split.edge_index, labels, labels
CASES: dict[str, tuple[Any, ...]] = {  # data, edge_label_index, options of the loader, of the sampler
    "all edges": (ring(12), None, {}),
    "given": (ring(12), given, {"neg_sampling": "binary"}),
    "input ids": (ring(12), given, {"neg_sampling": "triplet", "input_id": 50 + torch.arange(10)}),
    "labels": (ring(12), None, {"edge_label": labels}),
    "labels with negatives": (ring(12), None, {"edge_label": labels, "neg_sampling": BINARY}),
    "labels from one": (ring(12), None, {"edge_label": 1 + labels, "neg_sampling": BINARY}),
    "rows of labels": (ring(12), None, {"edge_label": 1 + torch.rand(24, 3), "neg_sampling": BINARY}),
    "half as many": (ring(12), None, {"neg_sampling": NegativeSampling("binary", 0.5)}),
    "a ratio": (ring(12), None, {"neg_sampling_ratio": 1.5}),
    "no ratio": (ring(12), None, {"neg_sampling_ratio": 0.0}),
    "triplets of four": (ring(12), None, {"neg_sampling": NegativeSampling("triplet", 2)}),
    "disjoint": (ring(12), None, {"neg_sampling": BINARY}, {"disjoint": True}),
    "disjoint triplets": (ring(12), None, {"neg_sampling": NegativeSampling("triplet", 2)}, {"disjoint": True}),
    "bidirectional": (ring(12), None, {"neg_sampling": BINARY}, {"subgraph_type": "bidirectional"}),
    "induced": (ring(12), None, {"neg_sampling": TRIPLET}, {"subgraph_type": "induced"}),
    "times": (dated, None, timed, {"time_attr": "time"}),
    "times of negatives": (dated, None, {"neg_sampling": BINARY, **timed}, {"time_attr": "time"}),
    "times of triplets": (dated, None, {"neg_sampling": TRIPLET, **timed}, {"time_attr": "time"}),
    "names that PyG adds": (split, split.edge_label_index, {"edge_label": split.edge_label}),
    "names that PyG removes": (split, split.edge_label_index, {"neg_sampling": TRIPLET}),
    "a relation": (library(), WRITES, {}),
    "a relation and None": (library(), (CITES, None), {"neg_sampling": BINARY}),
    "a relation and links": (library(), (WRITES, torch.tensor([[0, 6, 0], [9, 9, 2]])), {"neg_sampling": TRIPLET}),
    "two types": (library(), ("paper", "venue"), {"neg_sampling": BINARY}),
    "triplets of one type": (library(), CITES, {"neg_sampling": NegativeSampling("triplet", 2)}),
    "disjoint relation": (library(), WRITES, {"neg_sampling": BINARY}, {"disjoint": True}),
    "disjoint triplets of types": (library(), WRITES, {"neg_sampling": TRIPLET}, {"disjoint": True}),
    "times of types": (
        dated_library(),
        WRITES,
        {"neg_sampling": BINARY, "edge_label_time": torch.arange(27) // 3},
        {"time_attr": "time"},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_batch_is_what_pygs_link_loader_makes_of_the_same_sample(case: tuple[Any, ...]) -> None:
    data, edge_label_index, more, options = (*case, {})[:4]
    ours = list(LinkNeighborLoader(data, [2, 2], edge_label_index, batch_size=5, **more, **options))
    assert_same_batches(ours, LinkLoader(data, Replayed(ours), edge_label_index, batch_size=5, **more))


KEYS = pytest.mark.parametrize("key", [None, WRITES, CITES], ids=["one type", "two ends", "same ends"])
MODES: dict[str, NegativeSampling | None] = {"none": None, "binary": BINARY, "binary, 2": NegativeSampling("binary", 2)}
MODES |= {"half": NegativeSampling("binary", 0.5), "triplet": TRIPLET, "triplet of 3": NegativeSampling("triplet", 3)}


@KEYS
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("negatives", MODES.values(), ids=MODES)
def test_local_indices_point_at_the_links(key: Any, disjoint: bool, negatives: NegativeSampling | None) -> None:
    data = ring(12) if key is None else library()
    links = data.edge_index if key is None else data[key].edge_index
    options: Options = {"neg_sampling": negatives, "disjoint": disjoint, "batch_size": 7, "shuffle": True}
    for batch in LinkNeighborLoader(data, [2, 1], key, **options):
        input_id = batch.input_id if key is None else batch[key].input_id
        found, count = links_of(batch, key), input_id.numel()
        assert torch.equal(found[:, :count], links[:, input_id])
        assert found.shape[1] == count + (math.ceil(count * negatives.amount) if negatives else 0)
        if negatives is None or negatives.is_binary():
            label = (batch if key is None else batch[key]).get("edge_label")
            ones = (torch.arange(found.shape[1]) < count).float()
            assert label is None if negatives is None else torch.equal(label, ones)
        else:
            shape = (count,) if negatives.amount == 1 else (count, negatives.amount)
            assert (batch if key is None else batch[key[2]]).dst_neg_index.shape == shape


@KEYS
@pytest.mark.parametrize("negatives", [BINARY, NegativeSampling("triplet", 2)], ids=BOTH)
def test_the_trees_of_a_link_and_its_negatives_have_the_links_number(key: Any, negatives: NegativeSampling) -> None:
    data = ring(12) if key is None else library()
    options: Options = {"neg_sampling": negatives, "disjoint": True, "batch_size": 5, "rank": 1, "world_size": 2}
    for batch in LinkNeighborLoader(data, [2], key, **options):
        source, link, destination = (batch,) * 3 if key is None else (batch[key[0]], batch[key], batch[key[2]])
        count = link.input_id.numel()
        if negatives.is_binary():
            places = link.edge_label_index
        else:
            columns = destination.dst_neg_index.t().reshape(-1)
            places = [source.src_index, torch.cat([destination.dst_pos_index, columns])]
        for nodes, at in zip((source, destination), places, strict=True):
            assert torch.equal(nodes.batch[at], torch.arange(at.numel()) % count)
            assert nodes.batch.max() < count


@pytest.mark.parametrize("amount", [0.5, 1, 1.5, 2])
def test_the_number_of_a_tree_leads_to_the_time_of_its_link_for_any_amount_of_negatives(amount: float) -> None:
    data = ring(12)
    data.time = torch.zeros(12, dtype=torch.int64)
    options: Options = {"time_attr": "time", "edge_label_time": torch.arange(24), "batch_size": 5}
    for batch in LinkNeighborLoader(data, [2], None, neg_sampling=NegativeSampling("binary", amount), **options):
        for end in batch.edge_label_index:
            assert torch.equal(batch.edge_label_time[batch.batch[end]], batch.edge_label_time)


def test_negatives_are_uniform_and_their_ends_independent() -> None:
    sources, destinations = negatives_of(loops(20), NegativeSampling("binary", 300))
    assert_in_proportion(sources, torch.ones(20))
    assert_in_proportion(destinations, torch.ones(20))
    assert_in_proportion(sources * 20 + destinations, torch.ones(400))
    sources, destinations = negatives_of(loops(20), NegativeSampling("triplet", 300))
    assert_in_proportion(sources * 20 + destinations, torch.ones(400))


def test_negatives_are_in_proportion_to_their_weights() -> None:
    first, second = torch.arange(20) % 4, (torch.arange(20) + 1) % 3
    binary = NegativeSampling("binary", 300, src_weight=first.float(), dst_weight=second.float())
    sources, destinations = negatives_of(loops(20), binary)
    assert_in_proportion(sources, first)
    assert_in_proportion(destinations, second)
    _, destinations = negatives_of(loops(20), NegativeSampling("triplet", 300, dst_weight=second.float()))
    assert_in_proportion(destinations, second)


def test_strict_negatives_are_uniform_over_what_is_no_edge() -> None:
    data, absent = dense(12, 0.25), torch.ones(144, dtype=torch.int64)
    absent[data.edge_index[0] * 12 + data.edge_index[1]] = 0
    loose = negatives_of(data, NegativeSampling("binary", 30))
    assert not absent[loose[0] * 12 + loose[1]].all()
    sources, destinations = negatives_of(data, NegativeSampling("binary", 30), strict_negatives=True)
    assert_in_proportion(sources * 12 + destinations, absent)
    sources, destinations = negatives_of(data, NegativeSampling("triplet", 60), strict_negatives=True)
    for source in range(12):
        of_source = destinations[sources == source]
        assert_in_proportion(of_source, absent.view(12, 12)[source])


@KEYS
@pytest.mark.parametrize("negatives", [NegativeSampling("binary", 5), NegativeSampling("triplet", 5)], ids=BOTH)
def test_strict_negatives_are_never_edges(key: Any, negatives: NegativeSampling) -> None:
    data = random_graph(12, 60, 0) if key is None else library()
    known = set(zip(*(data.edge_index if key is None else data[key].edge_index).tolist(), strict=True))
    for batch in LinkNeighborLoader(data, [1], key, neg_sampling=negatives, strict_negatives=True, batch_size=8):
        count = (batch if key is None else batch[key]).input_id.numel()
        found = list(zip(*links_of(batch, key)[:, count:].tolist(), strict=True))
        assert len(found) == 5 * count
        assert not known & set(found)


@pytest.mark.parametrize("negatives", [NegativeSampling("binary", 9), NegativeSampling("triplet", 9)], ids=BOTH)
def test_strict_negatives_are_found_where_nine_of_ten_pairs_are_edges(negatives: NegativeSampling) -> None:
    sources, destinations = torch.cartesian_prod(torch.arange(20), torch.arange(20)).t()
    edges = (sources + destinations) % 10 > 0
    data = Data(edge_index=torch.stack([sources[edges], destinations[edges]]), num_nodes=20)
    found = negatives_of(data, negatives, strict_negatives=True)
    assert found.shape == (2, 9 * 360)
    assert (found.sum(0) % 10 == 0).all()


@pytest.mark.parametrize("negatives", [BINARY, TRIPLET], ids=BOTH)
def test_a_complete_graph_has_no_strict_negatives_and_says_so(negatives: NegativeSampling) -> None:
    with pytest.raises(DataError, match="nearly every pair is an edge"):
        negatives_of(dense(8, 1.1), negatives, strict_negatives=True)


@pytest.mark.parametrize("negatives", [NegativeSampling("binary", 2), NegativeSampling("triplet", 2)], ids=BOTH)
def test_negatives_exist_at_the_time_of_their_link(negatives: NegativeSampling) -> None:
    data, times = dated, timed["edge_label_time"]
    seen = set()
    for batch in LinkNeighborLoader(
        data, [2], None, None, times, time_attr="time", neg_sampling=negatives, batch_size=5
    ):
        link_times, ends = times[batch.input_id], links_of(batch)
        late = data.time[ends[:, len(link_times) :]] > link_times.repeat(2)
        assert not late[1].any()
        assert not late[0].any() or negatives.is_triplet()
        seen |= set(ends[1, len(link_times) :].tolist())
        sources, destinations = batch.edge_index
        assert (batch.time[sources] <= link_times[batch.batch[destinations]]).all()
        if negatives.is_binary():
            assert torch.equal(batch.edge_label_time, link_times.repeat(3))
        else:
            assert torch.equal(batch.seed_time, link_times)
    assert len(seen) > 6  # not always the oldest


def test_a_link_older_than_every_node_takes_the_oldest_as_in_pyg() -> None:
    times = torch.full((24,), -5)
    (batch,) = LinkNeighborLoader(
        dated, [2], edge_label_time=times, time_attr="time", neg_sampling=BINARY, batch_size=24
    )
    assert (links_of(batch)[:, 24:] == 0).all()


@pytest.mark.parametrize("negatives", [BINARY, TRIPLET], ids=BOTH)
def test_strict_negatives_of_a_link_older_than_every_node_are_the_oldest_or_an_error(
    negatives: NegativeSampling,
) -> None:
    data = Data(time=dated.time, edge_index=torch.stack([torch.arange(6), torch.arange(6) + 3]), num_nodes=12)
    times, links = torch.full((6,), -5), data.edge_index
    options = {"time_attr": "time", "neg_sampling": negatives, "strict_negatives": True, "batch_size": 6}
    (batch,) = LinkNeighborLoader(data, [2], links, edge_label_time=times, **options)
    assert (links_of(batch)[1, 6:] == 0).all()
    data.edge_index = torch.stack([torch.arange(6), torch.zeros(6, dtype=torch.int64)])
    with pytest.raises(DataError, match="newer than the link"):
        list(LinkNeighborLoader(data, [2], links, edge_label_time=times, **options))


def of_ranks(data: Data, world_size: int, **options: Any) -> Iterator[tuple[int, Data]]:
    """Every step's number and batch, rank by rank; a step of all ranks is of 24 links."""
    options |= {"batch_size": 24 // world_size, "shuffle": True, "world_size": world_size}
    for rank in range(world_size):
        yield from enumerate(LinkNeighborLoader(data, [2], rank=rank, **options))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("negatives", [NegativeSampling("binary", 2), NegativeSampling("triplet", 2)], ids=BOTH)
def test_a_link_has_equal_negatives_however_many_ranks_share_a_step(negatives: NegativeSampling, strict: bool) -> None:
    data = random_graph(40, 100, 5)

    def by_step(world_size: int) -> list[dict[int, list[Any]]]:
        steps: list[dict[int, list[Any]]] = []
        for step, batch in of_ranks(data, world_size, neg_sampling=negatives, strict_negatives=strict):
            steps += [{}] * (step == len(steps))
            own = links_of(batch).view(2, 3, -1).permute(2, 1, 0).tolist()  # per link: itself and its negatives
            steps[step] = {**steps[step], **dict(zip(batch.input_id.tolist(), own, strict=True))}
        return steps

    assert by_step(1) == by_step(2) == by_step(3)
    assert sum(map(len, by_step(1))) == 100


def test_negatives_change_with_the_epoch_and_the_seed_only() -> None:
    def negatives(seed: int, epoch: int) -> list[list[int]]:
        loader = LinkNeighborLoader(ring(12), [1], neg_sampling="binary", batch_size=24, seed=seed)
        loader.set_epoch(epoch)
        return links_of(next(iter(loader)))[:, 24:].tolist()

    assert negatives(1, 1) == negatives(1, 1)
    assert len({str(negatives(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4


@pytest.mark.parametrize("amount", [0.3, 0.7, 1.0, 1.7])
def test_ranks_have_together_the_negatives_of_one_process(amount: float) -> None:
    def negatives(world_size: int) -> list[list[list[int]]]:
        by_step: dict[int, list[list[int]]] = {}
        sampling = NegativeSampling("binary", amount)
        for step, batch in of_ranks(random_graph(40, 300, 1), world_size, neg_sampling=sampling):
            ends = batch.n_id[batch.edge_label_index[:, batch.edge_label == 0]]
            by_step.setdefault(step, []).extend(ends.t().tolist())
        return [sorted(by_step[step]) for step in sorted(by_step)]

    one = negatives(1)
    assert [len(step) for step in one] == [math.ceil(24 * amount)] * 12 + [math.ceil(12 * amount)]
    assert (negatives(2), negatives(4)) == (one, one)
