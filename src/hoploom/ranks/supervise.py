"""Supervise child processes. One thread handles the events that the children's threads report."""

import ctypes
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

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


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies; on other systems the lost rendezvous store ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)
