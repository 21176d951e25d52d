"""Files and names that survive a power cut: whole or not there. Costs waiting for the disk."""

import errno
import os
from collections.abc import Iterable
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
