"""The target of a build on Spark: a folder on a shared file system, or a prefix of an object store.

A folder is renamed when it is complete. Nothing is renamed in an object store: files have their names at once, and
store.json, without which they are no store, is written last.
"""

import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from hoploom.errors import HoploomError, StoreError
from hoploom.schema import Schema
from hoploom.store import format as layout
from hoploom.store.format import STORE_FILE, FileEntry, Manifest, PartRange
from hoploom.store.storage_path import StoragePath
from hoploom.store.write import StoreWriter

MARKER, STAGING = "hoploom-writes", "staging-"  # names in a prefix that is being written
PART = re.compile(r"part-\d{5}/")
LEFT = re.compile(rf"part-\d{{5}}/|{MARKER}$")
SETTLE = 1.0  # seconds in which the marker of a second writer would appear


class StoreTarget(Protocol):
    """A store that executors write."""

    staging: StoragePath  # for pieces; removed when the store is complete, or the build has failed
    place: StoragePath  # of the store's files

    def local_scratch(self, name: str) -> Path:
        """Make a folder for this process, which executors also reach if they reach the store by a path."""

    def add(self, name: str, entry: FileEntry) -> None:
        """Add a file that is written."""

    def describe(self, schema: Schema, parts: Sequence[PartRange]) -> None:
        """Set the schema and the parts."""


@contextmanager
def opened_target(out: str | Path) -> Iterator[StoreTarget]:
    """Open a store for writing; it is complete when the block ends, or does not appear."""
    place = StoragePath(str(out))
    if place.path is not None:
        with StoreWriter(place.path) as writer:
            yield FolderTarget(writer)
        return
    with PrefixTarget(place) as target:
        yield target


class FolderTarget:
    """A folder that all executors reach under the same path."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self.staging, self.place = StoragePath(str(writer.scratch)), StoragePath(str(writer.scratch.parent))
        self.add, self.describe = writer.add, writer.describe

    def local_scratch(self, name: str) -> Path:
        folder = self._writer.scratch / name
        folder.mkdir()
        return folder


class PrefixTarget:
    """A prefix of an object store. A marker object keeps other writers away until the store is complete.

    Only folders of parts, the writer's pieces and the marker are ever removed.
    """

    def __init__(self, place: StoragePath) -> None:
        self.place, self._own = place, secrets.token_hex(8)
        self.staging = place / f"{STAGING}{self._own}"
        self._files: dict[str, FileEntry] = {}
        self._described: tuple[Schema, tuple[PartRange, ...]] | None = None

    def __enter__(self) -> "PrefixTarget":
        self._refuse_existing()
        if left := sorted({name.split("/", 1)[0] for name, _ in self.place.names() if LEFT.match(name)}):
            what = f"{self.place} holds {', '.join(left[:5])} of a build that is running or was stopped"
            raise StoreError(f"{what}; wait for it, give another path, or remove them")
        with self.place.create(MARKER) as file:
            file.write(self._own.encode())
        time.sleep(SETTLE)
        self._require_own()  # if two begin together, the last marker wins
        self._scratch = Path(tempfile.mkdtemp(prefix="hoploom-"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: Any) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
            with suppress(HoploomError):  # the first error has the better message
                if self._owner() == self._own:
                    self._clear()

    def local_scratch(self, name: str) -> Path:
        folder = self._scratch / name
        folder.mkdir()
        return folder

    def add(self, name: str, entry: FileEntry) -> None:
        self._files[name] = entry

    def describe(self, schema: Schema, parts: Sequence[PartRange]) -> None:
        self._described = schema, tuple(parts)

    def _complete(self) -> None:
        assert self._described is not None
        self._refuse_existing()
        self._require_own()
        there = dict(self.place.names())
        for name, entry in self._files.items():
            if there.get(name) != entry.bytes:
                raise StoreError(f"{self.place}/{name} is missing or cut short; does something remove files?")
        with self.place.create(STORE_FILE) as file:
            file.write(layout.manifest_to_json(Manifest(*self._described, self._files)).encode())

    def _clear(self) -> None:
        """Remove the pieces, the parts unless the store is complete, and the marker."""
        self.place.remove(self.staging.url.rsplit("/", 1)[1])
        is_store = self.place.size(STORE_FILE) is not None
        parts = () if is_store else {name.split("/", 1)[0] for name, _ in self.place.names() if PART.match(name)}
        for folder in sorted(parts):
            self.place.remove(folder)
        self.place.remove(MARKER)

    def _refuse_existing(self) -> None:
        if self.place.size(STORE_FILE) is not None:
            raise StoreError(f"{self.place} exists; give another path, or remove it first")

    def _require_own(self) -> None:
        if self._owner() != self._own:
            raise StoreError(f"another process writes {self.place}, too; one of the two has to stop")

    def _owner(self) -> str | None:
        """Return the writer whose marker is there."""
        if self.place.size(MARKER) is None:
            return None
        with self.place.open(MARKER) as file:
            return file.read().decode()
