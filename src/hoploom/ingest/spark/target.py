"""The target of a build on Spark: a folder on a shared file system, or a prefix of an object store.

A folder is renamed when it is complete. Nothing is renamed in an object store: files have their names at once, and
store.json, without which they are no store, is written last.
"""

import re
import secrets
import shutil
import tempfile
import threading
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

LEASE, STAGING = "hoploom-writes", "staging-"  # names in a prefix that is being written
PART = re.compile(r"part-\d{5}/")
BEAT = 5.0  # seconds between two renewals of the lease
GIVEN_UP = 4 * BEAT  # without a renewal, the writer is gone


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
    """A prefix of an object store, guarded by a lease: a marker object that the writer renews.

    The next writer removes what a killed writer has left, but only what its lease covers: folders of parts, and pieces.
    """

    def __init__(self, place: StoragePath) -> None:
        self.place, self._own = place, secrets.token_hex(8)
        self.staging = place / f"{STAGING}{self._own}"
        self._files: dict[str, FileEntry] = {}
        self._described: tuple[Schema, tuple[PartRange, ...]] | None = None
        self._done, self._is_lost = threading.Event(), False
        self._beating = threading.Thread(target=self._beat, name="hoploom-lease", daemon=True)

    def __enter__(self) -> "PrefixTarget":
        self._refuse_existing()
        self._take_over()
        self._renew(0)
        time.sleep(BEAT / 5)
        self._require_own()  # if two begin together, the last marker wins
        self._scratch = Path(tempfile.mkdtemp(prefix="hoploom-"))
        self._beating.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: Any) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            self._done.set()
            self._beating.join()
            shutil.rmtree(self._scratch, ignore_errors=True)
            with suppress(HoploomError):  # the first error has the better message
                if self._owner() == self._own:
                    self._clear(self._own, with_parts=self.place.size(STORE_FILE) is None)

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

    def _refuse_existing(self) -> None:
        if self.place.size(STORE_FILE) is not None:
            raise StoreError(f"{self.place} exists; give another path, or remove it first")

    def _clear(self, owner: str, *, with_parts: bool) -> None:
        """Remove what a writer has left: its pieces, parts that are no store yet, and its lease."""
        self.place.remove(f"{STAGING}{owner}")
        folders = {name.split("/", 1)[0] for name, _ in self.place.names() if PART.match(name)} if with_parts else ()
        for folder in sorted(folders):
            self.place.remove(folder)
        self.place.remove(LEASE)

    # --- the lease ----------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Wait until the lease of another writer ends, and remove what it has left."""
        first = self._read_lease()
        if first is None:
            if any(PART.match(name) for name, _ in self.place.names()):
                raise StoreError(f"{self.place} holds parts of no store; give another path, or remove them")
            return
        end = time.monotonic() + GIVEN_UP
        while time.monotonic() < end:
            time.sleep(BEAT / 5)
            if self._read_lease() != first:
                raise StoreError(f"another process is writing {self.place}; wait for it, or give another path")
        self._clear(first.decode().split()[0], with_parts=True)

    def _require_own(self) -> None:
        if self._is_lost or self._owner() != self._own:
            raise StoreError(f"another process writes {self.place}, too; one of the two has to stop")

    def _beat(self) -> None:
        count = 0
        while not self._done.wait(BEAT):
            count += 1
            with suppress(HoploomError):  # the next one may get through
                self._is_lost = self._is_lost or self._owner() != self._own
                if not self._is_lost:
                    self._renew(count)

    def _renew(self, count: int) -> None:
        with self.place.create(LEASE) as file:
            file.write(f"{self._own} {count}".encode())

    def _read_lease(self) -> bytes | None:
        if self.place.size(LEASE) is None:
            return None
        with self.place.open(LEASE) as file:
            return file.read()

    def _owner(self) -> str | None:
        """Return the writer that has the lease."""
        lease = self._read_lease()
        return None if lease is None else lease.decode().split()[0]
