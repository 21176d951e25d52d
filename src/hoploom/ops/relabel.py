"""Ids to small numbers in order of first sight: the nodes of a batch, and rows held out of a larger table."""

from typing import NamedTuple

import torch
from torch import Tensor

from hoploom import _core
from hoploom.ops.rows import tensor_of

MAP_BUDGET = 256 << 20  # bytes of one direct map; beyond it ids are hashed
SLOT_BUDGET = 64 << 20  # the same of a map to slots, of which every loop has one


class NodeMap:
    """The nodes of one type in one batch; reused from batch to batch."""

    def __init__(self, num_nodes: int, budget: int = MAP_BUDGET) -> None:
        self._core = _core.NodeMap(num_nodes, budget)

    def add_seeds(self, nodes: Tensor, trees: Tensor | None = None) -> None:
        """Append every seed, repeated ones too; a repeated seed is found at its first place."""
        self._core.add_seeds(nodes.numpy(), None if trees is None else trees.numpy())

    def add(self, sources: Tensor, counts: Tensor, trees: Tensor | None = None) -> Tensor:
        """Local ids [n] int32 of the sources, new ones appended; trees are those of the frontier."""
        buffer = self._core.add(sources.numpy(), counts.numpy(), None if trees is None else trees.numpy())
        return tensor_of(buffer, torch.int32)

    def find(self, sources: Tensor, trees: Tensor | None = None) -> Tensor:
        """Return the local ids [n] int32 of the sources, each in its own tree; -1 where they are not in the batch."""
        return tensor_of(self._core.find(sources.numpy(), None if trees is None else trees.numpy()), torch.int32)

    def nodes(self, begin: int = 0) -> Tensor:
        """The nodes from local id `begin` on."""
        return tensor_of(self._core.nodes(begin))

    def trees(self, begin: int = 0) -> Tensor:
        """The trees of the nodes from local id `begin` on."""
        return tensor_of(self._core.trees(begin))

    def take(self) -> Tensor:
        """All nodes; leaves an empty map."""
        return tensor_of(self._core.take())

    def clear(self) -> None:
        """Forget the batch."""
        self._core.clear()

    def __len__(self) -> int:
        return len(self._core)


def fill_edges(local: Tensor, counts: Tensor, first: int, offset: int, out: Tensor) -> None:
    """Write one hop's edges into columns [offset, offset + n) of an edge_index.

    Row 0 takes the local source ids, row 1 the frontier's local ids (`first`, `first` + 1, ...).
    """
    _core.fill_edges(local.numpy(), counts.numpy(), first, offset, out.numpy())


class Found(NamedTuple):
    """Which of the ids asked for a map has."""

    slots: Tensor  # [ids] int64: the numbers of the ids at `hits`, anything elsewhere
    hits: Tensor  # [n] int64 places, in order
    misses: Tensor  # [m] int64 places, in order


class _Numbered:
    """Ids that have numbers: what both ways to keep them have in common."""

    _core: _core.IdMap | _core.IdRanks

    def find(self, ids: Tensor, places: Tensor | None = None) -> Found:
        """Look up the ids, or those at some places."""
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
    """Ids to numbers. Looking up is safe in any number of threads while none adds."""

    _core: _core.IdMap

    def __init__(self, expected: int = 0) -> None:
        self._core = _core.IdMap()
        self._core.reserve(expected)

    def add(self, ids: Tensor, places: Tensor | None = None) -> None:
        """Add the ids, or those at some places, that are not there yet."""
        self._core.add(ids.numpy(), None if places is None else places.numpy())


class IdRanks(_Numbered):
    """Ascending ids to numbers: no hash, but two bits for each id between the first and the last."""

    def __init__(self, ids: Tensor) -> None:
        self._core = _core.IdRanks(ids.numpy())

    @staticmethod
    def bytes_of(ids: Tensor) -> int:
        """What these ids would take."""
        return _core.IdRanks.bytes_of(int(ids[0]), int(ids[-1])) if ids.numel() else 0


class SlotMap:
    """Ids to slots of a table. An id that two rounds have not needed gives its slot to another one; for one thread."""

    def __init__(self, num_ids: int, budget: int = SLOT_BUDGET) -> None:
        """For ids below `num_ids`, each with 4 bytes if the budget allows that; else ids are hashed."""
        self._core = _core.SlotMap(num_ids if 4 * num_ids <= budget else 0)

    def begin(self) -> None:
        """Begin a round: slots of ids that neither this one nor the one before it needs are free."""
        self._core.begin()

    def find(self, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Look up the ids at some places: their slots [ids] int64 at these places, and the places [n] of the others."""
        slots, misses = self._core.find(ids.numpy(), places.numpy())
        return tensor_of(slots), tensor_of(misses)

    def add(self, ids: Tensor, places: Tensor, slots: Tensor) -> Tensor:
        """Write the slots of the ids at some places, and return those that were given to new ids: [n] int64.

        Add after all look-ups of a round: none is given away then whose id the round needs.
        """
        return tensor_of(self._core.add(ids.numpy(), places.numpy(), slots.numpy()))

    @property
    def ids(self) -> Tensor:
        """The id of every slot: [n] int64."""
        return tensor_of(self._core.ids())

    @property
    def num_needed(self) -> int:
        """How many ids this round needs."""
        return self._core.num_needed()

    def __len__(self) -> int:
        return len(self._core)
