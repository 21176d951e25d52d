"""Compare the loaders of all ranks, so that no seed is trained twice or left out without an error.

Ranks post what they read in the rendezvous store, when a loader is made and when a loop over it begins, and wait for
each other there. They make no collective call, which could mix with the user's own. Each loop costs a few requests.
"""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hoploom.errors import ConfigError, PeerError
from hoploom.ranks.deadlock import BACKWARD, COLLECTIVE, DeadlockDetector, calling, detector_here
from hoploom.ranks.rendezvous import with_timeout
from hoploom.ranks.share import Share

Found = TypeVar("Found")
AGREED, ALONE = "agreed", "alone"
MOST_HASHES, MOST_IN_ALL = 1024, 16384  # of seeds that a rank posts, and that all ranks together post
NOTICE = 10.0  # seconds of a wait for other ranks before a line says so
WHOLE = 2.0  # seconds of a wait if this rank may be the only one that reads the loader
READ = 5.0  # seconds until all ranks have read an error, before this one ends with it
LOOK = 0.25  # seconds between two looks at what other ranks have posted
REPLY = 5.0  # seconds for the process that holds the store
ONE_RANK = "if only one rank reads a loader, pass rank=0, world_size=1"
HINTS = {
    "seeds": "give all ranks the same seeds in the same order, and the loader divides them; or give each rank seeds of "
    "its own, with none in common; a random split needs a seed",
    "sampler": "the samplers of all ranks must draw the same order; the loader then gives each rank its share: give "
    "the samplers the same seeds and weights, and generators of the same seed",
    "store": "open the same graph on all ranks",
    "position": "loop over the loader, restore it and set its epoch alike on all ranks; next(iter(loader)) counts as "
    "an epoch",
}
TRAINED_TWICE = (
    "{ranks} train {seeds}: their loaders have rank=0, world_size=1 and shuffle=True or the same sampler; "
    "drop rank= and world_size=, and the loader deals the seeds out, each to one rank; if "
    "every rank must read all seeds, as in an evaluation, give shuffle=False"
)
DIVIDED_BADLY = f"{{ranks}} were given different seeds, but {{seeds}} are among both; {HINTS['seeds']}"


class LoaderReading(Protocol):
    """The settings and seeds of a loader, as ranks compare them."""

    @property
    def trains(self) -> bool:
        """Whether no seed may come on two ranks."""

    @property
    def is_divided(self) -> bool:
        """Whether each rank was given seeds of its own; the settings then count those of all ranks."""

    @property
    def settings(self) -> Mapping[str, str]:
        """All that decides the batches besides the rank, by name."""

    def seed_hashes(self, limit: int) -> list[int]:
        """Return the least hashes of the seeds, with repetitions; at most `limit`."""


class _Round:
    """One call of a channel that all ranks make, and the posts of the ranks about it."""

    def __init__(self, here: DeadlockDetector, channel: str, doing: str, *, trains: bool) -> None:
        self.here, self.channel, self.doing = here, channel, doing
        self._trains = trains
        self.number = here.begin(channel)
        self.posts = PrefixStore(f"{channel}/{self.number}", here.store)

    def post(self, text: str) -> None:
        """Post this rank's part."""
        self.posts.set(str(self.here.rank), text)

    def missing(self) -> list[int]:
        """Return the ranks that have not posted their part."""
        return [rank for rank in range(self.here.size) if not self.posts.check([str(rank)])]

    def wait(self, look: Callable[[], Found | None], *, may_be_alone: bool) -> Found | None:
        """Return what `look` finds once all ranks are here; None if all others turn out to wait for this rank.

        Raise ConfigError if a rank will never be here, and PeerError if one is not within the group's timeout.
        """
        here, deadline = self.here, time.monotonic() + self.here.seconds
        since, found, notice, lost = dict[int, int](), None, "", _Lost()

        def is_over(seconds: float) -> bool:
            nonlocal found, notice, lost
            seconds = max(0.0, min(seconds, deadline - time.monotonic()))
            found = with_timeout(seconds + REPLY, lambda: _poll(look, seconds))
            if found is not None:
                return True
            lost = with_timeout(REPLY, lambda: self._lost(since)) or lost
            left = deadline - time.monotonic()
            if not notice and left <= max(0.0, here.seconds - NOTICE):
                missing = ", ".join(map(str, with_timeout(REPLY, self.missing) or "?"))
                notice = f"rank {here.rank} waits for rank {missing} {self.doing}"
                print(f"hoploom: {notice}; {ONE_RANK}", file=sys.stderr, flush=True)
            return bool(lost.why) or (may_be_alone and lost.is_all) or left <= 0

        says = "waiting for the other ranks {} ({} at {}; {})".format(self.doing, *calling("loop"), ONE_RANK)
        with suppress(dist.DistError):  # a rank has left, as `lost` tells
            here.wait(self.channel, says, is_over, is_firm=not may_be_alone)
        if found is not None or (may_be_alone and lost.is_all):
            return found
        why = lost.why or (with_timeout(REPLY, lambda: self._lost(since)) or lost).why
        if why:
            raise ConfigError(f"rank {here.rank} waits for the other ranks {self.doing}, but {why}; {ONE_RANK}")
        raise PeerError(f"{notice or says}, and {here.seconds:g} seconds have passed; {ONE_RANK}")

    def _lost(self, since: dict[int, int]) -> "_Lost":
        """Find out whether the ranks that have not posted ever will."""
        here, missing = self.here, [rank for rank in self.missing() if rank != self.here.rank]
        whys, num_waiting = [], 0
        for rank, status in here.others(since).items():
            if rank in missing and status.has_left:
                whys.append(f"rank {rank} has ended")
            elif rank in missing and status.call.startswith(COLLECTIVE):
                whys.append(f"rank {rank} waits in {status.call}")
            elif rank in missing and status.call.startswith(BACKWARD):
                num_waiting += not self._trains  # it waits for gradients of this rank, or is only long
            elif rank in missing and status.is_firm and here.is_awaited_by(status):
                num_waiting += 1  # if this rank cannot go on, all ranks will get one error
        is_all = len(whys) + num_waiting == here.size - 1
        return _Lost(whys[0] if whys and len(whys) == len(missing) else "", is_all)


class _Lost(NamedTuple):
    """The reason why a missing rank never posts, if none of them will; and whether all other ranks are away."""

    why: str = ""
    is_all: bool = False


def _poll(look: Callable[[], Found | None], seconds: float) -> Found | None:
    """Return what `look` finds within so many seconds."""
    until, pause = time.monotonic() + seconds, 0.001
    while (found := look()) is None and time.monotonic() < until:
        threading.Event().wait(pause)
        pause = min(1.5 * pause, LOOK)
    return found


class Meeting:
    """The seeds of one loader on all ranks: posted when the loader is made, read before its first batch.

    Loaders of two ranks are the same one if the same lines of the script made them.
    """

    def __init__(self, here: DeadlockDetector, reading: LoaderReading, chain: Sequence[str], num_seeds: int) -> None:
        self.is_lone = False  # whether only this rank reads the loader
        channel = f"loader {hashlib.sha256(json.dumps(chain).encode()).hexdigest()[:16]}"
        self._round = _Round(here, channel, "to make the same loader", trains=reading.trains)
        with_timeout(REPLY, lambda: self._round.post(f"{num_seeds} {reading.settings['seeds']}"))

    def seeds(self, *, may_be_lone: bool) -> list[str]:
        """Return the number of seeds of each rank, and what tells them apart.

        If it may, a loader turns out to be `is_lone` once all other ranks wait for this one, and have not made it.
        """
        keys = [str(rank) for rank in range(self._round.here.size)]
        posts = self._round.posts

        def look() -> list[str] | None:
            return [text.decode() for text in posts.multi_get(keys)] if posts.check(keys) else None

        found = self._round.wait(look, may_be_alone=may_be_lone)
        self.is_lone = found is None
        return found or []

    def note_lone(self) -> None:
        """Post for the other ranks that this one has read the loader alone."""
        with_timeout(REPLY, lambda: self._round.posts.set("lone", str(self._round.here.rank)))

    def lone_reader(self) -> int | None:
        """Return the rank that has read the loader alone, if there is one."""
        posts = self._round.posts
        found = with_timeout(REPLY, lambda: posts.get("lone") if posts.check(["lone"]) else b"")
        return int(found) if found else None


def agree(
    share: Share, read: Callable[[], LoaderReading], detector: Callable[[], DeadlockDetector | None] = detector_here
) -> str:
    """Compare a loop over a loader with those of the other ranks before it begins. Raise ConfigError if they differ.

    Return AGREED, or ALONE if no other rank begins the loop, or "" if there are no ranks to compare with yet.
    """
    here = detector()
    if here is None:
        return ""
    reading, is_dealt = read(), share.world_size == here.size
    if not is_dealt and not (share.world_size == 1 and reading.trains):
        return AGREED  # every rank reads all of it, or ranks are arranged in a way of the user's own
    loop = _Loop(
        here, "loaders" if is_dealt else "whole loaders", "to read their shares of a loader", trains=reading.trains
    )
    with_timeout(REPLY, lambda: loop.compare(share, reading, is_dealt=is_dealt))
    if is_dealt:
        outcome = loop.wait(loop.outcome, may_be_alone=not share.is_given)
    else:  # this rank may be the only one that reads the loader
        outcome = with_timeout(WHOLE + REPLY, lambda: _poll(loop.outcome, WHOLE)) or AGREED
    if outcome is None:
        with_timeout(REPLY, lambda: loop.withdraw(share))
        return ALONE
    with_timeout(READ + REPLY, lambda: loop.confirm(outcome))
    if outcome != AGREED:
        raise ConfigError(outcome)
    return AGREED


class _Loop(_Round):
    """A loop over a loader, with the comparison of what the ranks read in it."""

    def outcome(self) -> str | None:
        """Return AGREED or the error of all ranks; None if not all have posted."""
        return self.posts.get("outcome").decode() if self.posts.check(["outcome"]) else None

    def withdraw(self, share: Share) -> None:
        """Take the posts back: no other rank reads this loader, and the next loop has its number."""
        for name in ("first", f"share/{share.rank}", "agreeing", "hashes", str(self.here.rank)):
            self.posts.delete_key(name)
        self.here.take_back(self.channel)

    def confirm(self, outcome: str) -> None:
        """Wait until every rank has read an error, before this one ends with it, or with the store that it holds."""
        self.posts.add("read", 1)
        deadline = time.monotonic() + (READ if outcome != AGREED or self.here.rank == 0 else 0.0)
        while time.monotonic() < deadline and self.posts.add("read", 0) < self.here.size:
            threading.Event().wait(0.01)

    def compare(self, share: Share, reading: LoaderReading, *, is_dealt: bool) -> None:
        """Post this rank's reading and compare it with those posted before; the last rank posts that all agree."""
        self.post("")
        difference = self._difference(share, reading) if is_dealt else self._common_seeds(reading, TRAINED_TWICE)
        if difference:
            self.posts.compare_set("outcome", "", difference)
        elif self.posts.add("agreeing", 1) == self.here.size:
            self.posts.compare_set("outcome", "", AGREED)

    def _difference(self, share: Share, reading: LoaderReading) -> str:
        """Return the error if this rank does not fit to the one that posted first, or has the share of another."""
        rank, settings = self.here.rank, dict(reading.settings)
        first, other = json.loads(self.posts.compare_set("first", "", json.dumps([rank, settings])))
        if other != settings:
            return difference_of((first, other), (rank, settings), self.here.size)
        holder = int(self.posts.compare_set(f"share/{share.rank}", "", str(rank)))
        if holder != rank:
            given = f"rank={share.rank}, world_size={share.world_size}"
            return (
                f"rank {holder} and rank {rank} both gave their loader {given}, so they would read the same seeds; "
                "give each rank its own, or leave rank= and world_size= out"
            )
        return self._common_seeds(reading, DIVIDED_BADLY) if reading.is_divided else ""

    def _common_seeds(self, reading: LoaderReading, error: str) -> str:
        """Return the error if a rank that posted before has some of the same seeds; a sample of them is compared.

        Seeds that repeat on one rank, as links of a multigraph do, may repeat on another one.
        """
        rank, size = self.here.rank, self.here.size
        hashes = reading.seed_hashes(max(16, min(MOST_HASHES, MOST_IN_ALL // size)))
        self.posts.append("hashes", json.dumps([rank, hashes]) + "\n")  # type: ignore[attr-defined]
        for other, theirs in map(json.loads, self.posts.get("hashes").decode().splitlines()):
            shared = 0 if other == rank else len(set(hashes) & set(theirs))
            may_repeat = any(len(set(one)) < len(one) for one in (hashes, theirs))
            if shared and (shared == len(set(hashes)) or not may_repeat):
                ranks = f"rank {min(rank, other)} and rank {max(rank, other)}"
                some = f"some of the same seeds ({shared} of {len(hashes)} that were compared)"
                return error.format(ranks=ranks, seeds="the same seeds" if shared == len(set(hashes)) else some)
        return ""


def difference_of(first: tuple[int, Mapping[str, str]], second: tuple[int, Mapping[str, str]], size: int) -> str:
    """Return the error about two ranks, each given with its number, whose settings differ."""
    (a, one), (b, other) = sorted([first, second], key=lambda numbered: numbered[0])
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    values = "; ".join(f"{name}: {one.get(name)} on rank {a}, {other.get(name)} on rank {b}" for name in names)
    hint = next((text for name, text in HINTS.items() if name in names), "give the same on all ranks")
    differ = f"the loaders of rank {a} and rank {b} differ, but their seeds are divided over {size} ranks ({values})"
    return f"{differ}; {hint}; {ONE_RANK}"
