"""Whether the ranks of a process group read the same loader, or seeds of their own: else some train twice or never.

They leave notes where they met, when a loader is made and at the first batch of each loop, never a collective, which
could cross the user's. It costs a rank a handful of requests for each loader, and at most a short wait for ranks that
come later: those compare themselves then, and what they find is seen at one of the next batches.
"""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hoploom.errors import ConfigError, PeerError
from hoploom.ranks.held_up import BACKWARD
from hoploom.ranks.rendezvous import within
from hoploom.ranks.share import Share
from hoploom.ranks.whereabouts import Whereabouts, has_left, is_waiting, waits_for, whereabouts

CHANNEL = "loaders"
AGREED = "agreed"
MARKS = 1024  # seeds that a rank with seeds of its own names to the others, and
ALL_MARKS = 16384  # at most that many by all ranks together
MADE = "hoploom/made"
LOOK = 0.05  # seconds between two looks at what other ranks do, for each rank: it takes some requests each
NOTICE = 10.0  # seconds of a wait for other ranks before a line says so
ALONE = "if only one rank reads a loader, pass rank=0, world_size=1"
OF_ONE_RANK = ("seeds", "sampler", "position")  # in what a loader tells of itself: may differ where seeds are divided
WAYS_OUT = {
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
DIVIDED_BADLY = f"{{ranks}} were given different seeds, but {{seeds}} are among both; {WAYS_OUT['seeds']}"


@dataclass(frozen=True)
class Waits:
    """Seconds to wait for other ranks."""

    dealt: float = 10.0  # at the first batch of a loader whose seeds are dealt over the ranks
    whole: float = 2.0  # at the first batch of one that this rank may be alone to read
    heard: float = 5.0  # until all ranks have heard of a difference, before this one ends with it
    look: float = 0.25  # between two looks at later batches
    reply: float = 5.0  # for who keeps the notes


class LoaderReading(Protocol):
    """What a loader reads, as far as other ranks want to know."""

    @property
    def trains(self) -> bool:
        """Whether no seed may come on two ranks."""

    @property
    def is_divided(self) -> bool:
        """True if each rank reads seeds of its own; told() then counts those of all ranks."""

    def told(self) -> Mapping[str, str]:
        """By name, all that decides its batches besides the rank."""

    def marks(self, limit: int) -> list[int]:
        """Return the least hashes of its seeds, with repetitions."""


@dataclass(frozen=True)
class Group:
    """A process group, and the store through which its ranks met."""

    store: Store
    rank: int
    size: int

    @property
    def seconds(self) -> float:
        """How long its ranks wait for each other."""
        return float(self.store.timeout.total_seconds())  # type: ignore[attr-defined]


def group_here() -> Group | None:
    """The process group that makes this process one of several ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Group(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())


class Others:
    """The other ranks of a group, as one rank that waits for them sees them."""

    def __init__(self, group: Group) -> None:
        self.group, self.here = group, whereabouts()
        self.ranks = [rank for rank in range(group.size) if rank != group.rank]
        self.since: dict[int, int] = {}  # see HeldUp.calls

    def calls(self) -> dict[int, str]:
        """Return, by rank, the calls of torch and of loaders in which other ranks stand still."""
        held_up = None if self.here is None else self.here.watch()
        if held_up is None:
            return {}
        held_up.ask()
        return held_up.calls(self.since)

    def wait_for_this_rank(self, *, trains: bool) -> bool:
        """Return whether each of them has ended, or waits in a call that this rank must join before it goes on.

        A backward pass waits for gradients of this rank, or is only long: it says nothing of a loader that trains.
        """
        calls, store = self.calls(), self.group.store
        return all(
            calls.get(rank, "").startswith("torch.distributed." if trains else "torch.")
            or has_left(store, rank)
            or (self.here is not None and waits_for(store, rank, self.here))
            for rank in self.ranks
        )


def is_meeting(store: Store, rank: int) -> bool:
    """Return whether a rank waits for the others before a loader's first batch."""
    return store.check([f"{MADE}/waits/{rank}"]) and store.get(f"{MADE}/waits/{rank}") != b""


class Meeting:
    """The seeds of one loader on all ranks: posted when it is made, read before its first batch.

    Loaders of two ranks are the same one if they have the same options, and the same lines of the script made them.
    """

    def __init__(self, group: Group, told: Mapping[str, str], chain: Sequence[str], num_seeds: int) -> None:
        self.group, self._posts = group, PrefixStore(MADE, group.store)
        self.is_lone = False  # whether only this rank reads the loader
        self.trains = told.get("shuffle") == "True" or "sampler" in told
        alike = {name: text for name, text in told.items() if name not in OF_ONE_RANK}
        self._key = hashlib.sha256(json.dumps([chain, alike]).encode()).hexdigest()[:16]
        within(Waits.reply, lambda: self._post(f"{num_seeds} {told['seeds']}"))

    def _post(self, seeds: str) -> None:
        self._key += f"/{self._posts.add(f'{self._key}/made/{self.group.rank}', 1)}"
        self._posts.set(f"{self._key}/{self.group.rank}", seeds)

    def seeds(self, *, may_be_lone: bool) -> list[str] | None:
        """Return the number of seeds of each rank, and what tells them apart; None if ranks differ, or are stuck.

        If it may, a loader turns out to be `is_lone` once all other ranks wait for this one, and have not made it.
        Raise PeerError if a rank has not made the loader within the timeout of the group.
        """
        limit = self.group.seconds
        found = within(limit + Waits.reply, lambda: self._wait(limit, may_be_lone))
        if isinstance(found, str):
            raise PeerError(found)
        return found

    def note_lone(self) -> None:
        """Note for the other ranks that this one has read the loader alone."""
        within(Waits.reply, lambda: self._posts.set(f"{self._key}/lone", str(self.group.rank)))

    def lone_reader(self) -> int | None:
        """Return the rank that has read the loader alone, if there is one."""
        note = f"{self._key}/lone"
        found = within(Waits.reply, lambda: self._posts.get(note) if self._posts.check([note]) else b"")
        return int(found) if found else None

    def _wait(self, limit: float, may_be_lone: bool) -> list[str] | str | None:
        began, pause, others = time.monotonic(), 0.001, Others(self.group)
        keys, waits = [f"{self._key}/{rank}" for rank in range(self.group.size)], f"waits/{self.group.rank}"
        look, looked, notice = LOOK * self.group.size, 0.0, ""
        self._posts.set(waits, self._key)
        try:
            while not self._posts.check(keys):
                seconds = time.monotonic() - began
                if seconds >= min(limit, NOTICE) and not notice:
                    missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not self._posts.check([key]))
                    notice = f"rank {self.group.rank} waits for rank {missing} to make the same loader"
                    print(f"hoploom: {notice}; {ALONE}", file=sys.stderr, flush=True)
                if seconds >= limit:
                    return f"{notice}, and {limit:g} seconds have passed; {ALONE}"
                if seconds - looked > look:
                    looked = seconds
                    if self._is_another(others.ranks):
                        return None
                    if others.wait_for_this_rank(trains=self.trains):
                        self.is_lone = may_be_lone
                        return None
                threading.Event().wait(min(pause, 0.25))
                pause *= 1.5
        finally:
            self._posts.set(waits, "")
        return [self._posts.get(key).decode() for key in keys]

    def _is_another(self, ranks: Sequence[int]) -> bool:
        """Return whether another rank waits before a loader that this rank has not made; it learns of it, too."""
        notes = [f"waits/{rank}" for rank in ranks if self._posts.check([f"waits/{rank}"])]
        there = {self._posts.get(note).decode() for note in notes} - {"", self._key}
        unknown = [key for key in there if not self._posts.check([f"{key}/{self.group.rank}"])]
        for key in unknown:
            self._posts.set(f"{key}/differs", "")
        return bool(unknown) or self._posts.check([f"{self._key}/differs"])


class Agreement:
    """That of one loader with those of the other ranks. Settled, it costs a look at a flag."""

    def __init__(
        self, share: Share, waits: Waits | None = None, group: Callable[[], Group | None] = group_here
    ) -> None:
        self.is_settled = False
        if share.world_size > 1 and (here := whereabouts()) is not None:
            here.watch()
        self._share, self._waits, self._group = share, waits or Waits(), group
        self._notes: _Notes | None = None
        self._next_look = 0.0

    def pass_batch(self, reading: LoaderReading, *, is_last: bool) -> bool:
        """Call before each batch is handed out; return whether only this rank reads the loader.

        Raise ConfigError if the ranks do not fit together.
        """
        if self.is_settled:
            return False
        if self._notes is None:
            self._begin(reading)
            if self._notes is None:
                return False
            if self._notes.is_lone and not self._share.is_given:
                self._withdraw(self._notes)
                return True
        elif is_last or time.monotonic() >= self._next_look:
            self._conclude(within(self._waits.reply, self._notes.verdict))
        self._next_look = time.monotonic() + self._waits.look
        if is_last and self._notes is not None and self._notes.is_dealt:
            self._wait_for_the_others(self._notes)
        return False

    def _withdraw(self, notes: "_Notes") -> None:
        """Leave no trace of a loader that no other rank reads: the next one has its number."""
        self.is_settled, self._notes = True, None
        within(self._waits.reply, notes.withdraw)
        if notes.here is not None:
            notes.here.take_back(CHANNEL)

    def _begin(self, reading: LoaderReading) -> None:
        group, share = self._group(), self._share
        if group is None:
            return
        is_dealt = share.world_size == group.size
        if not is_dealt and not (share.world_size == 1 and reading.trains):
            self.is_settled = True  # every rank reads all of it, or ranks are arranged in a way of the user's own
            return
        self._notes = notes = _Notes(group, share, is_dealt, reading.trains)
        seconds = self._waits.dealt if is_dealt else self._waits.whole
        posted = partial(notes.post_dealt if is_dealt else notes.post_whole, reading)
        here = notes.here
        if here is not None and is_dealt:
            here.begin(CHANNEL)
            here.watch()
        self._conclude(within(seconds + self._waits.reply, lambda: (posted(), notes.wait(seconds, is_first=True))[1]))

    def _conclude(self, verdict: str | None) -> None:
        """Settled where there is a verdict; all ranks raise it, and none ends before the others have heard."""
        if verdict is not None:
            self.is_settled = True
            notes, self._notes = self._notes, None  # they would keep alive where the ranks have met
            if notes is not None:
                heard = self._waits.heard
                within(heard + self._waits.reply, lambda: notes.hear(verdict, heard))
            if verdict != AGREED:
                raise ConfigError(verdict)

    def _wait_for_the_others(self, notes: "_Notes") -> None:
        """At the end of an epoch: what this rank has read is a share of the seeds, and who reads the others?"""
        notes.others.since = {}
        here, deadline = notes.here, time.monotonic() + notes.group.seconds
        verdict: list[str | None] = [None]

        def is_over(seconds: float) -> bool:
            left = min(seconds, max(0.0, deadline - time.monotonic()))
            verdict[0] = within(left + self._waits.reply, lambda: notes.wait(left))
            return verdict[0] is not None or notes.is_lost or time.monotonic() >= deadline

        if here is not None:
            with suppress(dist.DistError):  # a rank left without beginning this loader
                here.wait(CHANNEL, f"waiting for the other ranks to read their shares of a loader ({ALONE})", is_over)
        while here is None and not is_over(1.0):
            pass
        self._conclude(verdict[0])
        if not self.is_settled:
            self.is_settled = True
            said = (
                within(self._waits.reply, notes.left_alone) or "the process that holds the rendezvous store has ended"
            )
            raise ConfigError(said) if notes.is_lost else PeerError(said)


class _Notes:
    """What the ranks write down about the n-th loader that each of them began."""

    def __init__(self, group: Group, share: Share, is_dealt: bool, trains: bool) -> None:
        self.group, self.is_dealt, self._share = group, is_dealt, share
        self.others, self._trains = Others(group), trains
        self.is_lost = False  # whether a rank that has not begun this loader never will
        self.is_lone = False  # whether no other rank will begin it before this one goes on
        self._all = PrefixStore(f"hoploom/loaders/{'dealt' if is_dealt else 'whole'}", group.store)
        self._number, self._of = 0, self._all
        self._still: dict[int, str] = {}  # the calls in which the other ranks stand still, if all do
        self._seeds = ""

    @property
    def here(self) -> Whereabouts | None:
        return self.others.here

    def _begin(self) -> None:
        self._number = self._all.add(f"begun/{self.group.rank}", 1)
        self._of = PrefixStore(str(self._number), self._all)

    def _post(self, difference: str) -> None:
        """A difference is for all ranks; without one, who comes last says that they agree."""
        if difference:
            self._of.compare_set("verdict", "", difference)
        elif self._of.add("seen", 1) == self.group.size:
            self._of.compare_set("verdict", "", AGREED)

    def withdraw(self) -> None:
        """Take back what `post_dealt` left."""
        for name in ("first", f"share/{self._share.rank}", "seen", "marks"):
            self._of.delete_key(name)
        self._all.add(f"begun/{self.group.rank}", -1)

    def post_dealt(self, reading: LoaderReading) -> None:
        """Compare with the rank that came first; seeds that the ranks have divided with those of all before."""
        told = reading.told()
        self._begin()
        rank, share = self.group.rank, self._share
        self._seeds = told["seeds"].partition(" ")[0]
        first, other = json.loads(self._of.compare_set("first", "", json.dumps([rank, dict(told)])))
        holder = int(self._of.compare_set(f"share/{share.rank}", "", str(rank)))
        difference = "" if other == told else difference_of((first, other), (rank, told), self.group.size)
        if not difference and holder != rank:
            same = f"rank={share.rank}, world_size={share.world_size}"
            difference = (
                f"rank {holder} and rank {rank} both gave their loader {same}, so they would read the same seeds; give "
                "each rank its own, or leave rank= and world_size= out"
            )
        if not difference and reading.is_divided:
            difference = self._twice(reading, DIVIDED_BADLY)
        self._post(difference)

    def post_whole(self, reading: LoaderReading) -> None:
        """Compare with all that came before: nobody else may train the same seeds."""
        self._begin()
        self._post(self._twice(reading, TRAINED_TWICE))

    def _twice(self, reading: LoaderReading, error: str) -> str:
        """Return the error if a rank has some of the same seeds, else ""; a sample of the seeds is compared.

        Seeds that repeat on one rank, as links of a multigraph do, may repeat on another one.
        """
        limit = max(16, min(MARKS, ALL_MARKS // self.group.size))
        marks = reading.marks(limit)
        self._of.append("marks", json.dumps([self.group.rank, marks]) + "\n")  # type: ignore[attr-defined]
        lines = self._of.get("marks").decode().splitlines()
        for rank, theirs in map(json.loads, lines):
            shared = 0 if rank == self.group.rank else len(set(marks) & set(theirs))
            may_repeat = any(len(set(one)) < len(one) for one in (marks, theirs))
            if shared and (shared == len(set(marks)) or not may_repeat):
                ranks = f"rank {min(rank, self.group.rank)} and rank {max(rank, self.group.rank)}"
                some = f"some of the same seeds ({shared} of {len(marks)} that were compared)"
                return error.format(ranks=ranks, seeds="the same seeds" if shared == len(set(marks)) else some)
        return ""

    def verdict(self) -> str | None:
        return self._of.get("verdict").decode() if self._of.check(["verdict"]) else None

    def wait(self, seconds: float, *, is_first: bool = False) -> str | None:
        """The verdict, if there is one within so many seconds, and before it is known that there will be none."""
        deadline, pause = time.monotonic() + seconds, 0.001
        while (verdict := self.verdict()) is None and time.monotonic() < deadline:
            if pause > 0.1 and self._is_in_vain(is_first=is_first):
                return self.verdict()
            threading.Event().wait(min(pause, 0.25))
            pause *= 1.5
        return verdict

    def hear(self, verdict: str, seconds: float) -> None:
        """Wait until every rank has read the verdict, too: before this one ends with it, or with the notes it keeps."""
        self._of.add("heard", 1)
        deadline = time.monotonic() + (seconds if verdict != AGREED or self.group.rank == 0 else 0.0)
        while time.monotonic() < deadline and self._of.add("heard", 0) < self.group.size:
            threading.Event().wait(0.01)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.group.size) if self._all.add(f"begun/{rank}", 0) < self._number]

    def _is_in_vain(self, *, is_first: bool) -> bool:
        """Whether a rank has ended, or all others stand still elsewhere; at the first batch: for now."""
        missing, ranks, store = self._missing(), self.others.ranks, self.group.store
        calls = {rank: call for rank, call in self.others.calls().items() if not call.startswith(BACKWARD)}
        self._still = calls if len(calls) == len(ranks) else {}  # a backward pass may be long, and wait for nobody
        self.is_lone = is_first and missing == ranks and self.others.wait_for_this_rank(trains=self._trains)
        self.is_lost = bool(missing) and (any(has_left(store, rank) for rank in missing) or bool(self._still))
        return (
            self.is_lone
            or self.is_lost
            or (is_first and any(is_waiting(store, rank) or is_meeting(store, rank) for rank in missing))
        )

    def left_alone(self) -> str:
        rank = next(iter(self._missing()), None)
        if rank is None:
            return "the ranks lost each other"
        why = f"did not start it within {self.group.seconds:g} seconds"
        if has_left(self.group.store, rank):
            why = "has ended"
        elif self._still:
            why = f"waits in {self._still[rank]}"
        return (
            f"rank {self.group.rank} has finished its share of a loader whose {self._seeds} seeds are divided over "
            f"{self.group.size} ranks, but rank {rank} has not started this loader; it {why}; {ALONE}"
        )


def difference_of(first: tuple[int, Mapping[str, str]], second: tuple[int, Mapping[str, str]], size: int) -> str:
    """What two ranks have otherwise, in words."""
    (a, one), (b, other) = sorted([first, second], key=lambda told: told[0])
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    values = "; ".join(f"{name}: {one.get(name)} on rank {a}, {other.get(name)} on rank {b}" for name in names)
    way_out = next((text for name, text in WAYS_OUT.items() if name in names), "give the same on all ranks")
    differ = f"the loaders of rank {a} and rank {b} differ, but their seeds are divided over {size} ranks ({values})"
    return f"{differ}; {way_out}; {ALONE}"
