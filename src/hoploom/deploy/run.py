"""Run a cluster from here: servers, then trainers, until the trainers have ended; then nothing is left running.

The first failure ends all others. A server's end is one only where nobody else has its parts.
"""

import queue
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any

from hoploom.deploy.cluster_file import Cluster, Process
from hoploom.deploy.failure import Failure, ending, first_of
from hoploom.deploy.local import Local
from hoploom.deploy.programs import num_open_ports, processes, with_ports
from hoploom.deploy.ssh import Ssh
from hoploom.deploy.started import Event, Executor, SignalName, Started
from hoploom.deploy.view import View
from hoploom.errors import ConfigError

SERVE_DEADLINE = 300.0  # seconds until all servers serve
AFTER_FAILURE = 5.0  # seconds that the others get to end by themselves once one has failed
AFTER_TERMINATE = 10.0  # seconds between SIGTERM and SIGKILL
AFTER_INTERRUPT = 45.0  # the same after Ctrl-C: torchrun gives its processes 30, to write a checkpoint say
AFTER_KILL = 15.0  # seconds until everything is gone
SIGN_OF_LIFE = 10.0  # seconds between two
INTERRUPTED = 128  # and the signal's number: an exit code


def run(cluster: Cluster, command: Sequence[str]) -> int:
    """Start, show and end all processes of a cluster; the exit code.

    >>> run(read_cluster("cluster.toml"), ["train", "run.toml"])
    """
    executor = executor_of(cluster)
    planned = processes(with_free_ports(cluster), command)
    view = View([process.label for process in planned])
    with Launch(planned, executor, view) as launch:
        return launch.run()


def executor_of(cluster: Cluster) -> Executor:
    """Who starts processes from here."""
    if cluster.executor == "local":
        return Local()
    if cluster.executor == "ssh":
        return Ssh(cluster.ssh)
    raise ConfigError(f"executor is {cluster.executor}, which starts nothing from here; give local or ssh")


def with_free_ports(cluster: Cluster) -> Cluster:
    """Ports that were left open become ones that nobody listens on now."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(num_open_ports(cluster))]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return with_ports(cluster, [one.getsockname()[1] for one in held])


class Launch:
    """All processes of one launch. However this block is left, none is running afterwards."""

    def __init__(self, planned: Sequence[Process], executor: Executor, view: View) -> None:
        self._planned, self._executor, self._view = planned, executor, view
        self._started: dict[str, Started] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._failures: list[Failure] = []
        self._signals: list[int] = []
        self._before: dict[int, Any] = {}
        self._beat_at = 0.0
        self._ending = False

    def run(self) -> int:
        """Until the trainers have ended, one process has failed, or a signal came."""
        servers = [process for process in self._planned if process.is_server]
        trainers = [process for process in self._planned if not process.is_server]
        if self._start(servers, "serves", SERVE_DEADLINE) and self._start(trainers, "began", None):
            self._watch(lambda: not self._living(trainers), None)
        self._wind_down(trainers)
        self._ending = True
        self._stop(servers, "KILL" if len(self._signals) > 1 else "TERM", AFTER_TERMINATE)
        self._view.summarize(self._failures)
        if self._signals:
            return INTERRUPTED + self._signals[0]
        return first_of(self._failures).code if self._failures else 0

    # --- starting --------------------------------------------------------------------------------

    def _start(self, planned: Sequence[Process], state: str, seconds: float | None) -> bool:
        """Start these and wait until all have come to this state; False if something came between."""
        for process in planned:
            self._started[process.label] = Started(process, self._executor, self._view, self._events.put)
        mine = [self._started[process.label] for process in planned]
        begun = self._watch(lambda: all(one.began for one in mine), self._executor.begin_deadline())
        if begun is None:
            late = next(one for one in mine if not one.began)
            self._fail(Failure(late.label, f"no Python answers on {late.process.host.ssh}; see what hangs there"))
        if not begun or state == "began":
            return bool(begun)
        come = self._watch(lambda: all(one.serves for one in mine), seconds)
        if come is None:
            late = next(one for one in mine if not one.serves)
            message = f"does not serve after {seconds:.0f} seconds; its own lines may say why"
            self._fail(Failure(late.label, message, self._view.tail(late.label)))
        return bool(come)

    # --- watching --------------------------------------------------------------------------------

    def _watch(self, done: Callable[[], bool], seconds: float | None) -> bool | None:
        """True once it is done; False after a failure or a signal; None after so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done():
            if self._failures or self._signals:
                return False
            if deadline is not None and time.monotonic() >= deadline:
                return None
            self._take_event(deadline)
        return not (self._failures or self._signals)

    def _take_event(self, deadline: float | None) -> None:
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + SIGN_OF_LIFE
            for one in self._living():
                one.send("")
        until = self._beat_at if deadline is None else min(self._beat_at, deadline)
        try:
            event = self._events.get(timeout=max(0.0, until - now))
        except queue.Empty:
            return
        if event.what == "signal":
            self._signals.append(event.number)
        elif event.what == "deaf" and not self._signals:
            self._signals.append(signal.SIGPIPE)
        elif event.what == "ended" and not self._ending:
            self._settle(self._started[event.label], event.number)

    def _settle(self, one: Started, code: int) -> None:
        """A process has ended: was it to be?"""
        tail = self._view.tail(one.label)
        if not one.began:
            refusal = self._executor.refusal(one.process, code, tail)
            return self._fail(refusal or Failure(one.label, ending(code), tail, 1))
        if not one.process.is_server:
            return self._fail(Failure(one.label, ending(code), tail, code if 0 < code < 126 else 1)) if code else None
        if self._is_replaced(one):
            self._view.tell(f"{one.label} {ending(code)}; other servers have its parts, so training goes on")
        else:
            self._fail(Failure(one.label, ending(code), tail, code if 0 < code < 126 else 1))

    def _is_replaced(self, lost: Started) -> bool:
        """Whether trainers run, and living servers have all parts of one that ended."""
        trains = any(not one.process.is_server for one in self._living())
        others = {part for one in self._living() if one.process.is_server for part in one.process.host.parts}
        return trains and bool(lost.process.host.parts) and set(lost.process.host.parts) <= others

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)

    # --- ending ----------------------------------------------------------------------------------

    def _wind_down(self, trainers: Sequence[Process]) -> None:
        """Bring the trainers to an end, the gentler way first."""
        if self._signals:
            self._ending = True
            name: SignalName = "INT" if self._signals[0] == signal.SIGINT else "TERM"
            self._stop(trainers, name, AFTER_INTERRUPT)
        elif self._failures:
            self._until_ended(trainers, AFTER_FAILURE)
            self._ending = True
            self._stop(trainers, "TERM", AFTER_TERMINATE)

    def _stop(self, planned: Sequence[Process], name: SignalName, seconds: float) -> None:
        """A signal, and SIGKILL for those that are there after so many seconds, or a second Ctrl-C."""
        for one in self._living(planned):
            one.send(name)
        if not self._until_ended(planned, seconds):
            for one in self._living(planned):
                one.send("KILL")
            self._until_ended(planned, AFTER_KILL, hurries=False)

    def _until_ended(self, planned: Sequence[Process], seconds: float, *, hurries: bool = True) -> bool:
        """Whether all of these have ended by then; a signal that comes meanwhile ends the wait if it hurries."""
        deadline, signals = time.monotonic() + seconds, len(self._signals)
        while self._living(planned):
            if time.monotonic() >= deadline or (len(self._signals) > signals and hurries):
                return False
            self._take_event(deadline)
        return True

    def _living(self, planned: Iterable[Process] | None = None) -> list[Started]:
        labels = self._started if planned is None else [process.label for process in planned]
        return [
            self._started[label] for label in labels if label in self._started and self._started[label].code is None
        ]

    def __enter__(self) -> "Launch":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(Event("signal", number=number))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ending = True
            self._stop(self._planned, "KILL", AFTER_KILL)
        finally:
            for one in self._started.values():
                one.close()
            for number, handler in self._before.items():
                signal.signal(number, handler)
