"""`sampler=` of a PyG script: any torch sampler gives an epoch's order, dealt out to ranks and resumed like our own."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import assert_same_batches, seeds_of
from support.graphs import library, ring
from support.refusals import assert_refused
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch_geometric.loader import ImbalancedSampler

import hoploom

NUM_NODES = 50


class Coins(Sampler[int]):
    """Positions from Python's and NumPy's own generators."""

    def __iter__(self) -> Iterator[int]:
        return iter([random.randrange(NUM_NODES) for _ in range(20)] + np.random.permutation(20).tolist())

    def __len__(self) -> int:
        return 40


class Turning(Sampler[int]):
    """Another order each time that nothing but the number of calls decides."""

    calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter([(place + self.calls) % NUM_NODES for place in range(NUM_NODES)])

    def __len__(self) -> int:
        return NUM_NODES


WEIGHTS = torch.arange(NUM_NODES, dtype=torch.double)
SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 70),
    "weighted with a generator": lambda: WeightedRandomSampler(WEIGHTS, 30, generator=torch.Generator().manual_seed(1)),
    "imbalanced": lambda: ImbalancedSampler(torch.arange(NUM_NODES) // 40),
    "random": lambda: RandomSampler(range(NUM_NODES), replacement=True, num_samples=60),
    "a subset": lambda: SubsetRandomSampler([1, 4, 9, 16, 25, 36, 49]),
    "a subset in order": lambda: SequentialSampler(range(10)),
    "one share of one": lambda: DistributedSampler(range(NUM_NODES), num_replicas=1, rank=0),
    "Python and NumPy": Coins,
    "a list": lambda: [3, 3, 7, 0, 49, 3, 12],
}
each_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


def _loader(sampler: Any, **options: Any) -> hoploom.NeighborLoader:
    return hoploom.NeighborLoader(ring(NUM_NODES), [2, 2], **{"batch_size": 4, "sampler": sampler, **options})


@each_sampler
def test_an_epoch_is_what_the_sampler_gives_and_ranks_share_it_out(make: Any) -> None:
    alone = seeds_of(_loader(make(), batch_size=6))
    ranks = [list(_loader(make(), batch_size=2, rank=rank, world_size=3)) for rank in range(3)]
    shared = seeds_of(batch for step in zip(*ranks, strict=True) for batch in step)
    assert shared == alone  # every position of the order once, where it stands in the order
    assert len(alone) == len(make())


def test_a_list_is_walked_as_it_stands_and_positions_are_among_the_seeds() -> None:
    loader = _loader([1, 1, 0, 2], input_nodes=[30, 20, 10])
    (batch,) = loader
    assert (batch.n_id[:4].tolist(), batch.input_id.tolist()) == ([20, 20, 30, 10], [1, 1, 0, 2])
    assert (loader.dataset, loader([2]).n_id[0]) == (range(3), 10)


@each_sampler
def test_a_sampler_changes_nobodys_random_numbers_and_nobody_changes_its_own(make: Any) -> None:
    sampler = make()
    own = getattr(sampler, "generator", None) or torch.Generator()
    torch.manual_seed(3)
    before = torch.get_rng_state(), own.get_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = seeds_of(_loader(sampler))
    after = torch.get_rng_state(), own.get_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert all(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))
    assert before[2:] == after[2:]
    torch.manual_seed(4)
    random.seed(4)
    assert seeds_of(_loader(make())) == first


def test_epochs_seeds_and_generators_draw_anew() -> None:
    def made(seed: int = 0, of_generator: int | None = None) -> hoploom.NeighborLoader:
        generator = None if of_generator is None else torch.Generator().manual_seed(of_generator)
        return _loader(WeightedRandomSampler(WEIGHTS, 70, generator=generator), seed=seed)

    loader = made()
    first, second = seeds_of(loader), seeds_of(loader)
    loader.set_epoch(0)
    assert seeds_of(loader) == first
    drawn = [first, second, *(seeds_of(made(*given)) for given in [(1, None), (0, 1), (0, 2), (1, 1)])]
    assert len({tuple(seeds) for seeds in drawn}) == len(drawn)


@each_sampler
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_continues_at_every_step(make: Any, num_workers: int) -> None:
    whole = _loader(make(), num_workers=num_workers)
    list(whole)
    batches, states = [], []
    for batch in whole:  # epoch 1
        batches.append(batch)
        states.append(whole.state_dict())
    for step, state in enumerate(states):
        resumed = _loader(make(), num_workers=num_workers)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        if step + 1 < len(states):
            assert_same_batches(list(resumed), batches[step + 1 :])


def test_ranks_may_take_whole_steps_of_what_is_drawn() -> None:
    loader = _loader(SAMPLERS["weighted"](), rank=1, world_size=2)
    list(loader)
    whole = loader.steps(range(loader.num_whole_steps), dealt=False)
    assert_same_batches(list(whole), list(_loader(SAMPLERS["weighted"]())))


def test_a_sampler_that_draws_differently_again_cannot_resume_and_says_so() -> None:
    loader = _loader(Turning())
    next(iter(loader))
    state, resumed = loader.state_dict(), _loader(Turning())
    resumed.set_epoch(3)  # as of now it has turned further
    list(resumed)
    assert_refused(lambda: resumed.load_state_dict(state), "epoch 0", "Turning", "set_epoch(1)")
    with pytest.raises(
        hoploom.ConfigError, match=r"batch size or sampler; resume with the same ones, or go on with set_epoch"
    ):
        _loader(None).load_state_dict(state)


def test_a_state_is_that_of_the_order_that_the_loop_walks() -> None:
    positions = list(range(NUM_NODES))
    loader = _loader(positions)
    list(loader)
    batches = iter(loader)
    next(batches)
    positions.reverse()  # weights that were learned meanwhile, say
    list(loader.steps(range(1)))
    state = loader.state_dict()
    assert_refused(lambda: _loader(positions).load_state_dict(state), "epoch 1", "list", "set_epoch(2)")


def test_a_sampler_that_knows_its_epoch_is_told_it() -> None:
    def made() -> Any:
        return DistributedSampler(range(NUM_NODES), num_replicas=1, rank=0, shuffle=True)

    loader, theirs = _loader(made()), made()
    list(loader)
    theirs.set_epoch(1)
    assert seeds_of(loader) == list(theirs)


class Unending(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Longer(Unending):
    def __len__(self) -> int:
        return 3


WRONG: dict[str, tuple[Any, ...]] = {
    "with shuffle": ({"sampler": [0], "shuffle": True}, "mutually exclusive with shuffle"),
    "with locality": ({"sampler": [0], "locality": True}, "locality"),
    "that deals out shares": (
        {"sampler": DistributedSampler(range(16), num_replicas=3, rank=1), "rank": 0, "world_size": 2},
        "DistributedSampler",
        "3 ranks, the loader is for 2",
        "or leave it out",
    ),
    "of another rank": (
        {"sampler": DistributedSampler(range(16), num_replicas=2, rank=1), "rank": 0, "world_size": 2},
        "is for rank 1, but the loader is for rank 0",
        "leave it out",
    ),
    "of more nodes than seeds": ({"sampler": range(17)}, "range", "position 16", "16 seeds", "the same seeds"),
    "of batches": ({"sampler": BatchSampler(range(16), 4, False)}, "BatchSampler", "[0, 1, 2, 3]", "no batches"),
    "of fractions": ({"sampler": [0.5]}, "0.5", "one position"),
    "without a length": ({"sampler": Unending()}, "Unending", "length"),
    "that never ends": ({"sampler": Longer()}, "Longer", "more than 3", "len()"),
    "that is none": ({"sampler": 5}, "int", "torch Sampler"),
    "of nothing": ({"sampler": []}, "no positions"),
    "too short for the ranks": ({"sampler": [0, 1], "rank": 0, "world_size": 3}, "2 seeds", "3 ranks"),
}


@pytest.mark.parametrize(("given", "said"), [(case[0], case[1:]) for case in WRONG.values()], ids=WRONG)
def test_a_sampler_that_fails_is_refused_when_the_loader_is_made(given: dict[str, Any], said: tuple[str, ...]) -> None:
    assert_refused(lambda: hoploom.NeighborLoader(ring(16), [2], batch_size=4, **given), *said)


def test_links_are_drawn_like_nodes() -> None:
    data = library()
    key = data.edge_types[0]
    count = data[key].edge_index.shape[1]
    sampler = WeightedRandomSampler(torch.ones(count), 11)
    batches = list(hoploom.LinkNeighborLoader(data, [2], key, batch_size=4, sampler=sampler))
    assert [batch[key].input_id.numel() for batch in batches] == [4, 4, 3]
