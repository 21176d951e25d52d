"""The edges that a step predicts are not among those that it passes messages over."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import hoploom
from hoploom import ConfigError, LinkNeighborLoader
from hoploom.sample import exclusions

RATES, RATED = ("user", "rates", "item"), ("item", "rev_rates", "user")
USERS, ITEMS, EDGES = 30, 20, 400


def ratings(*, distinct: bool = False) -> HeteroData:
    """Users rate items, some of them several times; the reverse relation has its edges in another order."""
    generator, data = torch.Generator().manual_seed(7), HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = USERS, ITEMS
    pairs = torch.randperm(USERS * ITEMS, generator=generator)[:EDGES]
    if not distinct:
        pairs = torch.randint(USERS * ITEMS // 3, (EDGES,), generator=generator)
    ends = torch.stack([pairs // ITEMS, pairs % ITEMS])
    data[RATES].edge_index, data[RATED].edge_index = ends, ends.flip(0)[:, torch.randperm(EDGES, generator=generator)]
    return data


def batches(data: Any, **options: Any) -> list[Any]:
    given = {"edge_label_index": RATES, "batch_size": 50, "shuffle": True, "seed": 1, **options}
    return list(LinkNeighborLoader(data, given.pop("num_neighbors", [4, 3]), **given))


def seen(batch: Any, key: tuple[str, str, str]) -> list[int]:
    """The ids of the edges of a relation that a batch passes messages over."""
    if "blocks" in batch:
        return [edge for block in batch.blocks for edge in block.e_id[key].tolist()]
    return batch[key].e_id.tolist()  # type: ignore[no-any-return]


def pairs_of(ends: Tensor, ids: Any) -> Counter[tuple[int, int]]:
    return Counter((int(ends[0, index]), int(ends[1, index])) for index in ids)


MODES: dict[str, dict[str, Any]] = {
    "subgraph": {},
    "all neighbours": {"num_neighbors": [-1, -1]},
    "replace": {"replace": True},
    "labor": {"labor": True},
    "blocks": {"mode": "blocks"},
    "disjoint": {"disjoint": True},
    "induced": {"subgraph_type": "induced"},
    "negatives": {"neg_sampling": "triplet"},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("exclude", ["none", "self", "reverse", "both"])
def test_a_batch_sees_no_edge_that_it_predicts(exclude: str, options: dict[str, Any]) -> None:
    data = ratings(distinct=True)
    own, turned, leaks = 0, 0, {"self": 0, "reverse": 0}
    for batch in batches(data, exclude=exclude, **options):
        links = set(batch[RATES].input_id.tolist())
        predicted = pairs_of(data[RATES].edge_index, links)
        leaks["self"] += len(links & set(seen(batch, RATES)))
        leaks["reverse"] += len(predicted.keys() & pairs_of(data[RATED].edge_index.flip(0), seen(batch, RATED)).keys())
        own, turned = own + len(seen(batch, RATES)), turned + len(seen(batch, RATED))
    assert own > 0
    assert turned > 0
    assert (leaks["self"] == 0) is (exclude in ("self", "both"))
    assert (leaks["reverse"] == 0) is (exclude in ("reverse", "both"))


def test_both_is_the_default_of_the_links_of_a_relation_and_none_that_of_given_pairs() -> None:
    data = ratings(distinct=True)
    for given, exclude in ((RATES, "both"), ((RATES, None), "both"), ((RATES, data[RATES].edge_index), "none")):
        by_default, chosen = (
            batches(data, edge_label_index=given),
            batches(data, edge_label_index=given, exclude=exclude),
        )
        assert [seen(one, RATED) for one in by_default] == [seen(one, RATED) for one in chosen]
    del data[RATED]
    assert [seen(one, RATES) for one in batches(data)] == [seen(one, RATES) for one in batches(data, exclude="self")]


def test_a_fanout_counts_the_edges_that_are_left() -> None:
    data = ratings(distinct=True)
    degrees = torch.bincount(data[RATED].edge_index[1], minlength=USERS)
    for batch in batches(data, num_neighbors=[6]):
        users, first = batch["user"].n_id, batch["user"].n_id[: int(batch["user"].num_sampled_nodes[0])]
        predicted = torch.bincount(data[RATES].edge_index[0][batch[RATES].input_id], minlength=USERS)
        picked = torch.bincount(batch[RATED].edge_index[1], minlength=users.numel())[: first.numel()]
        assert picked.tolist() == (degrees - predicted)[first].clamp(max=6).tolist()


def test_of_parallel_edges_only_the_predicted_one_is_left_out() -> None:
    data = ratings()
    for batch in batches(data, num_neighbors=[-1], exclude="both"):
        links = batch[RATES].input_id.tolist()
        ends = data[RATES].edge_index
        users, items = set(ends[0][links].tolist()), set(ends[1][links].tolist())
        rest = [edge for edge in range(EDGES) if edge not in set(links)]
        assert Counter(seen(batch, RATES)) == Counter(edge for edge in rest if int(ends[1, edge]) in items)
        turned = pairs_of(data[RATED].edge_index.flip(0), seen(batch, RATED))
        assert turned == pairs_of(ends, [edge for edge in rest if int(ends[0, edge]) in users])


def test_given_pairs_leave_out_all_parallel_edges() -> None:
    data = ratings()
    for batch in batches(data, edge_label_index=(RATES, data[RATES].edge_index), num_neighbors=[-1], exclude="both"):
        predicted = pairs_of(data[RATES].edge_index, batch[RATES].input_id.tolist())
        assert not predicted.keys() & pairs_of(data[RATES].edge_index, seen(batch, RATES)).keys()
        assert not predicted.keys() & pairs_of(data[RATED].edge_index.flip(0), seen(batch, RATED)).keys()


def test_pairs_that_are_no_edges_exclude_nothing() -> None:
    data = ratings(distinct=True)
    there = pairs_of(data[RATES].edge_index, range(EDGES))
    others = torch.tensor([[u, i] for u in range(USERS) for i in range(ITEMS) if (u, i) not in there]).t()
    options = {"edge_label_index": (RATES, others), "num_neighbors": [-1]}
    for ours, plain in zip(batches(data, exclude="both", **options), batches(data, **options), strict=True):
        assert seen(ours, RATES) == seen(plain, RATES)
        assert seen(ours, RATED) == seen(plain, RATED)


def test_exclude_below_leaves_out_edges_with_an_end_of_few_links() -> None:
    data = ratings(distinct=True)
    ends = data[RATES].edge_index
    of_users, of_items = (torch.bincount(row) for row in ends)
    found: set[int] = set()
    for batch in batches(data, num_neighbors=[-1], exclude_below=13, exclude="self"):
        found |= set(seen(batch, RATES)) & set(batch[RATES].input_id.tolist())
    low = (of_users[ends[0]] < 13) | (of_items[ends[1]] < 13)
    assert 0 < int(low.sum()) < EDGES
    assert found == set(torch.nonzero(~low).view(-1).tolist())


def test_an_undirected_graph_of_one_type_is_its_own_reverse() -> None:
    generator = torch.Generator().manual_seed(3)
    half = torch.stack([torch.randint(40, (150,), generator=generator), torch.randint(40, (150,), generator=generator)])
    data = Data(edge_index=torch.cat([half, half.flip(0)], dim=1), num_nodes=40)
    for batch in LinkNeighborLoader(data, [-1], batch_size=30, shuffle=True, seed=2):
        predicted = pairs_of(data.edge_index, batch.input_id.tolist())
        turned = Counter({(v, u): count for (u, v), count in predicted.items()})
        there = pairs_of(data.edge_index, range(300))
        for pair, count in pairs_of(data.edge_index, batch.e_id.tolist()).items():
            assert count <= there[pair] - max(predicted[pair], turned[pair])


BUYS, BOUGHT = ("user", "buys", "item"), ("item", "bought_by", "user")


@pytest.mark.parametrize("kind", ["several lead back", "seeds of the reverse", "one type, another relation"])
def test_the_reverse_is_found_whatever_it_is_called(kind: str) -> None:
    data = ratings(distinct=True)
    data[BUYS].edge_index, data[BOUGHT].edge_index = (data[key].edge_index[:, ::2] for key in (RATES, RATED))
    seeds, back = RATES, [RATED]
    if kind == "several lead back":
        data["item", "rated_by", "user"].edge_index = data[RATED].edge_index
        del data[RATED]
        back = [("item", "rated_by", "user"), BOUGHT]
    elif kind == "seeds of the reverse":
        data["item", "rev_buys", "user"].edge_index = data[BOUGHT].edge_index
        seeds, back = RATED, [RATES]
    else:
        follows = torch.randint(USERS, (2, 300), generator=torch.Generator().manual_seed(2))
        seeds, back = ("user", "follows", "user"), [("user", "followed_by", "user")]
        data[seeds].edge_index, data[back[0]].edge_index = follows, follows.flip(0)
    for batch in batches(data, edge_label_index=seeds, num_neighbors=[-1, -1]):
        predicted = pairs_of(data[seeds].edge_index, batch[seeds].input_id.tolist())
        for key in back:
            assert seen(batch, key)
            found = pairs_of(data[key].edge_index.flip(0), seen(batch, key))
            there = pairs_of(data[seeds].edge_index, range(data[seeds].edge_index.shape[1]))
            assert all(count <= there[pair] - predicted[pair] for pair, count in found.items() if pair in predicted)


def test_links_are_looked_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ratings()
    pairs = (RATES, data[RATES].edge_index)

    def found() -> list[tuple[list[int], list[int]]]:
        made = batches(data) + batches(data, edge_label_index=pairs, exclude="both")
        return [(seen(one, RATES), seen(one, RATED)) for one in made]

    whole = found()
    for at_once in (1, 30):
        monkeypatch.setattr(exclusions, "AT_ONCE", at_once)
        assert found() == whole


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_leaves_out_the_links_of_all_its_ranks(world_size: int) -> None:
    """So blocks do not depend on the number of ranks: each node has the picks that one process makes."""
    data = ratings()

    def steps(rank: int, world: int) -> Iterator[dict[int, list[int]]]:
        options = {"rank": rank, "world_size": world, "batch_size": 60 // world, "num_neighbors": [3]}
        for batch in batches(data, mode="blocks", **options):
            block = batch.blocks[0]
            ends = batch["item"].n_id[block.edge_index[RATES][1]].tolist()
            found: dict[int, list[int]] = {}
            for item, edge in zip(ends, block.e_id[RATES].tolist(), strict=True):
                found.setdefault(item, []).append(edge)
            yield found

    for whole, *shares in zip(steps(0, 1), *(steps(rank, world_size) for rank in range(world_size)), strict=True):
        assert {item: picks for share in shares for item, picks in share.items()} == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": "all"}, r"exclude is 'all'; choose one of \['none', 'self', 'reverse', 'both'\]"),
        ({"exclude": "none", "exclude_below": 3}, "exclude_below has no effect without exclude"),
        ({"exclude_below": 0}, "exclude_below is 0; give a number of links"),
        (
            {"edge_label_index": (("user", "likes", "item"), torch.zeros(2, 3, dtype=torch.int64)), "exclude": "self"},
            r"exclude='self' leaves out edges of \('user', 'likes', 'item'\), which the graph does not have",
        ),
        (
            {"subgraph_type": "bidirectional", "exclude": "self"},
            "leaves edges that subgraph_type='bidirectional' reverses",
        ),
        ({"time_window": 5}, "time_window is set while 'time_attr' is not set"),
        ({"time_window": "5 moons"}, "time_window is '5 moons'; give a number and a unit: s, m, h, d"),
        ({"time_window": -1}, "time_window is -1; give a whole number in the unit of the times"),
        ({"time_window": 2.5}, "time_window is 2.5; give a whole number in the unit of the times"),
        ({"strictly_before": True}, "strictly_before is set while 'time_attr' is not set"),
        ({"strictly_before": True, "time_window": 0}, "time_window is set while"),
    ],
)
def test_options_that_cannot_be_are_one_error_before_the_first_step(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        batches(ratings(), **options)


def test_the_reverse_of_a_relation_without_one_cannot_be_left_out() -> None:
    data = ratings()
    del data[RATED]
    with pytest.raises(ConfigError, match="exclude='both' needs the relation with the reverse edges of"):
        batches(data, exclude="both")


def test_a_window_leaves_out_what_is_too_old_or_at_the_very_time() -> None:
    """Node v has in-edges of all other nodes; an edge's time is that of its source."""
    count = 12
    ends = torch.tensor([[u, v] for v in range(count) for u in range(count) if u != v]).t()
    data = Data(edge_index=ends, num_nodes=count, time=torch.arange(count) * 10)
    every = [0, 10, 20]
    for window, strictly, ages in ((25, False, every), (20, False, every), (20, True, [10, 20]), (19, True, [10])):
        loader = hoploom.NeighborLoader(
            data, [-1], input_time=torch.full((count,), 60), input_nodes=torch.arange(count), batch_size=count,
            time_attr="time", time_window=window, strictly_before=strictly,
        )  # fmt: skip
        batch = next(iter(loader))
        found = {60 - int(data.time[batch.n_id[u]]) for u in batch.edge_index[0]}
        assert found == set(ages)


def test_a_window_may_be_given_in_days() -> None:
    day = 24 * 3600 * 10**6  # stores keep dates in microseconds
    data = Data(edge_index=torch.tensor([[0, 1, 2], [3, 3, 3]]), num_nodes=4, time=torch.tensor([0, 5, 9, 10]) * day)
    for window, sources in (("5d", {1, 2}), ("48h", {2}), ("1s", set())):
        loader = hoploom.NeighborLoader(data, [-1], input_nodes=[3], time_attr="time", time_window=window)
        batch = next(iter(loader))
        assert {int(batch.n_id[u]) for u in batch.edge_index[0]} == sources
