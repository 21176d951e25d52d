"""The target of a build on Spark: a folder on a shared file system, or a prefix of an object store.

A folder is renamed when it is complete. Nothing is renamed in an object store: files have their final names at once,
and store.json, which makes them a store, is written last.
"""

import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


class StoreTarget:
    """A store that executors write: where its files and pieces go, and the manifest entries of the finished files."""

    def __init__(self, place: StoragePath, staging: StoragePath, scratch: Path) -> None:
        self.place, self.staging, self._scratch = place, staging, scratch
        self.files: dict[str, FileEntry] = {}
        self.described: tuple[Schema, tuple[PartRange, ...]] | None = None  # set before the block ends

    def local_scratch(self, name: str) -> Path:
        """Return a new folder for this process's files: beside the store, or on this machine for an object store."""
        folder = self._scratch / name
        folder.mkdir()
        return folder


@contextmanager
def opened_target(out: str | Path) -> Iterator[StoreTarget]:
    """Open a store for writing. The store appears at the end of the block, or not at all if the block fails."""
    place = StoragePath(str(out))
    if place.path is None:
        with (
            tempfile.TemporaryDirectory(prefix="hoploom-", ignore_cleanup_errors=True) as scratch,
            _opened_prefix(place, Path(scratch)) as target,
        ):
            yield target
        return
    with StoreWriter(place.path) as writer:
        target = StoreTarget(StoragePath(str(writer.scratch.parent)), StoragePath(str(writer.scratch)), writer.scratch)
        yield target
        assert target.described is not None
        for left in writer.scratch.parent.glob("part-*/**/.*"):  # a killed task was writing it
            left.unlink(missing_ok=True)
        for name, entry in target.files.items():
            writer.add(name, entry)
        writer.describe(*target.described)


@contextmanager
def _opened_prefix(place: StoragePath, scratch: Path) -> Iterator[StoreTarget]:
    """Open a prefix of an object store for writing; a marker keeps other writers away. Foreign files stay there."""
    own = secrets.token_hex(8)
    _refuse_existing(place)
    if left := sorted({name.split("/", 1)[0] for name, _ in place.names() if LEFT.match(name)}):
        what = f"{place} holds {', '.join(left[:5])} of a build that is running or was stopped"
        raise StoreError(f"{what}; wait for it, give another path, or remove them")
    with place.create(MARKER) as file:
        file.write(own.encode())
    time.sleep(SETTLE)
    _require_own(place, own)  # if two begin together, the last marker wins
    target = StoreTarget(place, place / f"{STAGING}{own}", scratch)
    try:
        yield target
        _refuse_existing(place)
        _require_own(place, own)
        there = dict(place.names())
        for name, entry in target.files.items():
            if there.get(name) != entry.bytes:
                raise StoreError(f"{place}/{name} is missing or cut short; does something remove files?")
        assert target.described is not None
        with place.create(STORE_FILE) as file:
            file.write(layout.manifest_to_json(Manifest(*target.described, target.files)).encode())
    finally:
        with suppress(HoploomError):  # the first error has the better message
            _require_own(place, own)
            place.remove(f"{STAGING}{own}")
            if place.size(STORE_FILE) is None:
                for folder in sorted({name.split("/", 1)[0] for name, _ in place.names() if PART.match(name)}):
                    place.remove(folder)
            place.remove(MARKER)


def _refuse_existing(place: StoragePath) -> None:
    if place.size(STORE_FILE) is not None:
        raise StoreError(f"{place} exists; give another path, or remove it first")


def _require_own(place: StoragePath, own: str) -> None:
    """Raise StoreError unless the marker object has this writer's token `own`."""
    if place.size(MARKER) is not None:
        with place.open(MARKER) as file:
            if file.read().decode() == own:
                return
    raise StoreError(f"another process writes {place}, too; one of the two has to stop")
