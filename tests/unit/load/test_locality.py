"""Locality: ranks get the seeds of their own parts, and every seed still comes once, in equal steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import assert_same_batches, seeds_of
from support.graphs import library, ring, save_in_parts

import hoploom
from hoploom.load.order import LocalOrder, Order
from hoploom.store.base import Deployment

PARTS = st.sets(st.integers(0, 3), max_size=4).map(lambda parts: tuple(sorted(parts)))


@st.composite
def orders(draw: st.DrawFn) -> list[LocalOrder]:
    """The orders of all ranks, over seeds that lie anywhere."""
    owners = draw(st.lists(st.integers(0, 3), min_size=1, max_size=150))
    held = draw(st.lists(PARTS, min_size=1, max_size=min(5, len(owners))))
    layout = {"held": tuple(held), "parts": torch.tensor(owners, dtype=torch.int16), "num_parts": 4}
    plain = {
        "batch_size": draw(st.integers(1, 20)),
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "least_tail": draw(st.integers(1, 8)),
        "extra_seeds": draw(st.integers(0, len(held) - 1)),
    }
    first = LocalOrder(len(owners), **plain, world_size=len(held), **layout)
    return [replace(first, rank=rank) for rank in range(len(held))]


def _share(order: Order, epoch: int, step: int) -> list[int]:
    return order.at_epoch(epoch).indices(*order.rank_span(step)).tolist()


@given(orders(), st.integers(0, 2))
def test_every_seed_comes_once_over_all_ranks_in_equal_steps(ranks: list[LocalOrder], epoch: int) -> None:
    seen: list[int] = []
    for step in range(ranks[0].num_steps):
        shares = [_share(order, epoch, step) for order in ranks]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        seen += [seed for share in shares for seed in share]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(ranks[0].num_seeds))
    dropped = ranks[0].num_seeds - len(seen)
    assert dropped == (ranks[0].num_seeds % ranks[0].global_batch if ranks[0].drop_last else 0)


@given(orders(), st.integers(0, 2))
def test_no_seed_is_away_from_home_while_a_place_at_home_goes_to_strangers(ranks: list[LocalOrder], epoch: int) -> None:
    """Where each part has one host, the number of local seeds is the largest there can be."""
    homes = ranks[0]
    if len({part for host in homes.hosts for part in host}) != sum(map(len, homes.hosts)):
        return  # a part with several hosts
    for host in homes.hosts:
        mine = [order for order in ranks if homes.held[order.rank] == host]
        given_seeds = [seed for order in mine for step in range(order.num_steps) for seed in _share(order, epoch, step)]
        local = sum(int(homes.parts[seed]) in host for seed in given_seeds)
        owned = sum(int(homes.parts[seed]) in host for seed in range(ranks[0].num_seeds))
        assert local == min(owned, len(given_seeds))


@given(orders(), st.integers(0, 2))
def test_an_epoch_continued_in_the_same_layout_has_the_same_shares(ranks: list[LocalOrder], epoch: int) -> None:
    order = ranks[-1]
    whole = [_share(order, epoch, step) for step in range(order.num_steps)]
    for done in range(order.num_steps):
        consumed = order.step_span(done - 1)[1] if done else 0
        rest = replace(order, _newest={}).after(done, consumed)
        assert [_share(rest, epoch, step) for step in range(done, rest.num_steps)] == whole[done:]


def _order(owners: Sequence[int], held: Sequence[tuple[int, ...]], **options: Any) -> LocalOrder:
    num_parts = 1 + max(*owners, *(part for parts in held for part in parts))
    layout = {"held": tuple(held), "parts": torch.tensor(owners, dtype=torch.int16), "num_parts": num_parts}
    return LocalOrder(len(owners), **{"batch_size": 10, **options}, world_size=len(held), **layout)


def test_without_shuffling_a_host_goes_through_its_own_seeds_in_order() -> None:
    order = _order([0, 1] * 20, [(0,), (1,)])
    assert [_share(order, 0, step) for step in (0, 1)] == [list(range(0, 20, 2)), list(range(20, 40, 2))]
    other = replace(order, rank=1)
    assert _share(other, 0, 0) == list(range(1, 20, 2))


def test_what_fills_up_a_host_is_spread_over_its_epoch() -> None:
    """Host 1 owns a quarter of the seeds: half of what it gets is foreign, in every part of the epoch alike."""
    order = replace(_order([0, 0, 0, 1] * 1000, [(0,), (1,)], batch_size=500, shuffle=True), rank=1)
    foreign = [sum(seed % 4 != 3 for seed in _share(order, 0, step)) for step in range(4)]
    assert sum(foreign) == 1000
    assert all(abs(count - 250) < 60 for count in foreign)  # five standard deviations


def test_shuffling_is_new_in_every_epoch_and_for_every_seed() -> None:
    order = _order([0, 1] * 50, [(0,), (1,)], shuffle=True)
    first = [_share(order, epoch, 0) for epoch in (0, 1, 0)]
    assert first[0] == first[2] != first[1]
    assert _share(_order([0, 1] * 50, [(0,), (1,)], shuffle=True, seed=1), 0, 0) != first[0]
    assert first[0] != sorted(first[0])


def _loader(folder: Path, rank: int = 0, **options: Any) -> hoploom.NeighborLoader:
    given_options = {"batch_size": 6, "shuffle": True, "locality": [[0], [1]], **options}
    return hoploom.NeighborLoader(folder, [2, 2], rank=rank, world_size=2, **given_options)


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rings") / "ring"
    save_in_parts(hoploom.from_pyg(ring(50)), folder, 2)
    return folder


def test_two_ranks_see_the_seeds_of_their_own_parts(rings: Path) -> None:
    assert [sorted(seeds_of(_loader(rings, rank))) for rank in range(2)] == [list(range(25)), list(range(25, 50))]


def test_the_owner_of_a_link_is_its_destinations_part(rings: Path) -> None:
    sources = torch.arange(40)
    links = torch.stack([sources, (sources + 25) % 50])
    for rank in range(2):
        loader = hoploom.LinkNeighborLoader(
            rings, [2], links, batch_size=5, shuffle=True, rank=rank, world_size=2, locality=[[0], [1]]
        )
        ends = torch.cat([batch.n_id[batch.edge_label_index[1]] for batch in loader])
        assert len(ends) == 20
        assert int((ends // 25 == rank).sum()) == [15, 20][rank]  # 25 links lead to part 1, which has room for 20


def test_seeds_of_one_type_go_by_that_types_cuts(tmp_path: Path) -> None:
    store = save_in_parts(hoploom.from_pyg(library()), tmp_path / "s", 2)
    for index, kind in enumerate(store.schema.node_types):
        cut = store.ranges[1].first_nodes[index]
        if not 0 < cut * 2 == kind.num_nodes:
            continue
        loader = hoploom.NeighborLoader(store, [2], kind.name, batch_size=1, rank=1, world_size=2, locality=[[0], [1]])
        found = [int(batch[kind.name].n_id[0]) for batch in loader]
        assert found == list(range(cut, kind.num_nodes))


@pytest.mark.parametrize("change", [{"locality": [[1], [0]]}, {"locality": False}, {"batch_size": 5}])
def test_inside_an_epoch_another_layout_is_refused_with_the_way_out(rings: Path, change: dict[str, Any]) -> None:
    loader = _loader(rings)
    batches = iter(loader)
    next(batches)
    fresh = _loader(rings, **change)
    with pytest.raises(hoploom.ConfigError, match=r"middle of epoch 0, .* locality, .* or go on with set_epoch\(1\)"):
        fresh.load_state_dict(loader.state_dict())
    assert len(list(batches)) == 4
    fresh.load_state_dict(loader.state_dict())  # at the start of an epoch
    assert fresh.state_dict()["epoch"] == 1


def test_where_every_rank_holds_all_locality_changes_nothing(rings: Path) -> None:
    plain = list(_loader(rings, 1, locality=False))
    assert_same_batches(plain, _loader(rings, 1, locality=True))
    assert_same_batches(plain, _loader(rings, 1, locality=[[0, 1], [1, 0]]))
    in_memory = [
        hoploom.NeighborLoader(ring(50), [2], batch_size=6, shuffle=True, locality=locality, rank=1, world_size=2)
        for locality in (False, True)
    ]
    assert_same_batches(*in_memory)


def test_what_a_context_found_out_is_what_true_means(rings: Path) -> None:
    store = replace(hoploom.open(rings), deployment=Deployment(homes=((0,), (1,))))
    loader = hoploom.NeighborLoader(
        store, [2, 2], batch_size=6, shuffle=True, rank=1, world_size=2, locality=True
    )  # fmt: skip
    assert_same_batches(loader, _loader(rings, 1))


@pytest.mark.parametrize(
    ("locality", "message"),
    [
        ([[0]], "lists the parts of 1 ranks, there are 2; give the parts of every rank"),
        ([[0], [2]], "names part 2, the store has 2; count parts from 0"),
        ([[0], [-1]], "a part in locality is -1"),
        ([0, 1], r"locality is \[0, 1\]; give True, or the parts of every rank, e.g. locality=\[\[0\], \[1\]\]"),
        ("parts", "locality is 'parts'"),
    ],
)
def test_a_layout_that_is_none_is_refused(rings: Path, locality: Any, message: str) -> None:
    with pytest.raises(hoploom.ConfigError, match=message):
        _loader(rings, locality=locality)


def test_true_needs_somebody_who_knows_the_layout(rings: Path) -> None:
    with pytest.raises(
        hoploom.ConfigError,
        match=r"nobody said which rank holds what; open the store with hoploom.open\(path, context=context\), or give",
    ):
        _loader(hoploom.open(rings, parts=[0]), locality=True, input_nodes=[1, 2])  # type: ignore[arg-type]
