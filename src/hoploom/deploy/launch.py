"""Run a cluster from this host: start servers, then trainers; when the trainers have ended, stop the servers.

The first failure ends all processes. The end of a server counts as a failure, unless other servers have its parts.
Every output line is shown with its process' label. The last lines of each process are kept to find the first error.
"""

import os
import re
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TextIO

from hoploom.config.values import join_address, split_address
from hoploom.deploy.cluster_file import Cluster, Process
from hoploom.deploy.guarded import (
    Executor,
    Failure,
    GuardedProcess,
    ProcessEvent,
    SignalName,
    Supervisor,
    ending,
    is_consequence,
)
from hoploom.deploy.programs import processes
from hoploom.deploy.ssh import Ssh
from hoploom.errors import ConfigError
from hoploom.ranks.environment import LOOPBACK
from hoploom.system import Closing, EndTimeouts, put_back, take_over

INTERRUPTED = 128  # plus the signal's number: an exit code
SERVE_DEADLINE = 300.0  # seconds until all servers are ready
TIMEOUTS = EndTimeouts(after_interrupt=45.0, after_terminate=10.0)  # torchrun gives its processes 30 after Ctrl-C
SHOWN_LINES = 40  # of the first error
KEPT_LINES = 200  # of the stderr of each process and rank
OF_RANK = re.compile(r"\[default(\d+)\]:")  # torchrun writes this before each line of a local rank
TORCHRUN_NOISE = re.compile(r"torch/distributed/elastic/\S+\.py:\d+\]")
TORCHRUN_BANNER = re.compile(r"\s*$|\*+$|Setting OMP_NUM_THREADS")  # at every start
ERROR = re.compile(
    r"(\[\w+\]: ?)*(hoploom: (?!warning)|[\w.]*(Error|Exception|Interrupt)\b)"
)  # a traceback's last line
KILLED = re.compile(r"failed \(exitcode: -\d+\) local_rank")  # torchrun's line about a rank that a signal has killed


def run_cluster(cluster: Cluster, command: Sequence[str]) -> int:
    """Run the processes of a cluster until its trainers have ended, and show their output; return the exit code."""
    with Launch(processes(with_free_ports(cluster), command), executor_of(cluster)) as launch:
        return launch.run()


def shell_lines(cluster: Cluster, command: Sequence[str]) -> list[str]:
    """Return one text for each process of a launch: a comment with its label, and a shell command that starts it."""
    executor, planned = executor_of(cluster), processes(with_free_ports(cluster), command)
    return [f"# {process.label}\n{executor.shown(process)}" for process in planned]


def executor_of(cluster: Cluster) -> Executor:
    """Return the executor that starts processes from this host; raise ConfigError for Slurm and Kubernetes."""
    if cluster.executor == "local":
        return Executor()
    if cluster.executor == "ssh":
        return Ssh(cluster.ssh)
    raise ConfigError(f"executor is {cluster.executor}, which starts nothing from here; give local or ssh")


def with_free_ports(cluster: Cluster) -> Cluster:
    """Return the cluster with a free port of this host in place of each port 0."""
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


class Launch(Closing):
    """All processes of one launch. Use it in a `with` block, after which none of them is running."""

    def __init__(self, planned: Sequence[Process], executor: Executor, timeouts: EndTimeouts = TIMEOUTS) -> None:
        self._servers = {process.label: process for process in planned if process.is_server}
        self._trainers = {process.label: process for process in planned if not process.is_server}
        self._executor, self._timeouts = executor, timeouts
        labels = [process.label for process in planned]
        self._view = View(labels, when_unread=lambda: self._signal(signal.SIGPIPE))
        self._supervisor = Supervisor(self._handle)
        self._failures: list[Failure] = []
        self._signals: list[int] = []
        self._before: dict[int, Any] = {}
        self._ending = False

    def run(self) -> int:
        """Run until the trainers have ended, one process has failed, or a signal came; return the exit code."""
        if self._start_servers() and self._start(self._trainers):
            self._until(lambda: not self._supervisor.living(self._trainers), None)
        self._stop_trainers()
        self._ending = True
        name: SignalName = "KILL" if len(self._signals) > 1 else "TERM"
        self._supervisor.stop(name, self._timeouts.after_terminate, self._servers, hurried=self._hurry())
        self._view.summarize(self._failures)
        if self._signals:
            return INTERRUPTED + self._signals[0]
        return first_of(self._failures).code if self._failures else 0

    # --- starting: each of these returns False once a failure or a signal has come ---------------

    def _start_servers(self) -> bool:
        """Start the servers and wait until all are ready; return False after a failure or a signal."""
        if not self._start(self._servers):
            return False
        servers = self._supervisor.living(self._servers)
        if not self._until(lambda: all(server.ready for server in servers), SERVE_DEADLINE):
            late = next(server for server in servers if not server.ready)
            message = f"does not serve after {SERVE_DEADLINE:.0f} seconds; its own lines may say why"
            self._failures.append(Failure(late.label, message, self._view.tail(late.label)))
        return not self._is_over

    def _start(self, planned: dict[str, Process]) -> bool:
        """Start processes and wait until all guards have begun; return False after a failure or a signal."""
        report = self._supervisor.events.put
        started = [
            self._supervisor.add(GuardedProcess(process, self._executor, self._view.show, report))
            for process in planned.values()
        ]
        if not self._until(lambda: all(one.began for one in started), self._executor.begin_deadline):
            late = next(one for one in started if not one.began)
            message = f"no Python answers on {late.process.host.ssh}; see what hangs there"
            self._failures.append(Failure(late.label, message))
        return not self._is_over

    def _until(self, done: Callable[[], bool], seconds: float | None) -> bool:
        return self._supervisor.until(lambda: done() or self._is_over, seconds)

    @property
    def _is_over(self) -> bool:
        return bool(self._failures or self._signals)

    # --- events ----------------------------------------------------------------------------------

    def _handle(self, event: ProcessEvent) -> None:
        """Record a signal, or the failure of a process. The end of a server is no failure if others have its parts."""
        if event.what == "signal" and not (event.number == signal.SIGPIPE and self._signals):
            self._signals.append(event.number)
        if event.what != "ended" or self._ending:
            return
        one = self._supervisor.children[event.label]
        code, tail, is_server = one.code, self._view.tail(one.label), one.process.is_server
        parts = set(one.process.host.parts)
        others = {part for other in self._supervisor.living(self._servers) for part in other.process.host.parts}
        if not one.began:
            self._failures.append(self._executor.refusal(one.process, code, tail))
        elif is_server and parts and parts <= others and self._supervisor.living(self._trainers):
            self._view.announce(f"{one.label} {ending(code)}; other servers have its parts, so training goes on")
        elif code or is_server:
            self._failures.append(Failure(one.label, ending(code), tail, code if 0 < code < 126 else 1))

    # --- ending ----------------------------------------------------------------------------------

    def _stop_trainers(self) -> None:
        """Stop the trainers; after a failure, first give them time to end by themselves."""
        timeouts, running, hurried = self._timeouts, list(self._trainers), self._hurry()
        if self._signals:
            self._ending = True
            name: SignalName = "INT" if self._signals[0] == signal.SIGINT else "TERM"
            self._supervisor.stop(name, timeouts.after_interrupt, running, hurried=hurried)
        elif self._failures:
            self._supervisor.until(lambda: not self._supervisor.living(running) or hurried(), timeouts.after_failure)
            self._ending = True
            self._supervisor.stop("TERM", timeouts.after_terminate, running, hurried=self._hurry())

    def _hurry(self) -> Callable[[], bool]:
        """Return a function that tells whether a signal has come since this call, such as a second Ctrl-C."""
        num_signals = len(self._signals)
        return lambda: len(self._signals) > num_signals

    def __enter__(self) -> "Launch":
        """Install signal handlers. If SIGINT is ignored, as in a shell's background job, it stays ignored."""
        self._before = take_over(self._signal)
        return self

    def _signal(self, number: int, frame: FrameType | None = None) -> None:
        self._supervisor.events.put(ProcessEvent("signal", number=number))

    def close(self) -> None:
        """Kill the processes that still run, and restore the signal handlers."""
        try:
            self._ending = True
            self._supervisor.close()
        finally:
            put_back(self._before)


@dataclass
class Tail:
    """The last lines on stderr of one speaker, which is a process or one of torchrun's ranks."""

    speaker: str
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    error_at: int | None = None  # the position of its first error among those of all speakers


def cause(tails: Sequence[Tail], own: str) -> Tail | None:
    """Return the last lines of the process that failed first, None if none has.

    Ranks come before torchrun (`own`), reports of another process' failure last.
    """
    failed = sorted((tail for tail in tails if tail.error_at is not None), key=lambda tail: tail.error_at or 0)
    of_ranks = [tail for tail in failed if tail.speaker != own] or failed
    first = next((tail for tail in of_ranks if not is_consequence(tail.lines)), None)
    # a killed rank has printed nothing: torchrun says so, and other ranks report only consequences
    killed = (tail for tail in tails if tail.speaker == own and any(map(KILLED.search, tail.lines)))
    return first or next(killed, None) or next(iter(of_ranks), None)


def first_of(failures: Sequence[Failure]) -> Failure:
    """Return the first failure that is not a consequence of another process' failure; if there is none, the first."""
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


def without_noise(tail: Sequence[str]) -> tuple[str, ...]:
    """Return the lines without torchrun's banner and without its log; all lines if nothing else is left."""
    own = next((i for i, line in enumerate(tail) if TORCHRUN_NOISE.search(line)), len(tail))
    begin = next((i for i, line in enumerate(tail[:own]) if not TORCHRUN_BANNER.match(line)), own)
    return tuple(tail[begin:own] or tail)


class View:
    """Prints the lines of all processes; thread-safe. Calls `when_unread` once if nobody reads the output any more."""

    def __init__(self, labels: Sequence[str], when_unread: Callable[[], None] = lambda: None) -> None:
        self._streams: dict[bool, TextIO] = {False: sys.stdout, True: sys.stderr}
        self._when_unread = when_unread
        self._width = max(map(len, labels), default=0)
        self._tails: dict[str, dict[str, Tail]] = {label: {} for label in labels}  # by label, then by speaker
        self._num_errors = 0
        self._lock = threading.Lock()
        self._is_unread = False

    def show(self, label: str, line: str, *, is_error: bool) -> None:
        """Print one line of a process; `line` has no line end. Keep the line for `tail` if it is from stderr."""
        speaker, line = label, line.rpartition("\r")[2]
        if label.endswith("/trainers") and (found := OF_RANK.match(line)):  # [default2]: of gpu1/trainers
            speaker, line = f"{label.removesuffix('s')}-{found[1]}", line[found.end() :]
        with self._lock:
            if is_error:
                tail = self._tails[label].setdefault(speaker, Tail(speaker))
                tail.lines.append(line)
                if tail.error_at is None and ERROR.match(line):
                    self._num_errors += 1
                    tail.error_at = self._num_errors
            self._write(f"{speaker:<{self._width}} | {line}\n", is_error=is_error)

    def announce(self, line: str) -> None:
        """Print a message of the launcher itself."""
        with self._lock:
            self._write(f"hoploom: {line}\n", is_error=True)

    def tail(self, label: str) -> tuple[str, ...]:
        """Return a process' last lines on stderr; if a rank or torchrun has failed, only those of the first to fail."""
        with self._lock:
            tails = list(self._tails[label].values())
            first = cause(tails, label)
            shown = tails if first is None else [first]
            return tuple(
                line if tail.speaker == label else f"{tail.speaker} | {line}" for tail in shown for line in tail.lines
            )

    def summarize(self, failures: Sequence[Failure]) -> None:
        """Print the error of the process that failed first, then the labels of the other processes that failed."""
        if not failures:
            return
        first = first_of(failures)
        is_phrase = first.message.startswith(("ended", "was killed"))
        lines = [f"\nhoploom: first error: {first.label}{' ' if is_phrase else ': '}{first.message}"]
        lines += [f"  {line}" for line in without_noise(first.tail)[-SHOWN_LINES:]]
        others = [failure.label for failure in failures if failure is not first]
        if others:
            lines.append(f"after that: {', '.join(others)} failed, too")
        with self._lock:
            self._write("".join(f"{line}\n" for line in lines), is_error=True)

    def _write(self, text: str, *, is_error: bool) -> None:
        """Write `text`. If the reader is gone, discard this and later output, and call `when_unread` once."""
        stream = self._streams[is_error]
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())  # flushing at the end would change the exit code
            if not self._is_unread:
                self._is_unread = True
                self._when_unread()
