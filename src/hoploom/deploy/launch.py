"""Run a cluster from here: servers, then trainers, until the trainers have ended; then nothing is left running.

The first failure ends all others. A server's end is one only where nobody else has its parts.
"""

import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any

from hoploom.config.values import join_address, split_address
from hoploom.deploy.cluster_file import Cluster, Process
from hoploom.deploy.programs import processes
from hoploom.deploy.ssh import Ssh
from hoploom.deploy.supervise import Executor, KeptProcess, Local, ProcessEvent, SignalName, Supervisor
from hoploom.deploy.view import Failure, View, ending, first_of
from hoploom.errors import ConfigError
from hoploom.ranks.stopping import put_back, take_over

LOOPBACK = "127.0.0.1"
INTERRUPTED = 128  # and the signal's number: an exit code


@dataclass(frozen=True)
class Patience:
    """How many seconds a launch waits, and for what."""

    serve: float = 300.0  # until all servers are ready
    after_failure: float = 5.0  # for the others to end by themselves once one has failed
    after_terminate: float = 10.0  # between SIGTERM and SIGKILL
    after_interrupt: float = 45.0  # the same after Ctrl-C: torchrun gives its processes 30, to write a checkpoint say


def run(cluster: Cluster, command: Sequence[str]) -> int:
    """Start, show and end all processes of a cluster; the exit code.

    >>> run(read_cluster("cluster.toml"), ["train", "run.toml"])
    """
    with Launch(processes(with_free_ports(cluster), command), executor_of(cluster)) as launch:
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

        def free_port() -> int:
            held = stack.enter_context(socket.socket())
            held.bind((LOOPBACK, 0))
            return int(held.getsockname()[1])

        address, port = split_address(cluster.rendezvous)
        rendezvous = join_address(address, port or free_port())
        hosts = tuple(
            replace(host, port=free_port()) if host.serves and not host.port else host for host in cluster.hosts
        )
        return replace(cluster, hosts=hosts, rendezvous=rendezvous)


class Launch:
    """All processes of one launch. However this block is left, none is running afterwards."""

    def __init__(self, planned: Sequence[Process], executor: Executor, patience: Patience | None = None) -> None:
        self._servers = [process for process in planned if process.is_server]
        self._trainers = [process for process in planned if not process.is_server]
        self._executor, self._patience = executor, patience or Patience()
        self._view = View([process.label for process in planned], when_unread=lambda: self._signal(signal.SIGPIPE))
        self._supervisor = Supervisor(executor, self._view.show, self._handle)
        self._failures: list[Failure] = []
        self._signals: list[int] = []
        self._before: dict[int, Any] = {}
        self._ending = False

    def run(self) -> int:
        """Until the trainers have ended, one process has failed, or a signal came."""
        if self._start_servers() and self._start(self._trainers):
            self._until(lambda: not self._supervisor.living(self._trainers), None)
        self._stop_trainers()
        self._ending = True
        self._stop(self._servers, "KILL" if len(self._signals) > 1 else "TERM", self._patience.after_terminate)
        self._view.summarize(self._failures)
        if self._signals:
            return INTERRUPTED + self._signals[0]
        return first_of(self._failures).code if self._failures else 0

    # --- starting --------------------------------------------------------------------------------

    def _start_servers(self) -> bool:
        """Whether all are ready."""
        if not self._start(self._servers):
            return False
        kept, seconds = self._supervisor.living(self._servers), self._patience.serve
        if not self._until(lambda: all(one.ready for one in kept), seconds):
            late = next(one for one in kept if not one.ready)
            message = f"does not serve after {seconds:.0f} seconds; its own lines may say why"
            self._failures.append(Failure(late.label, message, self._view.tail(late.label)))
        return not self._is_over

    def _start(self, planned: Sequence[Process]) -> bool:
        """Whether all have begun."""
        kept = self._supervisor.start(planned)
        if not self._until(lambda: all(one.began for one in kept), self._executor.begin_deadline()):
            late = next(one for one in kept if not one.began)
            message = f"no Python answers on {late.process.host.ssh}; see what hangs there"
            self._failures.append(Failure(late.label, message))
        return not self._is_over

    def _until(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Wait; whether it is done, or a failure or signal came, within so many seconds."""
        return self._supervisor.until(lambda: done() or self._is_over, seconds)

    @property
    def _is_over(self) -> bool:
        return bool(self._failures or self._signals)

    # --- what happens ----------------------------------------------------------------------------

    def _handle(self, event: ProcessEvent) -> None:
        if event.what == "signal" and not (event.number == signal.SIGPIPE and self._signals):
            self._signals.append(event.number)
        elif event.what == "ended" and not self._ending:
            self._settle(self._supervisor.kept[event.label], event.number)

    def _settle(self, one: KeptProcess, code: int) -> None:
        """A process has ended: was it to be?"""
        tail, is_server = self._view.tail(one.label), one.process.is_server
        failure = Failure(one.label, ending(code), tail, code if 0 < code < 126 else 1)
        if not one.began:
            self._failures.append(self._executor.refusal(one.process, code, tail))
        elif is_server and self._is_replaced(one):
            self._view.announce(f"{one.label} {ending(code)}; other servers have its parts, so training goes on")
        elif code or is_server:
            self._failures.append(failure)

    def _is_replaced(self, lost: KeptProcess) -> bool:
        """Whether trainers run, and living servers have all parts of one that ended."""
        others = {part for one in self._supervisor.living(self._servers) for part in one.process.host.parts}
        parts = set(lost.process.host.parts)
        return bool(parts) and parts <= others and bool(self._supervisor.living(self._trainers))

    # --- ending ----------------------------------------------------------------------------------

    def _stop_trainers(self) -> None:
        """The gentler way first."""
        patience = self._patience
        if self._signals:
            self._ending = True
            is_interrupt = self._signals[0] == signal.SIGINT
            self._stop(self._trainers, "INT" if is_interrupt else "TERM", patience.after_interrupt)
        elif self._failures:
            hurried = self._hurry()
            self._supervisor.until(
                lambda: not self._supervisor.living(self._trainers) or hurried(), patience.after_failure
            )
            self._ending = True
            self._stop(self._trainers, "TERM", patience.after_terminate)

    def _stop(self, planned: Sequence[Process], name: SignalName, seconds: float) -> None:
        self._supervisor.stop(name, seconds, planned, hurried=self._hurry())

    def _hurry(self) -> Callable[[], bool]:
        """Says whether another signal has come since: a second Ctrl-C kills at once."""
        num_signals = len(self._signals)
        return lambda: len(self._signals) > num_signals

    # --- signals ---------------------------------------------------------------------------------

    def __enter__(self) -> "Launch":
        """SIGINT that was ignored when this process started (a shell's background job) stays ignored."""
        self._before = take_over(self._signal)
        return self

    def _signal(self, number: int, frame: FrameType | None = None) -> None:
        self._supervisor.events.put(ProcessEvent("signal", number=number))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ending = True
            self._supervisor.close()
        finally:
            put_back(self._before)
