"""Work that ranks do in passes over files in a folder they share: all finish a pass, or all stop.

A rank that fails leaves a note in the folder, which the others look for between two slices; so nobody works on
for nothing, and all of them meet once more before the folder goes.
"""

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch

from hoploom.dist.collectives import all_or_none
from hoploom.dist.context import Context
from hoploom.errors import HoploomError, StoreError


class _PeerFailedError(Exception):
    """Ends this rank's share of a pass that another rank cannot finish."""


class SharedFolder:
    """A temporary folder of all ranks, beside `target`. Gone when the block is left, however that happens."""

    def __init__(self, target: Path, context: Context) -> None:
        self._target, self._context = target, context
        token = int(context.broadcast(torch.tensor([secrets.randbits(62)])))
        self.path = target.absolute().with_name(f".{target.name}.partial-{token:016x}")

    def __enter__(self) -> "SharedFolder":
        try:
            with self.together("making a folder"):
                if self._context.is_main:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self.path.mkdir()
            with self.together("opening the folder"):
                if not self.path.exists():
                    raise StoreError(f"{self.path} is not to be seen here; give a path on a disk that all hosts share")
        except BaseException:
            self._remove()
            raise
        return self

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks, perhaps on other hosts."""
        return self._context.world_size > 1

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """A pass of all ranks. Left when all have finished it; an error of one is an error of all."""
        with all_or_none(self._context, doing):
            try:
                yield
            except _PeerFailedError:
                pass  # the rank that failed tells the others
            except BaseException as error:
                self._leave_note()
                if not isinstance(error, OSError) or isinstance(error, HoploomError):
                    raise
                raise StoreError(self._explained(error)) from error

    def check_peers(self) -> None:
        """Leave the pass if another rank has failed."""
        if any(self._note(rank).exists() for rank in range(self._context.world_size) if rank != self._context.rank):
            raise _PeerFailedError

    def _explained(self, error: OSError) -> str:
        if error.errno == errno.ENOSPC:
            return f"the disk is full writing {self._target} and nothing was kept; free some space"
        return f"cannot write {self._target}: {error}"

    def _leave_note(self) -> None:
        if self.is_shared:
            with suppress(OSError):
                self._note(self._context.rank).touch()

    def _note(self, rank: int) -> Path:
        return self.path / f"failed-{rank}"

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or self._context.is_main:
            self._remove()
