"""Supervise child processes, and handle the signals that end this process and them.

One thread handles the events that the children's threads report. Signal handlers need the main thread: in others
nothing changes. A process that ignores SIGINT when it starts, as a shell's background jobs do, stops at SIGTERM only.
"""

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

HEARTBEAT_INTERVAL = 10.0  # seconds
KILL_TIMEOUT = 15.0  # seconds from SIGKILL until everything is gone
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
SignalName = Literal["INT", "TERM", "KILL"]


@dataclass(frozen=True)
class EndTimeouts:
    """Seconds that processes get to end by themselves."""

    after_failure: float = 5.0  # of another process
    after_interrupt: float = 30.0  # to write a checkpoint, say; a second Ctrl-C ends them
    after_terminate: float = 3.0  # between SIGTERM and SIGKILL


class ProcessEvent(NamedTuple):
    """A change of one child, or a signal to this process."""

    what: Literal["began", "ready", "failed", "ended", "signal"]
    label: str = ""
    number: int = 0  # of the signal


class Child(Protocol):
    """A started process that reports its events."""

    label: str
    ended: bool  # set by the supervisor, before its end is handled

    def send(self, name: SignalName | Literal["HEARTBEAT"]) -> None: ...

    def close(self) -> None: ...


ChildT = TypeVar("ChildT", bound=Child)


class Supervisor(Generic[ChildT]):
    """All child processes of one kind. After `close`, none of them is running."""

    def __init__(self, handle: Callable[[ProcessEvent], None] = lambda event: None) -> None:
        self.events: queue.SimpleQueue[ProcessEvent] = queue.SimpleQueue()
        self.children: dict[str, ChildT] = {}  # by label
        self._handle = handle
        self._next_heartbeat = 0.0

    def add(self, child: ChildT) -> ChildT:
        """Supervise a child that reports to `events`, and return it."""
        self.children[child.label] = child
        return child

    def living(self, labels: Iterable[str] | None = None) -> list[ChildT]:
        """Return the children that have not ended: all, or those of `labels` that were started."""
        found = self.children.values() if labels is None else map(self.children.get, labels)
        return [child for child in found if child is not None and not child.ended]

    def until(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Handle events until `done`; return False if `seconds` have passed before."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            if now >= self._next_heartbeat:
                self._next_heartbeat = now + HEARTBEAT_INTERVAL
                for child in self.living():
                    child.send("HEARTBEAT")
            wake_at = self._next_heartbeat if deadline is None else min(self._next_heartbeat, deadline)
            with suppress(queue.Empty):
                event = self.events.get(timeout=max(0.0, wake_at - now))
                if event.what == "ended":
                    self.children[event.label].ended = True
                self._handle(event)
        return True

    def stop(
        self,
        name: SignalName,
        seconds: float,
        labels: Iterable[str] | None = None,
        *,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send a signal, and SIGKILL to the children that are left after `seconds`, or once `hurried` returns True."""
        named = None if labels is None else list(labels)
        for child in self.living(named):
            child.send(name)
        self.until(lambda: not self.living(named) or hurried(), seconds)
        for child in self.living(named):
            child.send("KILL")
        self.until(lambda: not self.living(named), KILL_TIMEOUT)

    def close(self) -> None:
        """Kill the children that are left."""
        try:
            self.stop("KILL", KILL_TIMEOUT)
        finally:
            for child in self.children.values():
                child.close()


def killed_by(number: int) -> str:
    """Return how a process ended that a signal has killed."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = "; the kernel does that when memory runs out: see dmesg" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


# --- signals to this process ---------------------------------------------------------------------


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
