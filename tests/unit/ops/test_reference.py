"""The C++ core makes the picks of the Python reference, bit for bit, over generated graphs."""

import dataclasses
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference
from torch import Tensor

from hoploom import _core, keys, ops
from hoploom.ops.sample import MAP_BUDGET, mix_words

FANOUTS = [-1, 0, 1, 3, 15, 64, 65, 200]
DEGREES = [0, 1, 2, 3, 4, 7, 15, 16, 40, 64, 65, 66, 200, 230]
# Around the edges of 31 and 32 bits, where a narrow type would show.
FIRST_NODES = [0, 5, (1 << 31) - 3, (1 << 32) - 2, 1 << 40]
FIRST_IDS = [(1 << 31) - 8, (1 << 32) - 8, 1 << 45]

words64 = st.integers(0, (1 << 64) - 1)
words32 = st.integers(0, (1 << 32) - 1)
fanouts = pytest.mark.parametrize(
    "fanout", [pytest.param(fanout, marks=pytest.mark.slow) if fanout in (1, 200) else fanout for fanout in FANOUTS]
)
replaces = pytest.mark.parametrize("replace", [False, True])
few = settings(max_examples=20)


@dataclass(frozen=True)
class Graph:
    """A small part in plain lists, and a frontier in it."""

    indptr: list[int]
    indices: list[int]
    dtype: torch.dtype
    frontier: reference.Frontier
    columns: reference.Columns
    first: tuple[int, int]  # node, edge
    key: int
    stream: int

    def by_reference(self, rule: reference.Rule) -> reference.Picks:
        return reference.sample(self.indptr, self.indices, self.frontier, rule, self.columns, self.first)

    def by_core(self, rule: reference.Rule) -> reference.Picks:
        lists = ops.EdgeLists(
            torch.tensor(self.indptr),
            torch.tensor(self.indices, dtype=self.dtype),
            *self.first,
            tensor_or_none(self.columns.weight, torch.float32),
            tensor_or_none(self.columns.edge_time),
            tensor_or_none(self.columns.source_time),
        )
        nodes, trees, times = self.frontier
        frontier = ops.Frontier(int64(nodes), tensor_or_none(trees), tensor_or_none(times))
        *options, excluded = rule
        picks = ops.sample(lists, frontier, ops.Rule(*options, tensor_or_none(excluded)))
        return reference.Picks(*(column.tolist() for column in picks))

    def rule(self, fanout: int, **flags: bool) -> reference.Rule:
        return reference.Rule(self.key, self.stream, fanout, **flags)


def int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def tensor_or_none(values: Sequence[float] | None, dtype: torch.dtype = torch.int64) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=dtype)


def float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def random_weights(rng: random.Random, size: int) -> list[float]:
    """Of all magnitudes, some zero and some negative: neither of these is ever picked."""
    kinds = [0.0, 0.0, -1.0, 1.0, rng.random(), rng.random(), 1e-30, 1e30]
    return [float32(rng.choice(kinds)) for _ in range(size)]


def random_times(rng: random.Random, degrees: list[int]) -> list[int]:
    """Ascending within each list, with ties; signed."""
    return [time for degree in degrees for time in sorted(rng.randint(-20, 20) for _ in range(degree))]


def timed_sources(rng: random.Random, degrees: list[int]) -> tuple[list[int], list[int]]:
    """Source ids whose lists ascend by the sources' times, and those times."""
    source_time = [rng.randint(-20, 20) for _ in range(50)]
    lists = [sorted((rng.randrange(50) for _ in range(degree)), key=source_time.__getitem__) for degree in degrees]
    return [source for sources in lists for source in sources], source_time


@st.composite
def graphs(
    draw: st.DrawFn, time: str | None = None, *, weight: bool = False, trees: bool = False, times: bool = False
) -> Graph:
    """Small graphs with empty lists, repeated edges, repeated frontier nodes and any offsets."""
    degrees = draw(st.lists(st.sampled_from(DEGREES), min_size=1, max_size=8))
    first = draw(st.sampled_from(FIRST_NODES)), draw(st.sampled_from(FIRST_NODES))
    rows = draw(st.lists(st.integers(0, len(degrees) - 1), max_size=40))
    rng = random.Random(draw(words32))
    indptr = [sum(degrees[:row]) for row in range(len(degrees) + 1)]
    wide = time != "source" and draw(st.booleans())
    first_id = draw(st.sampled_from(FIRST_IDS)) if wide else 0
    indices = [first_id + rng.randrange(50) for _ in range(indptr[-1])]
    source_time = None
    if time == "source":
        indices, source_time = timed_sources(rng, degrees)
    return Graph(
        indptr,
        indices,
        torch.int64 if wide else torch.int32,
        reference.Frontier(
            [first[0] + row for row in rows],
            [rng.choice([0, 1, len(rows), -1, 1 << 40]) for _ in rows] if trees else None,
            [rng.randint(-25, 25) for _ in rows] if times else None,
        ),
        reference.Columns(
            random_weights(rng, indptr[-1]) if weight else None,
            random_times(rng, degrees) if time == "edge" else None,
            source_time,
        ),
        first,
        draw(words64),
        draw(words32),
    )


def ring(num_nodes: int, degree: int, first_node: int = 0) -> Graph:
    """Node v has the in-edges of v + 1, v + 2, ... v + degree; the frontier is all nodes."""
    indices = [(node + step) % num_nodes for node in range(num_nodes) for step in range(1, degree + 1)]
    frontier = reference.Frontier([first_node + node for node in range(num_nodes)])
    indptr = [node * degree for node in range(num_nodes + 1)]
    return Graph(indptr, indices, torch.int32, frontier, reference.NO_COLUMNS, (first_node, 0), key=7, stream=3)


# The vectors that the authors of Philox publish with Random123 (kat_vectors, philox 4 32 10).
KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),  # the digits of pi
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(word: int) -> int:
    """A 64-bit word as an int64 tensor holds it."""
    return word - (1 << 64) if word >> 63 else word


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_philox_makes_the_published_words(
    key: tuple[int, int], counter: tuple[int, int, int, int], words: tuple[int, int, int, int]
) -> None:
    key64 = key[1] << 32 | key[0]
    assert reference.philox(key64, counter) == words
    ids = torch.tensor([signed(counter[1] << 32 | counter[0])])
    assert ops.draw_words(key64, ids, counter[2], counter[3]).tolist() == [list(words)]


@pytest.mark.parametrize(("seed", "word"), [(0, 0xE220A8397B1DCDAF), (1234567, 6457827717110365317)])
def test_mix_makes_the_published_first_word_of_splitmix64(seed: int, word: int) -> None:
    assert keys.mix(seed, 0) == word


@given(words64, st.lists(words64, max_size=5))
def test_mix_is_the_cores_and_that_of_arrays(state: int, values: list[int]) -> None:
    mixed = [keys.mix(state, value) for value in values]
    assert [_core.mix(state, value) for value in values] == mixed
    assert mix_words(np.full(1, state, dtype=np.uint64), np.array(values, dtype=np.uint64)).tolist() == mixed


def test_keys_are_light_to_import() -> None:
    script = "import sys, hoploom.keys; print([name for name in ('numpy', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@given(words64, st.integers(-(1 << 63), (1 << 63) - 1), words32, words32)
def test_core_words_equal_the_reference(key: int, node: int, stream: int, block: int) -> None:
    draws = reference.Draws(key, node, stream)
    words = ops.draw_words(key, torch.tensor([node]), stream, block).tolist()
    assert words == [[draws.word(4 * block + i) for i in range(4)]]


@given(words64, words32, st.integers(0, 100), st.integers(1, (1 << 63) - 1))
def test_bounded_draws_equal_the_reference(key: int, node: int, draw: int, bound: int) -> None:
    wide = reference.Draws(key, node, 4).wide(draw)
    assert ops.draw_bounded(key, torch.tensor([node]), 4, draw, bound).tolist() == [wide * bound >> 64]


@given(st.floats(2.0**-53, 1.0 - 2.0**-53))
def test_exact_log_is_within_two_roundings_of_the_logarithm(x: float) -> None:
    assert math.isclose(reference.exact_log(x), math.log(x), rel_tol=2.0**-51)


def test_the_reference_speaks_of_rules_and_frontiers_as_the_ops_do() -> None:
    assert reference.Rule._fields == ops.Rule._fields
    assert reference.Frontier._fields == ops.Frontier._fields
    assert reference.Picks._fields == ops.Picks._fields


@fanouts
@few
@given(
    graph=st.one_of(
        graphs(weight=True),
        graphs(weight=True, trees=True),
        graphs("edge", weight=True, trees=True, times=True),
        graphs("source", weight=True, trees=True, times=True),
        graphs("edge", weight=True),  # no seed times: the whole list is seen
    ),
    flags=st.fixed_dictionaries({flag: st.booleans() for flag in ("replace", "last", "labor", "weighted")}),
)
def test_any_mixture_of_options_equals_the_reference(graph: Graph, fanout: int, flags: dict[str, bool]) -> None:
    rule = graph.rule(fanout, **flags)
    assert graph.by_core(rule) == graph.by_reference(rule)


@fanouts
@few
@given(
    graph=st.one_of(
        graphs(),
        graphs(weight=True, trees=True),
        graphs("edge", weight=True, trees=True, times=True),
        graphs("source", weight=True, times=True),
    ),
    flags=st.fixed_dictionaries({flag: st.booleans() for flag in ("replace", "last", "labor", "weighted")}),
    window=st.sampled_from([-1, 0, 3, 10, (1 << 63) - 1]),
    share=st.sampled_from([0.02, 0.3, 0.9, 1.0]),
    chosen=st.randoms(use_true_random=False),
)
def test_excluded_and_expired_edges_are_not_picked_and_the_rest_is_drawn_as_a_shorter_list(
    graph: Graph, fanout: int, flags: dict[str, bool], window: int, share: float, chosen: random.Random
) -> None:
    first, count = graph.first[1], len(graph.indices)
    excluded = sorted(chosen.sample(range(first - 3, first + count + 3), int(share * (count + 6))))
    flags |= {"weighted": flags["weighted"] and graph.columns.weight is not None}
    rule = graph.rule(fanout, **flags)._replace(window=window, excluded=excluded)
    picks = graph.by_core(rule)
    assert not set(picks.edges) & set(excluded)
    assert picks == graph.by_reference(rule)


def test_excluded_positions_must_ascend() -> None:
    rule = ring(8, 3).rule(2)._replace(excluded=[4, 4])
    with pytest.raises(ValueError, match="excluded positions do not ascend"):
        ring(8, 3).by_core(rule)


@fanouts
@replaces
@few
@given(graph=graphs())
def test_uniform_picks_equal_the_reference(graph: Graph, fanout: int, replace: bool) -> None:
    """And those of the general path: seed times without edge times cut nothing off, but take it."""
    rule = graph.rule(fanout, replace=replace)
    picks = graph.by_core(rule)
    assert picks == graph.by_reference(rule)
    timed = dataclasses.replace(graph, frontier=graph.frontier._replace(times=[0] * len(graph.frontier.nodes)))
    assert picks == timed.by_core(rule)


@pytest.mark.parametrize("degree", [65_536, 65_537, 100_000])
@pytest.mark.parametrize("fanout", [3, 65])
@replaces
def test_lists_longer_than_sixteen_bits_equal_the_reference(degree: int, fanout: int, replace: bool) -> None:
    indptr, frontier = [0, degree, degree + 9], reference.Frontier([1, 0, 1])
    graph = Graph(indptr, list(range(degree + 9)), torch.int32, frontier, reference.NO_COLUMNS, (0, 0), 5, 1)
    rule = graph.rule(fanout, replace=replace)
    assert graph.by_core(rule) == graph.by_reference(rule)


@fanouts
def test_a_frontier_longer_than_the_pipeline_equals_the_reference(fanout: int) -> None:
    graph = ring(num_nodes=16 * 8 * 2 + 5, degree=17)
    assert graph.by_core(graph.rule(fanout)) == graph.by_reference(graph.rule(fanout))


@few
@given(words64, st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257])))
def test_permute_equals_the_reference_and_reaches_every_place(key: int, size: int) -> None:
    order = ops.permute(key, size, 0, size).tolist()
    assert order == [reference.permute(key, size, position) for position in range(size)]
    assert sorted(order) == list(range(size))


@given(words64, st.integers(1, (1 << 63) - 1), st.data())
def test_permute_of_any_size_equals_the_reference(key: int, size: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, size - 1))
    expected = [reference.permute(key, size, position)]
    assert ops.permute(key, size, position, position + 1).tolist() == expected


@pytest.mark.parametrize("size", [65_536, 100_003])
def test_a_large_permutation_reaches_every_place(size: int) -> None:
    order = torch.cat([ops.permute(9, size, 0, 1000), ops.permute(9, size, 1000, size)])
    assert torch.equal(order.sort().values, torch.arange(size))


def test_an_empty_permutation_is_empty() -> None:
    assert ops.permute(1, 0, 0, 0).tolist() == []


ids = st.lists(st.integers(0, 30), max_size=60)
budgets = pytest.mark.parametrize("budget", [MAP_BUDGET, 0], ids=["direct", "hashed"])


def runs(total: int, rng: random.Random) -> list[int]:
    """Counts of a frontier, some zero, that sum to `total`."""
    owners = Counter(rng.randrange(5) for _ in range(total))
    return [owners[owner] for owner in range(5)]


@budgets
@given(seeds=ids, sources=ids, again=ids, rng=st.randoms(use_true_random=False))
def test_relabelling_equals_the_reference(
    seeds: list[int], sources: list[int], again: list[int], rng: random.Random, budget: int
) -> None:
    node_map = ops.NodeMap(31, budget)
    for _ in range(2):  # the second batch finds nothing of the first
        node_map.add_seeds(int64(seeds))
        local = []
        for hop in (sources, again):
            counts = torch.tensor(runs(len(hop), rng))
            local += node_map.add(int64(hop), counts).tolist()
        nodes, expected = reference.relabel(seeds, sources + again)
        assert (node_map.nodes().tolist(), local) == (nodes, expected)
        assert node_map.take().tolist() == nodes


@budgets
@given(seeds=ids, sources=ids, rng=st.randoms(use_true_random=False))
def test_relabelling_in_trees_equals_the_reference(
    seeds: list[int], sources: list[int], rng: random.Random, budget: int
) -> None:
    node_map, seed_trees = ops.NodeMap(31, budget), [rng.randrange(3) for _ in seeds]
    trees, counts = [2, 0, 1, 1, 0], runs(len(sources), rng)
    node_map.add_seeds(int64(seeds), int64(seed_trees))
    local = node_map.add(int64(sources), torch.tensor(counts), torch.tensor(trees))
    source_trees = [tree for tree, count in zip(trees, counts, strict=True) for _ in range(count)]
    nodes, expected = reference.relabel(
        list(zip(seed_trees, seeds, strict=True)), list(zip(source_trees, sources, strict=True))
    )
    assert local.tolist() == expected
    assert list(zip(node_map.trees().tolist(), node_map.nodes().tolist(), strict=True)) == nodes
