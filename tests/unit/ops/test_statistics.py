"""Picks have the distribution they promise: chi-square tests of the core under fixed keys.

Every list of a graph here has the same degree and sources of its own, so that one call is many trials.
"""

from collections.abc import Callable
from itertools import combinations, permutations

import pytest
import torch
from support.proportions import assert_in_proportion, assert_uniform
from torch import Tensor

from hoploom import keys, ops

FANOUTS = {3: 2, 10: 5, 100: 10, 1000: 10, 100_000: 64}  # by degree
NUM_EDGES = 2_000_000  # of one graph, at most

degrees = pytest.mark.parametrize(
    "degree", [pytest.param(degree, marks=pytest.mark.slow) if degree in (10, 1000) else degree for degree in FANOUTS]
)
replaces = pytest.mark.parametrize("replace", [False, True])
in_trees = pytest.mark.parametrize("in_trees", [False, True], ids=["vector", "trees"])


def shrink_of(population: int, fanout: int, *, replace: bool = False) -> float:
    """Without replacement, inclusion varies less."""
    return 1.0 if replace else (population - fanout) / (population - 1)


def uneven(degree: int) -> Tensor:
    """Weights 3 0 2 4 1, over and over."""
    return ((torch.arange(degree) * 2 + 3) % 5).float()


def equal_lists(
    degree: int, *, num_nodes: int = 20_000, weight: Tensor | None = None, timed: bool = False
) -> ops.EdgeLists:
    """Lists of one degree, weights [degree] and times 0, 1, 2, ...; no two share a source."""
    num_nodes = min(num_nodes, NUM_EDGES // degree)
    return ops.EdgeLists(
        torch.arange(num_nodes + 1) * degree,
        torch.arange(num_nodes * degree, dtype=torch.int32),
        weight=None if weight is None else weight.repeat(num_nodes),
        edge_time=torch.arange(degree).repeat(num_nodes) if timed else None,
    )


def num_keys(degree: int) -> int:
    return 1 if degree <= 100 else 10


def draw(
    lists: ops.EdgeLists,
    fanout: int,
    num_keys: int = 1,
    *,
    in_trees: bool = False,
    until: int | None = None,
    **flags: bool,
) -> Tensor:
    """Positions picked [picks] for every node, under so many keys; `until` is the seeds' time."""
    num_nodes = len(lists.indptr) - 1
    nodes = torch.arange(num_nodes)
    times = None if until is None else torch.full_like(nodes, until)
    frontier = ops.Frontier(nodes, nodes if in_trees else None, times)
    rules = [ops.Rule(keys.batch_key(1, 2, step), 0, fanout, **flags) for step in range(num_keys)]
    edges = torch.cat([ops.sample(lists, frontier, rule).edges for rule in rules])
    return edges % (lists.num_edges // num_nodes)


@degrees
@replaces
@in_trees
def test_uniform_picks_are_uniform(degree: int, replace: bool, in_trees: bool) -> None:
    fanout = FANOUTS[degree]
    positions = draw(equal_lists(degree), fanout, num_keys(degree), in_trees=in_trees, replace=replace)
    assert_uniform(positions, degree, shrink_of(degree, fanout, replace=replace))


@pytest.mark.parametrize("degree", [100, 100_000])
def test_many_uniform_picks_are_uniform(degree: int) -> None:
    positions = draw(equal_lists(degree), 80, num_keys(degree))
    assert_uniform(positions, degree, shrink_of(degree, 80))


@degrees
@replaces
def test_weighted_picks_are_in_proportion_to_weight(degree: int, replace: bool) -> None:
    """Without replacement the first is. Of 100 000, the later picks are as good as the first."""
    lists = equal_lists(degree, weight=uneven(degree))
    fanout = FANOUTS[degree] if replace or degree > 1000 else 1
    positions = draw(lists, fanout, num_keys(degree), replace=replace, weighted=True)
    assert_in_proportion(positions, uneven(degree).double())


def test_weighted_picks_without_replacement_are_drawn_one_after_another() -> None:
    weights = [1.0, 2.0, 3.0, 4.0]
    chances = torch.zeros(16, dtype=torch.float64)  # of a set {i < j}, at 4 i + j
    for i, j in permutations(range(4), 2):
        chances[4 * min(i, j) + max(i, j)] += weights[i] / 10 * weights[j] / (10 - weights[i])
    lists = equal_lists(4, num_nodes=100_000, weight=torch.tensor(weights))
    pairs = draw(lists, 2, weighted=True).view(-1, 2).sort().values
    assert_in_proportion(4 * pairs[:, 0] + pairs[:, 1], chances)


def test_a_budget_draws_one_node_after_another_by_squared_sums() -> None:
    """Nodes 1 to 3 have 1/2, 1 and 3/2, from lists of one and of two; node 0 is in the batch."""
    sources = torch.tensor([2, 0, 1, 3, 0, 3, 3])
    picks = ops.Picks(torch.tensor([1, 2, 2, 0, 2]), sources, torch.arange(7))
    weights = [0.0, 0.25, 1.0, 2.25]
    chances = torch.zeros(16, dtype=torch.float64)  # of i before j, at 4 i + j
    for i, j in permutations(range(1, 4), 2):
        chances[4 * i + j] = weights[i] / 3.5 * weights[j] / (3.5 - weights[i])
    pairs = []
    for step in range(8_000):
        budget = ops.NodeBudget()
        budget.add(picks, torch.where(sources == 0, 0, -1).int())
        pairs.append(budget.draw(keys.batch_key(0, 0, step), 7, 2))
    first, second = torch.stack(pairs).t()
    assert_in_proportion(4 * first + second, chances)


@degrees
@replaces
def test_temporal_picks_are_uniform_over_what_the_seed_may_see(degree: int, replace: bool) -> None:
    population, fanout = max(2, degree // 2), FANOUTS[degree] // 2
    lists = equal_lists(degree, timed=True)
    positions = draw(lists, fanout, num_keys(degree), until=population - 1, replace=replace)
    assert_uniform(positions, population, shrink_of(population, fanout, replace=replace))


@degrees
@pytest.mark.parametrize("way", ["labor", "weighted"])
def test_labor_picks_and_equal_weights_are_uniform(degree: int, way: str) -> None:
    fanout, weight = FANOUTS[degree], torch.full((degree,), 0.3)
    positions = draw(equal_lists(degree, weight=weight), fanout, num_keys(degree), **{way: True})
    assert_uniform(positions, degree, shrink_of(degree, fanout))


STRATEGIES: dict[str, Callable[[ops.EdgeLists], Tensor]] = {
    "vector": lambda lists: draw(lists, 2),
    "trees": lambda lists: draw(lists, 2, in_trees=True),
    "weighted": lambda lists: draw(lists, 2, weighted=True),
    "temporal": lambda lists: draw(lists, 2, until=4),
    "labor": lambda lists: draw(lists, 2, labor=True),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_sets_of_positions_are_equally_likely(strategy: str) -> None:
    lists = equal_lists(5, num_nodes=50_000, weight=torch.ones(5), timed=True)
    pairs = STRATEGIES[strategy](lists).view(-1, 2).sort().values
    sets = torch.zeros(25, dtype=torch.float64)
    sets[[5 * i + j for i, j in combinations(range(5), 2)]] = 1.0
    assert_in_proportion(5 * pairs[:, 0] + pairs[:, 1], sets)


def assert_independent(first: Tensor, second: Tensor, num_values: int = 10) -> None:
    """All pairs of values are equally likely."""
    assert_uniform(first * num_values + second, num_values**2)


# (key, stream, tree) of two hops that must know nothing of each other; without a tree: the vector path
NAMESAKES = {
    "seed": ((keys.batch_key(0, 0, 0), 0, None), (keys.batch_key(1, 0, 0), 0, None)),
    "epoch": ((keys.batch_key(0, 0, 0), 0, None), (keys.batch_key(0, 1, 0), 0, None)),
    "step": ((keys.batch_key(0, 0, 0), 0, None), (keys.batch_key(0, 0, 1), 0, None)),
    "epoch and step": ((keys.batch_key(0, 0, 1), 0, None), (keys.batch_key(0, 1, 0), 0, None)),
    "hop": ((5, keys.stream(0, 0), None), (5, keys.stream(1, 0), None)),
    "relation": ((5, keys.stream(0, 0), None), (5, keys.stream(0, 1), None)),
    "hop and relation": ((5, keys.stream(0, 1), None), (5, keys.stream(1, 0), None)),
    "tree": ((5, 0, 0), (5, 0, 1)),
}


@pytest.mark.parametrize(
    ("differs", "flags"),
    [
        *((differs, {}) for differs in NAMESAKES),
        *((differs, {"weighted": True}) for differs in ("seed", "hop")),
        *((differs, {"labor": True}) for differs in ("seed", "epoch and step")),
    ],
)
def test_picks_are_unrelated_when_anything_differs(differs: str, flags: dict[str, bool]) -> None:
    lists, nodes = equal_lists(10, weight=torch.ones(10)), torch.arange(20_000)
    first, second = (
        ops.sample(
            lists,
            ops.Frontier(nodes, None if tree is None else torch.full_like(nodes, tree)),
            ops.Rule(key, stream, 1, **flags),
        )
        for key, stream, tree in NAMESAKES[differs]
    )
    assert_independent(first.edges % 10, second.edges % 10)


@pytest.mark.parametrize("flags", [{}, {"weighted": True}, {"labor": True}], ids=str)
def test_neighbouring_nodes_pick_unrelated_positions(flags: dict[str, bool]) -> None:
    picks = draw(equal_lists(10, weight=torch.ones(10)), 1, **flags).view(-1, 2)
    assert_independent(picks[:, 0], picks[:, 1])


@in_trees
def test_the_draws_of_one_node_are_unrelated(in_trees: bool) -> None:
    picks = draw(equal_lists(10), 10, in_trees=in_trees, replace=True).view(-1, 10)
    for i, j in combinations(range(10), 2):
        assert_independent(picks[:, i], picks[:, j])


def orders(size: int, num_epochs: int) -> Tensor:
    """The order of each epoch: [num_epochs, size]."""
    return torch.stack([ops.permute(keys.epoch_key(3, epoch), size, 0, size) for epoch in range(num_epochs)])


@pytest.mark.parametrize("size", [3, 4])
def test_all_orders_of_a_few_are_equally_likely(size: int) -> None:
    numbered = {order: number for number, order in enumerate(permutations(range(size)))}
    seen = torch.tensor([numbered[tuple(order)] for order in orders(size, 20_000).tolist()])
    assert_uniform(seen, len(numbered))


@pytest.mark.parametrize("size", [5, 16])
def test_neighbours_in_an_order_are_unrelated(size: int) -> None:
    shuffled = orders(size, 20_000)
    different = (1 - torch.eye(size, dtype=torch.float64)).flatten()
    for place in range(size - 1):
        assert_in_proportion(shuffled[:, place] * size + shuffled[:, place + 1], different)


def test_successive_epochs_are_unrelated() -> None:
    shuffled = orders(10, 20_000)
    for place in range(10):
        assert_independent(shuffled[0::2, place], shuffled[1::2, place])


def test_a_long_order_keeps_no_distance() -> None:
    """Neither from where an element was, nor to the next element, nor to its place in the next epoch."""
    first, second = orders(100_000, 2)
    for distance in (first - torch.arange(100_000), first.diff(), first - second):
        assert_uniform(distance % 100_000, 100_000)
