"""What buckets remember between rounds: arrays in files under a place's staging prefix, made whole or not at all."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hoploom.errors import StoreError
from hoploom.store.storage_path import StoragePath

Array = NDArray[Any]


@dataclass(frozen=True)
class State:
    """A folder; every task writes files of its own, and writes the same again where it runs again."""

    place: StoragePath
    folder: str

    def __truediv__(self, name: str) -> "State":
        return State(self.place, f"{self.folder}/{name}")

    def save(self, name: str, bucket: int, **arrays: Array) -> None:
        with self.place.create(self._path(name, bucket)) as file:
            for array in arrays.values():
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)

    def load(self, name: str, bucket: int, *names: str) -> Mapping[str, Array]:
        """The first arrays of a file under these names, in the order in which they were saved."""
        with self.place.open(self._path(name, bucket)) as file:
            return {each: np.lib.format.read_array(file, allow_pickle=False) for each in names}

    def drop(self, name: str) -> None:
        """Remove files that nobody needs. Where a task that runs twice still writes, they go with the whole folder."""
        with suppress(StoreError):
            self.place.remove(f"{self.folder}/{name}")

    def _path(self, name: str, bucket: int) -> str:
        return f"{self.folder}/{name}/{bucket:06d}.npy"
