"""Detect ranks that wait for each other for ever, and ranks whose main thread is blocked in a call of torch.

Each rank counts the calls that it begins together with the others, by channel: calls of a context, averaged gradients,
loaders. A rank that waits for long posts its status in the rendezvous store: the call that it waits for, and the number
of calls that it has begun on every channel. If all ranks wait, each for one that has not begun the call, none can go
on: that is a proof, however slow a rank or a network is. Only ranks that wait for seconds send any requests.
"""

import atexit
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from hoploom.errors import ConfigError
from hoploom.ranks.rendezvous import is_reachable, own_client, with_timeout

PATIENCE = 2.0  # seconds of a wait before the rank posts it
INTERVAL = 1.0  # seconds between two looks at the statuses of other ranks, or at this rank's main thread
PER_RANK = 0.002  # seconds more for each rank, for the process that holds the store
GOODBYE = 2.0  # seconds to withdraw a status
STILL = 3  # looks at which the main thread must be in the very same call, and
AGAIN = 2  # of these, within the wait of the rank that reads the status
INSIDE = ("hoploom", "torch", "contextlib", "functools")  # packages that are not the user's script
COLLECTIVES = re.compile(r"(monitored_)?barrier|new_group|(all_|broadcast|reduce|gather|scatter)\w*")  # not recv, send
TORCH, GRADIENTS = "torch.distributed.distributed_c10d", "torch.autograd.graph"  # modules with blocking calls
COLLECTIVE, BACKWARD = "torch.distributed.", "torch.autograd.backward"

SAME_CALLS = (
    "every rank must make the same calls, in the same order and equally often: look for a call that only some ranks "
    "reach (if context.is_main: ...), or for loops of different length"
)

Wait = Callable[[float], bool]  # waits at most so many seconds; returns whether the wait is over


@dataclass(frozen=True)
class Status:
    """A rank's status, as it posts it for the ranks that wait for it."""

    begun: Mapping[str, int] = field(default_factory=dict)  # calls, by channel
    channel: str = ""  # of the call that the rank waits for; empty if it waits for none
    number: int = 0  # of that call
    doing: str = ""  # the call, in words
    serial: int = 0  # of the rank's waits
    is_firm: bool = True  # whether the rank cannot go on before all ranks have begun the call
    call: str = ""  # of torch, in which the main thread is blocked
    looks: int = 0  # at which it was found there
    has_left: bool = False

    def waits_for(self, other: "Status") -> bool:
        """Return whether the rank waits for a call that the other rank has yet to begin."""
        return bool(self.channel) and other.begun.get(self.channel, 0) < self.number


def detector_here() -> "DeadlockDetector | None":
    """Return the detector of this process, or None if no process group makes it one of several ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return _of_group(dist.group.WORLD)


@lru_cache(maxsize=1)
def _of_group(group: dist.ProcessGroup) -> "DeadlockDetector":
    store = dist.distributed_c10d._get_default_store()
    here = DeadlockDetector(store, group.rank(), group.size(), dist.is_initialized)
    atexit.register(here.leave)  # in scripts that never destroy their process group
    return here


class DeadlockDetector:
    """This rank's detector. It counts, and posts where the rank waits; rank 0 finds out if all of them do."""

    def __init__(self, store: Store, rank: int, size: int, is_open: Callable[[], bool] = lambda: True) -> None:
        self.store = PrefixStore("hoploom", own_client(store))
        self.rank, self.size = rank, size
        self.seconds: float = store.timeout.total_seconds()  # type: ignore[attr-defined]
        self.averaging_seconds = 0.0  # that this rank has waited for the gradients of the others
        self._begun: Counter[str] = Counter()
        self._status, self._posting = Status(), threading.Lock()
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, args=(is_open,), daemon=True, name="hoploom deadlocks")
        self._watching.start()

    def begin(self, channel: str) -> int:
        """Count one more call of this channel; return its number, from 1."""
        self._begun[channel] += 1
        return self._begun[channel]

    def take_back(self, channel: str) -> None:
        """Uncount the last call of this channel: it turned out to be this rank's alone."""
        self._begun[channel] -= 1

    def wait(self, channel: str, doing: str, waited: Wait, *, is_firm: bool = True) -> None:
        """Wait for the last call of this channel. A rank whose wait is not firm goes on once all others wait for it.

        Raise ConfigError if all ranks wait and none can go on, DistError if a rank has left without this call.
        """
        if waited(PATIENCE):
            return
        found: list[Exception] = []
        over = threading.Event()
        # in a thread, as requests have no deadline if the process that holds the store hangs
        talking = threading.Thread(target=self._talk, args=(channel, doing, is_firm, over, found), daemon=True)
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

    def others(self, since: dict[int, int]) -> dict[int, Status]:
        """Return the statuses of the other ranks, or none until all have posted one.

        `since` keeps how often each was found in a call of torch before: its status may be older than this wait.
        """
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        keys = [f"status/{rank}" for rank in ranks]
        if not self.store.check(keys):
            return {}
        found = {rank: _read(text) for rank, text in zip(ranks, self.store.multi_get(keys), strict=True)}
        for rank, status in found.items():
            since[rank] = min(status.looks, since.get(rank, status.looks))
            if status.looks < since[rank] + AGAIN:
                found[rank] = replace(status, call="")
        return found

    def is_awaited_by(self, status: Status) -> bool:
        """Return whether a rank waits for a call that this rank has yet to begin."""
        return status.waits_for(Status(self._begun))

    def leave(self) -> None:
        """Tell ranks that wait for calls which this one will never begin, and release the store."""
        atexit.unregister(self.leave)
        _of_group.cache_clear()
        self._over.set()
        self._watching.join(INTERVAL)
        if not self._status.has_left and is_reachable(self.store):
            with_timeout(GOODBYE, self._post_leaving)
        self.store = PrefixStore("", HashStore())  # the rendezvous store would not be released

    def _post_leaving(self) -> None:
        self.store.compare_set("left", "", json.dumps(asdict(self._post(has_left=True, channel="", call=""))))

    def _post(self, **changes: Any) -> Status:
        with self._posting:
            self._status = status = replace(self._status, begun=dict(self._begun), **changes)
            self.store.set(f"status/{self.rank}", json.dumps(asdict(status)))
        return status

    def _watch(self, is_open: Callable[[], bool]) -> None:
        """Post the call of torch in which the main thread is blocked."""
        seen: tuple[FrameType | None, str] = (None, "")
        looks = 0
        with suppress(RuntimeError):  # the process that holds the store has ended
            self._post()
            while not self._over.wait(INTERVAL) and is_open():
                here = _blocking_call()
                looks = looks + 1 if here == seen and here[1] else 0
                seen = here
                if looks >= STILL or self._status.call:
                    self._post(call=here[1] if looks >= STILL else "", looks=looks)

    def _talk(self, channel: str, doing: str, is_firm: bool, over: threading.Event, found: list[Exception]) -> None:
        """Post a wait until it is over or hopeless."""
        store, interval, is_over = self.store, INTERVAL + PER_RANK * self.size, False
        wait = {"channel": channel, "number": self._begun[channel], "doing": doing, "is_firm": is_firm}
        with suppress(RuntimeError):  # the process that holds the store has ended, as the wait itself will show
            status = self._post(serial=self._status.serial + 1, **wait)
            store.add("waiting", 1)
            verdict = f"verdict/{self.rank}/{status.serial}"
            while not (found or is_over):
                is_over = over.wait(interval)
                if self.rank == 0 and store.add("waiting", 0) >= self.size:
                    self._judge(interval)
                if store.check([verdict]):
                    found.append(ConfigError(store.get(verdict).decode()))
                elif is_firm and store.check(["left"]) and status.waits_for(_read(store.get("left"))):
                    found.append(dist.DistError("it left before its part"))
            self._post(channel="")
            store.add("waiting", -1)

    def _judge(self, interval: float) -> None:
        """Post an error for all ranks if none of them can go on. Rank 0 may hold the store, so it ends last."""
        store = self.store
        waits = [_read(text) for text in store.multi_get([f"status/{rank}" for rank in range(self.size)])]
        one_goes_on = sum(not wait.is_firm for wait in waits) == 1
        if one_goes_on or not all(any(wait.waits_for(other) for other in waits) for wait in waits):
            return
        other = next(rank for rank, wait in enumerate(waits) if wait.channel != waits[0].channel)
        error = f"rank 0 was {waits[0].doing}, but rank {other} was {waits[other].doing}, and each waits for the other"
        verdicts = [f"verdict/{rank}/{wait.serial}" for rank, wait in enumerate(waits)]
        store.multi_set(verdicts, [f"{error}; {SAME_CALLS}"] * self.size)  # type: ignore[attr-defined]
        until = time.monotonic() + 2 * interval
        while store.add("waiting", 0) > 1 and time.monotonic() < until:
            threading.Event().wait(INTERVAL / 20)


def _read(text: bytes) -> Status:
    return Status(**json.loads(text))


# --- frames of this process ----------------------------------------------------------------------


def calling(doing: str) -> tuple[str, str]:
    """Return the function of Hoploom that the script called, and where, e.g. ("evaluate", "train.py:20")."""
    frame, function = sys._getframe(1), doing
    while frame.f_back is not None:
        package = _module(frame).partition(".")[0]
        if package == "hoploom":
            name = frame.f_code.co_name
            function = function if name.startswith("_") else name
        elif package not in INSIDE:
            break
        frame = frame.f_back
    return function, _line(frame)


def call_chain() -> list[str]:
    """Return the lines of the script that lead to this call: equal on ranks that run the same functions.

    The line that calls the first function is left out: one rank may be the process that starts the others.
    """
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package, is_top = _module(frame).partition(".")[0], frame.f_code.co_name == "<module>"
        if package == "multiprocessing" or (lines and (is_top or package == "torch")):
            break
        if package not in INSIDE:
            lines.append(_line(frame))
        frame = frame.f_back
    return lines


def _blocking_call() -> tuple[FrameType | None, str]:
    """Return the frame and the name of the call of torch in which the main thread waits; (None, "") if in none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    call, name = None, ""  # the frame is kept between two looks, so that no other call gets the same identity
    while frame is not None and _module(frame) in ("threading", TORCH, GRADIENTS):
        function = frame.f_code.co_name
        if _module(frame) == GRADIENTS:
            call, name = frame, BACKWARD
        elif COLLECTIVES.fullmatch(function) and frame.f_locals.get("group") in (None, dist.group.WORLD):
            call, name = frame, COLLECTIVE + function  # a subgroup may wait for a rank that is busy
        frame = frame.f_back
    while frame is not None and _module(frame).startswith(("torch", "hoploom", "contextlib")):
        frame = frame.f_back
    return (None, "") if call is None or frame is None else (call, f"{name} ({_line(frame)})")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
