"""The operations of a hop: sample adjacency lists by keyed draws, and number the nodes in order of first sight.

The draws and the maps of ids serve others too: shuffles, partitions, and caches of rows.
"""

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

MAP_BUDGET = 256 << 20  # bytes of a direct map; larger graphs use hashing
SLOT_BUDGET = 64 << 20  # bytes of a direct map to slots; every loop has one


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


class NodeMap:
    """Numbers of the nodes of one type in a batch; reused for the next batch."""

    def __init__(self, num_nodes: int, budget: int = MAP_BUDGET) -> None:
        self._core = _core.NodeMap(num_nodes, budget)

    def add_seeds(self, nodes: Tensor, trees: Tensor | None = None) -> None:
        """Append every seed, including repeated ones; a repeated seed is found at its first position."""
        self._core.add_seeds(nodes.numpy(), None if trees is None else trees.numpy())

    def add(self, sources: Tensor, counts: Tensor, trees: Tensor | None = None) -> Tensor:
        """Return local ids [n] int32 of the sources, appending new ones; `trees` are those of the frontier."""
        buffer = self._core.add(sources.numpy(), counts.numpy(), None if trees is None else trees.numpy())
        return tensor_of(buffer, torch.int32)

    def find(self, sources: Tensor, trees: Tensor | None = None) -> Tensor:
        """Return the local ids [n] int32 of the sources, each in its own tree; -1 if they are not in the batch."""
        return tensor_of(self._core.find(sources.numpy(), None if trees is None else trees.numpy()), torch.int32)

    def nodes(self, begin: int = 0) -> Tensor:
        """Return the nodes from local id `begin` on."""
        return tensor_of(self._core.nodes(begin))

    def trees(self, begin: int = 0) -> Tensor:
        """Return the trees of the nodes from local id `begin` on."""
        return tensor_of(self._core.trees(begin))

    def take(self) -> Tensor:
        """Return all nodes and empty the map."""
        return tensor_of(self._core.take())

    def clear(self) -> None:
        """Empty the map."""
        self._core.clear()

    def __len__(self) -> int:
        return len(self._core)


def fill_edges(local: Tensor, counts: Tensor, first: int, offset: int, out: Tensor) -> None:
    """Write one hop's edges into columns [offset, offset + n) of an edge_index.

    Row 0 takes the local source ids, row 1 the frontier's local ids (`first`, `first` + 1, ...).
    """
    _core.fill_edges(local.numpy(), counts.numpy(), first, offset, out.numpy())


class Found(NamedTuple):
    """The result of a lookup: hits and misses."""

    slots: Tensor  # [ids] int64: the numbers of the ids at `hits`, arbitrary at misses
    hits: Tensor  # [n] int64 positions, ascending
    misses: Tensor  # [m] int64 positions, ascending


class _Numbered:
    """Base class of IdMap and IdRanks."""

    _core: _core.IdMap | _core.IdRanks

    def find(self, ids: Tensor, places: Tensor | None = None) -> Found:
        """Look up the ids, or those at `places`."""
        return Found(*map(tensor_of, self._core.find(ids.numpy(), None if places is None else places.numpy())))

    @property
    def ids(self) -> Tensor:
        """All ids by number: [n] int64."""
        return tensor_of(self._core.ids())

    @property
    def num_bytes(self) -> int:
        return self._core.bytes()

    def __len__(self) -> int:
        return len(self._core)


class IdMap(_Numbered):
    """A hash map from ids to numbers. Lookups are thread-safe while no thread adds."""

    _core: _core.IdMap

    def __init__(self, expected: int = 0) -> None:
        self._core = _core.IdMap()
        self._core.reserve(expected)

    def add(self, ids: Tensor, places: Tensor | None = None) -> None:
        """Add new ids among the given ones, or among those at `places`."""
        self._core.add(ids.numpy(), None if places is None else places.numpy())


class IdRanks(_Numbered):
    """A map from ascending ids to their ranks, without hashing: two bits per id between the first and the last."""

    def __init__(self, ids: Tensor) -> None:
        self._core = _core.IdRanks(ids.numpy())

    @staticmethod
    def bytes_of(ids: Tensor) -> int:
        """Return the bytes that these ids would take."""
        return _core.IdRanks.bytes_of(int(ids[0]), int(ids[-1])) if ids.numel() else 0


class SlotMap:
    """A map from ids to slots of a table, for one thread. Slots unused for two rounds are reused."""

    def __init__(self, num_ids: int, budget: int = SLOT_BUDGET) -> None:
        """Make a direct map of 4 bytes per id below `num_ids` if the budget allows it, else a hash table."""
        self._core = _core.SlotMap(num_ids if 4 * num_ids <= budget else 0)

    def begin(self) -> None:
        """Begin a round: slots of ids that are used neither in it nor in the last one become free."""
        self._core.begin()

    def find(self, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Look up the ids at `places`: return their slots [ids] int64, and the positions [n] of misses."""
        slots, misses = self._core.find(ids.numpy(), places.numpy())
        return tensor_of(slots), tensor_of(misses)

    def add(self, ids: Tensor, places: Tensor, slots: Tensor) -> Tensor:
        """Write the slots of the ids at `places`, and return the slots of new ids: [n] int64.

        Call it after all lookups of a round, so that no slot is reused whose id the round needs.
        """
        return tensor_of(self._core.add(ids.numpy(), places.numpy(), slots.numpy()))

    @property
    def ids(self) -> Tensor:
        """Id of every slot: [n] int64."""
        return tensor_of(self._core.ids())

    @property
    def num_needed(self) -> int:
        """Number of ids that this round uses."""
        return self._core.num_needed()

    def __len__(self) -> int:
        return len(self._core)
