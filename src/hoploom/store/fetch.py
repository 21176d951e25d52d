"""Fetch parts of a store from a StoragePath to a disk of this host.

Pieces of files are read in parallel and written in order; store.json is written last. Needs memory for NUM_READERS
pieces. After an interruption, the next fetch keeps the complete files.
"""

import fcntl
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from hoploom.errors import ConfigError, StoreError
from hoploom.store.check import file_problems
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
IN_FLIGHT = ".fetching.json"  # renamed to store.json at the end
Show = Callable[[str, int, int], None]  # called with: activity, bytes done, bytes in all


@dataclass(frozen=True)
class FetchResult:
    """The result of a fetch: its parts, files, bytes and duration."""

    parts: tuple[int, ...]
    num_files: int
    bytes: int  # of all files of these parts, fetched or present before
    transferred: int  # bytes of the files that were not present before
    seconds: float


def fetch(
    source: StoragePath, folder: Path, parts: Sequence[int] | None = None, show: Show = lambda *_: None
) -> FetchResult:
    """Copy these parts of a store (default: all) from `source` to `folder`. Complete files are not copied again."""
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
            folders = {part_folder(part) for part in numbers}
            wanted = {name: entry for name, entry in manifest.files.items() if name.partition("/")[0] in folders}
            missing = _find_missing(folder, wanted, show, trusts=is_store)
            transferred = sum(entry.bytes for entry in missing.values())
            free = shutil.disk_usage(folder).free
            if transferred > free:
                needed = f"{folder} needs {transferred / 1e9:,.3f} GB more, and its disk has {free / 1e9:,.3f} GB free"
                raise StoreError(f"{needed}; free some space, or fetch fewer parts")
            _transfer(source, folder, missing, transferred, show)
            changed = chain.from_iterable(inside(folder, name).parents for name in missing)
            for inner in sorted(set(changed)):
                if inner.is_relative_to(folder):
                    sync_folder(inner)
            if (folder / IN_FLIGHT).exists():
                os.replace(folder / IN_FLIGHT, folder / STORE_FILE)
                sync_folder(folder)
        finally:
            os.close(handle)
    except StoreError:
        raise
    except OSError as error:
        if error.errno in DISK_FULL:
            hint = "free some space and run the same command again: complete files are kept"
            raise StoreError(f"the disk is full writing {folder}; {hint}") from error
        raise StoreError(f"cannot write {folder}: {error}") from error
    total = sum(entry.bytes for entry in wanted.values())
    return FetchResult(numbers, len(wanted), total, transferred, time.monotonic() - begun)


def manifest_at(source: StoragePath) -> tuple[bytes, Manifest]:
    """Return the bytes and the parsed contents of the store.json in `source`; raise StoreError if there is none."""
    if source.size(STORE_FILE) is None:
        next(source.names(), None)  # raises if there is no bucket
        raise StoreError(
            f"{source} has no {STORE_FILE}: its build has not finished, or it is no store; wait, or correct the path"
        )
    with source.open(STORE_FILE) as file:
        written = file.read(MOST_BYTES + 1)
    return written, parse_manifest(written, f"{source}/{STORE_FILE}")


def _begin(folder: Path, written: bytes, source: StoragePath) -> bool:
    """Return whether the folder has this store.json; if none, keep it in IN_FLIGHT. Raise StoreError for another."""
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


def _find_missing(folder: Path, wanted: Mapping[str, FileEntry], show: Show, *, trusts: bool) -> dict[str, FileEntry]:
    """Remove damaged files; return the files that the folder then lacks. If `trusts`, only file sizes are checked."""

    def is_here(name: str, entry: FileEntry) -> bool:
        path = inside(folder, name)
        _partial(path).unlink(missing_ok=True)
        has_size = path.exists() and path.stat().st_size == entry.bytes
        if has_size and (trusts or not any(file_problems(folder, name, entry))):
            return True
        path.unlink(missing_ok=True)
        return False

    total, done = sum(entry.bytes for entry in wanted.values()), 0
    missing: dict[str, FileEntry] = {}
    with ThreadPoolExecutor(NUM_READERS) as pool:
        found = pool.map(is_here, wanted.keys(), wanted.values())
        for (name, entry), present in zip(wanted.items(), found, strict=True):
            if not present:
                missing[name] = entry
            elif not trusts:
                done += entry.bytes
                show("checking", done, total)
    return missing


def _partial(path: Path) -> Path:
    """Return the path under which a file is written until it is complete."""
    return path.with_name(f".{path.name}.partial")


def _transfer(source: StoragePath, folder: Path, missing: Mapping[str, FileEntry], total: int, show: Show) -> None:
    pool, done = ThreadPoolExecutor(NUM_READERS), 0
    offsets = ((name, at) for name, entry in missing.items() for at in range(0, entry.bytes, PIECE))
    try:
        pieces = _read_ahead(pool, ((source, name, missing[name].bytes, at) for name, at in offsets))
        for name, entry in missing.items():
            path = inside(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            crc = 0
            with _partial(path).open("wb", buffering=0) as file:
                for _ in range(0, entry.bytes, PIECE):
                    piece, own = next(pieces)
                    left = memoryview(piece)
                    while left:
                        left = left[file.write(left) :]
                    crc, done = combine(crc, own, len(piece)), done + len(piece)
                    show("fetching", done, total)
                os.fsync(file.fileno())
            if crc != entry.crc32:
                _partial(path).unlink()
                what = f"{path} has checksum {crc:08x}, {entry.crc32:08x} expected, and was removed"
                raise StoreError(f"{what}; run the same command again, and if that fails too, write the store again")
            os.replace(_partial(path), path)
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(
    pool: ThreadPoolExecutor, pieces: Iterator[tuple[StoragePath, str, int, int]]
) -> Iterator[tuple[bytes, int]]:
    """Yield the bytes and the CRC-32 of each piece, in order, with NUM_READERS reads in flight."""
    in_flight: deque[Future[tuple[bytes, int]]] = deque()
    for piece in pieces:
        in_flight.append(pool.submit(_read, *piece))
        if len(in_flight) >= NUM_READERS:
            yield in_flight.popleft().result()
    while in_flight:
        yield in_flight.popleft().result()


def _read(source: StoragePath, name: str, file_bytes: int, at: int) -> tuple[bytes, int]:
    size, url = min(PIECE, file_bytes - at), f"{source}/{name}"
    try:
        with source.open(name) as file:
            file.seek(at)
            piece = file.read(size)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read {url}: {error}") from error
    if len(piece) < size:
        raise StoreError(f"{url} ends after {at + len(piece)} bytes of {file_bytes}; write the store there again")
    return piece, zlib.crc32(piece)
