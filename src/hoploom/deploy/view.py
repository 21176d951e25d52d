"""One terminal view of all processes: whole lines, each with the label of who said it; only the last ones are kept."""

import os
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TextIO

from hoploom.deploy.failure import ERROR, Failure, Tail, cause, first_of, without_noise

SHOWN_LINES = 40  # of the first error
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
OF_RANK = re.compile(r"\[default(\d+)\]:")  # how torchrun begins a line of a local rank


class View:
    """Where lines go. Any thread may call it."""

    def __init__(self, labels: Sequence[str], out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._streams = {False: out or sys.stdout, True: err or sys.stderr}
        self._colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
        self._width = max(map(len, labels), default=0)
        self._tails: dict[str, dict[str, Tail]] = {label: {} for label in labels}  # of each of its speakers
        self._num_errors = 0
        self._lock = threading.Lock()
        self.is_deaf = False  # nobody reads what we write any more

    def show(self, label: str, line: str, *, is_error: bool) -> None:
        """One line of a process, without its end."""
        line = line.rpartition("\r")[2]
        speaker, line = _speaker(label, line)
        with self._lock:
            if is_error:
                self._keep(self._tails[label].setdefault(speaker, Tail(speaker)), line)
            self._write(f"{self._prefix(label, speaker, is_error)}{line}\n", is_error=is_error)

    def tell(self, line: str) -> None:
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
        lines = [f"{first.label} {first.message}" if _is_phrase(first.message) else f"{first.label}: {first.message}"]
        lines += [f"  {line}" for line in without_noise(first.tail)[-SHOWN_LINES:]]
        others = [failure for failure in failures if failure is not first]
        if others:
            lines.append(f"after that: {_listed(failure.label for failure in others)} failed, too")
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
            self.is_deaf = True
            _let_go(stream)


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


def _is_phrase(message: str) -> bool:
    return message.startswith(("ended", "was killed"))


def _listed(labels: Iterable[str]) -> str:
    return ", ".join(labels)
