"""Bring parts of a store from a place that all hosts reach to a disk of this host.

Pieces are read several at a time, and appended in order: what a stopped fetch leaves is the beginning of a file, and
the next one goes on behind it. store.json comes last. Costs NUM_READERS pieces of memory.
"""

import fcntl
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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

PIECE = 16 << 20  # bytes
NUM_READERS = 8
UNDER_WAY = ".fetching.json"  # what will be store.json
Show = Callable[[str, int, int], None]  # what is done, bytes done, of how many
_Piece = tuple[bytes, int]  # and its checksum


@dataclass(frozen=True)
class FetchResult:
    """What a fetch has brought."""

    parts: tuple[int, ...]
    num_files: int
    bytes: int  # of all files of these parts
    transferred: int  # bytes; the others were here
    seconds: float


@dataclass(frozen=True)
class _Copy:
    """One file, as it is here."""

    name: str
    entry: FileEntry
    path: Path
    kept: int = 0  # bytes that are here
    crc: int = 0  # of these
    is_here: bool = False  # under its name

    @property
    def partial(self) -> Path:
        """Its name until it is complete."""
        return self.path.with_name(f".{self.path.name}.partial")

    @property
    def pieces(self) -> range:
        """Where the pieces that are not here begin."""
        return range(self.kept, self.entry.bytes, PIECE)


def fetch(
    source: StoragePath, folder: Path, parts: Sequence[int] | None = None, show: Show = lambda *_: None
) -> FetchResult:
    """Bring these parts, or all; what is here already is not transferred again.

    >>> fetch(StoragePath("s3://bucket/papers.parts"), Path("/nvme/papers.parts"), [3])
    """
    begun = time.monotonic()
    written, manifest = manifest_at(source)
    numbers = tuple(range(len(manifest.parts))) if parts is None else tuple(sorted(set(parts)))
    for part in numbers:
        if not 0 <= part < len(manifest.parts):
            raise ConfigError(f"there is no part {part}: {source} has parts 0 to {len(manifest.parts) - 1}")
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            is_store = _begin(folder, written, manifest, source)
            copies = _look(folder, manifest, numbers, show, trusts=is_store)
            missing = [copy for copy in copies if not copy.is_here]
            to_come = sum(copy.entry.bytes - copy.kept for copy in missing)
            _check_space(folder, to_come)
            _transfer(source, missing, to_come, show)
            _finish(folder, {copy.path.parent for copy in missing})
    total = sum(copy.entry.bytes for copy in copies)
    return FetchResult(numbers, len(copies), total, to_come, time.monotonic() - begun)


def manifest_at(source: StoragePath) -> tuple[bytes, Manifest]:
    """The store.json of a store that lies there, as it is written and as it is meant."""
    if source.size(STORE_FILE) is None:
        next(source.names(), None)  # says where the bucket is missing
        raise StoreError(
            f"{source} has no {STORE_FILE}: its build has not finished, or it is no store; wait, or correct the path"
        )
    with source.open(STORE_FILE) as file:
        written = file.read(MOST_BYTES + 1)
    return written, parse_manifest(written, f"{source}/{STORE_FILE}")


def _begin(folder: Path, written: bytes, manifest: Manifest, source: StoragePath) -> bool:
    """Whether the store is here already, with some parts. Nothing of another store may be."""
    for name in (STORE_FILE, UNDER_WAY):
        try:
            found = regular(folder / name).read_bytes()
        except FileNotFoundError:
            continue
        if found != written:
            what = "another store" if name == STORE_FILE else "a fetch of another store that was stopped"
            raise StoreError(f"{folder} holds {what}, not that of {source}; give another folder, or remove this one")
        return name == STORE_FILE
    write_whole(folder / UNDER_WAY, [written])
    return False


def _look(folder: Path, manifest: Manifest, parts: Sequence[int], show: Show, *, trusts: bool) -> list[_Copy]:
    """The files of these parts as they are here. Those of an open store were checked when they came."""
    folders = {part_folder(part) for part in parts}
    wanted = [(name, entry) for name, entry in manifest.files.items() if name.partition("/")[0] in folders]
    copies, done = [], 0
    total = sum(entry.bytes for _, entry in wanted)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for copy in pool.map(lambda one: _as_it_is(folder, *one, trusts=trusts), wanted):
            copies.append(copy)
            done += copy.kept
            if done and not trusts:
                show("checking", done, total)
    return copies


def _as_it_is(folder: Path, name: str, entry: FileEntry, *, trusts: bool) -> _Copy:
    """A file that is not what it has to be is removed."""
    path = inside(folder, name)
    copy = _Copy(name, entry, path)
    if path.exists():
        size = path.stat().st_size
        if size == entry.bytes and (trusts or _checksum(path) == entry.crc32):
            return _Copy(name, entry, path, size, entry.crc32, is_here=True)
        path.unlink()
    if copy.partial.exists():
        size = copy.partial.stat().st_size
        if size <= entry.bytes:
            return _Copy(name, entry, path, size, _checksum(copy.partial))
        copy.partial.unlink()
    return copy


def _checksum(path: Path) -> int:
    crc = 0
    with regular(path).open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


def _check_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        needed = f"{folder} needs {size / 1e9:,.3f} GB more, and its disk has {free / 1e9:,.3f} GB free"
        raise StoreError(f"{needed}; free some space, or fetch fewer parts")


# --- transferring --------------------------------------------------------------------------------


def _transfer(source: StoragePath, missing: Sequence[_Copy], total: int, show: Show) -> None:
    pool, done = ThreadPoolExecutor(NUM_READERS), 0
    try:
        read_ahead = _in_order(pool, source, ((copy, at) for copy in missing for at in copy.pieces))
        for copy in missing:
            copy.path.parent.mkdir(parents=True, exist_ok=True)
            for piece in _append(copy, islice(read_ahead, len(copy.pieces))):
                done += piece
                show("fetching", done, total)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ThreadPoolExecutor, source: StoragePath, pieces: Iterator[tuple[_Copy, int]]) -> Iterator[_Piece]:
    """The contents of pieces, a few of them read ahead."""
    ahead: deque[Future[_Piece]] = deque()
    for copy, at in pieces:
        ahead.append(pool.submit(_read, source, copy, at))
        if len(ahead) >= NUM_READERS:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _read(source: StoragePath, copy: _Copy, at: int) -> _Piece:
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


def _append(copy: _Copy, pieces: Iterator[_Piece]) -> Iterator[int]:
    """Write what is missing of a file, and give it its name once it is what store.json says."""
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
    """What came survives a power cut; then there is a store."""
    for inner in sorted(set(chain.from_iterable((one, *one.parents) for one in changed))):
        if inner.is_relative_to(folder):
            sync_folder(inner)
    if (folder / UNDER_WAY).exists():
        os.replace(folder / UNDER_WAY, folder / STORE_FILE)
        sync_folder(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One fetch at a time writes to a folder; the kernel lets go of the lock of a process that ends."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if error.errno in DISK_FULL:
            text = (
                f"the disk is full writing {folder}; free some space and run the same command again: it goes on there"
            )
            raise StoreError(text) from error
        raise StoreError(f"cannot write {folder}: {error}") from error
