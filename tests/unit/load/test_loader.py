"""Order, coverage, position, and what happens when a loop ends early."""

import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import assert_same_batches, seeds_of
from support.graphs import ring

import hoploom
from hoploom import ops
from hoploom.load.order import Order


def _loader(**options: Any) -> hoploom.NeighborLoader:
    given_options = {"batch_size": 4, "shuffle": True, **options}
    return hoploom.NeighborLoader(ring(50), [2, 2], **given_options)


@given(
    num_seeds=st.integers(1, 300),
    batch_size=st.integers(1, 40),
    world_size=st.integers(1, 6),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_seed_comes_once_over_all_ranks_in_equal_steps(
    num_seeds: int, batch_size: int, world_size: int, shuffle: bool, epoch: int
) -> None:
    orders = [Order(num_seeds, batch_size, shuffle, rank=rank, world_size=world_size) for rank in range(world_size)]
    if num_seeds < world_size:
        with pytest.raises(hoploom.ConfigError, match="ranks"):
            orders[0].check()
        return
    seen: list[int] = []
    for step in range(orders[0].num_steps):
        sizes = []
        for order in orders:
            assert order.num_steps == orders[0].num_steps
            begin, end = order.rank_span(step)
            sizes.append(end - begin)
            seen += order.at_epoch(epoch).indices(begin, end).tolist()
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        assert max(sizes) <= batch_size + 1
    assert sorted(seen) == list(range(num_seeds))


@given(num_seeds=st.integers(4, 200), world_size=st.integers(1, 4), stop=st.integers(0, 20), later=st.integers(1, 4))
def test_an_epoch_continued_at_another_world_size_drops_and_repeats_nothing(
    num_seeds: int, world_size: int, stop: int, later: int
) -> None:
    first = [Order(num_seeds, 3, True, rank=rank, world_size=world_size) for rank in range(world_size)]
    stop = min(stop, first[0].num_steps)
    seen = [i for order in first for step in range(stop) for i in order.indices(*order.rank_span(step)).tolist()]
    consumed = first[0].step_span(stop - 1)[1] if stop else 0
    for rank in range(later):
        order = Order(num_seeds, 3, True, rank=rank, world_size=later).after(stop, consumed)
        for step in range(stop, order.num_steps if consumed < num_seeds else stop):
            seen += order.indices(*order.rank_span(step)).tolist()
    assert sorted(seen) == list(range(num_seeds))


def test_a_tail_shorter_than_the_world_joins_the_step_before_it() -> None:
    sizes = [[b.batch_size for b in _loader(batch_size=8, rank=rank, world_size=3)] for rank in range(3)]
    assert sizes == [[8, 8], [8, 9], [8, 9]]  # 50 seeds: 24, then 26 cut at 8 and 17


def test_ranks_share_the_picks_of_a_step() -> None:
    """In blocks mode the union of the ranks' batches is the one-process batch: same key, same picks."""
    alone = next(iter(_loader(batch_size=8, mode="blocks")))
    pairs = set()
    for rank in range(2):
        batch = next(iter(_loader(batch_size=4, rank=rank, world_size=2, mode="blocks")))
        pairs |= _edges(batch)
    assert pairs == _edges(alone)


def _edges(batch: Any) -> set[tuple[int, int]]:
    block = batch.blocks[-1]
    return set(map(tuple, batch.n_id[block.edge_index].t().tolist()))


def test_shuffling_changes_with_the_epoch_and_the_seed_only() -> None:
    loader = _loader()
    first, second = seeds_of(loader), seeds_of(loader)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    loader.set_epoch(0)
    assert seeds_of(loader) == first
    assert seeds_of(_loader(seed=1)) != first
    assert seeds_of(_loader(shuffle=False)) == list(range(50))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_restores_at_every_step_of_two_epochs(num_workers: int) -> None:
    loader = _loader(num_workers=num_workers)
    states, batches = [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
    for done, state in enumerate(states[:-1]):
        fresh = _loader(num_workers=num_workers)
        fresh.load_state_dict(state)
        rest = list(fresh)
        if state["epoch"] == 0:
            rest += list(fresh)
        assert_same_batches(batches[done:], rest)


def test_set_epoch_keeps_a_restored_position_inside_that_epoch() -> None:
    loader = _loader()
    loader.set_epoch(5)
    batches = iter(loader)
    next(batches)
    rest, fresh = list(batches), _loader()
    fresh.load_state_dict({**loader.state_dict(), "epoch": 5, "step": 1, "consumed_seeds": 4})
    fresh.set_epoch(5)
    assert_same_batches(rest, fresh)
    fresh.set_epoch(5)
    assert len(list(fresh)) == len(rest) + 1


def test_state_is_plain_numbers_and_foreign_states_are_refused() -> None:
    loader = _loader()
    state = loader.state_dict()
    assert all(isinstance(value, int) for value in state.values())
    for change in (
        {"num_seeds": 51},
        {"seed": 9},
        {"shuffle": 0},
        {"consumed_seeds": 51},
        {"step": -1},
        {"epoch": None},
        {"epoch": 1.5},
    ):
        with pytest.raises(hoploom.ConfigError):
            loader.load_state_dict({**state, **change})


def _threads() -> int:
    return sum(thread.name.startswith("hoploom") for thread in threading.enumerate())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_a_loop_early_leaves_no_thread_and_a_clean_next_epoch(num_workers: int) -> None:
    loader = _loader(num_workers=num_workers)
    for _batch in loader:
        break
    assert _threads() == 0
    loader.set_epoch(0)
    assert sorted(seeds_of(loader)) == list(range(50))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_in_transform_arrives_once_and_names_the_step(num_workers: int) -> None:
    def transform(batch: Any) -> Any:
        if 7 in batch.n_id[: batch.batch_size].tolist():
            raise KeyError("seven")
        return batch

    loader = _loader(num_workers=num_workers, transform=transform, shuffle=False)
    batches = iter(loader)
    next(batches)
    with pytest.raises(hoploom.BatchError, match=r"step 1 of epoch 0 .*seven") as caught:
        next(batches)
    assert not list(batches)
    assert isinstance(caught.value.__cause__, KeyError)
    assert _threads() == 0


def test_two_iterators_at_once_do_not_disturb_each_other() -> None:
    loader = _loader(num_workers=2)
    first, second = iter(loader), iter(loader)
    pairs = list(zip(first, second, strict=True))
    fresh = _loader()
    assert_same_batches([left for left, _ in pairs], fresh)
    assert_same_batches([right for _, right in pairs], fresh)


def test_the_newest_of_two_iterators_says_where_the_loader_is() -> None:
    loader = _loader()
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    next(first)
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 1)


def test_dropping_the_loader_in_the_middle_of_an_epoch_frees_everything() -> None:
    loader = _loader(num_workers=2)
    batches = iter(loader)
    next(batches)
    alive = weakref.ref(loader)
    del loader, batches
    gc.collect()
    assert alive() is None
    assert _threads() == 0


STUCK = """
import threading, torch, hoploom
from dataclasses import replace
from torch_geometric.data import Data
data = Data(x=torch.zeros(20000, 64), edge_index=torch.randint(20000, (2, 200000)))
unfinished = iter(hoploom.NeighborLoader(data, [10, 10], batch_size=500, num_workers=2))
next(unfinished)
stuck = lambda batch: threading.Event().wait()
loader = hoploom.NeighborLoader(data, [1], batch_size=5, num_workers=2, timeout=0.2, transform=stuck)
loader._pipeline = replace(loader._pipeline, close_deadline=0.2)
try:
    list(loader)
except hoploom.BatchError as error:
    print(error)
"""


def test_threads_in_the_middle_of_an_epoch_or_that_never_return_do_not_hold_up_the_end_of_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step 0 was not made within 0.2 s")


def test_a_batch_kept_is_never_overwritten() -> None:
    loader = _loader(num_workers=2)
    kept = list(loader)
    copies = [batch.clone() for batch in kept]
    for _ in range(3):
        list(loader)
    assert_same_batches(kept, copies)


def test_a_thousand_epochs_use_no_more_memory_than_ten() -> None:
    loader = hoploom.NeighborLoader(ring(20), [2], batch_size=10, num_workers=2)
    for _ in range(10):
        list(loader)
    gc.collect()
    before = ops.pool_use()
    for _ in range(200):
        list(loader)
    gc.collect()
    assert ops.pool_use()[1] <= before[1]
    assert _threads() == 0


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([], r"has dtype torch.float32 and shape \(0,\); give a list of positions"),
        (torch.empty(0, dtype=torch.bool), r"has dtype torch.bool and shape \(0,\); give a list of positions"),
        ([0.5], r"has dtype torch.float32 and shape \(1,\); give a list of positions"),
        (torch.tensor([True]), r"has dtype torch.bool and shape \(1,\); give a list of positions"),
        (3, r"has dtype torch.int64 and shape \(\); give a list of positions"),
        ([0, 50], r"holds 50, out of range \[0, 50\); give positions among the seeds"),
        ([-1, 50], r"holds -1, out of range \[0, 50\); give positions among the seeds"),
    ],
)
def test_a_loader_is_called_with_positions_among_the_seeds(index: Any, said: str) -> None:
    with pytest.raises(hoploom.ConfigError, match=f"^index {said}$"):
        _loader()(index)


@pytest.mark.parametrize("threads", [0, 2])
def test_steps_leave_the_position_alone(threads: int) -> None:
    loader = _loader(num_workers=threads)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert (len(list(loader.steps(range(2, 5)))), loader.state_dict()) == (3, state)
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
    assert (steps[0][-1][1], len(_loader(least_tail=3)), len(_loader(least_tail=2))) == (num_seeds, 12, 13)


def test_steps_that_the_loop_does_not_have_are_refused() -> None:
    loader = _loader()
    for step in (-1, 13):
        with pytest.raises(hoploom.ConfigError, match=r"not in range\(0, 13\)"):
            loader.num_seeds(step)


def told(**options: Any) -> dict[str, str]:
    return dict(hoploom.NeighborLoader(ring(12), [2], **options).reading().settings)


@pytest.mark.parametrize(
    ("name", "value", "beside"),
    [
        ("sample_frontier", lambda layer, graph, seeds: graph.in_edges(seeds), {"mode": "blocks"}),
        ("fields", ["x"], {}),
        ("degrees", True, {}),
        ("replace", True, {}),
        ("batch_size", 3, {}),
    ],
)
def test_ranks_that_differ_in_an_option_see_it_by_its_name(name: str, value: Any, beside: dict[str, Any]) -> None:
    one, other = told(**beside), told(**beside, **{name: value})
    assert [key for key in one if one[key] != other[key]] == [name]
    assert told(**beside, **{name: value}) == other
