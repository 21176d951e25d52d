"""A process that was started, here or elsewhere, under its keeper: its lines are shown, its end is reported."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol

from hoploom.deploy import keeper
from hoploom.deploy.cluster_file import Process
from hoploom.deploy.failure import Failure
from hoploom.deploy.view import View
from hoploom.errors import ConfigError
from hoploom.serve.ready import Ready

LONGEST_LINE = 65536  # bytes; a longer one is shown in pieces
MOST_JOB = 60_000  # bytes: what a pipe takes before anybody reads it
LAST_LINES = 5.0  # seconds for readers to come to the end once the process is gone
Happening = Literal["began", "serves", "ended", "deaf"]
SignalName = Literal["INT", "TERM", "KILL"]


class Executor(Protocol):
    """How processes are started on some kind of host."""

    @property
    def silence(self) -> float | None: ...

    def arguments(self, process: Process) -> list[str]: ...

    def shown(self, process: Process) -> str: ...

    def begin_deadline(self) -> float: ...

    def refusal(self, process: Process, code: int, tail: tuple[str, ...]) -> Failure | None: ...


class Event(NamedTuple):
    """Something happened to a process, or a signal came."""

    what: Happening | Literal["signal"]
    label: str = ""
    number: int = 0


class Started:
    """One process and its keeper. `close` leaves neither running."""

    def __init__(self, process: Process, executor: Executor, view: View, report: Callable[[Event], None]) -> None:
        self.process = process
        self.began, self.serves = False, False
        self.code: int | None = None
        self._told_deaf = False
        self._view, self._report = view, report
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
        assert self._popen.stdin is not None
        os.set_blocking(self._popen.stdin.fileno(), False)
        self._threads = [
            threading.Thread(target=self._read, args=(is_error,), daemon=True) for is_error in (False, True)
        ]
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self._threads, self._waiter):
            thread.start()

    @property
    def label(self) -> str:
        return self.process.label

    def send(self, name: SignalName | Literal[""]) -> None:
        """Have the keeper pass a signal on; "": a sign of life."""
        self._write(f"{name}\n".encode())

    def cut(self) -> None:
        """Without a word to the keeper: by its stdin's end it stops what it runs, if it can still hear."""
        with suppress(OSError):
            self._stdin().close()

    def close(self) -> None:
        """End it at once, if it still runs."""
        self.cut()
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self._popen.pid, signal.SIGKILL)
        for thread in (self._waiter, *self._threads):
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
            return self._report(Event("began", self.label))
        self._view.show(self.label, line, is_error=is_error)
        if self._view.is_deaf and not self._told_deaf:
            self._told_deaf = True
            self._report(Event("deaf", self.label))
        if self.process.is_server and not is_error and not self.serves and Ready.read(line) is not None:
            self.serves = True
            self._report(Event("serves", self.label))

    def _wait(self) -> None:
        code = self._popen.wait()
        for thread in self._threads:
            thread.join(LAST_LINES)
        self.code = code
        self._report(Event("ended", self.label, code))


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
