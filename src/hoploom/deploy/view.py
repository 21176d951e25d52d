"""What is shown of a launch: whole lines, each with the label of who said it, and the first error on top.

Of each process only the last lines are kept, to tell what went wrong: who, how it ended, and the last it said.
"""

import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TextIO

SHOWN_LINES = 40  # of the first error
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
OF_RANK = re.compile(r"\[default(\d+)\]:")  # how torchrun begins a line of a local rank
TORCHRUN_NOISE = re.compile(r"torch/distributed/elastic/\S+\.py:\d+\]")
TORCHRUN_BANNER = re.compile(r"\s*$|\*+$|Setting OMP_NUM_THREADS")  # what it says at every start
CONSEQUENCES = ("PeerError", "no sign of life came from", "hoploom: interrupted")  # another one failed first
LOST_CONNECTION = 255  # ssh's exit code for its own troubles
KEPT_LINES = 200  # of each speaker's stderr
ERROR = re.compile(
    r"(\[\w+\]: ?)*(hoploom: (?!warning)|[\w.]*(Error|Exception|Interrupt)\b)"
)  # a traceback's last line
KILLED = re.compile(r"failed \(exitcode: -\d+\) local_rank")  # torchrun, of a rank that said nothing itself


# --- what went wrong -----------------------------------------------------------------------------


@dataclass
class Tail:
    """The last that one speaker said on stderr: a process, or one of torchrun's ranks."""

    speaker: str
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    error_at: int | None = None  # the place of its first error among all speakers' first ones

    @property
    def is_consequence(self) -> bool:
        return tells_of_another(self.lines)


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


def without_noise(tail: Sequence[str]) -> tuple[str, ...]:
    """What the program itself said last: torchrun's own account of it is long and comes after."""
    own = next((i for i, line in enumerate(tail) if TORCHRUN_NOISE.search(line)), len(tail))
    begin = next((i for i, line in enumerate(tail[:own]) if not TORCHRUN_BANNER.match(line)), own)
    return tuple(tail[begin:own] or tail)


# --- what is shown -------------------------------------------------------------------------------


class View:
    """Where lines go. Any thread may call it; `when_unread` is called once nobody reads them any more."""

    def __init__(self, labels: Sequence[str], when_unread: Callable[[], None] = lambda: None) -> None:
        self._streams: dict[bool, TextIO] = {False: sys.stdout, True: sys.stderr}
        self._when_unread = when_unread
        self._colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
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
            self._write(f"{self._prefix(label, speaker, is_error)}{line}\n", is_error=is_error)

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

    def _prefix(self, label: str, speaker: str, is_error: bool) -> str:
        written = f"{speaker:<{self._width}} | "
        if not self._streams[is_error].isatty():
            return written
        return f"\x1b[{self._colours[label]}m{written}\x1b[0m"

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
