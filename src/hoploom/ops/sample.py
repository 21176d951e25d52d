"""Sample one hop of one relation's adjacency lists; keyed permutations, bounded integers and random words."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom import _core
from hoploom.ops.rows import tensor_of

Words = NDArray[np.uint64]


class Frontier(NamedTuple):
    """The nodes of one type that a hop expands."""

    nodes: Tensor  # [n] int64
    trees: Tensor | None = None  # [n] int64: disjoint sampling only
    times: Tensor | None = None  # [n] int64: temporal sampling only


class Picks(NamedTuple):
    """The edges picked for one relation, in the order of its frontier."""

    counts: Tensor  # [frontier] int64
    sources: Tensor  # [picks] int64 node ids
    edges: Tensor  # [picks] int64 positions in the store's CSC order


class Rule(NamedTuple):
    """The options of one hop of one relation."""

    key: Any  # int; on a device, [] int64, which may change between replays
    stream: int
    fanout: int
    replace: bool = False
    last: bool = False
    labor: bool = False
    weighted: bool = False


@dataclass(frozen=True)
class EdgeLists:
    """One relation's in-edges for a contiguous range of destinations."""

    indptr: Tensor  # [num_nodes + 1] int64, positions within this part
    indices: Tensor  # [num_edges] int32 or int64 source ids
    first_node: int = 0
    first_edge: int = 0
    weight: Tensor | None = None  # [num_edges] float32
    edge_time: Tensor | None = None  # [num_edges] int64
    source_time: Tensor | None = None  # [num_sources] int64
    core: _core.Lists = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        optional = (self.weight, self.edge_time, self.source_time)
        core = _core.Lists(
            self.indptr.numpy(),
            self.indices.numpy(),
            self.first_node,
            self.first_edge,
            *(None if column is None else column.numpy() for column in optional),
        )
        object.__setattr__(self, "core", core)

    @property
    def columns(self) -> list[Tensor]:
        """All columns that are present."""
        optional = (self.weight, self.edge_time, self.source_time)
        return [self.indptr, self.indices, *(column for column in optional if column is not None)]

    @property
    def num_edges(self) -> int:
        return self.indices.numel()


def sample(lists: EdgeLists, frontier: Frontier, rule: Rule, *, positions_only: bool = False) -> Picks:
    """Sample edges for every node of a frontier. With `positions_only`, sources are not read and are zeros.

    >>> sample(lists, Frontier(torch.tensor([0, 7])), Rule(key=1, stream=0, fanout=5))
    """
    nodes, trees, times = frontier
    counts, sources, edges = _core.sample(
        lists.core,
        nodes.numpy(),
        None if trees is None else trees.numpy(),
        None if times is None else times.numpy(),
        *rule,
        positions_only,
    )
    return Picks(tensor_of(counts), tensor_of(sources), tensor_of(edges))


def widen_picks(counts: Tensor, sources: Tensor, edges: Tensor, first_edge: int) -> Picks:
    """Return picks as int64, with `first_edge` added to the edges. Columns are int32 or int64."""
    widened = _core.widen_picks(counts.numpy(), sources.numpy(), edges.numpy(), first_edge)
    return Picks(*map(tensor_of, widened))


def stitch(parts: Sequence[tuple[Tensor, Picks]], frontier_size: int) -> Picks:
    """Return the picks of several parts in the frontier's order; each part has its positions in the frontier."""
    columns = [(places.numpy(), *(column.numpy() for column in picks)) for places, picks in parts]
    return Picks(*map(tensor_of, _core.stitch(columns, frontier_size)))  # type: ignore[arg-type]


class NodeBudget:
    """HGT's weights of the nodes of one type that are not in the batch yet."""

    def __init__(self) -> None:
        self._core = _core.NodeBudget()

    def add(self, picks: Picks, local: Tensor) -> None:
        """Add 1 / the node's number of picks to each picked source, except sources with a local id."""
        self._core.add(picks.sources.numpy(), local.numpy(), picks.counts.numpy())

    def draw(self, key: int, stream: int, count: int) -> Tensor:
        """Draw up to `count` nodes by their squared weights, without replacement, and remove them."""
        return tensor_of(self._core.draw(key, stream, count))


def permute(key: int, size: int, begin: int, end: int) -> Tensor:
    """Return entries [begin, end) of a keyed permutation of [0, size), in O(1) memory."""
    return tensor_of(_core.permute(key, size, begin, end))


def draw_bounded(key: int, ids: Tensor, stream: int, draw: int, bound: int) -> Tensor:
    """Return one integer in [0, bound) per id, the draw-th of its stream: [n] int64."""
    return tensor_of(_core.draw_bounded(key, ids.numpy(), stream, draw, bound))


def draw_words(key: int, ids: Tensor, stream: int, block: int = 0) -> Tensor:
    """Return four random 32-bit words per id: [n, 4] uint32."""
    return tensor_of(_core.draw_words(key, ids.numpy(), stream, block), torch.uint32).view(-1, 4)


def mix_words(state: Words, value: Words) -> Words:
    """Return the keys with one 64-bit value each mixed in: hoploom.keys.mix for arrays."""
    z: Words = (state ^ value) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
