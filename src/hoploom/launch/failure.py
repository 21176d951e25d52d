"""What went wrong with one process, in words: who, how it ended, and the last it said."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

TORCHRUN_NOISE = re.compile(r"torch/distributed/elastic/\S+\.py:\d+\]")
TORCHRUN_BANNER = re.compile(r"\s*$|\*+$|Setting OMP_NUM_THREADS")  # what it says at every start
CONSEQUENCES = ("PeerError", "no sign of life came from")  # another one failed first
LOST_CONNECTION = 255  # ssh's exit code for its own troubles


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
        return any(word in line for line in self.tail for word in CONSEQUENCES)


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
