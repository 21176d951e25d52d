"""Print a mistake that all ranks of torchrun make once: rank 0 shows the error's message, and the other ranks end.

Ranks compare their errors in the rendezvous store, which torchrun holds. A rank whose error is another one, or comes
alone, prints it as Python does; that takes it up to WAIT seconds longer.
"""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from types import TracebackType

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hoploom.errors import ConfigError, HoploomError, PeerError
from hoploom.ranks import environment
from hoploom.ranks.environment import RankInfo
from hoploom.ranks.rendezvous import PAUSES, rendezvous_store, with_timeout

PACKAGE = str(Path(__file__).parents[1])
WAIT = 5.0  # seconds for rank 0 to come to the same error
FIRST = "rank 0"  # the key of its error


def report_once() -> None:
    """Install `OneReport` in this process if torchrun started it as one of several ranks."""
    with suppress(ConfigError):
        info = environment.read_started()
        if info.hosted and info.world_size > 1 and not isinstance(sys.excepthook, OneReport):
            sys.excepthook = OneReport(info, sys.excepthook)


@dataclass(frozen=True)
class OneReport:
    """A `sys.excepthook` that prints a mistake on rank 0 alone, if all ranks made it."""

    info: RankInfo
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object]  # Python's hook, or torch's

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # from torchrun, once another rank has ended
        text = f"{kind.__name__}: {error}"
        is_mistake = isinstance(error, HoploomError) and not isinstance(error, PeerError)
        if self.info.rank == 0:
            if is_mistake:
                print(f"hoploom: {_line_of(trace)}{text}", file=sys.stderr, flush=True)
            else:
                self.before(kind, error, trace)
            with_timeout(WAIT, lambda: self._errors().set(FIRST, text))
        elif not (is_mistake and with_timeout(WAIT + 1, self._first_error) == text):
            self.before(kind, error, trace)

    def _errors(self) -> PrefixStore:
        store = rendezvous_store(self.info, timedelta(seconds=WAIT))
        return PrefixStore(f"hoploom/errors/{self.info.restarts}", store)

    def _first_error(self) -> str:
        errors, deadline = self._errors(), time.monotonic() + WAIT
        while not errors.check([FIRST]) and time.monotonic() < deadline:
            threading.Event().wait(PAUSES[0])
        return errors.get(FIRST).decode() if errors.check([FIRST]) else ""


def _line_of(trace: TracebackType | None) -> str:
    """Return the line of the script that called Hoploom, with a colon behind it."""
    frames = list(takewhile(lambda frame: not frame.filename.startswith(PACKAGE), traceback.extract_tb(trace)))
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
