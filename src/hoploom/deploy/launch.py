"""Run a cluster from here: servers, then trainers, until the trainers have ended; then nothing is left running.

Before them, hosts fetch their parts of the store where the cluster file has a `cache`.
The first failure ends all others. A server's end is one only where nobody else has its parts. Lines are shown whole,
each with the label of who said it; the last of each are kept, to tell in the end who failed first and how.
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
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

from hoploom.config.values import join_address, split_address
from hoploom.deploy.cluster_file import Cluster, Process
from hoploom.deploy.log_files import LogFiles
from hoploom.deploy.programs import interface_note, processes
from hoploom.deploy.ssh import Ssh
from hoploom.deploy.supervise import (
    Executor,
    Failure,
    KeptProcess,
    Local,
    ProcessEvent,
    SignalName,
    Supervisor,
    ending,
    tells_of_another,
)
from hoploom.errors import ConfigError
from hoploom.ranks.stopping import put_back, take_over

LOOPBACK = "127.0.0.1"
INTERRUPTED = 128  # and the signal's number: an exit code
SHOWN_LINES = 40  # of the first error
OF_RANK = re.compile(r"\[default(\d+)\]:")  # how torchrun begins a line of a local rank
TORCHRUN_NOISE = re.compile(r"torch/distributed/elastic/\S+\.py:\d+\]")
TORCHRUN_BANNER = re.compile(r"\s*$|\*+$|Setting OMP_NUM_THREADS")  # what it says at every start
KEPT_LINES = 200  # of each speaker's stderr
ERROR = re.compile(
    r"(\[\w+\]: ?)*(hoploom: (?!warning)|[\w.]*(Error|Exception|Interrupt)\b)"
)  # a traceback's last line
KILLED = re.compile(r"failed \(exitcode: -\d+\) local_rank")  # torchrun, of a rank that said nothing itself


@dataclass(frozen=True)
class Patience:
    """How many seconds a launch waits, and for what."""

    serve: float = 300.0  # until all servers are ready
    after_failure: float = 5.0  # for the others to end by themselves once one has failed
    after_terminate: float = 10.0  # between SIGTERM and SIGKILL
    after_interrupt: float = 45.0  # the same after Ctrl-C: torchrun gives its processes 30, to write a checkpoint say


def run(cluster: Cluster, command: Sequence[str], logs: Path | None = None) -> int:
    """Start, show and end all processes of a cluster; the exit code. Their lines also go to files in the folder `logs`.

    >>> run(read_cluster("cluster.toml"), ["train", "run.toml"])
    """
    planned, executor = processes(with_free_ports(cluster), command), executor_of(cluster)
    with Launch(planned, executor, logs=logs) as launch:
        return launch.run()


def shell_lines(cluster: Cluster, command: Sequence[str]) -> list[str]:
    """Return what a launch would start: a line for a shell for each process, after a comment that names it."""
    executor, planned = executor_of(cluster), processes(with_free_ports(cluster), command)
    shown = [f"# {process.label}\n{executor.shown(process)}" for process in planned]
    return [*interface_note(cluster), *shown]


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

    def __init__(
        self,
        planned: Sequence[Process],
        executor: Executor,
        patience: Patience | None = None,
        *,
        logs: Path | None = None,
    ) -> None:
        self._servers = [process for process in planned if process.is_server]
        self._fetches = [process for process in planned if process.is_fetch]
        self._trainers = [process for process in planned if not (process.is_server or process.is_fetch)]
        self._executor, self._patience = executor, patience or Patience()
        self._logs = None if logs is None else LogFiles(logs)
        labels = [process.label for process in planned]
        self._view = View(labels, when_unread=lambda: self._signal(signal.SIGPIPE), logs=self._logs)
        self._supervisor = Supervisor(executor, self._view.show, self._handle)
        self._failures: list[Failure] = []
        self._signals: list[int] = []
        self._before: dict[int, Any] = {}
        self._ending = False

    def run(self) -> int:
        """Until the trainers have ended, one process has failed, or a signal came."""
        if self._logs is not None:
            self._view.announce(f"every process logs to a file of its own in {self._logs.folder}")
        if self._run_all(self._fetches) and self._start_servers():
            self._run_all(self._trainers)
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

    def _run_all(self, planned: Sequence[Process]) -> bool:
        """Whether all have begun and ended as they were to."""
        if self._start(planned):
            self._until(lambda: not self._supervisor.living(planned), None)
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
        """The gentler way first. What fetches stops as they do."""
        patience, running = self._patience, [*self._fetches, *self._trainers]
        if self._signals:
            self._ending = True
            is_interrupt = self._signals[0] == signal.SIGINT
            self._stop(running, "INT" if is_interrupt else "TERM", patience.after_interrupt)
        elif self._failures:
            hurried = self._hurry()
            self._supervisor.until(lambda: not self._supervisor.living(running) or hurried(), patience.after_failure)
            self._ending = True
            self._stop(running, "TERM", patience.after_terminate)

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
            if self._logs is not None:
                self._logs.close()


# --- what is shown -------------------------------------------------------------------------------


@dataclass
class Tail:
    """The last that one speaker said on stderr: a process, or one of torchrun's ranks."""

    speaker: str
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    error_at: int | None = None  # the place of its first error among all speakers' first ones

    @property
    def is_consequence(self) -> bool:
        return tells_of_another(self.lines)


def cause(tails: Sequence[Tail], own: str) -> Tail | None:
    """Of the speakers of one process, who failed first: one that tells of an error, and of no other's end.

    Its ranks' errors come before the account of torchrun, which speaks under the process' `own` name: that counts
    where a rank was killed, and where no rank told of an error.
    """
    told = sorted((tail for tail in tails if tail.error_at is not None), key=lambda tail: tail.error_at or 0)
    of_ranks = [tail for tail in told if tail.speaker != own] or told
    first = next((tail for tail in of_ranks if not tail.is_consequence), None)
    killed = (tail for tail in tails if tail.speaker == own and any(map(KILLED.search, tail.lines)))
    return first or next(killed, None) or next(iter(of_ranks), None)


def first_of(failures: Sequence[Failure]) -> Failure:
    """The one that began it all: the first in time that tells of no other's end."""
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


def without_noise(tail: Sequence[str]) -> tuple[str, ...]:
    """What the program itself said last: torchrun's own account of it is long and comes after."""
    own = next((i for i, line in enumerate(tail) if TORCHRUN_NOISE.search(line)), len(tail))
    begin = next((i for i, line in enumerate(tail[:own]) if not TORCHRUN_BANNER.match(line)), own)
    return tuple(tail[begin:own] or tail)


class View:
    """Where lines go. Any thread may call it; `when_unread` is called once nobody reads them any more."""

    def __init__(
        self, labels: Sequence[str], when_unread: Callable[[], None] = lambda: None, logs: LogFiles | None = None
    ) -> None:
        self._logs = logs
        self._streams: dict[bool, TextIO] = {False: sys.stdout, True: sys.stderr}
        self._when_unread = when_unread
        self._width = max(map(len, labels), default=0)
        self._tails: dict[str, dict[str, Tail]] = {label: {} for label in labels}  # of each of its speakers
        self._num_errors = 0
        self._lock = threading.Lock()
        self._is_unread = False

    def show(self, label: str, line: str, *, is_error: bool) -> None:
        """One line of a process, without its end."""
        line = line.rpartition("\r")[2]
        speaker, line = _speaker(label, line)
        with self._lock:
            if is_error:
                self._keep(self._tails[label].setdefault(speaker, Tail(speaker)), line)
            self._write(f"{speaker:<{self._width}} | {line}\n", is_error=is_error)
            self._log(speaker, line)

    def _log(self, speaker: str, line: str) -> None:
        """A folder that cannot be written to holds nobody up."""
        if self._logs is None:
            return
        try:
            self._logs.write(speaker, line)
        except (OSError, ValueError) as error:  # ValueError: closed, at the very end
            self._write(
                f"hoploom: warning: cannot write logs in {self._logs.folder} any more: {error}\n", is_error=True
            )
            self._logs = None

    def announce(self, line: str) -> None:
        """One line of our own."""
        with self._lock:
            self._write(f"hoploom: {line}\n", is_error=True)

    def tail(self, label: str) -> tuple[str, ...]:
        """The last lines of its stderr: of the rank that failed first, else of all who spoke."""
        with self._lock:
            tails = list(self._tails[label].values())
            first = cause(tails, label)
            shown = tails if first is None else [first]
            return tuple(
                line if tail.speaker == label else f"{tail.speaker} | {line}" for tail in shown for line in tail.lines
            )

    def summarize(self, failures: Sequence[Failure]) -> None:
        """The first error on top, the others below."""
        if not failures:
            return
        first = first_of(failures)
        is_phrase = first.message.startswith(("ended", "was killed"))
        lines = [f"{first.label}{' ' if is_phrase else ': '}{first.message}"]
        lines += [f"  {line}" for line in without_noise(first.tail)[-SHOWN_LINES:]]
        others = [failure.label for failure in failures if failure is not first]
        if others:
            lines.append(f"after that: {', '.join(others)} failed, too")
        with self._lock:
            self._write(f"\nhoploom: first error: {lines[0]}\n", is_error=True)
            self._write("".join(f"{line}\n" for line in lines[1:]), is_error=True)

    def _keep(self, tail: Tail, line: str) -> None:
        tail.lines.append(line)
        if tail.error_at is None and ERROR.match(line):
            self._num_errors += 1
            tail.error_at = self._num_errors

    def _write(self, text: str, *, is_error: bool) -> None:
        """A reader that has gone away is noted; the processes are not held up by it."""
        stream = self._streams[is_error]
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):
            _let_go(stream)
            if not self._is_unread:
                self._is_unread = True
                self._when_unread()


def _let_go(stream: TextIO) -> None:
    """What it still holds goes nowhere: flushing it at the end would change the exit code."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _speaker(label: str, line: str) -> tuple[str, str]:
    """gpu1/trainers: [default2]:... is what gpu1/trainer-2 says."""
    found = OF_RANK.match(line)
    if found is None or not label.endswith("/trainers"):
        return label, line
    return f"{label.removesuffix('s')}-{found[1]}", line[found.end() :]
