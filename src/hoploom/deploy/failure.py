"""What went wrong with one process, in words: who, how it ended, and the last it said."""

import re
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TORCHRUN_NOISE = re.compile(r"torch/distributed/elastic/\S+\.py:\d+\]")
TORCHRUN_BANNER = re.compile(r"\s*$|\*+$|Setting OMP_NUM_THREADS")  # what it says at every start
CONSEQUENCES = ("PeerError", "no sign of life came from", "hoploom: interrupted")  # another one failed first
LOST_CONNECTION = 255  # ssh's exit code for its own troubles
KEPT_LINES = 200  # of each speaker's stderr
ERROR = re.compile(
    r"(\[\w+\]: ?)*(hoploom: (?!warning)|[\w.]*(Error|Exception|Interrupt)\b)"
)  # a traceback's last line
KILLED = re.compile(r"failed \(exitcode: -\d+\) local_rank")  # torchrun, of a rank that said nothing itself


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
    """Whether somebody else failed first."""
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
