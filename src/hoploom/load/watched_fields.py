"""The fields of PyG data that a loader was made of: one that is replaced later would not come into batches, as in PyG.

Writing into a field is seen by both. A new tensor of the same values is taken for the old one; that is compared once.
"""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from hoploom.errors import ConfigError


class WatchedFields:
    """Those of one loader's data; of a store there are none."""

    def __init__(self, data: Any) -> None:
        storages = data.stores if isinstance(data, Data | HeteroData) else []
        self._held = [[s, name, rows] for s in storages for name, rows in s.items() if _is_dense(rows)]

    def check(self) -> None:
        """Raise ConfigError if a field holds other values than it did."""
        for held in self._held:
            storage, name, rows = held
            now = storage.get(name)
            if now is rows or not _is_dense(now) or now.device != rows.device:  # deleted, or moved elsewhere
                continue
            if not _are_same(now, rows):
                raise ConfigError(
                    f"{name} of the data was replaced after the loader was made, which keeps the old one; make the "
                    f"loader afterwards, or write into it: use data.{name}[:] = ..."
                )
            held[2] = now


def _is_dense(rows: Any) -> bool:
    return isinstance(rows, Tensor) and rows.layout == torch.strided


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Value by value; not-a-number is the same as itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool((one.eq(other) | (one.ne(one) & other.ne(other))).all())
