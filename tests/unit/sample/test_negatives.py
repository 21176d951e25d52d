"""Candidates of triplets, each kind against a loop in plain Python, and on any number of ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.batch_servers import without_graph
from support.graphs import in_parts, library, random_graph
from support.reference import Draws, Edges, Rule, pick
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData as Batch
from torch_geometric.sampler import NegativeSampling
from torch_geometric.transforms import ToUndirected

import hoploom
from hoploom import ConfigError, LinkNeighborLoader, keys
from hoploom.ranking.scored_links import links_of_batch
from hoploom.train import LinkPrediction

WRITES = ("author", "writes", "paper")
THREE = NegativeSampling("triplet", 3)
Made = dict[int, list[int]]  # link -> the ids of its candidates


def rated() -> HeteroData:
    """20 users rated 30 items at some time, some twice; user 19 rated nothing."""
    generator, data = torch.Generator().manual_seed(3), HeteroData()
    data["user"].x, data["item"].x = torch.ones(20, 1), torch.ones(30, 1)
    ends = [torch.randint(19, (150,), generator=generator), torch.randint(30, (150,), generator=generator)]
    data["user", "rates", "item"].edge_index = torch.stack(ends)
    data["user", "rates", "item"].time = torch.randint(50, (150,), generator=generator)
    return ToUndirected()(data)


RATES = ("user", "rates", "item")
LINKS = torch.stack([torch.arange(40) % 20, (torch.arange(40) * 7) % 30])
TIMES = (torch.arange(40) * 11) % 60
LISTED = torch.randint(30, (40, 6), generator=torch.Generator().manual_seed(5))
LISTED[::3, 2:5] = -1


def made(data: Any, key: Any = RATES, links: Tensor | None = LINKS, world_size: int = 1, **options: Any) -> list[Made]:
    """The candidates of all links, step by step, in steps of 12 links."""
    steps: list[Made] = []
    given: dict[str, Any] = {"batch_size": 12 // world_size, "seed": 4, "neg_sampling": THREE, **options}
    given["edge_label_index"] = links if key is None else (key, links)
    for rank in range(world_size):
        for step, batch in enumerate(LinkNeighborLoader(data, [2], rank=rank, world_size=world_size, **given)):
            link, end = (batch, batch) if key is None else (batch[key], batch[key[2]])
            index = end.dst_neg_index.view(link.input_id.numel(), -1)
            found = torch.where(index < 0, -1, end.n_id[index])
            steps += [{}] * (step == len(steps))
            steps[step] = steps[step] | dict(zip(link.input_id.tolist(), found.tolist(), strict=True))
    return steps


Draw = Callable[[int, int, int], int]  # (index of the link in its step, repeat, attempt) -> node


def drawn(step: int, num_nodes: int, *, joint: bool = False) -> Draw:
    key = keys.batch_key(4, 0, step)

    def draw(index: int, repeat: int, attempt: int) -> int:
        slot = repeat if joint else index | repeat << 40
        return Draws(key, slot, keys.NEGATIVE_STREAM + 1).wide(attempt) * num_nodes >> 64

    return draw


def by_loop(choose: Callable[[int, int, int], list[int]]) -> list[Made]:
    """`choose` gets the step, the index in the step, and the link."""
    return [
        {link: choose(step, index, link) for index, link in enumerate(range(12 * step, min(12 * step + 12, 40)))}
        for step in range(4)
    ]


def edges_of(data: Any, key: Any = RATES) -> list[tuple[int, int]]:
    return [(int(source), int(end)) for source, end in data[key].edge_index.t()]


@pytest.mark.parametrize("is_strict", [False, True])
def test_joint_candidates_are_drawn_once_for_all_links_of_a_step(is_strict: bool) -> None:
    data = rated()
    edges, sources = set(edges_of(data)), LINKS[0].tolist()

    def choose(step: int, index: int, link: int) -> list[int]:
        draw, found = drawn(step, 30, joint=True), []
        for repeat in range(3):
            attempt = 0
            while is_strict and (sources[link], draw(index, repeat, attempt)) in edges:
                attempt += 1
            found.append(draw(index, repeat, attempt))
        return found

    steps = made(data, candidates="joint", strict_negatives=is_strict)
    assert steps == by_loop(choose)
    assert is_strict or {len(set(map(tuple, step.values()))) for step in steps} == {1}


@pytest.mark.parametrize("place", ["here", "servers make batches", "transformed", "called"])
@pytest.mark.parametrize("is_typed", [False, True])
def test_shared_candidates_are_a_field_and_pygs_field_shows_them(is_typed: bool, place: str) -> None:
    """Also in a batch that a device, a server or the user has copied, where rows of memory are no longer shared."""
    store = hoploom.from_pyg(rated() if is_typed else random_graph(30, 200, seed=1))
    store = without_graph(store)[0] if place == "servers make batches" else store
    given: Any = (RATES, LINKS) if is_typed else LINKS
    options: dict[str, Any] = {"neg_sampling": THREE, "candidates": "joint", "batch_size": 12, "seed": 4}
    if place == "transformed":
        options["transform"] = Batch.clone
    loader = LinkNeighborLoader(store, [2], given, **options)
    for batch in [loader(list(range(12)))] if place == "called" else loader:
        end = batch["item"] if is_typed else batch
        shared, copied = end.dst_neg_shared, batch.clone()
        assert torch.equal(end.dst_neg_index, shared.expand(end.dst_pos_index.numel(), 3))
        assert (end.dst_neg_index.stride(0) == 0) == (place != "transformed")
        for each in (batch, copied):
            links = links_of_batch(each, "bpr")
            assert links.shared is not None
            assert torch.equal(links.shared, shared)
            are_true = end.n_id[end.dst_neg_index] == end.n_id[end.dst_pos_index][:, None]
            wanted = end.dst_neg_index.masked_fill(are_true, -1)
            assert torch.equal(links.spread().ends[1].view(-1, 4)[:, 1:], wanted)
        (copied["item"] if is_typed else copied).dst_neg_index[0, 0] = 0
        assert torch.equal((copied["item"] if is_typed else copied).dst_neg_shared, shared)
    uniform = next(iter(LinkNeighborLoader(store, [2], given, **options | {"candidates": "uniform"})))
    assert "dst_neg_shared" not in (uniform["item"] if is_typed else uniform)


@pytest.mark.parametrize("is_timed", [False, True])
def test_historical_candidates_are_other_destinations_of_the_source_at_an_earlier_time(is_timed: bool) -> None:
    data = rated()
    times = data[RATES].time.tolist()
    options: dict[str, Any] = {"time_attr": "time", "edge_label_time": TIMES} if is_timed else {}

    def choose(step: int, index: int, link: int) -> list[int]:
        source, destination = LINKS[:, link].tolist()
        edges = sorted(zip(times if is_timed else [-1] * 150, range(150), edges_of(data), strict=True))
        earlier = [end for time, _, (start, end) in edges if start == source and time < int(TIMES[link])]
        key, found = keys.batch_key(4, 0, step), []
        for repeat in range(3):
            slot, own = index | repeat << 40, list[int]()
            for fanout in (8, 512):
                rule = Rule(key, keys.stream(1 << 14, 1), fanout)
                own = own or [
                    earlier[at] for at in pick(rule, source, Edges(earlier), slot) if earlier[at] != destination
                ]
            draws = Draws(key, slot, keys.NEGATIVE_STREAM + 2)
            found.append(own[draws.wide(0) * len(own) >> 64] if own else drawn(step, 30)(index, repeat, 0))
        return found

    steps = made(data, candidates="historical", **options)
    assert steps == by_loop(choose)
    assert made(data, candidates="historical", disjoint=True, **options) == steps


def test_the_one_edge_to_another_destination_is_found_among_many_to_the_links_own() -> None:
    data = rated()
    data[RATES].edge_index = torch.tensor([[0] * 1001, [7] * 600 + [9] + [7] * 400])
    data["item", "rev_rates", "user"].edge_index = data[RATES].edge_index.flip(0)
    (step,) = made(data, links=torch.tensor([[0, 0], [7, 9]]), candidates="historical")
    assert step == {0: [9, 9, 9], 1: [7, 7, 7]}


def test_earlier_destinations_of_a_popular_source_come_as_often_as_its_edges() -> None:
    data = rated()
    ends = torch.arange(3000) % 30 % 20  # two edges in three go to the first ten items
    data[RATES].edge_index = torch.stack([torch.zeros_like(ends), ends])
    data["item", "rev_rates", "user"].edge_index = data[RATES].edge_index.flip(0)
    sampling = NegativeSampling("triplet", 3000)
    (step,) = made(data, links=torch.tensor([[0], [29]]), candidates="historical", neg_sampling=sampling)
    counts = torch.bincount(torch.tensor(step[0]), minlength=30)
    expected = torch.bincount(ends, minlength=30)
    assert ((counts - expected).abs() < 6 * expected.double().sqrt() + 0.5).all()


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("has_known", [False, True])
def test_all_other_nodes_are_candidates_but_known_links(is_strict: bool, has_known: bool) -> None:
    data = rated()
    others = {(int(source), int(end)) for source, end in torch.stack([LINKS[0], (LINKS[1] + 1) % 30]).t()}
    bad = (set(edges_of(data)) if is_strict else set()) | (others if has_known else set())
    options: dict[str, Any] = {"strict_negatives": is_strict, "neg_sampling": None, "candidates": "all"}
    options["known_links"] = torch.tensor(sorted(others)).t() if has_known else None

    def choose(step: int, index: int, link: int) -> list[int]:
        source, destination = LINKS[:, link].tolist()
        return [-1 if (source, end) in bad else end for end in range(30) if end != destination]

    assert made(data, **options) == made(data, disjoint=True, **options) == by_loop(choose)


@pytest.mark.parametrize("amount", [1, 4, 6])
@pytest.mark.parametrize("is_strict", [False, True])
def test_listed_candidates_are_taken_or_some_are_drawn_and_padding_comes_last(amount: int, is_strict: bool) -> None:
    data = rated()
    bad = set(edges_of(data)) if is_strict else set()

    def choose(step: int, index: int, link: int) -> list[int]:
        listed = [-1 if (int(LINKS[0, link]), end) in bad else end for end in LISTED[link].tolist()]
        if amount == 6:
            return listed
        draws = [Draws(keys.batch_key(4, 0, step), index | j << 40, keys.NEGATIVE_STREAM + 3) for j in range(6)]
        order = sorted(range(6), key=lambda j: (listed[j] < 0, draws[j].word(0)))
        return [listed[j] for j in order[:amount]]

    sampling = NegativeSampling("triplet", amount)
    options: dict[str, Any] = {"candidates": LISTED, "strict_negatives": is_strict}
    assert made(data, neg_sampling=sampling, **options) == by_loop(choose)
    if amount == 6:
        assert made(data, neg_sampling=None, disjoint=True, **options) == by_loop(choose)


def test_candidates_that_are_newer_than_their_link_do_not_count() -> None:
    data = random_graph(30, 100, 0)
    options: dict[str, Any] = {"time_attr": "node_time", "edge_label_time": TIMES, "neg_sampling": None}
    links = LINKS % 30
    late = data.node_time[None, :] > TIMES[:, None]

    def of_all(step: int, index: int, link: int) -> list[int]:
        return [-1 if late[link, end] else end for end in range(30) if end != int(links[1, link])]

    def of_listed(step: int, index: int, link: int) -> list[int]:
        return [-1 if end < 0 or late[link, end] else end for end in LISTED[link].tolist()]

    assert made(data, None, links, candidates="all", **options) == by_loop(of_all)
    assert made(data, None, links, candidates=LISTED, **options) == by_loop(of_listed)


@pytest.mark.parametrize("candidates", ["all", LISTED], ids=["all", "listed"])
def test_trees_of_candidates_that_are_left_have_the_number_and_the_time_of_their_link(candidates: Any) -> None:
    data = random_graph(30, 300, 0)
    options: dict[str, Any] = {"time_attr": "node_time", "edge_label_time": TIMES, "candidates": candidates}
    for batch in LinkNeighborLoader(data, [3], LINKS % 30, batch_size=12, **options):
        rows, columns = (batch.dst_neg_index >= 0).nonzero(as_tuple=True)
        assert 0 < rows.numel() < batch.dst_neg_index.numel()
        assert torch.equal(batch.batch[batch.dst_neg_index[rows, columns]], rows)
        sources, ends = batch.edge_index
        assert (batch.node_time[sources] <= batch.seed_time[batch.batch[ends]]).all()


KINDS: dict[str, dict[str, Any]] = {
    "joint": {"candidates": "joint", "strict_negatives": True},
    "historical": {"candidates": "historical"},
    "historical, times": {"candidates": "historical", "time_attr": "time", "edge_label_time": TIMES},
    "all": {"candidates": "all", "strict_negatives": True, "known_links": LINKS, "neg_sampling": "triplet"},
    "listed": {"candidates": LISTED, "neg_sampling": NegativeSampling("triplet", 2)},
    "known": {"strict_negatives": True, "known_links": torch.cartesian_prod(torch.arange(20), torch.arange(20)).t()},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_candidates_are_the_same_on_any_number_of_ranks_and_parts_and_on_servers(options: dict[str, Any]) -> None:
    attrs = {"time_attr": "time"} if "time_attr" in options else {}
    data = rated()
    one = made(data, shuffle=True, **options)
    assert one == made(data, shuffle=True, world_size=2, **options) == made(data, shuffle=True, world_size=4, **options)
    store = hoploom.from_pyg(data, **attrs)
    assert one == made(in_parts(store, 3), shuffle=True, **options)
    assert one == made(without_graph(store)[0], shuffle=True, **options)


@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_known_links_are_no_strict_negatives_wherever_a_batch_is_made(mode: str) -> None:
    data = library()
    known = torch.cartesian_prod(torch.arange(7), torch.arange(5)).t()
    options: dict[str, Any] = {"neg_sampling": NegativeSampling(mode, 4), "strict_negatives": True, "batch_size": 99}
    for store in (data, without_graph(hoploom.from_pyg(data))[0]):
        (batch,) = LinkNeighborLoader(store, [0], WRITES, known_links=known, **options)
        if mode == "binary":
            ends = batch[WRITES].edge_label_index[:, batch[WRITES].edge_label == 0][1]
        else:
            ends = batch["paper"].dst_neg_index.reshape(-1)
        assert set(batch["paper"].n_id[ends].tolist()) <= set(range(5, 10))


def test_a_score_of_no_candidate_is_minus_infinity_and_has_no_gradient() -> None:
    data = rated()
    rows = {name: torch.randn(data[name].num_nodes, 4).requires_grad_() for name in ("user", "item")}

    class Rows(torch.nn.Module):
        def forward(self, batch: Any) -> Any:
            return {name: rows[name][batch[name].n_id] for name in rows}

    options: dict[str, Any] = {"candidates": "all", "strict_negatives": True, "batch_size": 8}
    batch = next(iter(LinkNeighborLoader(data, [2], (RATES, LINKS), **options)))
    task = LinkPrediction(loss="softmax", metrics=["mrr"])
    scores = task.outputs(Rows(), batch)
    edges = set(edges_of(data))
    for link, (source, destination) in enumerate(LINKS[:, :8].t().tolist()):
        every = rows["item"] @ rows["user"][source]
        every[[end for end in range(30) if (source, end) in edges and end != destination]] = -torch.inf
        expected = torch.cat([every[destination : destination + 1], every[:destination], every[destination + 1 :]])
        torch.testing.assert_close(scores[link], expected)
    task.losses(scores, task.targets(batch)).sum().backward()
    assert all(of.grad is not None and of.grad.isfinite().all() for of in rows.values())


def without_reverse() -> HeteroData:
    data = rated()
    del data["item", "rev_rates", "user"]
    return data


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt kind": ({"candidates": "historic"}, "choose one of"),
    "joint pairs": ({"candidates": "joint", "neg_sampling": "binary"}, "for triplets"),
    "historical alone": ({"candidates": "historical", "neg_sampling": None}, "for triplets"),
    "strict historical": ({"candidates": "historical", "strict_negatives": True}, "leave strict_negatives out"),
    "no reverse": ({"data": without_reverse(), "candidates": "historical"}, "ToUndirected"),
    "a number of all": ({"candidates": "all"}, "neg_sampling='triplet'"),
    "pairs of all": ({"candidates": "all", "neg_sampling": "binary"}, "neg_sampling='triplet'"),
    "listed pairs": ({"candidates": LISTED, "neg_sampling": "binary"}, "for triplets"),
    "weights of listed": (
        {"candidates": LISTED, "neg_sampling": NegativeSampling("triplet", 2, dst_weight=torch.ones(30))},
        "dst_weight",
    ),
    "a row too few": ({"candidates": LISTED[1:]}, r"\[40, m\]"),
    "fractions": ({"candidates": LISTED.float()}, "float32"),
    "one column": ({"candidates": LISTED[:, 0]}, "shape"),
    "no column": ({"candidates": LISTED[:, :0]}, "shape"),
    "an id too large": ({"candidates": LISTED + LISTED.eq(LISTED.max())}, "out of range"),
    "an id of -2": ({"candidates": LISTED - 1}, "-2"),
    "a row of -1": ({"candidates": torch.cat([LISTED[:39], LISTED[:1] * 0 - 1])}, "row 39"),
    "more than there are": ({"candidates": LISTED[:, :2]}, "at most 2"),
    "known but not strict": ({"known_links": LINKS}, "strict_negatives=True"),
    "known, out of range": ({"known_links": LINKS + 20, "strict_negatives": True}, "out of range"),
    "known, turned": ({"known_links": LINKS.t(), "strict_negatives": True}, "shape"),
}


@pytest.mark.parametrize(("options", "said"), BAD.values(), ids=BAD)
def test_bad_candidates_are_one_error_when_the_loader_is_made(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"data": rated(), "neg_sampling": THREE, **options}
    with pytest.raises(ConfigError, match=said):
        LinkNeighborLoader(given.pop("data"), [2], (RATES, LINKS), **given)


def test_all_candidates_that_do_not_fit_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoploom.system.available_memory", lambda: 10_000)
    data = Data(edge_index=torch.arange(400).view(2, 200), num_nodes=400)
    with pytest.raises(ConfigError, match=r"399 candidates of each of 50 links take .* smaller batch_size"):
        LinkNeighborLoader(data, [2], candidates="all", batch_size=50, exclude="none")
