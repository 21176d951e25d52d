"""Handle Ctrl-C and SIGTERM, which training answers between two steps, and the end of a parent process.

Python runs signal handlers in the main thread only: in other threads nothing changes. A process that ignores SIGINT
when it starts, as a shell's background jobs do, goes on ignoring it, and stops at SIGTERM.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def take_over(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Handle SIGTERM, and SIGINT if it is not ignored; return the handlers before, for `put_back`."""
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    return {number: signal.signal(number, handler) for number in numbers}


def put_back(handlers: Mapping[int, Any]) -> None:
    """Install the handlers that `take_over` returned."""
    for number, handler in handlers.items():
        if handler is not None:  # None: it was not Python's, and cannot be put back
            signal.signal(number, handler)


class StopRequests:
    """A context manager in which SIGINT and SIGTERM set `stop_requested`; a second SIGINT raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            self._before = take_over(self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop_requested = True

    def __exit__(self, *raised: object) -> None:
        put_back(self._before)
        self._before = {}


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """A context manager in which SIGTERM raises KeyboardInterrupt, unless the script handles or ignores it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies; on other systems the lost rendezvous store ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)
