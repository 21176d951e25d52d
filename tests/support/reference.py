"""The specification of every random choice, as plain Python over ints, floats and lists.

The C++ core and the Triton kernels must make exactly these picks. Trades all speed for being readable:
where the core and this file differ, decide here which is right, then mend the other.

Words. A position is an index into one node's list of in-edges; a pick is a chosen position. A draw is one
random number: draws are numbered, and each can be computed without those before it.
Weights are float32 values held as Python floats (float64); every sum, quotient and logarithm is float64,
rounded after each operation (no fused multiply-add).
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from hoploom.keys import BUDGET, mix, stream

Node = TypeVar("Node", bound=Hashable)
MASK32 = (1 << 32) - 1

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
NARROW_LIMIT = 1 << 16  # a population above this takes two words a draw
LABOR_STREAM = MASK32


@lru_cache(maxsize=1 << 12)  # consecutive draws share a block
def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words from a 64-bit key and four 32-bit counter words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & MASK32, key >> 32
    for _ in range(10):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & MASK32, p0 >> 32 ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


class Draws:
    """The numbered draws of one (key, id, stream)."""

    def __init__(self, key: int, node: int, stream: int) -> None:
        self.key, self.stream = key, stream
        self.low, self.high = node & MASK32, node >> 32 & MASK32

    def word(self, draw: int) -> int:
        """32 random bits: word draw % 4 of block draw // 4."""
        block = draw // 4 & MASK32
        return philox(self.key, (self.low, self.high, self.stream, block))[draw % 4]

    def wide(self, draw: int) -> int:
        """64 random bits: two words, the first one high."""
        return self.word(2 * draw) << 32 | self.word(2 * draw + 1)

    def unit(self, draw: int) -> float:
        """A float strictly inside (0, 1): the middle of one of 2^52 equal steps."""
        return ((self.wide(draw) >> 12) + 0.5) * 2.0**-52


def bounded(draws: Draws, draw: int, bound: int, population: int) -> int:
    """An integer in [0, bound) by multiply-shift; the population decides how many words it takes."""
    if population > NARROW_LIMIT:
        return draws.wide(draw) * bound >> 64
    return draws.word(draw) * bound >> 32


def exact_log(x: float) -> float:
    """ln(x) for 0 < x < 1 from +, -, *, / alone, so that every device rounds alike."""
    m, exponent = math.frexp(x)  # x = m * 2^exponent, m in [0.5, 1)
    if m < 0.70710678118654752:  # sqrt(1/2): keeps s small
        m, exponent = m * 2.0, exponent - 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = 0.0  # atanh(s) / s = 1 + z/3 + z^2/5 + ... + z^10/21, by Horner's rule
    for n in range(21, 0, -2):
        series = series * z + 1.0 / n
    return exponent * 0.69314718055994531 + 2.0 * s * series


def permute(key: int, size: int, position: int) -> int:
    """Where `position` goes in a keyed permutation of [0, size): Feistel rounds, walked back into range."""
    bits = max(1, (size - 1).bit_length())
    half = max(4, (bits + 1) // 2)  # fewer bits a half would leave small shuffles uneven
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for step in range(6):
            left, right = right, left ^ mix(mix(key, step), right) & mask
        position = left << half | right
        if position < size:
            return position


class Rule(NamedTuple):
    """How one hop of one relation is drawn. The fields of hoploom.ops.Rule, in its order."""

    key: int
    stream: int  # hop << 16 | relation
    fanout: int  # -1: all
    replace: bool = False
    last: bool = False
    labor: bool = False
    weighted: bool = False
    window: int = -1  # edges older than this before the node's time are left out; -1: none are too old
    excluded: Sequence[int] | None = None  # positions in the store that are never picked


class Edges(NamedTuple):
    """The in-edges of one node."""

    sources: Sequence[int]
    weights: Sequence[float] | None = None
    times: Sequence[int] | None = None  # ascending

    def seen(self, time: int | None, window: int) -> range:
        """The positions of the edges not later than `time` and, with a window, not older than `time - window`."""
        if time is None or self.times is None:
            return range(len(self.sources))
        end = sum(edge_time <= time for edge_time in self.times)
        return range(sum(edge_time < time - window for edge_time in self.times) if window >= 0 else 0, end)


def pick(
    rule: Rule,
    node: int,
    edges: Edges,
    tree: int | None = None,
    time: int | None = None,
    excluded: Collection[int] = (),
) -> list[int]:
    """The positions picked for one node. Time and exclusions cut the list first; the rest sees only what is left."""
    seen = edges.seen(time, rule.window)
    left = [position for position in seen if position not in excluded]
    if rule.last and time is not None and rule.fanout >= 0:
        return left[max(0, len(left) - rule.fanout) :]
    draws = Draws(rule.key if tree is None else mix(rule.key, tree), node, rule.stream)
    if rule.weighted:
        assert edges.weights is not None
        weights = [0.0 if position in excluded else edges.weights[position] for position in seen]
        return [seen[place] for place in pick_weighted(draws, weights, rule.fanout, replace=rule.replace)]
    if rule.labor:
        places = pick_labor(rule.key, [edges.sources[position] for position in left], rule.fanout)
    elif rule.fanout < 0 or (not rule.replace and len(left) <= rule.fanout):
        return left
    elif rule.replace:
        places = pick_with_replacement(draws, len(left), rule.fanout)
    else:
        places = pick_without_replacement(draws, len(left), rule.fanout)
    return [left[place] for place in places]


def pick_with_replacement(draws: Draws, population: int, fanout: int) -> list[int]:
    """Draw i is pick i; an empty list has no picks."""
    if population == 0:
        return []
    return [bounded(draws, draw, population, population) for draw in range(fanout)]


def pick_without_replacement(draws: Draws, population: int, fanout: int) -> list[int]:
    """Floyd's algorithm, in the order picked: a repeat is replaced by the newest position, never yet seen."""
    picks: list[int] = []
    for draw, newest in enumerate(range(population - fanout, population)):
        position = bounded(draws, draw, newest + 1, population)
        picks.append(newest if position in picks else position)
    return picks


def pick_weighted(draws: Draws, weights: Sequence[float], fanout: int, *, replace: bool) -> list[int]:
    """Picks in proportion to weight; what weighs nothing is never picked."""
    positive = [position for position, weight in enumerate(weights) if weight > 0]
    if not positive or fanout < 0 or (not replace and len(positive) <= fanout):
        return positive
    return pick_by_sums(draws, weights, fanout) if replace else pick_by_races(draws, weights, fanout)


def pick_by_sums(draws: Draws, weights: Sequence[float], fanout: int) -> list[int]:
    """With replacement, in draw order: the first position whose running sum exceeds draw * total."""
    sums, total = [], 0.0
    for weight in weights:
        total += max(0.0, weight)
        sums.append(total)
    final = sums.index(total)  # where rounding leaves no sum above: the last edge that weighs anything
    picks = []
    for draw in range(fanout):
        target = draws.unit(draw) * total
        picks.append(next((position for position, reached in enumerate(sums) if reached > target), final))
    return picks


def pick_by_races(draws: Draws, weights: Sequence[float], fanout: int) -> list[int]:
    """Without replacement, ascending: edge i finishes at -ln(draw i) / weight i, the earliest win."""
    races = [
        (-exact_log(draws.unit(position)) / weight, position) for position, weight in enumerate(weights) if weight > 0
    ]
    return sorted(position for _, position in sorted(races)[:fanout])


def pick_labor(key: int, sources: Sequence[int], fanout: int) -> list[int]:
    """Ascending: the lowest ranks. A source has one rank, whichever node, hop, relation or tree asks."""
    if fanout < 0 or len(sources) <= fanout:
        return list(range(len(sources)))
    ranks = [(Draws(key, source, LABOR_STREAM).wide(0), position) for position, source in enumerate(sources)]
    return sorted(position for _, position in sorted(ranks)[:fanout])


class Columns(NamedTuple):
    """What a relation carries beside its lists."""

    weight: Sequence[float] | None = None  # per edge
    edge_time: Sequence[int] | None = None  # per edge, ascending within a list
    source_time: Sequence[int] | None = None  # per source, lists ascending by it; edge_time goes first


NO_COLUMNS = Columns()


class Frontier(NamedTuple):
    """The nodes a hop expands. The fields of hoploom.ops.Frontier, in its order."""

    nodes: Sequence[int]
    trees: Sequence[int] | None = None
    times: Sequence[int] | None = None


class Picks(NamedTuple):
    """The edges picked, in the order of the frontier. The fields of hoploom.ops.Picks, in its order."""

    counts: list[int]
    sources: list[int]
    edges: list[int]


def sample(
    indptr: Sequence[int],
    indices: Sequence[int],
    frontier: Frontier,
    rule: Rule,
    columns: Columns = NO_COLUMNS,
    first: tuple[int, int] = (0, 0),
) -> Picks:
    """The picks of a whole frontier; `first` is the part's first node and first edge in the store."""
    first_node, first_edge = first
    picks = Picks([], [], [])
    for i, node in enumerate(frontier.nodes):
        row = node - first_node
        begin, end = indptr[row], indptr[row + 1]
        tree = None if frontier.trees is None else frontier.trees[i]
        time = None if frontier.times is None else frontier.times[i]
        edges = edges_of(indices, columns, begin, end)
        excluded = {position - first_edge - begin for position in rule.excluded or ()}
        positions = pick(rule, node, edges, tree, time, excluded)
        picks.counts.append(len(positions))
        picks.sources.extend(indices[begin + position] for position in positions)
        picks.edges.extend(first_edge + begin + position for position in positions)
    return picks


def edges_of(indices: Sequence[int], columns: Columns, begin: int, end: int) -> Edges:
    """One node's in-edges with their weights and times."""
    sources = indices[begin:end]
    weights = None if columns.weight is None else columns.weight[begin:end]
    if columns.edge_time is not None:
        return Edges(sources, weights, columns.edge_time[begin:end])
    if columns.source_time is not None:
        return Edges(sources, weights, [columns.source_time[source] for source in sources])
    return Edges(sources, weights)


NEIGHBORS_READ = 50


def hgt_nodes(
    num_types: int,
    relations: Sequence[
        tuple[int, int, Sequence[int], Sequence[int]]
    ],  # source type, destination type, indptr, indices
    seeds: tuple[int, Sequence[int]],  # their type and ids
    num_samples: Sequence[Sequence[int]],  # [layer][type]
    key: int,
) -> list[list[int]]:
    """The nodes of a batch by type, in the order in which they join it.

    A node that joins gives each of its in-neighbours an equal share of 1, relation by relation in the order of the
    graph; of a long list, the picks of plain sampling alone. Budgets are sums of shares in that order, in float64.
    """
    nodes: list[list[int]] = [[] for _ in range(num_types)]
    budgets: list[dict[int, float]] = [{} for _ in range(num_types)]
    nodes[seeds[0]] = list(seeds[1])
    first = [0] * num_types  # of the nodes that joined last
    for layer, counts in enumerate(num_samples):
        frontiers = [of_type[begin:] for of_type, begin in zip(nodes, first, strict=True)]
        first = [len(of_type) for of_type in nodes]
        for number, (source, destination, indptr, indices) in enumerate(relations):
            for node in frontiers[destination]:
                rule = Rule(key, stream(layer, number), NEIGHBORS_READ)
                picks = sample(indptr, indices, Frontier([node]), rule).sources
                for neighbour in picks:
                    if neighbour not in nodes[source]:
                        budgets[source][neighbour] = budgets[source].get(neighbour, 0.0) + 1.0 / len(picks)
        for node_type, count in enumerate(counts):
            drawn = draw_by_budget(mix(key, BUDGET), stream(layer, node_type), budgets[node_type], count)
            nodes[node_type] += drawn
            for node in drawn:
                del budgets[node_type][node]
    return nodes


def draw_by_budget(key: int, word: int, budget: Mapping[int, float], count: int) -> list[int]:
    """Nodes by the end of their races, the earliest first: -ln(draw 0) / budget^2; ties by id."""
    races = [(-exact_log(Draws(key, node, word).unit(0)) / (weight * weight), node) for node, weight in budget.items()]
    return [node for _, node in sorted(races)[:count]]


def relabel(seeds: Sequence[Node], sources: Sequence[Node]) -> tuple[list[Node], list[int]]:
    """The batch's nodes and the local ids of the sources. Disjoint batches give (tree, node) pairs.

    Every seed has a place, repeated ones too; a repeated seed is found at its first place.
    Then come the other nodes in order of first sight.
    """
    nodes = list(seeds)
    places: dict[Node, int] = {}
    for place, node in enumerate(seeds):
        places.setdefault(node, place)
    local: list[int] = []
    for node in sources:
        if node not in places:
            places[node] = len(nodes)
            nodes.append(node)
        local.append(places[node])
    return nodes, local
