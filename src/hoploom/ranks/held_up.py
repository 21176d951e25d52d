"""Which ranks stand still in a call of torch.distributed: what a rank asks that waits for others which may never come.

Each rank looks once a second whether somebody asks, and then at its own main thread. That costs it microseconds, and
nothing else can be known of a call that is the user's own: it is inside torch, and hears nobody.
"""

import re
import sys
import threading
from contextlib import suppress
from types import FrameType

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hoploom.ranks.rendezvous import own_client

LOOK = 1.0  # seconds between two looks
STILL = 3  # looks at which a rank must be in the very same call, and
AGAIN = 2  # of these, within the wait of the rank that asks
OURS = "hoploom.ranks.agreement"  # where a loader waits; calls of ours say by themselves where they wait
THEIRS = "torch.distributed.distributed_c10d"
GRADIENTS, BACKWARD = "torch.autograd.graph", "torch.autograd.backward"  # where plain DDP waits for gradients
COLLECTIVES = re.compile(r"(monitored_)?barrier|new_group|(all_|broadcast|reduce|gather|scatter)\w*")  # not recv, send


class HeldUp:
    """What the ranks of a group say of their main threads."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._notes, self._rank, self._size = PrefixStore("hoploom/held", own_client(store)), rank, size
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True, name="hoploom held up")

    def start(self) -> None:
        self._watching.start()

    def ask(self) -> None:
        """Have all ranks say where they are, from now on."""
        self._notes.set("asked", "1")

    def calls(self, since: dict[int, int]) -> dict[int, str]:
        """Return, by rank, the calls in which other ranks stand still; empty until all of them have looked.

        `since` keeps how often they had been seen there before: a note may be older than this rank's wait.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        if not self._notes.check([f"at/{rank}" for rank in others]):
            return {}
        said = {rank: self._notes.get(f"at/{rank}").decode().partition(" ") for rank in others}
        for rank, (looks, _, _) in said.items():
            since[rank] = min(int(looks), since.get(rank, int(looks)))
        return {rank: call for rank, (looks, _, call) in said.items() if call and int(looks) >= since[rank] + AGAIN}

    def _watch(self) -> None:
        seen: tuple[FrameType | None, str] = (None, "")
        looks = 0
        with suppress(RuntimeError):  # who keeps the notes is gone
            while not self._over.wait(LOOK):
                if not dist.is_initialized():  # who keeps the notes may be gone, and torch would print a page about it
                    return
                if not self._notes.check(["asked"]):
                    continue
                here = _waiting_call()
                looks = looks + 1 if here == seen else 0
                seen = here
                self._notes.set(f"at/{self._rank}", f"{looks} {here[1] if looks >= STILL else ''}")

    def end(self) -> None:
        self._over.set()
        self._watching.join(LOOK)


def _waiting_call() -> tuple[FrameType | None, str]:
    """Return the frame and the name of the call in which the main thread waits; (None, "") if it does not."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and _module(frame) == "threading":
        frame = frame.f_back
    call: FrameType | None = None  # kept between two looks, so that no other call gets the same identity
    name = ""
    while frame is not None and _module(frame) in (OURS, THEIRS, GRADIENTS):
        function = frame.f_code.co_name
        if _module(frame) == GRADIENTS:
            call, name = frame, BACKWARD
        if _module(frame) == OURS or (COLLECTIVES.fullmatch(function) and _is_of_all(frame)):
            call, name = frame, f"torch.distributed.{function}"
        frame = frame.f_back
    if frame is not None and _module(frame).startswith("hoploom.load"):
        name = "reading its share of a loader to the end"
    while frame is not None and _module(frame).startswith(("torch", "hoploom", "contextlib")):
        frame = frame.f_back
    if call is None or frame is None:
        return None, ""
    return call, f"{name} ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"


def _is_of_all(frame: FrameType) -> bool:
    """Whether all ranks take part, this one too; calls of a subgroup may wait for a rank that is busy."""
    return frame.f_locals.get("group") in (None, dist.group.WORLD)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
