"""Checks that ranks fit together: in the calls that they share, and in the seeds that each rank's loader reads.

Each rank counts the shared calls that it begins, separately for a context, averaged gradients and loaders. A rank that
waits for long posts its status in the rendezvous store: the call that it waits for, the torch call that blocks its main
thread, and its counts. If every rank waits for a rank that has not begun the same call, this proves a deadlock, and all
ranks raise one error. Loaders post their settings in the same store, when they are made and when an iteration begins.
They make no collective calls, which could mix with yours.
"""

import atexit
import hashlib
import json
import re
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache, partial
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from hoploom.config.values import as_int
from hoploom.errors import ConfigError, PeerError
from hoploom.ranks import environment
from hoploom.ranks.rendezvous import is_reachable, poll, with_timeout

Found = TypeVar("Found")

GIVEN, GROUP, SINGLE = "as given", "from the process group", "the only process"  # origins of a Share
DIVIDED, LONE = "seeds divided before the loader got them", "the only rank that reads this loader"
LAUNCHERS = {"torchrun": "from torchrun's environment", "slurm": "from Slurm's environment", "single": SINGLE}

PATIENCE = 2.0  # seconds of waiting after which a rank posts its status
INTERVAL = 1.0  # seconds between two looks at the posted statuses, and at this rank's main thread
PER_RANK = 0.002  # seconds more for each rank, to spare the process that holds the store
STILL = 3  # looks in a row at the same call until the main thread counts as blocked in it
AGAIN = 2  # further looks at it until another rank trusts the status, which may be old
INSIDE = ("hoploom", "torch", "contextlib", "functools")  # packages that are not the user's script
COLLECTIVES = re.compile(r"(monitored_)?barrier|new_group|(all_|broadcast|reduce|gather|scatter)\w*")  # not recv, send
TORCH, GRADIENTS = "torch.distributed.distributed_c10d", "torch.autograd.graph"  # modules with blocking calls
COLLECTIVE, BACKWARD = "torch.distributed.", "torch.autograd.backward"
SAME_CALLS = (
    "every rank must make the same calls, in the same order and equally often: look for a call that only some ranks "
    "reach (if context.is_main: ...), or for loops of different length"
)
AGREED, ALONE = "agreed", "alone"
MOST_HASHES, MOST_IN_ALL = 1024, 16384  # hashes of seeds: from one rank, and from all together
NOTICE = 10.0  # seconds of waiting for other ranks after which a line is printed
WHOLE = 2.0  # seconds to wait for other ranks if this rank may be the only one that reads the loader
READ = 5.0  # seconds to wait until all ranks have read an error, before this rank raises it
REPLY = 5.0  # seconds for a reply of the process that holds the store
GOODBYE = 2.0  # seconds to post that a rank leaves; the rendezvous ends the whole farewell after 3
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


@dataclass(frozen=True)
class Share:
    """One rank's share of a loader's seeds, which are distributed over `world_size` ranks."""

    rank: int = 0
    world_size: int = 1
    origin: str = GIVEN

    @property
    def is_given(self) -> bool:
        """Whether the script chose the share, by rank= and world_size= or by giving each rank different seeds."""
        return self.origin in (GIVEN, DIVIDED, LONE)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, {self.origin}"


@cache
def print_share(share: Share) -> None:
    """Print a line, once and on rank 0, if a loader distributes its seeds over ranks without being asked to."""
    if share.world_size > 1 and share.rank == 0 and not share.is_given:
        line = f"a loader shares its seeds among {share.world_size} ranks ({share.origin})"
        print(f"hoploom: {line}; rank=0, world_size=1 reads all on each rank", file=sys.stderr, flush=True)


def read_share(rank: Any, world_size: Any) -> Share:
    """Return the share that `rank` and `world_size` give; if both are None, that of the process group or launcher."""
    if rank is not None or world_size is not None:
        return Share(
            as_int("rank", rank, 0, "give this process's number among world_size, 0 for the first, or neither"),
            as_int("world_size", world_size, 1, "give the number of ranks, with rank, or neither"),
        )
    if dist.is_initialized():
        return Share(dist.get_rank(), dist.get_world_size(), GROUP)
    try:
        info = environment.read_started()
    except ConfigError as error:
        later = "or make the loader once there is a process group, with Lightning in train_dataloader()"
        raise ConfigError(f"{error}; {later}") from error
    return Share(info.rank, info.world_size, LAUNCHERS[info.source] if info.world_size > 1 else SINGLE)


@dataclass(frozen=True)
class Status:
    """The calls that a rank has begun and the call that it waits for. Ranks post their status for each other."""

    begun: Mapping[str, int] = field(default_factory=dict)  # number of calls, by channel
    channel: str = ""  # of the call that the rank waits for; empty if it waits for none
    number: int = 0  # of that call in its channel
    doing: str = ""  # the call, in words
    serial: int = 0  # of the wait, counted by the rank
    is_firm: bool = True  # whether the rank cannot go on before all ranks have begun the call
    call: str = ""  # of torch, in which the main thread is blocked
    looks: int = 0  # in a row that found it in this call
    has_left: bool = False

    def waits_for(self, other: "Status") -> bool:
        """Return whether this rank waits for a call that the rank with status `other` has not begun yet."""
        return bool(self.channel) and other.begun.get(self.channel, 0) < self.number


def detector_here() -> "DeadlockDetector | None":
    """Return the DeadlockDetector of this process; None unless it is in a process group of several ranks."""
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
    """Finds ranks that wait for each other forever. A thread posts this rank's status; rank 0 compares all statuses."""

    def __init__(self, store: Store, rank: int, size: int, is_open: Callable[[], bool] = lambda: True) -> None:
        own = store.clone() if hasattr(store, "clone") else store  # older versions of torch have no clone
        self.store = PrefixStore("hoploom", own)  # on its own connection, which waits for no calls of other threads
        self.rank, self.size = rank, size
        self.seconds: float = store.timeout.total_seconds()  # type: ignore[attr-defined]
        self.averaging_seconds = 0.0  # that this rank has waited for other ranks' gradients
        self.begun: Counter[str] = Counter()  # number of calls, by channel
        self._waiting = Status()  # the call that this rank waits for, without counts
        self._errors: dict[int, Exception] = {}  # by the serial of the wait that each ends
        self._judged: list[int] = []  # the serials of all ranks at the last verdict
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, args=(is_open,), daemon=True, name="hoploom deadlocks")
        self._watching.start()

    def begin(self, channel: str) -> int:
        """Count that this rank begins a call of the kind `channel`; return the number of such calls so far."""
        self.begun[channel] += 1
        return self.begun[channel]

    def wait(self, channel: str, doing: str, waited: Callable[[float], bool], *, is_firm: bool = True) -> None:
        """Wait for this rank's newest call of `channel`: repeat `waited(seconds)` until True.

        Raise ConfigError if all ranks wait for each other, DistError if one has left.
        """
        if waited(PATIENCE):
            return
        serial, lost = self._waiting.serial + 1, None
        self._waiting = status = Status({}, channel, self.begun[channel], doing, serial, is_firm)
        try:
            while serial not in self._errors and not waited(INTERVAL):
                pass
        except RuntimeError as error:  # a rank that has read the verdict already may have left
            lost = error
        finally:
            self._waiting = Status(serial=serial)
        with_timeout(REPLY, lambda: self._read_verdict(status))  # before `lost`, which may only follow from the verdict
        if serial in self._errors:
            raise self._errors.pop(serial) from lost
        if lost is not None:
            raise lost

    def statuses(self) -> list[Status]:
        """Return the statuses of all ranks; [] until all have posted one, because reading would wait for them."""
        keys = [f"status/{rank}" for rank in range(self.size)]
        return [Status(**json.loads(text)) for text in self.store.multi_get(keys)] if self.store.check(keys) else []

    def leave(self) -> None:
        """Post that this rank leaves, so that no rank waits for calls that it will never begin; release the store."""
        atexit.unregister(self.leave)
        _of_group.cache_clear()
        is_first = not self._over.is_set()
        self._over.set()
        self._watching.join(INTERVAL)
        if is_first and is_reachable(self.store):
            status = Status(dict(self.begun), has_left=True)  # only the first counts: later ones may have begun more
            with_timeout(GOODBYE, lambda: self.store.compare_set("left", "", self._post(status)))
        self.store = PrefixStore("", HashStore())  # releases the rendezvous store

    def _watch(self, is_open: Callable[[], bool]) -> None:
        """Post the status and read rank 0's verdict, until the process group or the process with its TCPStore ends."""
        seen: tuple[FrameType | None, str] = (None, "")
        looks, posted = 0, Status()
        with suppress(RuntimeError):
            self._post(posted)
            while not self._over.wait(INTERVAL + (PER_RANK * self.size if posted.channel else 0.0)) and is_open():
                here = _blocking_call()
                looks = looks + 1 if here == seen and here[1] else 0
                seen, waiting = here, self._waiting  # read before the counts: they may only be newer
                status = replace(waiting, begun=dict(self.begun), call=here[1] if looks >= STILL else "", looks=looks)
                if status.channel or status.call or posted.channel or posted.call:
                    self._post(status)
                posted = status
                if status.channel:
                    if self.rank == 0:
                        self._judge()
                    self._read_verdict(status)

    def _post(self, status: Status) -> str:
        text = json.dumps(asdict(status))
        self.store.set(f"status/{self.rank}", text)
        return text

    def _read_verdict(self, status: Status) -> None:
        """Store an error, which `wait` raises, if rank 0 has found a deadlock or a rank has left without the call."""
        verdict = f"verdict/{self.rank}/{status.serial}"
        if self.store.check([verdict]):
            self._errors[status.serial] = ConfigError(self.store.get(verdict).decode())
        elif (
            status.is_firm
            and self.store.check(["left"])
            and status.waits_for(Status(**json.loads(self.store.get("left"))))
        ):
            self._errors[status.serial] = dist.DistError("it left before its part")

    def _judge(self) -> None:
        """Post an error for all ranks if none can go on. Then pause, so that they can read it before this rank ends."""
        waits = self.statuses()
        serials, one_goes_on = [wait.serial for wait in waits], sum(not wait.is_firm for wait in waits) == 1
        is_known = any(serial == before for serial, before in zip(serials, self._judged, strict=False))
        is_stuck = bool(waits) and all(any(wait.waits_for(other) for other in waits) for wait in waits)
        if one_goes_on or is_known or not is_stuck:
            return
        self._judged = serials
        other = next(rank for rank, wait in enumerate(waits) if wait.channel != waits[0].channel)
        error = f"rank 0 was {waits[0].doing}, but rank {other} was {waits[other].doing}, and each waits for the other"
        verdicts = [f"verdict/{rank}/{serial}" for rank, serial in enumerate(serials)]
        self.store.multi_set(verdicts, [f"{error}; {SAME_CALLS}"] * self.size)  # type: ignore[attr-defined]
        self._over.wait(2 * (INTERVAL + PER_RANK * self.size))


def calling(doing: str) -> tuple[str, str]:
    """Return the Hoploom function that the script called, else `doing`, and the line: ("evaluate", "train.py:20")."""
    function = doing
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        package = _module(frame).partition(".")[0]
        if package == "hoploom":
            name = frame.f_code.co_name
            function = function if name.startswith("_") else name
        elif package not in INSIDE:
            break
    return function, _line(frame)


def call_chain() -> list[str]:
    """Return the lines of the script that lead to this call, equal on ranks that run the same functions.

    The top line is left out: it may differ on a rank that started the others.
    """
    lines: list[str] = []
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        package, is_top = _module(frame).partition(".")[0], frame.f_code.co_name == "<module>"
        if package == "multiprocessing" or (lines and (is_top or package == "torch")):
            break
        if package not in INSIDE:
            lines.append(_line(frame))
    return lines


def _blocking_call() -> tuple[FrameType | None, str]:
    """Return the frame and the name of the torch call that blocks the main thread; (None, "") if there is none."""
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


class LoaderReading(Protocol):
    """The settings of a loader and the hashes of its seeds, which ranks compare."""

    @property
    def trains(self) -> bool: ...  # whether two ranks must not read the same seed
    @property
    def is_divided(self) -> bool: ...  # whether the script gave each rank other seeds
    @property
    def settings(self) -> Mapping[str, str]: ...  # all that decides the batches besides the rank, by name
    def seed_hashes(self, limit: int) -> list[int]: ...  # the `limit` lowest, with repetitions


class _Round:
    """One comparison of a loader on all ranks. Each rank posts entries to a log in the rendezvous store."""

    def __init__(self, here: DeadlockDetector, channel: str, doing: str, *, trains: bool) -> None:
        self.here, self.channel, self.doing, self._trains = here, channel, doing, trains
        self.posts = PrefixStore(f"{channel}/{here.begin(channel)}", here.store)
        self._looks: dict[int, int] = {}  # by rank: `Status.looks` when this round began

    def post(self, **entry: Any) -> None:
        """Append an entry of this rank to the log."""
        self.posts.append("log", json.dumps({"rank": self.here.rank, **entry}) + "\n")  # type: ignore[attr-defined]
        self.posts.add("posted", 1)

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of all ranks so far, in the order in which they were posted."""
        log = self.posts.get("log").decode() if self.posts.check(["log"]) else ""
        return [json.loads(line) for line in log.splitlines()]

    def all_entries(self) -> list[dict[str, Any]] | None:
        """Return the entries once all ranks have posted, else None."""
        return self.entries() if self.posts.add("posted", 0) >= self.here.size else None

    def wait(self, look: Callable[[], Found | None], *, may_be_alone: bool) -> Found | None:
        """Return the first result of `look`, or None if `may_be_alone` and no other rank can join.

        Raise ConfigError if a rank will never post its entry, PeerError if a rank has not after the group's timeout.
        """
        here, deadline = self.here, time.monotonic() + self.here.seconds
        found, notice, why, is_alone = None, "", "", False

        def is_over(seconds: float) -> bool:
            nonlocal found, notice, why, is_alone
            seconds = max(0.0, min(seconds, deadline - time.monotonic()))
            found = with_timeout(seconds + REPLY, lambda: poll(look, seconds))
            if found is not None:
                return True
            missing, why, is_alone = with_timeout(REPLY, self._lost) or (["?"], why, is_alone)
            left = deadline - time.monotonic()
            if not notice and left <= max(0.0, here.seconds - NOTICE):
                notice = f"rank {here.rank} waits for rank {', '.join(missing)} {self.doing}"
                print(f"hoploom: {notice}; {ONE_RANK}", file=sys.stderr, flush=True)
            return bool(why) or (may_be_alone and is_alone) or left <= 0

        says = "waiting for the other ranks {} ({} at {}; {})".format(self.doing, *calling("loop"), ONE_RANK)
        try:
            here.wait(self.channel, says, is_over, is_firm=not may_be_alone)
        except dist.DistError:  # a rank has left, as its status says
            why = (with_timeout(REPLY, self._lost) or ("", "", False))[1]
        if found is not None or (may_be_alone and is_alone):
            return found
        if why:
            raise ConfigError(f"rank {here.rank} waits for the other ranks {self.doing}, but {why}; {ONE_RANK}")
        raise PeerError(f"{notice or says}, and {here.seconds:g} seconds have passed; {ONE_RANK}")

    def _lost(self) -> tuple[list[str], str, bool]:
        """Return the ranks that have not posted, why none of them will (or ""), and whether no other can join."""
        here, posted = self.here, {self.here.rank, *(entry["rank"] for entry in self.entries())}
        missing, whys, num_waiting = [rank for rank in range(here.size) if rank not in posted], [], 0
        for rank, status in enumerate(here.statuses()):
            first = self._looks[rank] = min(status.looks, self._looks.get(rank, status.looks))
            call = status.call if status.looks >= first + AGAIN else ""  # a status may be older than this wait
            if rank not in missing:
                continue
            if status.has_left:
                whys.append(f"rank {rank} has ended")
            elif call.startswith(COLLECTIVE):
                whys.append(f"rank {rank} waits in {call}")
            elif call.startswith(BACKWARD):
                num_waiting += not self._trains  # the rank waits for gradients of this rank, or is slow
            elif status.is_firm and status.waits_for(Status(here.begun)):
                num_waiting += 1  # if this rank cannot go on, all ranks will get one error
        why = whys[0] if whys and len(whys) == len(missing) else ""
        return [str(rank) for rank in missing], why, len(whys) + num_waiting == here.size - 1


class Meeting(_Round):
    """The exchange of a loader's seeds: ranks post theirs when they make it, and read all before the first batch.

    Loaders made by the same lines of the script count as the same.
    """

    def __init__(self, here: DeadlockDetector, reading: LoaderReading, chain: Sequence[str], num_seeds: int) -> None:
        channel = f"loader {hashlib.sha256(json.dumps(chain).encode()).hexdigest()[:16]}"
        super().__init__(here, channel, "to make the same loader", trains=reading.trains)
        with_timeout(REPLY, lambda: self.post(seeds=f"{num_seeds} {reading.settings['seeds']}"))

    def seeds(self, *, may_be_lone: bool) -> list[str]:
        """Return each rank's number of seeds and fingerprint; with `may_be_lone`, [] if no other rank can join."""
        entries = self.wait(self.all_entries, may_be_alone=may_be_lone) or []
        return [entry["seeds"] for entry in sorted(entries, key=lambda entry: int(entry["rank"]))]

    def note_lone(self) -> None:
        """Post in the store that this rank has read the loader alone."""
        with_timeout(REPLY, lambda: self.posts.set("lone", str(self.here.rank)))

    def lone_reader(self) -> int | None:
        """Return the rank that has read the loader alone, or None."""
        found = with_timeout(REPLY, lambda: self.posts.get("lone") if self.posts.check(["lone"]) else b"")
        return int(found) if found else None


def agree(
    share: Share, read: Callable[[], LoaderReading], detector: Callable[[], DeadlockDetector | None] = detector_here
) -> str:
    """Compare a loader with those of other ranks; raise ConfigError if they differ.

    Return AGREED, ALONE if no other rank reads it, or "" without a process group.
    """
    here = detector()
    if here is None:
        return ""
    reading, is_dealt = read(), share.world_size == here.size
    if not is_dealt and not (share.world_size == 1 and reading.trains):
        return AGREED  # every rank reads the whole loader, or the user has divided the ranks in another way
    channel = "loaders" if is_dealt else "whole loaders"
    loop = _Loop(here, channel, "to read their shares of a loader", trains=reading.trains)
    with_timeout(REPLY, lambda: loop.compare(share, reading, is_dealt=is_dealt))
    if is_dealt:
        outcome = loop.wait(loop.outcome, may_be_alone=not share.is_given)
    else:  # this rank may be the only one that reads the loader
        outcome = with_timeout(WHOLE + REPLY, lambda: poll(loop.outcome, WHOLE)) or AGREED
    if outcome is None:
        for name in ("log", "posted", f"settings/{here.rank}"):
            with_timeout(REPLY, partial(loop.posts.delete_key, name))
        here.begun[channel] -= 1  # the next loop takes this loop's number
        return ALONE
    with_timeout(READ + REPLY, lambda: loop.confirm(outcome))
    if outcome != AGREED:
        raise ConfigError(outcome)
    return AGREED


class _Loop(_Round):
    """The comparison of the ranks' loaders before an iteration over them."""

    def compare(self, share: Share, reading: LoaderReading, *, is_dealt: bool) -> None:
        """Post this rank's settings and seed hashes. If they do not fit another rank's, no rank waits any longer."""
        here = self.here
        limit = max(16, min(MOST_HASHES, MOST_IN_ALL // here.size))
        hashes = reading.seed_hashes(limit) if reading.is_divided or not is_dealt else []
        settings = json.dumps(dict(reading.settings))
        self.posts.set(f"settings/{here.rank}", settings)  # not in the log, which every rank reads each second
        digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
        self.post(hashes=hashes, **({"share": share.rank, "digest": digest} if is_dealt else {}))
        if self._difference():
            self.posts.add("posted", here.size)

    def outcome(self) -> str | None:
        """Return AGREED or the error text for all ranks; None if a rank has not posted yet."""
        return (self._difference() or AGREED) if self.posts.add("posted", 0) >= self.here.size else None

    def confirm(self, outcome: str) -> None:
        """Post that this rank has read `outcome`. On rank 0, or after an error, wait for the other ranks."""
        self.posts.add("read", 1)
        seconds = READ if outcome != AGREED or self.here.rank == 0 else 0.0  # rank 0 may hold the store
        poll(lambda: self.posts.add("read", 0) >= self.here.size, seconds)

    def _difference(self) -> str:
        """Return the error text for the first log entry that does not fit an earlier one, or "". It is equal on all."""
        entries, size = self.entries(), self.here.size
        of_share, of_hash = dict[int, int](), defaultdict[int, list[int]](list)  # the ranks that posted them
        may_repeat: set[int] = set()  # ranks whose seeds repeat, as links of a multigraph do
        for entry in entries:
            rank, first, hashes = entry["rank"], entries[0], {*entry["hashes"]}
            if entry.get("digest") != first.get("digest"):
                ranks = sorted((first["rank"], rank))
                one, another = (json.loads(self.posts.get(f"settings/{rank}")) for rank in ranks)
                return difference_of((ranks[0], one), (ranks[1], another), size)
            if "share" in entry and (holder := of_share.setdefault(entry["share"], rank)) != rank:
                given = f"rank={entry['share']}, world_size={size}"
                return (
                    f"rank {min(holder, rank)} and rank {max(holder, rank)} both gave their loader {given}, so they "
                    "would read the same seeds; give each rank its own, or leave rank= and world_size= out"
                )
            if len(hashes) < len(entry["hashes"]):
                may_repeat.add(rank)
            for other, shared in Counter(other for one in hashes for other in of_hash[one]).items():
                is_same = shared == len(hashes)
                if is_same or not may_repeat & {rank, other}:
                    some = f"some of the same seeds ({shared} of {len(entry['hashes'])} that were compared)"
                    error = DIVIDED_BADLY if "share" in entry else TRAINED_TWICE
                    named = f"rank {min(other, rank)} and rank {max(other, rank)}"
                    return error.format(ranks=named, seeds="the same seeds" if is_same else some)
            for one in hashes:
                of_hash[one].append(rank)
        return ""


def difference_of(first: tuple[int, Mapping[str, str]], second: tuple[int, Mapping[str, str]], size: int) -> str:
    """Return the error text for two ranks whose settings differ. `first` and `second` are (rank, settings)."""
    (a, one), (b, other) = first, second
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    values = "; ".join(f"{name}: {one.get(name)} on rank {a}, {other.get(name)} on rank {b}" for name in names)
    hint = next((text for name, text in HINTS.items() if name in names), "give the same on all ranks")
    differ = f"the loaders of rank {a} and rank {b} differ, but their seeds are divided over {size} ranks ({values})"
    return f"{differ}; {hint}; {ONE_RANK}"
