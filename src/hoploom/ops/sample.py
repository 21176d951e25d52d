"""Operations of a hop: sample neighbours with keyed random numbers, and give nodes local ids by first occurrence.

Shuffles, partitions and caches of rows use the random numbers and the id maps, too.
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

MAP_BUDGET = 256 << 20  # most bytes of a NodeMap that is an array; for more nodes it is a hash table
SLOT_BUDGET = 64 << 20  # most bytes of a SlotMap that is an array; every loop has one


class Frontier(NamedTuple):
    """The nodes of one type that a hop expands."""

    nodes: Tensor  # [n] int64
    trees: Tensor | None = None  # [n] int64, disjoint sampling only: the number of the seed that led to each node
    times: Tensor | None = None  # [n] int64, temporal sampling only: edges after a node's time are not sampled


class Picks(NamedTuple):
    """The sampled in-edges of one relation, frontier node by frontier node."""

    counts: Tensor  # [frontier] int64: picks of each node
    sources: Tensor  # [picks] int64 node ids
    edges: Tensor  # [picks] int64 positions in the store's CSC order


class Rule(NamedTuple):
    """Sampling options of one relation in one hop."""

    key: Any  # int; on a GPU a tensor, [] int64, which may change between replays of a CUDA graph
    stream: int
    fanout: int
    replace: bool = False
    last: bool = False  # in temporal sampling: take the latest edges
    labor: bool = False
    weighted: bool = False
    window: int = -1  # in temporal sampling: skip edges older than this before a node's time; -1: skip none
    excluded: Tensor | None = None  # [n] int64, ascending: positions in the store's CSC order that are not picked


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
        """The tensors of this object that are not None."""
        optional = (self.weight, self.edge_time, self.source_time)
        return [self.indptr, self.indices, *(column for column in optional if column is not None)]

    @property
    def num_edges(self) -> int:
        return self.indices.numel()


def sample(lists: EdgeLists, frontier: Frontier, rule: Rule, *, positions_only: bool = False) -> Picks:
    """Sample in-edges of every frontier node. With `positions_only`, source ids are not read: `sources` are zeros."""
    nodes, trees, times = frontier
    counts, sources, edges = _core.sample(
        lists.core,
        nodes.numpy(),
        None if trees is None else trees.numpy(),
        None if times is None else times.numpy(),
        *rule[:-1],
        None if rule.excluded is None else rule.excluded.numpy(),
        positions_only,
    )
    return Picks(tensor_of(counts), tensor_of(sources), tensor_of(edges))


def widen_picks(counts: Tensor, sources: Tensor, edges: Tensor, first_edge: int) -> Picks:
    """Return picks with int64 columns, from int32 or int64 ones, and with `first_edge` added to `edges`."""
    widened = _core.widen_picks(counts.numpy(), sources.numpy(), edges.numpy(), first_edge)
    return Picks(*map(tensor_of, widened))


def stitch(parts: Sequence[tuple[Tensor, Picks]], frontier_size: int) -> Picks:
    """Return the picks of all parts in the frontier's order. `parts`: pairs (positions in the frontier, picks)."""
    columns = [(places.numpy(), *(column.numpy() for column in picks)) for places, picks in parts]
    return Picks(*map(tensor_of, _core.stitch(columns, frontier_size)))  # type: ignore[arg-type]


class NodeBudget:
    """The budget of HGT sampling for one node type: the weight of each node that may be drawn next into the batch."""

    def __init__(self) -> None:
        self._core = _core.NodeBudget()

    def add(self, picks: Picks, local: Tensor) -> None:
        """Add 1 / n to the weight of each new source (`local` is -1); n is the frontier node's number of picks."""
        self._core.add(picks.sources.numpy(), local.numpy(), picks.counts.numpy())

    def draw(self, key: int, stream: int, count: int) -> Tensor:
        """Remove and return up to `count` nodes, drawn without replacement in proportion to their squared weights."""
        return tensor_of(self._core.draw(key, stream, count))


def permute(key: int, size: int, begin: int, end: int) -> Tensor:
    """Return entries [begin, end) of a random permutation of [0, size), which `key` determines, in O(1) memory."""
    return tensor_of(_core.permute(key, size, begin, end))


def draw_bounded(key: int, ids: Tensor, stream: int, draw: int, bound: int) -> Tensor:
    """Return a random integer in [0, bound) per id: [n] int64. Key, id, stream and draw determine the integer."""
    return tensor_of(_core.draw_bounded(key, ids.numpy(), stream, draw, bound))


def draw_words(key: int, ids: Tensor, stream: int, block: int = 0) -> Tensor:
    """Return four random 32-bit words per id: [n, 4] uint32. Key, id, stream and block determine the words."""
    return tensor_of(_core.draw_words(key, ids.numpy(), stream, block), torch.uint32).view(-1, 4)


def mix_words(state: Words, value: Words) -> Words:
    """Return hoploom.keys.mix(state[i], value[i]) for all i: a value mixed into each 64-bit key."""
    z: Words = (state ^ value) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class NodeMap:
    """A map from the node ids of one type to their local ids in a batch. Its memory is reused for the next batch."""

    def __init__(self, num_nodes: int, budget: int = MAP_BUDGET) -> None:
        self._core = _core.NodeMap(num_nodes, budget)

    def add_seeds(self, nodes: Tensor, trees: Tensor | None = None) -> None:
        """Append every seed, repeated ones included; look-ups find the first occurrence of a repeated seed."""
        self._core.add_seeds(nodes.numpy(), None if trees is None else trees.numpy())

    def add(self, sources: Tensor, counts: Tensor, trees: Tensor | None = None) -> Tensor:
        """Append new sources; return each source's local id, [n] int32. `counts` and `trees` are per frontier node."""
        buffer = self._core.add(sources.numpy(), counts.numpy(), None if trees is None else trees.numpy())
        return tensor_of(buffer, torch.int32)

    def find(self, sources: Tensor, trees: Tensor | None = None) -> Tensor:
        """Return the sources' local ids, [n] int32; -1 if missing. `trees`: seed numbers, in disjoint sampling."""
        return tensor_of(self._core.find(sources.numpy(), None if trees is None else trees.numpy()), torch.int32)

    def nodes(self, begin: int = 0) -> Tensor:
        """Return the node ids that have the local ids `begin`, `begin` + 1, ...: [n] int64."""
        return tensor_of(self._core.nodes(begin))

    def trees(self, begin: int = 0) -> Tensor:
        """Return the seed numbers, in disjoint sampling, of the nodes with local ids from `begin` on: [n] int64."""
        return tensor_of(self._core.trees(begin))

    def take(self) -> Tensor:
        """Return all node ids, in the order of local ids, and empty the map."""
        return tensor_of(self._core.take())

    def clear(self) -> None:
        """Empty the map."""
        self._core.clear()

    def __len__(self) -> int:
        return len(self._core)


def fill_edges(local: Tensor, counts: Tensor, first: int, offset: int, out: Tensor) -> None:
    """Write a hop's edges to `out` from column `offset` on: sources' local ids, and frontier nodes from `first` on."""
    _core.fill_edges(local.numpy(), counts.numpy(), first, offset, out.numpy())


class Found(NamedTuple):
    """The result of looking up ids in a map."""

    slots: Tensor  # [ids] int64: the number that the map gives to each id; arbitrary for ids at `misses`
    hits: Tensor  # [n] int64: positions of the ids that are in the map, ascending
    misses: Tensor  # [m] int64: positions of the ids that are not, ascending


class _Numbered:
    """Base class of IdMap and IdRanks, which number distinct ids from 0."""

    _core: _core.IdMap | _core.IdRanks

    def find(self, ids: Tensor, places: Tensor | None = None) -> Found:
        """Look up all ids, or only ids[places]; return a Found."""
        return Found(*map(tensor_of, self._core.find(ids.numpy(), None if places is None else places.numpy())))

    @property
    def ids(self) -> Tensor:
        """The ids in the map, in the order of their numbers: [n] int64."""
        return tensor_of(self._core.ids())

    @property
    def num_bytes(self) -> int:
        return self._core.bytes()

    def __len__(self) -> int:
        return len(self._core)


class IdMap(_Numbered):
    """A hash map that numbers ids in order of insertion. Lookups are thread-safe while no thread adds."""

    _core: _core.IdMap

    def __init__(self, expected: int = 0) -> None:
        self._core = _core.IdMap()
        self._core.reserve(expected)

    def add(self, ids: Tensor, places: Tensor | None = None) -> None:
        """Add the ids, or only ids[places], that are not in the map yet."""
        self._core.add(ids.numpy(), None if places is None else places.numpy())


class IdRanks(_Numbered):
    """A map from sorted ids to their index, without hashing. Takes two bits per integer between first and last id."""

    def __init__(self, ids: Tensor) -> None:
        self._core = _core.IdRanks(ids.numpy())

    @staticmethod
    def bytes_of(ids: Tensor) -> int:
        """Return the bytes that an IdRanks of these ids would take."""
        return _core.IdRanks.bytes_of(int(ids[0]), int(ids[-1])) if ids.numel() else 0


class SlotMap:
    """Assigns ids to rows (slots) of a table, for one thread. A slot is reused once two rounds have not used its id."""

    def __init__(self, num_ids: int, budget: int = SLOT_BUDGET) -> None:
        """Allocate an array of 4 bytes for each id below `num_ids` if it fits the budget, else a hash table."""
        self._core = _core.SlotMap(num_ids if 4 * num_ids <= budget else 0)

    def begin(self) -> None:
        """Begin a round, such as a batch. Slots of ids looked up in neither this nor the last round become free."""
        self._core.begin()

    def find(self, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Look up ids[places]. Return slots, valid at `places`, and the positions that have none: both int64."""
        slots, misses = self._core.find(ids.numpy(), places.numpy())
        return tensor_of(slots), tensor_of(misses)

    def add(self, ids: Tensor, places: Tensor, slots: Tensor) -> Tensor:
        """Give slots to ids[places] without one, after a round's lookups; write slots[places], return new slots."""
        return tensor_of(self._core.add(ids.numpy(), places.numpy(), slots.numpy()))

    @property
    def ids(self) -> Tensor:
        """The id of every slot, free slots included: [n] int64."""
        return tensor_of(self._core.ids())

    def __len__(self) -> int:
        return len(self._core)
