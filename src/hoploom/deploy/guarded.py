"""Supervise the programs of a cluster: a ProcessGuard per program, on its host, ends it when this process ends."""

import json
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple

from hoploom.deploy import guard
from hoploom.deploy.cluster_file import Process
from hoploom.errors import ConfigError
from hoploom.serve import Ready
from hoploom.system import killed_by

LOST_CONNECTION = 255  # ssh's exit code for its own errors
CONSEQUENCES = ("PeerError", "no sign of life came from", "hoploom: interrupted")  # after another's failure
LONGEST_LINE = 65536  # bytes; a longer one is shown in pieces
MOST_JOB = 60_000  # bytes that a pipe takes before they are read
SignalName = Literal["INT", "TERM", "KILL"]
HEARTBEAT_INTERVAL = 10.0  # seconds
KILL_TIMEOUT = 15.0  # seconds from SIGKILL until everything is gone
LAST_LINES = 5.0  # seconds for the last lines to be read once the process has ended
# Runs the Python source in the first line of stdin. -I: a json.py in the working directory is not imported.
BOOT = ("-I", "-c", 'import json;exec(json.loads(open(0,"rb",0,closefd=False).readline()))')


@dataclass(frozen=True)
class Failure:
    """The failure of one process: a message, the last lines of its stderr, and an exit code for the launch."""

    label: str
    message: str
    tail: tuple[str, ...] = ()  # the last lines of its stderr
    code: int = 1

    @property
    def is_consequence(self) -> bool:
        """Whether this process failed only because another process had failed."""
        return is_consequence(self.tail)


def is_consequence(lines: Iterable[str]) -> bool:
    """Return whether these output lines of a process report that another process has failed."""
    return any(word in line for line in lines for word in CONSEQUENCES)


def ending(code: int) -> str:
    """Return a phrase for messages that says how a process with this exit code ended."""
    number = code - 128 if code > 128 else -code
    if number in set(signal.Signals):
        return killed_by(number)
    if code == LOST_CONNECTION:
        return f"ended with exit code {code}, or the connection to its host broke; its last lines say which"
    return f"ended with exit code {code}" if code else "ended early, though with exit code 0"


class Executor:
    """Starts guarded processes on this host; its subclass `Ssh` starts them on other hosts."""

    silence: float | None = None  # seconds without a heartbeat, after which a guard ends its program; None: no limit
    begin_deadline = 60.0  # seconds within which a guard must begin

    def arguments(self, process: Process) -> list[str]:
        """Return the command, as a list of words, that starts the guard of a process."""
        return [process.host.python, *BOOT]

    def shown(self, process: Process) -> str:
        """Return a shell command with which the user can start the process without a launch."""
        return by_hand(process)

    def refusal(self, process: Process, code: int, tail: Sequence[str]) -> Failure:
        """Return the failure to report if a process ended before its guard began to run."""
        message = f"{process.host.python} ended with exit code {code} before it ran anything; give a working Python"
        return Failure(process.label, message, tuple(tail), 1)


def by_hand(process: Process) -> str:
    """Return a shell command that starts the process on its host without a guard. LOGS in it stands for a folder."""
    words = ["LOGS" if word == guard.LOGS else word for word in process.words]
    variables = [f"{name}={shlex.quote(value)}" for name, value in process.environment.items()]
    return " ".join([f"cd {shlex.quote(process.folder)} &&", *variables, shlex.join(words)])


ShowLine = Callable[..., None]  # (label, line, *, is_error): takes each line that a process prints


class ProcessEvent(NamedTuple):
    """An event for the supervisor: a change of one child process, or a signal to this process."""

    what: Literal["began", "ready", "ended", "signal"]
    label: str = ""
    number: int = 0  # of the signal


class GuardedProcess:
    """A program that runs under a guard. This object starts both and has pipes to the guard; `close` ends both."""

    def __init__(
        self, process: Process, executor: Executor, show: ShowLine, report: Callable[[ProcessEvent], None]
    ) -> None:
        self.process, self.label = process, process.label
        self.began = False
        self.ended = False  # set by the supervisor, before it handles the end
        self.ready: Ready | None = None  # the line that a server prints when it is ready
        self.code = 0  # the exit code, once the process has ended
        self._show, self._report = show, report
        job = _job(process, executor.silence)
        words = executor.arguments(process)
        try:
            self._popen = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal is for this process alone, which passes it on
            )
        except OSError as error:
            raise ConfigError(f"{words[0]} cannot be run: {error.strerror}; install it, or give its path") from error
        self._write(job)
        os.set_blocking(self._stdin.fileno(), False)
        streams = ((self._popen.stdout, False), (self._popen.stderr, True))
        self._readers = [threading.Thread(target=self._read, args=given, daemon=True) for given in streams]
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    def send(self, name: SignalName | Literal["HEARTBEAT"]) -> None:
        """Send the guard a signal for its program, or a heartbeat, which shows that this process is alive."""
        self._write(b"\n" if name == "HEARTBEAT" else f"{name}\n".encode())

    def close(self) -> None:
        """End the process at once, if it still runs. When its stdin is closed, a guard stops its program."""
        with suppress(OSError):
            self._stdin.close()
        self._popen.kill()
        for thread in (self._waiter, *self._readers):
            thread.join(LAST_LINES)

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._popen.stdin is not None
        return self._popen.stdin

    def _write(self, words: bytes) -> None:
        """Write to the guard without blocking. Errors are ignored, because `_wait` reports the end of a guard."""
        with suppress(OSError, ValueError):
            os.write(self._stdin.fileno(), words)

    def _read(self, stream: IO[bytes], is_error: bool) -> None:
        with stream:
            for raw in iter(lambda: stream.readline(LONGEST_LINE), b""):
                self._take(raw.decode(errors="replace").rstrip("\r\n"), is_error=is_error)

    def _take(self, line: str, *, is_error: bool) -> None:
        if not is_error and not self.began and guard.MARK in line:
            self.began = True
            return self._report(ProcessEvent("began", self.label))
        self._show(self.label, line, is_error=is_error)
        if self.process.is_server and not is_error and self.ready is None:
            self.ready = Ready.read(line)
            if self.ready is not None:
                self._report(ProcessEvent("ready", self.label))

    def _wait(self) -> None:
        self.code = self._popen.wait()
        for thread in self._readers:
            thread.join(LAST_LINES)
        self._report(ProcessEvent("ended", self.label))


class Supervisor:
    """A group of guarded processes. `until` calls `handle` with their events. After `close`, none is running."""

    def __init__(self, handle: Callable[[ProcessEvent], None] = lambda event: None) -> None:
        self.events: queue.SimpleQueue[ProcessEvent] = queue.SimpleQueue()
        self.children: dict[str, GuardedProcess] = {}  # by label
        self._handle = handle
        self._next_heartbeat = 0.0

    def add(self, child: GuardedProcess) -> GuardedProcess:
        """Supervise `child` and return it. The child must report its events to `self.events`."""
        self.children[child.label] = child
        return child

    def living(self, labels: Iterable[str] | None = None) -> list[GuardedProcess]:
        """Return the children that have not ended; if `labels` is given, only children with one of these labels."""
        found = self.children.values() if labels is None else map(self.children.get, labels)
        return [child for child in found if child is not None and not child.ended]

    def until(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Handle events and send heartbeats until `done` returns True. Return False if `seconds` pass before that."""
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
        """Send a signal to these children (default: all); kill them after `seconds`, or once `hurried` returns True."""
        named = None if labels is None else list(labels)
        for child in self.living(named):
            child.send(name)
        self.until(lambda: not self.living(named) or hurried(), seconds)
        for child in self.living(named):
            child.send("KILL")
        self.until(lambda: not self.living(named), KILL_TIMEOUT)

    def close(self) -> None:
        """Kill the children that still run."""
        try:
            self.stop("KILL", KILL_TIMEOUT)
        finally:
            for child in self.children.values():
                child.close()


def _job(process: Process, silence: float | None) -> bytes:
    """Return two lines for the guard's stdin: the source of guard.py and the job, each as JSON."""
    source = Path(guard.__file__).read_text(encoding="utf-8")
    job = {
        "words": process.words,
        "environment": dict(process.environment),
        "folder": process.folder,
        "silence": silence,
    }
    lines = f"{json.dumps(source)}\n{json.dumps(job)}\n".encode()
    if len(lines) > MOST_JOB:
        raise ConfigError(
            f"{process.label} has {len(lines)} bytes of words and variables; give it less than {MOST_JOB}"
        )
    return lines
