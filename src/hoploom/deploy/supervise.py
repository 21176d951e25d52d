"""Processes under a keeper each: started, watched by way of one queue, and ended by one ladder of signals.

The ladder is a signal, so many seconds, then SIGKILL. Keepers pass signals on to what they keep, and end all of it when
this process is gone, however that ended.
"""

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
from typing import IO, Literal, NamedTuple, Protocol

from hoploom.deploy import keeper
from hoploom.deploy.cluster_file import Process
from hoploom.errors import ConfigError
from hoploom.serve.ready import Ready

LOST_CONNECTION = 255  # ssh's exit code for its own troubles
CONSEQUENCES = ("PeerError", "no sign of life came from", "hoploom: interrupted")  # another one failed first
LONGEST_LINE = 65536  # bytes; a longer one is shown in pieces
MOST_JOB = 60_000  # bytes: what a pipe takes before anybody reads it
LAST_LINES = 5.0  # seconds for readers to come to the end once the process is gone
SIGN_OF_LIFE = 10.0  # seconds between two
AFTER_KILL = 15.0  # seconds until everything is gone
# Runs what the first line of stdin holds. -I: a json.py in the working directory is none of its business.
BOOT = ("-I", "-c", 'import json;exec(json.loads(open(0,"rb",0,closefd=False).readline()))')
SignalName = Literal["INT", "TERM", "KILL"]


@dataclass(frozen=True)
class Failure:
    """A process that failed."""

    label: str
    message: str
    tail: tuple[str, ...] = ()  # the last lines of its stderr
    code: int = 1

    @property
    def is_consequence(self) -> bool:
        """Whether it only tells of another one's end."""
        return tells_of_another(self.tail)


def tells_of_another(lines: Iterable[str]) -> bool:
    """Whether another process failed first."""
    return any(word in line for line in lines for word in CONSEQUENCES)


def ending(code: int) -> str:
    """How a process ended."""
    number = code - 128 if code > 128 else -code
    if number in set(signal.Signals):
        name = signal.Signals(number).name
        hint = "; the kernel does that when memory runs out: see dmesg" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    if code == LOST_CONNECTION:
        return f"ended with exit code {code}, or the connection to its host broke; its last lines say which"
    return f"ended with exit code {code}" if code else "ended early, though with exit code 0"


class Executor(Protocol):
    """How processes are started on some kind of host."""

    @property
    def silence(self) -> float | None: ...

    def arguments(self, process: Process) -> list[str]: ...

    def shown(self, process: Process) -> str: ...

    def begin_deadline(self) -> float: ...

    def refusal(self, process: Process, code: int, tail: tuple[str, ...]) -> Failure: ...


class Local:
    """The executor of this host."""

    silence: float | None = None  # the end of a pipe is never missed on one host

    def arguments(self, process: Process) -> list[str]:
        """What starts the keeper."""
        return [process.host.python, *BOOT]

    def shown(self, process: Process) -> str:
        """The same by hand."""
        return by_hand(process)

    def begin_deadline(self) -> float:
        """Seconds until the keeper must have begun."""
        return 60.0

    def refusal(self, process: Process, code: int, tail: Sequence[str]) -> Failure:
        """What is wrong where no keeper began."""
        message = f"{process.host.python} ended with exit code {code} before it ran anything; give a working Python"
        return Failure(process.label, message, tuple(tail), 1)


def by_hand(process: Process) -> str:
    """A line for a shell on the process' host; the folder for logs is the keeper's."""
    words = ["LOGS" if word == keeper.LOGS else word for word in process.words]
    variables = [f"{name}={shlex.quote(value)}" for name, value in process.environment.items()]
    return " ".join([f"cd {shlex.quote(process.folder)} &&", *variables, shlex.join(words)])


# --- one process ---------------------------------------------------------------------------------


class ProcessEvent(NamedTuple):
    """Something happened to a process, or a signal came."""

    what: Literal["began", "ready", "ended", "signal"]
    label: str = ""
    number: int = 0


class ShowLine(Protocol):
    """Takes each line that a process prints."""

    def __call__(self, label: str, line: str, *, is_error: bool) -> None: ...


class KeptProcess:
    """One process and its keeper. `close` leaves neither running."""

    def __init__(
        self, process: Process, executor: Executor, show: ShowLine, report: Callable[[ProcessEvent], None]
    ) -> None:
        self.process = process
        self.began = False
        self.ready: Ready | None = None  # of a server
        self.code: int | None = None  # once its end was handled
        self._show, self._report = show, report
        job = _job(process, executor.silence)
        try:
            self._popen = subprocess.Popen(
                executor.arguments(process),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal is for us alone: we pass it on
            )
        except OSError as error:
            name = executor.arguments(process)[0]
            raise ConfigError(f"{name} cannot be run: {error.strerror}; install it, or give its path") from error
        self._write(job)
        os.set_blocking(self._stdin().fileno(), False)
        self._readers = [
            threading.Thread(target=self._read, args=(is_error,), daemon=True) for is_error in (False, True)
        ]
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    @property
    def label(self) -> str:
        return self.process.label

    def send(self, name: SignalName | Literal[""]) -> None:
        """Have the keeper pass a signal on; "": a sign of life."""
        self._write(f"{name}\n".encode())

    def close(self) -> None:
        """End it at once, if it still runs: by its stdin's end a keeper stops what it keeps."""
        with suppress(OSError):
            self._stdin().close()
        self._popen.kill()
        for thread in (self._waiter, *self._readers):
            thread.join(LAST_LINES)

    def _stdin(self) -> IO[bytes]:
        assert self._popen.stdin is not None
        return self._popen.stdin

    def _write(self, words: bytes) -> None:
        """As far as the pipe takes it: who does not read is stuck or gone, and its deadline passes."""
        with suppress(OSError, ValueError):
            os.write(self._stdin().fileno(), words)

    def _read(self, is_error: bool) -> None:
        stream = self._popen.stderr if is_error else self._popen.stdout
        assert stream is not None
        with stream:
            for raw in iter(lambda: stream.readline(LONGEST_LINE), b""):
                self._take(raw.decode(errors="replace").rstrip("\r\n"), is_error=is_error)

    def _take(self, line: str, *, is_error: bool) -> None:
        if not is_error and not self.began and keeper.MARK in line:
            self.began = True
            return self._report(ProcessEvent("began", self.label))
        self._show(self.label, line, is_error=is_error)
        if self.process.is_server and not is_error and self.ready is None:
            self.ready = Ready.read(line)
            if self.ready is not None:
                self._report(ProcessEvent("ready", self.label))

    def _wait(self) -> None:
        code = self._popen.wait()
        for thread in self._readers:
            thread.join(LAST_LINES)
        self._report(ProcessEvent("ended", self.label, code))


def _job(process: Process, silence: float | None) -> bytes:
    """The keeper's text, and what it is to run: a line each."""
    source = Path(keeper.__file__).read_text(encoding="utf-8")
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


# --- all of them ---------------------------------------------------------------------------------


class Supervisor:
    """Starts processes, and hands what happens to them to `handle`. After `close` none is running."""

    def __init__(self, executor: Executor, show: ShowLine, handle: Callable[[ProcessEvent], None]) -> None:
        self.events: queue.SimpleQueue[ProcessEvent] = queue.SimpleQueue()
        self.kept: dict[str, KeptProcess] = {}  # by label
        self._executor, self._show, self._handle = executor, show, handle
        self._beat_at = 0.0

    def start(self, processes: Sequence[Process]) -> list[KeptProcess]:
        """Start these."""
        for process in processes:
            self.kept[process.label] = KeptProcess(process, self._executor, self._show, self.events.put)
        return [self.kept[process.label] for process in processes]

    def living(self, processes: Iterable[Process] | None = None) -> list[KeptProcess]:
        """Of these, or of all, those that were started and have not ended."""
        labels = list(self.kept) if processes is None else [process.label for process in processes]
        return [self.kept[label] for label in labels if label in self.kept and self.kept[label].code is None]

    def until(self, done: Callable[[], bool], seconds: float | None) -> bool:
        """Take in what happens; whether it is done within so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._take_event(deadline)
        return True

    def stop(
        self,
        name: SignalName,
        seconds: float,
        processes: Sequence[Process] | None = None,
        *,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """A signal, and SIGKILL for those that are there after so many seconds, or once it is hurried."""
        for one in self.living(processes):
            one.send(name)
        self.until(lambda: not self.living(processes) or hurried(), seconds)
        for one in self.living(processes):
            one.send("KILL")
        self.until(lambda: not self.living(processes), AFTER_KILL)

    def close(self) -> None:
        """End at once what still runs."""
        try:
            self.stop("KILL", AFTER_KILL)
        finally:
            for one in self.kept.values():
                one.close()

    def _take_event(self, deadline: float | None) -> None:
        """Wait for one, and give keepers their sign of life meanwhile."""
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + SIGN_OF_LIFE
            for one in self.living():
                one.send("")
        until = self._beat_at if deadline is None else min(self._beat_at, deadline)
        with suppress(queue.Empty):
            event = self.events.get(timeout=max(0.0, until - now))
            if event.what == "ended":
                self.kept[event.label].code = event.number
            self._handle(event)
