"""Fetch parts of a store from a StoragePath to a disk of this host.

Pieces are read several at a time and appended in order: a fetch that was stopped leaves the beginning of a file, and
the next one continues it. store.json comes last. Costs NUM_READERS pieces of memory.
"""

import fcntl
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from hoploom.errors import ConfigError, StoreError
from hoploom.store.format import (
    DISK_FULL,
    MOST_BYTES,
    STORE_FILE,
    FileEntry,
    Manifest,
    inside,
    parse_manifest,
    part_folder,
    regular,
    sync_folder,
    write_whole,
)
from hoploom.store.storage_path import StoragePath
from hoploom.store.write import combine

PIECE = 16 << 20  # bytes of one read
NUM_READERS = 8
IN_FLIGHT = ".fetching.json"  # becomes store.json at the end
Show = Callable[[str, int, int], None]  # called with: activity, bytes done, bytes in all


@dataclass(frozen=True)
class FetchResult:
    """The parts, files and bytes of a fetch."""

    parts: tuple[int, ...]
    num_files: int
    bytes: int  # of all files of these parts
    transferred: int  # bytes; the others were here
    seconds: float


@dataclass(frozen=True)
class _Copy:
    """The state of one file on this host."""

    entry: FileEntry
    name: str
    path: Path
    kept: int = 0  # bytes that are here
    crc: int = 0  # of these
    is_complete: bool = False

    @property
    def partial(self) -> Path:
        """The path of the file until it is complete."""
        return self.path.with_name(f".{self.path.name}.partial")

    @property
    def offsets(self) -> range:
        """The offsets of the missing pieces."""
        return range(self.kept, self.entry.bytes, PIECE)


def fetch(
    source: StoragePath, folder: Path, parts: Sequence[int] | None = None, show: Show = lambda *_: None
) -> FetchResult:
    """Fetch these parts, or all. Files and beginnings of files that are here are not transferred again.

    >>> fetch(StoragePath("s3://bucket/papers.parts"), Path("/nvme/papers.parts"), [3])
    """
    begun = time.monotonic()
    written, manifest = manifest_at(source)
    numbers = tuple(range(len(manifest.parts))) if parts is None else tuple(sorted(set(parts)))
    for part in numbers:
        if not 0 <= part < len(manifest.parts):
            raise ConfigError(f"there is no part {part}: {source} has parts 0 to {len(manifest.parts) - 1}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # one fetch at a time; the kernel unlocks for a process that ends
            is_store = _begin(folder, written, source)
            copies = _find_copies(folder, manifest, numbers, show, trusts=is_store)
            missing = [copy for copy in copies if not copy.is_complete]
            transferred = sum(copy.entry.bytes - copy.kept for copy in missing)
            free = shutil.disk_usage(folder).free
            if transferred > free:
                needed = f"{folder} needs {transferred / 1e9:,.3f} GB more, and its disk has {free / 1e9:,.3f} GB free"
                raise StoreError(f"{needed}; free some space, or fetch fewer parts")
            _transfer(source, missing, transferred, show)
            _finish(folder, {copy.path.parent for copy in missing})
        finally:
            os.close(handle)
    except StoreError:
        raise
    except OSError as error:
        if error.errno in DISK_FULL:
            hint = "free some space and run the same command again: it goes on there"
            raise StoreError(f"the disk is full writing {folder}; {hint}") from error
        raise StoreError(f"cannot write {folder}: {error}") from error
    total = sum(copy.entry.bytes for copy in copies)
    return FetchResult(numbers, len(copies), total, transferred, time.monotonic() - begun)


def manifest_at(source: StoragePath) -> tuple[bytes, Manifest]:
    """Return the store.json of a store in shared storage: its bytes, and parsed."""
    if source.size(STORE_FILE) is None:
        next(source.names(), None)  # raises if there is no bucket
        raise StoreError(
            f"{source} has no {STORE_FILE}: its build has not finished, or it is no store; wait, or correct the path"
        )
    with source.open(STORE_FILE) as file:
        written = file.read(MOST_BYTES + 1)
    return written, parse_manifest(written, f"{source}/{STORE_FILE}")


def _begin(folder: Path, written: bytes, source: StoragePath) -> bool:
    """Return whether the folder has the store already, with some parts; raise StoreError if it has another one."""
    for name in (STORE_FILE, IN_FLIGHT):
        try:
            found = regular(folder / name).read_bytes()
        except FileNotFoundError:
            continue
        if found != written:
            what = "another store" if name == STORE_FILE else "a fetch of another store that was stopped"
            raise StoreError(f"{folder} holds {what}, not that of {source}; give another folder, or remove this one")
        return name == STORE_FILE
    write_whole(folder / IN_FLIGHT, [written])
    return False


def _find_copies(folder: Path, manifest: Manifest, parts: Sequence[int], show: Show, *, trusts: bool) -> list[_Copy]:
    """Return the state of the files of these parts. If the store is complete, their checksums are trusted."""
    folders = {part_folder(part) for part in parts}
    wanted = [(name, entry) for name, entry in manifest.files.items() if name.partition("/")[0] in folders]
    total = sum(entry.bytes for _, entry in wanted)
    copies: list[_Copy] = []
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for copy in pool.map(lambda one: _find_copy(folder, *one, trusts=trusts), wanted):
            copies.append(copy)
            done = sum(one.kept for one in copies) if not trusts else 0
            if done:
                show("checking", done, total)
    return copies


def _find_copy(folder: Path, name: str, entry: FileEntry, *, trusts: bool) -> _Copy:
    """Return the state of a file; remove it if it has the wrong size or checksum."""
    path = inside(folder, name)
    copy = _Copy(entry, name, path)
    if path.exists():
        size = path.stat().st_size
        if size == entry.bytes and (trusts or _checksum(path) == entry.crc32):
            return _Copy(entry, name, path, size, entry.crc32, is_complete=True)
        path.unlink()
    if copy.partial.exists():
        size = copy.partial.stat().st_size
        if size <= entry.bytes:
            return _Copy(entry, name, path, size, _checksum(copy.partial))
        copy.partial.unlink()
    return copy


def _checksum(path: Path) -> int:
    crc = 0
    with regular(path).open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


def _transfer(source: StoragePath, missing: Sequence[_Copy], total: int, show: Show) -> None:
    pool, done = ThreadPoolExecutor(NUM_READERS), 0
    try:
        pieces = _read_ahead(pool, source, ((copy, at) for copy in missing for at in copy.offsets))
        for copy in missing:
            copy.path.parent.mkdir(parents=True, exist_ok=True)
            for num_bytes in _append(copy, islice(pieces, len(copy.offsets))):
                done += num_bytes
                show("fetching", done, total)
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(
    pool: ThreadPoolExecutor, source: StoragePath, pieces: Iterator[tuple[_Copy, int]]
) -> Iterator[tuple[bytes, int]]:
    """Yield pieces and their checksums in order, with some reads in flight."""
    in_flight: deque[Future[tuple[bytes, int]]] = deque()
    for copy, at in pieces:
        in_flight.append(pool.submit(_read, source, copy, at))
        if len(in_flight) >= NUM_READERS:
            yield in_flight.popleft().result()
    while in_flight:
        yield in_flight.popleft().result()


def _read(source: StoragePath, copy: _Copy, at: int) -> tuple[bytes, int]:
    size, url = min(PIECE, copy.entry.bytes - at), f"{source}/{copy.name}"
    try:
        with source.open(copy.name) as file:
            file.seek(at)
            piece = file.read(size)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read {url}: {error}") from error
    if len(piece) < size:
        what = f"{url} ends after {at + len(piece)} bytes of {copy.entry.bytes}"
        raise StoreError(f"{what}; write the store there again")
    return piece, zlib.crc32(piece)


def _append(copy: _Copy, pieces: Iterator[tuple[bytes, int]]) -> Iterator[int]:
    """Write the missing pieces of a file, then check and rename it; yield the bytes of each piece."""
    crc = copy.crc
    with copy.partial.open("ab", buffering=0) as file:
        for piece, own in pieces:
            left = memoryview(piece)
            while left:
                left = left[file.write(left) :]
            crc = combine(crc, own, len(piece))
            yield len(piece)
        os.fsync(file.fileno())
    if crc != copy.entry.crc32:
        copy.partial.unlink()
        what = f"{copy.path} has checksum {crc:08x}, {copy.entry.crc32:08x} expected, and was removed"
        raise StoreError(f"{what}; run the same command again, and if that fails too, write the store again")
    os.replace(copy.partial, copy.path)


def _finish(folder: Path, changed: set[Path]) -> None:
    """Make the new files survive a power cut, then name store.json."""
    for inner in sorted(set(chain.from_iterable((one, *one.parents) for one in changed))):
        if inner.is_relative_to(folder):
            sync_folder(inner)
    if (folder / IN_FLIGHT).exists():
        os.replace(folder / IN_FLIGHT, folder / STORE_FILE)
        sync_folder(folder)
