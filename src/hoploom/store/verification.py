"""Checking the files of a store in the background, while it is served or trained on: slowly, and once."""

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hoploom.closing import Closing
from hoploom.errors import StoreError
from hoploom.store import format as layout
from hoploom.store.check import file_problems

RATE = 100 << 20  # bytes a second: about a tenth of a core, and of a disk
LOWEST = 19  # niceness


class _ClosedError(Exception):
    """The rest need not be checked."""


class Verification(Closing):
    """A thread that compares the files of some parts with their checksums, and keeps the first problem.

    >>> with Verification(Path("papers.store"), [0]) as verification:
    ...     verification.finish()
    """

    def __init__(self, folder: Path, parts: Sequence[int], rate: float = RATE) -> None:
        """The topology of other parts is compared, too, where it is on this host."""
        self._folder, self._rate, self._problem = folder, rate, ""
        own = {layout.part_folder(part) for part in parts}
        listed = layout.read_manifest(folder).files
        self._files = {
            name: entry
            for name, entry in listed.items()
            if name.partition("/")[0] in own or ("/csc." in name and layout.inside(folder, name).exists())
        }
        self._closed, self._hurry = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="hoploom-verify", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if sys.platform == "linux":  # where threads have a niceness, which the disk's scheduler heeds, too
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        with suppress(_ClosedError):
            for name, entry in self._files.items():
                for problem in file_problems(self._folder, name, entry, self._pause):
                    self._problem = problem
                    return

    def _pause(self, num_bytes: int) -> None:
        """Keep to the rate."""
        self._hurry.wait(num_bytes / self._rate)
        if self._closed.is_set():
            raise _ClosedError

    def check(self) -> None:
        """Raise StoreError if a damaged file has been found."""
        if self._problem:
            raise StoreError(
                f"{self._folder}: {self._problem}; restore the file, for example with `hoploom fetch`, and see "
                "`hoploom check`"
            )

    def finish(self, seconds: float | None = None) -> bool:
        """Wait for the end, at full speed from now on, but no longer than this; return whether all files are read.

        StoreError if a file is damaged.
        """
        self._hurry.set()
        self._thread.join(seconds)
        self.check()
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread, wherever it is."""
        self._closed.set()
        self._hurry.set()
        self._thread.join()
