"""Where executors write a store: a folder beside its path on a shared file system, renamed when it is complete."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from hoploom.schema import Schema
from hoploom.store.format import FileEntry, PartRange
from hoploom.store.place import Place
from hoploom.store.write import StoreWriter


class StoreTarget(Protocol):
    """A store that executors write."""

    staging: Place  # for pieces; it goes when the store is complete, or was given up
    place: Place  # where the store's files are written

    def local_scratch(self, name: str) -> Path:
        """A folder for this process; executors reach it, where they reach the store by a path."""

    def add(self, name: str, entry: FileEntry) -> None:
        """A file that is written."""

    def describe(self, schema: Schema, parts: Sequence[PartRange]) -> None:
        """What the files are."""


class FolderTarget:
    """On a file system that all executors reach under the same path."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self.staging, self.place = Place(str(writer.scratch)), Place(str(writer.scratch.parent))
        self.add, self.describe = writer.add, writer.describe

    def local_scratch(self, name: str) -> Path:
        folder = self._writer.scratch / name
        folder.mkdir()
        return folder


@contextmanager
def opened_target(path: str) -> Iterator[StoreTarget]:
    """A store to be written; it is there complete when the block ends, or not at all."""
    with StoreWriter(Path(path)) as writer:
        yield FolderTarget(writer)
