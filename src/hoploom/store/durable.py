"""Files and names that survive a power cut: whole or not there. Costs waiting for the disk."""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hoploom.errors import StoreError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file; the one that was there stays until the new one is whole and on the disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_synced(partial, pieces)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise StoreError(_explained(path, error)) from error


def _write_synced(partial: Path, pieces: Iterable[bytes | memoryview]) -> None:
    with partial.open("wb", buffering=0) as file:  # no buffer that could fail to be flushed in close()
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())


def _explained(path: Path, error: OSError) -> str:
    if error.errno in DISK_FULL:
        return f"the disk is full writing {path}; what was there before is kept; free some space"
    return f"cannot write {path}: {error}"


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class WorkFolder:
    """A new folder beside a target, in which that is made. close() removes it, unless it was renamed.

    Its owner holds a lock on it that the kernel drops with the process: one without a lock was left by a process that
    was killed, and the next one removes it.
    """

    def __init__(self, target: Path) -> None:
        target = target.absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{target.name}.partial-"
        for left in target.parent.glob(f"{_literal(prefix)}*"):
            _remove_unless_locked(left)
        while True:
            self.path = target.with_name(f"{prefix}{secrets.token_hex(8)}")
            self.path.mkdir()
            if (lock := _locked(self.path)) is not None:
                self._lock = lock
                return

    def close(self) -> None:
        """Remove what is left of the folder, then let go of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _locked(folder: Path) -> int | None:
    """A lock on the folder, None if somebody took it for a left one before it was locked."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a file system without locks: nothing is removed there either
        fcntl.flock(handle, fcntl.LOCK_EX)
    if folder.exists():
        return handle
    os.close(handle)
    return None


def _literal(name: str) -> str:
    """A name whose brackets, stars and question marks mean themselves in a glob."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _remove_unless_locked(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # renamed or removed meanwhile
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # another process is at work in it, or the file system knows no locks
    finally:
        os.close(handle)
