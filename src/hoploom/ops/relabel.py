"""Maps from ids to small numbers in order of first sight: for the nodes of a batch, and for cached rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from hoploom import _core
from hoploom.ops.rows import tensor_of

MAP_BUDGET = 256 << 20  # bytes of a direct map; larger graphs use hashing
SLOT_BUDGET = 64 << 20  # bytes of a direct map to slots; every loop has one


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
