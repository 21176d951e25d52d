"""The ids of your tables and those of the store, looked up in both directions.

No index is kept: a look-up of your ids reads the type's column once, so ask for many at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom.errors import ConfigError, DataError
from hoploom.schema import ORIGINAL_ID, NodeType, holds_text, read_ids
from hoploom.store.base import FeatureStore, Wanted
from hoploom.store.edges import rows_of

Ids = NDArray[Any]  # int64, or text


def is_text(given: Any) -> bool:
    """Return whether these are ids of tables with text ids: strings in a list or an array."""
    if isinstance(given, np.ndarray):
        return given.dtype.kind == "U" or (given.dtype.kind == "O" and all(isinstance(one, str) for one in given.flat))
    return isinstance(given, list | tuple) and len(given) > 0 and isinstance(given[0], str)


@dataclass(frozen=True, eq=False)
class OriginalIds:
    """The ids of one node type: yours (`original`) and those of the store (`stored`).

    >>> ids = store.ids("user")
    >>> ids.stored(["ann", "bob"])
    tensor([17, 4])
    >>> ids.original([17, 4])
    array(['ann', 'bob'], dtype='<U3')
    """

    features: FeatureStore
    node_type: NodeType

    @property
    def are_text(self) -> bool:
        field = self.node_type.fields.get(ORIGINAL_ID)
        return field is not None and holds_text(field)

    def original(self, ids: Any) -> Ids:
        """Return your ids of these nodes of the store: [n] int64 or text."""
        name = self.node_type.name
        nodes = read_ids(f"ids of {name!r}", torch.as_tensor(ids), self.node_type.num_nodes, ConfigError)
        if ORIGINAL_ID not in self.node_type.fields:
            return nodes.numpy()
        found = _values(self.features.gather([Wanted(name, ORIGINAL_ID, nodes)])[0])
        return np.char.decode(found, "utf-8") if self.are_text else found

    def stored(self, originals: Any, what: str = "ids") -> Tensor:
        """Return the store's ids of these ids of yours: [n] int64. Raise DataError for one that no node has.

        `what` names the ids in errors.
        """
        asked = self._read(originals, what)
        if ORIGINAL_ID not in self.node_type.fields:
            found = np.where((asked >= 0) & (asked < self.node_type.num_nodes), asked, -1)
        elif len(asked) == 0:
            found = np.empty(0, np.int64)
        else:
            found = self._sought(asked)
        if len(found) and found.min() < 0:
            unknown = asked[found < 0]
            first = unknown[0].decode() if self.are_text else int(unknown[0])
            more = f" ({len(unknown):,} of {len(asked):,} are unknown)" if len(unknown) > 1 else ""
            raise DataError(f"{self.node_type.name!r} has no node with the id {first!r}{more}; {self._hint()}")
        return torch.from_numpy(found)

    def _sought(self, asked: Ids) -> NDArray[np.int64]:
        """Return the position in the column of each id, or -1."""
        wanted, inverse = np.unique(asked, return_inverse=True)
        found, first = np.full(len(wanted), -1, np.int64), 0
        for ids in self._column():
            at = np.searchsorted(wanted, ids).clip(max=len(wanted) - 1)
            hit = wanted[at] == ids
            found[at[hit]] = first + np.flatnonzero(hit)
            first += len(ids)
        return found[inverse]

    def _column(self) -> Iterator[Ids]:
        return map(_values, rows_of(self.features, self.node_type.name, ORIGINAL_ID, self.node_type.num_nodes))

    def _read(self, originals: Any, what: str) -> Ids:
        """Return your ids as they are in the column: int64, or UTF-8 without its padding."""
        try:
            given = np.asarray(originals)
            if given.ndim != 1:
                raise ConfigError(f"{what} of {self.node_type.name!r} have shape {given.shape}; give a list of ids")
            if given.size == 0:
                return given.astype(np.int64)
            if not self.are_text and (given.dtype.kind in "iuU" or all(map(_may_be_integer, given))):
                return np.array(given.tolist(), np.int64) if given.dtype == np.uint64 else given.astype(np.int64)
            if self.are_text and (given.dtype.kind == "U" or all(isinstance(one, str) for one in given)):
                return np.char.encode(given.astype(str), "utf-8")
        except (ValueError, TypeError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
        shown = repr(list(originals)[:3])
        raise ConfigError(f"{what} of {self.node_type.name!r} are {shown:.80}...; {self._hint()}")

    def _hint(self) -> str:
        if not self.node_type.num_nodes:
            return "the type has no nodes"
        return f"give ids such as {self.original([0]).tolist()[0]!r}, which is node 0 of the store"


def _may_be_integer(one: Any) -> bool:
    return isinstance(one, int | np.integer | str) and not isinstance(one, bool)


def _values(rows: Tensor) -> Ids:
    if rows.dim() == 1:
        return rows.to(torch.int64).numpy()
    return rows.contiguous().numpy().view(f"S{rows.shape[1]}").reshape(-1)
