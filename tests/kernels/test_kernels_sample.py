"""The kernels make the picks of the Python reference, bit for bit, over generated graphs.

So does the core, in tests/unit/ops/test_reference.py.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from support import reference
from support.kernel_forms import UNWRITTEN, frontier_of, lists_of, no_faults, picks_of, rule_of, written

from hoploom import ops
from hoploom.ops.kernels.sample import sample

DEGREES = [0, 1, 2, 3, 4, 7, 15, 16, 40, 64, 65, 66]
FIRST_IDS = [(1 << 31) - 8, (1 << 32) - 8, 1 << 45]  # around the edges of 31 and 32 bits
WEIGHTS = [0.0, -1.0, 1.0, 1.0, 1e-30, 1e30, float("inf")]


@dataclass(frozen=True)
class Graph:
    """A small relation in plain lists, a frontier in it, and where both stand in larger arrays."""

    indptr: list[int]
    indices: torch.Tensor
    nodes: list[int]
    columns: reference.Columns = reference.NO_COLUMNS
    trees: list[int] | None = None
    times: list[int] | None = None  # by tree
    first_tree: int = 0
    begin: int = 0
    spare: int = 0
    weight: torch.Tensor | None = None

    def tells(self, fanout: int) -> bool:
        """Whether lists longer and no longer than the fanout are among those that are expanded."""
        degrees = [self.indptr[node + 1] - self.indptr[node] for node in self.nodes]
        return (
            len(degrees) > 2
            and any(degrees)
            and (fanout < 0 or fanout >= max(DEGREES) or min(degrees) <= fanout < max(degrees))
        )

    def frontier(self) -> reference.Frontier:
        times = None
        if self.times is not None and self.trees is not None:
            times = [self.times[tree - self.first_tree] for tree in self.trees]
        return reference.Frontier(self.nodes, self.trees, times)

    def by_reference(self, rule: ops.Rule) -> reference.Picks:
        frontier = self.frontier()
        given = rule._replace(excluded=None if rule.excluded is None else rule.excluded.tolist())
        return reference.sample(self.indptr, self.indices.tolist(), frontier, reference.Rule(*given), self.columns)

    def by_kernels(self, rule: ops.Rule, device: torch.device) -> reference.Picks:
        """The picks, after a look at all that is written beside them."""
        times = [int64_or_none(column) for column in self.columns[1:]]
        lists = lists_of(self.indptr, self.indices, device, self.weight, *times)
        frontier = frontier_of(self.nodes, device, self.trees, self.times, self.first_tree, self.begin, self.spare)
        num_places, faults = frontier.nodes.numel(), no_faults(device)
        capacity = 9 + len(self.nodes) * max(abs(rule.fanout), *DEGREES)
        picks = picks_of(capacity, device, num_places, begin=4)
        sample(lists, frontier, rule_of(rule, device), picks, faults)
        assert picks.indptr is not None
        firsts = picks.indptr[self.begin : self.begin + len(self.nodes) + 1].tolist()
        counts = [after - first for first, after in pairwise(firsts)]
        sources, edges, destinations = written(picks)
        assert (firsts[0], firsts[-1]) == (4, int(picks.span.end))
        assert destinations == [self.begin + row for row, count in enumerate(counts) for _ in range(count)]
        assert (set(picks.sources[int(picks.span.end) :].tolist()), int(faults)) == ({UNWRITTEN}, 0)
        return reference.Picks(counts, sources, edges)


def int64_or_none(values: Sequence[int] | None) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int64)


def graph(seed: int, time: str | None = None, *, trees: bool = False, max_degree: int = 66) -> Graph:
    """Empty lists, repeated edges and nodes, weights of all magnitudes, sources beyond 32 bits."""
    rng = random.Random(seed)
    degrees = [rng.choice([degree for degree in DEGREES if degree <= max_degree]) for _ in range(rng.randint(1, 8))]
    indptr = [sum(degrees[:row]) for row in range(len(degrees) + 1)]
    is_wide = time != "source" and rng.random() < 0.5
    first_id = rng.choice(FIRST_IDS) if is_wide else 0
    source_time = [rng.randint(-20, 20) for _ in range(30)]
    lists = [[rng.randrange(30) for _ in range(degree)] for degree in degrees]
    if time == "source":
        lists = [sorted(sources, key=source_time.__getitem__) for sources in lists]
    edge_time = [when for degree in degrees for when in sorted(rng.randint(-20, 20) for _ in range(degree))]
    weight = torch.tensor([rng.choice([*WEIGHTS, rng.random()]) for _ in range(indptr[-1])], dtype=torch.float32)
    nodes = [rng.randrange(len(degrees)) for _ in range(rng.randint(0, 6))]
    first_tree = rng.choice([0, 1 << 40])
    tree_ids = (
        [first_tree + rng.randrange(5) for _ in nodes] if time else [rng.choice([0, 1, -1, 1 << 40]) for _ in nodes]
    )
    return Graph(
        indptr,
        torch.tensor(
            [first_id + source for sources in lists for source in sources],
            dtype=torch.int64 if is_wide else torch.int32,
        ),
        nodes,
        reference.Columns(
            weight.tolist(), edge_time if time == "edge" else None, source_time if time == "source" else None
        ),
        tree_ids if trees or time else None,
        [rng.randint(-25, 25) for _ in range(5)] if time else None,
        first_tree,
        begin=rng.choice([0, 3]),
        spare=rng.choice([0, 2, 10]),
        weight=weight,
    )


def check(device: torch.device, seed: int, fanout: int, time: str | None = None, **options: Any) -> None:
    """Key and stream are any; the kernels and the reference agree. `options`: of the graph and the rule."""
    rng = random.Random(seed)
    graph_options = {name: options.pop(name) for name in ("trees", "max_degree") if name in options}
    graphs = (graph(one, time, **graph_options) for one in count(1000 * seed))
    drawn = next(one for one in graphs if one.tells(fanout))
    excluded = None
    if (share := options.pop("excluded", 0.0)) > 0:
        num_edges = drawn.indices.numel()
        excluded = torch.tensor(sorted(rng.sample(range(num_edges), max(1, int(share * num_edges)))))
    rule = ops.Rule(rng.getrandbits(64), rng.getrandbits(32), fanout, **options, excluded=excluded)
    assert drawn.by_kernels(rule, device) == drawn.by_reference(rule)


@pytest.mark.parametrize(
    ("fanout", "options"),
    [
        *((fanout, {"replace": replace}) for replace in (False, True) for fanout in (-1, 0, 3, 64, 65)),
        *((fanout, {"weighted": True}) for fanout in (-1, 15, 65)),
        *((fanout, {"weighted": True, "replace": True, "max_degree": 40}) for fanout in (-1, 5, 70)),
        *((fanout, {"labor": True}) for fanout in (-1, 15, 65)),
    ],
    ids=str,
)
def test_picks_are_those_of_the_reference(device: torch.device, fanout: int, options: dict[str, Any]) -> None:
    check(device, fanout + 1, fanout, **options)


RULES: list[dict[str, bool]] = [
    {},
    {"replace": True},
    {"last": True},
    {"weighted": True},
    {"weighted": True, "last": True},
    {"labor": True},
    {"labor": True, "last": True},
    {"weighted": True, "labor": True, "replace": True},
]
rules = pytest.mark.parametrize("flags", RULES, ids="-".join)


@pytest.mark.parametrize("time", ["edge", pytest.param("source", marks=pytest.mark.slow)])
@rules
def test_nothing_later_than_a_trees_time_is_picked(device: torch.device, flags: dict[str, bool], time: str) -> None:
    seed = RULES.index(flags)
    check(device, seed, seed % 4 or -1, time, max_degree=40, **flags)


@rules
def test_each_tree_has_draws_of_its_own(device: torch.device, flags: dict[str, bool]) -> None:
    check(device, RULES.index(flags), 3, trees=True, max_degree=16, **flags)


@pytest.mark.parametrize("share", [0.05, pytest.param(0.7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fanout", "flags"),
    [
        *((-1, {}), (3, {}), (3, {"replace": True}), (65, {}), (5, {"labor": True}), (5, {"weighted": True})),
        (5, {"weighted": True, "replace": True}),
    ],
    ids=str,
)
def test_excluded_edges_are_not_picked(device: torch.device, fanout: int, flags: dict[str, bool], share: float) -> None:
    check(device, fanout + 9, fanout, excluded=share, **({"max_degree": 40} if fanout < 10 else {}), **flags)


@pytest.mark.parametrize("time", ["edge", pytest.param("source", marks=pytest.mark.slow)])
@pytest.mark.parametrize("flags", [{}, {"last": True}, {"weighted": True}], ids="-".join)
def test_edges_older_than_a_window_are_not_picked(device: torch.device, flags: dict[str, bool], time: str) -> None:
    for window in (0, 12, (1 << 63) - 1):
        check(device, 5 + window % 7, 3, time, max_degree=40, window=window, excluded=0.2, **flags)
