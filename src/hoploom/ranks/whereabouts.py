"""Where every rank waits for the others, so that ranks which wait for each other for ever learn it within seconds.

Each rank counts what it begins together with the others, on several channels: calls of a context, averaged gradients,
loaders. A rank that waits long leaves a note where ranks meet: on which channel, for which number, and how far it has
come on all of them. Once all ranks wait, and each of them for one that has not begun what it waits for, none can go on:
that is a proof, however slow a rank or a network is. Ranks that wait for a few seconds pay for it, the others nothing.
"""

import atexit
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import FrameType

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from hoploom.errors import ConfigError
from hoploom.ranks.held_up import HeldUp
from hoploom.ranks.rendezvous import within

NOTES = "hoploom/whereabouts"
PATIENCE = 2.0  # seconds of a wait before a rank says where it waits
INTERVAL = 1.0  # seconds between two looks at what others say
PER_RANK = 0.002  # seconds more for each rank, for who keeps the notes
GOODBYE = 2.0  # seconds to take a note back
INSIDE = ("hoploom", "torch", "contextlib", "functools")  # modules that are not the user's own

SAME_CALLS = (
    "every rank must make the same calls, in the same order and equally often: look for a call that only some ranks "
    "reach (if context.is_main: ...), or for loops of different length"
)

Wait = Callable[[float], bool]  # waits at most so many seconds; whether it is over


@dataclass(frozen=True)
class LongWait:
    """What a rank that waits says: for what, and how far it has come."""

    channel: str
    number: int
    says: str  # the call, in words
    begun: Mapping[str, int]  # per channel
    serial: int  # of this rank's long waits

    def is_blocked_by(self, other: "LongWait") -> bool:
        """Whether the other one has yet to begin what this one waits for."""
        return other.begun.get(self.channel, 0) < self.number


def calling(doing: str) -> tuple[str, str]:
    """The function of Hoploom that the user called, and the line that called it, e.g. ("evaluate", "train.py:20")."""
    frame, function = sys._getframe(1), doing
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "hoploom":
            name = frame.f_code.co_name
            function = function if name.startswith("_") else name
        elif package not in INSIDE:
            break
        frame = frame.f_back
    return function, f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def call_chain() -> list[str]:
    """Return the lines of the script that lead to this call: the same on ranks that run the same functions.

    The line that calls the first function is left out: one rank may be the process that starts the others.
    """
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package, is_top = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_name == "<module>"
        if package == "multiprocessing" or (lines and (is_top or package == "torch")):
            break
        if package not in INSIDE:
            lines.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return lines


def whereabouts() -> "Whereabouts | None":
    """Those of this process, where a process group makes it one of several ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return _of_group(dist.group.WORLD)


def is_waiting(store: Store, rank: int) -> bool:
    """Whether a rank of the group that met there has waited for long in a call of ours."""
    return store.check([f"{NOTES}/at/{rank}"]) and store.get(f"{NOTES}/at/{rank}") != b""


def waits_for(store: Store, rank: int, here: "Whereabouts") -> bool:
    """Return whether a rank has waited for long in a call of ours that this rank has not begun."""
    note = store.get(f"{NOTES}/at/{rank}") if store.check([f"{NOTES}/at/{rank}"]) else b""
    return bool(note) and here.has_not_begun(_read(note))


def has_left(store: Store, rank: int) -> bool:
    """Whether a rank of the group that met there has, for good."""
    return bool(store.check([f"{NOTES}/left/{rank}"]))


@lru_cache(maxsize=1)
def _of_group(group: dist.ProcessGroup) -> "Whereabouts":
    store = PrefixStore(NOTES, dist.distributed_c10d._get_default_store())
    here = Whereabouts(group.rank(), group.size(), store)
    atexit.register(here.leave)  # of a script that never takes its process group down
    return here


class Whereabouts:
    """This rank's part: it counts, says where it waits, and rank 0 judges when all of them do."""

    def __init__(self, rank: int, world_size: int, store: PrefixStore) -> None:
        self.rank, self.world_size = rank, world_size
        self._store: PrefixStore | None = store  # until this rank leaves
        self._held_up: HeldUp | None = None
        self._begun: Counter[str] = Counter()
        self._waits = 0
        self.averaging_seconds = 0.0  # that this rank has waited for the others' gradients

    def begin(self, channel: str) -> int:
        """Count one more thing that this rank does with the others; its number, from 1."""
        self._begun[channel] += 1
        return self._begun[channel]

    def take_back(self, channel: str) -> None:
        """Uncount the last thing begun: it turned out to be this rank's alone."""
        self._begun[channel] -= 1

    def has_not_begun(self, other: LongWait) -> bool:
        """Return whether another rank waits for something that this rank has yet to begin."""
        return self._begun[other.channel] < other.number

    def wait(self, channel: str, says: str, waited: Wait) -> None:
        """Wait for the last thing begun on this channel.

        Raises ConfigError where all ranks wait and none can go on, DistError where one has left without its part.
        """
        if waited(PATIENCE):
            return
        self._waits += 1
        standing = LongWait(channel, self._begun[channel], says, dict(self._begun), self._waits)
        found: list[Exception] = []
        over = threading.Event()
        # a thread of its own: who keeps the notes may itself hang, and asking has no deadline
        talking = threading.Thread(target=self._talk, args=(standing, over, found), daemon=True)
        talking.start()
        lost: RuntimeError | None = None
        try:
            while not found and not waited(INTERVAL):
                pass
        except RuntimeError as error:  # a rank that has read the verdict already may have left
            lost = error
        finally:
            over.set()
            talking.join(GOODBYE)
        if found:
            raise found[0] from lost
        if lost is not None:
            raise lost

    def watch(self) -> HeldUp | None:
        """From now on, who waits for this rank can learn where its main thread stands still."""
        if self._held_up is None and self._store is not None:
            self._held_up = HeldUp(self._store, self.rank, self.world_size)
            self._held_up.start()
        return self._held_up

    def leave(self) -> None:
        """Let ranks that wait for something that this one will never begin know it, and let go of where they met."""
        atexit.unregister(self.leave)
        _of_group.cache_clear()
        store, self._store = self._store, None
        held_up, self._held_up = self._held_up, None
        if held_up is not None:
            held_up.end()
        if store is not None and _is_kept(store):
            within(GOODBYE, lambda: self._say_left(store))

    def _say_left(self, store: PrefixStore) -> None:
        store.compare_set("left", "", json.dumps(asdict(LongWait("", 0, "", dict(self._begun), 0))))
        store.set(f"left/{self.rank}", "")

    def _talk(self, standing: LongWait, over: threading.Event, found: list[Exception]) -> None:
        """Say where this rank waits until that is over or hopeless."""
        interval, asked = INTERVAL + PER_RANK * self.world_size, f"verdict/{self.rank}/{standing.serial}"
        store = self._store
        if store is None:
            return
        with suppress(RuntimeError):  # who keeps the notes is gone, which the wait itself will find out
            store.set(f"at/{self.rank}", json.dumps(asdict(standing)))
            store.add("waiting", 1)
            is_over = False
            while not (found or is_over):
                is_over = over.wait(interval)
                if self.rank == 0 and store.add("waiting", 0) >= self.world_size:
                    self._judge(store)
                if store.check([asked]):
                    found.append(ConfigError(store.get(asked).decode()))
                elif store.check(["left"]) and standing.is_blocked_by(_read(store.get("left"))):
                    found.append(dist.DistError("it left before its part"))
            store.set(f"at/{self.rank}", "")
            store.add("waiting", -1)

    def _judge(self, store: PrefixStore) -> None:
        """Tell all ranks where they stand, if none of them can go on; the notes may end with rank 0, so it is last."""
        notes = [store.get(f"at/{rank}") for rank in range(self.world_size)]
        if not all(notes):
            return
        standings = [_read(note) for note in notes]
        if all(any(one.is_blocked_by(other) for other in standings) for one in standings):
            asked = [f"verdict/{rank}/{standing.serial}" for rank, standing in enumerate(standings)]
            store.multi_set(asked, [verdict_on(standings)] * self.world_size)  # type: ignore[attr-defined]
            until = time.monotonic() + 2 * (INTERVAL + PER_RANK * self.world_size)
            while store.add("waiting", 0) > 1 and time.monotonic() < until:
                threading.Event().wait(INTERVAL / 20)


def _is_kept(store: PrefixStore) -> bool:
    """Whether somebody still keeps the notes: asking who is gone makes torch print a page of warnings."""
    kept: Store = store
    while isinstance(kept, PrefixStore):
        kept = kept.underlying_store
    if not isinstance(kept, TCPStore):
        return True
    with suppress(OSError), socket.create_connection((kept.host, kept.port), 1.0):
        return True
    return False


def _read(note: bytes) -> LongWait:
    return LongWait(**json.loads(note))


def verdict_on(standings: Sequence[LongWait]) -> str:
    """Which ranks wait where, in words: two ranks that do not wait for the same are enough."""
    first = standings[0]
    other = next(rank for rank, standing in enumerate(standings) if standing.channel != first.channel)
    return (
        f"rank 0 was {first.says}, but rank {other} was {standings[other].says}, and each waits for the other; "
        f"{SAME_CALLS}"
    )
