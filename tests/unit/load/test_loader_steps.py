"""Steps of one's choice, and how many seeds a step has."""

from typing import Any

import pytest
from support.batches import assert_same_batches
from support.graphs import ring

import hoploom
from hoploom.load.order import Order


def _loader(**options: Any) -> hoploom.NeighborLoader:
    given_options = {"batch_size": 4, "shuffle": True, **options}
    return hoploom.NeighborLoader(ring(50), [2, 2], **given_options)


def test_ranks_that_share_out_steps_see_the_batches_of_one_process() -> None:
    loader = _loader()
    whole = list(_loader())
    shared = [list(loader.steps(range(rank, len(loader), 3))) for rank in range(3)]
    for rank in range(3):
        assert_same_batches(shared[rank], whole[rank::3])


@pytest.mark.parametrize("threads", [0, 2])
def test_steps_leave_the_position_alone(threads: int) -> None:
    loader = _loader(num_workers=threads)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert len(list(loader.steps(range(2, 5)))) == 3
    assert loader.state_dict() == state
    assert (loader.epoch, loader.rank, loader.world_size) == (0, 0, 1)


def test_steps_outside_of_the_epoch_are_refused() -> None:
    loader = _loader()
    with pytest.raises(hoploom.ConfigError, match="has 13"):
        loader.steps(range(12, 14))
    assert list(loader.steps(range(5, 5))) == []


def test_the_seeds_of_a_step_are_counted_over_all_ranks() -> None:
    ranks = [_loader(rank=rank, world_size=3) for rank in range(3)]
    for loops in (0, 1):
        sizes = [[batch.batch_size for batch in loader] for loader in ranks]
        assert [sum(step) for step in zip(*sizes, strict=True)] == [12, 12, 12, 14]
        assert [ranks[0].num_seeds(step) for step in range(4)] == [12, 12, 12, 14], loops


def test_the_seeds_of_a_step_are_known_after_resuming_at_another_batch_size() -> None:
    loader = _loader()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    wider = _loader(batch_size=10)
    wider.load_state_dict(loader.state_dict())
    assert [batch.batch_size for batch in wider] == [wider.num_seeds(step) for step in range(3, 7)] == [10, 10, 10, 8]


@pytest.mark.parametrize("num_seeds", [49, 50, 53, 63, 64, 66])
def test_a_least_tail_gives_every_number_of_ranks_the_same_steps(num_seeds: int) -> None:
    orders = [Order(num_seeds, 16 // world_size, world_size=world_size, least_tail=4) for world_size in (1, 2, 4)]
    steps = [[order.step_span(step) for step in range(order.num_steps)] for order in orders]
    assert steps[0] == steps[1] == steps[2]
    assert steps[0][-1][1] == num_seeds
    assert len(_loader(least_tail=3)) == 12
    assert len(_loader(least_tail=2)) == 13


def test_steps_that_the_loop_does_not_have_are_refused() -> None:
    loader = _loader()
    for step in (-1, 13):
        with pytest.raises(hoploom.ConfigError, match=r"not in range\(0, 13\)"):
            loader.num_seeds(step)
