"""Distinct ids numbered in the order in which they came: what rows are held out of a larger table."""

from typing import NamedTuple

from torch import Tensor

from hoploom import _core
from hoploom.ops.buffers import tensor_of


class Found(NamedTuple):
    """Which of the ids asked for a map has."""

    slots: Tensor  # [ids] int64: the numbers of the ids at `hits`, anything elsewhere
    hits: Tensor  # [n] int64 places, in order
    misses: Tensor  # [m] int64 places, in order


class IdMap:
    """Ids to numbers. Looking up is safe in any number of threads while none adds."""

    def __init__(self, expected: int = 0) -> None:
        self._core = _core.IdMap()
        self._core.reserve(expected)

    def add(self, ids: Tensor, places: Tensor | None = None) -> None:
        """Add the ids, or those at some places, that are not there yet."""
        self._core.add(ids.numpy(), None if places is None else places.numpy())

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
