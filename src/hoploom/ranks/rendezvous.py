"""Where ranks meet, and the notes that they leave there: who ended and why, for those whom talking failed.

The notes are of torch's TCPStore, which rank 0 or the launcher keeps. What asks it never waits longer than it says.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from hoploom.errors import ConfigError, PeerError
from hoploom.ranks.environment import RankPlace

FAREWELL = 3.0  # seconds for what ranks say to each other at the end; peers that hang can hold it up
ROLL_CALL = 1.0  # seconds to find out which peer it was
LOOPBACK = "127.0.0.1"


class RankNotes:
    """Short notes that ranks leave for each other where they met, to say who is to blame when talking fails."""

    def __init__(self, place: RankPlace, notes: PrefixStore) -> None:
        self._rank, self._notes = place.rank, notes
        self._keeper = _keeper(place)
        self._others = [rank for rank in range(place.world_size) if rank != place.rank]
        self._lost = False

    def leave(self, farewell: str) -> None:
        """Say why, unless it is because the others are lost; then close what connects the ranks."""
        if not self._lost:
            _within(FAREWELL, lambda: self._note("ended", farewell))
        _within(FAREWELL, _destroy_group)

    def missing(self) -> str:
        """Which peer ended, or else which ones give no sign of life while this rank waits a moment for one."""
        self._lost = True
        found: list[str] = []
        _within(FAREWELL, lambda: found.append(self._roll_call()))
        return found[0] if found else f"{self._keeper} does not answer"

    def _roll_call(self) -> str:
        self._note("lost", "")
        silent, deadline = set(self._others), time.monotonic() + ROLL_CALL
        try:
            while silent and time.monotonic() < deadline:
                for rank in silent:
                    if self._notes.check([f"ended/{rank}"]):
                        return f"rank {rank} {self._notes.get(f'ended/{rank}').decode(errors='replace')}"
                silent = {rank for rank in silent if not self._notes.check([f"lost/{rank}"])}
                threading.Event().wait(ROLL_CALL / 20)
        except RuntimeError:
            return f"{self._keeper} ended or cannot be reached"
        if not silent:
            return "the ranks lost each other"
        return f"no sign of life came from {', '.join(f'rank {rank}' for rank in sorted(silent))}"

    def wait_for_the_others(self, seconds: float) -> None:
        """Until every other rank has left, or knows that some are lost; at most so long."""
        ended = threading.Event()
        if not self._lost:
            _within(seconds, lambda: self._watch_the_others(ended))
        ended.set()

    def _watch_the_others(self, ended: threading.Event) -> None:
        staying = set(self._others)
        with suppress(RuntimeError):  # who keeps the notes has left too
            while staying and not ended.wait(ROLL_CALL / 20):
                staying = {rank for rank in staying if not self._is_gone(rank)}

    def _is_gone(self, rank: int) -> bool:
        return any(self._notes.check([f"{kind}/{rank}"]) for kind in ("ended", "lost"))

    def _note(self, kind: str, text: str) -> None:
        with suppress(RuntimeError):  # whoever keeps the notes may itself be gone
            self._notes.set(f"{kind}/{self._rank}", text)


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Call it, but do not wait longer: these calls of torch have no deadline of their own where a peer hangs."""
    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    calling.join(seconds)


def hold_meeting_point(port: int, wait: timedelta) -> TCPStore:
    """Where ranks of this host find each other: held by this process, on loopback only; port 0: any that is free."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(512)
        port = listener.getsockname()[1]
        return TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach()
        )


def meeting_point(place: RankPlace, wait: timedelta) -> TCPStore:
    """The store that all ranks reach, held by rank 0 where no launcher holds it."""
    holds = place.rank == 0 and not place.hosted
    address = LOOPBACK if place.on_one_host and not place.hosted else place.address
    try:
        if holds and place.on_one_host:
            return hold_meeting_point(place.port, wait)
        return TCPStore(address, place.port, is_master=holds, wait_for_workers=False, timeout=wait)
    except (RuntimeError, OSError) as error:
        where = f"{address}:{place.port}"
        if holds:
            raise ConfigError(
                f"rank 0 cannot listen on {where}; set MASTER_PORT to a port that is free there"
            ) from error
        raise PeerError(
            f"rank {place.rank} of {place.world_size} cannot reach {_keeper(place)} at {where} within "
            f"{wait.total_seconds():g} seconds; see whether it runs, and whether this host may connect to it"
        ) from error


def _keeper(place: RankPlace) -> str:
    return "the launcher" if place.hosted else "rank 0"


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
