"""A folder beside a target, in which it is made. What a killed process left behind is removed by the next one.

Its owner holds a lock on it that the kernel drops with the process: a folder without a lock belongs to nobody.
"""

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path


class WorkFolder:
    """A new, locked folder. close() removes it, unless it was renamed."""

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
