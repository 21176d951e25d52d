"""Where ranks meet, and the notes that they leave there: who ended and why, for those whom talking failed.

The notes are of torch's TCPStore, which rank 0 or the launcher keeps. What asks it never waits longer than it says.
"""

import fcntl
import gc
import ipaddress
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from hoploom.config.values import is_loopback, join_address
from hoploom.errors import ConfigError, PeerError
from hoploom.ranks.environment import LOOPBACK, LOOPBACK_INTERFACES, RankInfo

Answer = TypeVar("Answer")

FAREWELL = 3.0  # seconds for what ranks say to each other at the end; peers that hang can hold it up
ROLL_CALL = 1.0  # seconds to find out which peer it was
PAUSES = 0.005, 0.25  # seconds between two looks whether all are here: at first, and at most
ATTEMPT, ATTEMPT_ENDS = 5.0, 1.0  # seconds of one attempt to reach the meeting point, and what torch takes longer
SILENCE = 60.0  # seconds for one who accepts connections to say something: names may have to be looked up
STRANGER = "Ping failed"  # torch, of one who answers otherwise than its store does
READ_ADDRESS, IFREQ = 0x8915, struct.Struct("16sHH4s16x")  # SIOCGIFADDR, and what it takes: name, family, port, address
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Rendezvous:
    """Short notes that ranks leave for each other where they met, to say who is to blame when talking fails.

    `kind` is what messages call those who meet.
    """

    def __init__(self, place: RankInfo, notes: PrefixStore, kind: str = "rank") -> None:
        self.store = notes
        self._rank, self._world_size, self._kind = place.rank, place.world_size, kind
        self._keeper, self._keeps = _keeper(place, kind), place.rank == 0 and not place.hosted
        self._others = [rank for rank in range(place.world_size) if rank != place.rank]
        self._lost = False

    def arrive(self, said: str, seconds: float) -> None:
        """Wait until all are here. One that leaves before that ends the waiting of all."""
        deadline, pause, reason = time.monotonic() + seconds, PAUSES[0], ""
        try:
            self.store.set(f"here/{self._rank}", said)
            if self.store.add("arrived", 1) == self._world_size:
                self.store.set("complete", "")
            while not reason and not self.store.check(["complete"]):  # torch's own wait prints when it is over
                reason = self._why_not(deadline)
                threading.Event().wait(pause)
                pause = min(2 * pause, PAUSES[1])
        except RuntimeError:
            reason = f"{self._keeper} ended or cannot be reached"
        if reason:
            self._give_up(reason)
            raise PeerError(f"{self._kind} {self._rank} of {self._world_size} was meeting the others, and {reason}")

    def _give_up(self, reason: str) -> None:
        """Have those who are here tell the same reason, not that this one ended."""
        self._lost = True

        def tell() -> None:
            with suppress(RuntimeError):
                self.store.compare_set("gone", "", f"{self._rank} gave up, as {reason}")
                here = [rank for rank in self._others if self.store.check([f"here/{rank}"])]
                while self._keeps and not all(map(self._is_gone, here)):
                    threading.Event().wait(ROLL_CALL / 20)

        self._note("lost", "")
        with_timeout(FAREWELL, tell)

    def _why_not(self, deadline: float) -> str:
        """Why not all can be here any more; "": they still can."""
        if self.store.check(["gone"]) and not self.store.check(["complete"]):  # else it has been here, and left since
            return f"{self._kind} {self.store.get('gone').decode(errors='replace')}"
        if time.monotonic() < deadline:
            return ""
        absent = [f"{self._kind} {rank}" for rank in self._others if not self.store.check([f"here/{rank}"])]
        return f"{', '.join(absent)} did not connect in time; check that it was started, and read its own output"

    def said(self) -> list[str]:
        """What all said when they arrived."""
        return [text.decode() for text in self.store.multi_get([f"here/{i}" for i in range(self._world_size)])]

    def own_address(self, place: RankInfo) -> str:
        """Return the address at which the other hosts reach this one. All ranks call.

        It is the one that packets to the meeting point leave from. On the first host, whose name may be loopback there,
        it is the one that packets to another host leave from.
        """
        own = address_towards(place.address, place.port)
        self.store.set(f"address/{self._rank}", own)
        if not is_loopback(own):
            return own
        told = self.store.multi_get([f"address/{rank}" for rank in (self._rank, *self._others)])
        far = next((address for text in told if not is_loopback(address := text.decode())), None)
        return own if far is None else address_towards(far, place.port)

    def leave(self, farewell: str, close: Callable[[], object] = lambda: None) -> None:
        """Say why, unless it is because the others are lost; then close what connects the ranks."""
        if not self._lost:
            with_timeout(FAREWELL, lambda: self._note("ended", farewell))
        with_timeout(FAREWELL, close)
        if self._lost and self._keeps:  # the others notice after this one, and want to know whom they lost
            self._stay(FAREWELL)

    def missing(self) -> str:
        """Return which peer ended, or else which ones give no sign of life while this rank waits a moment for one."""
        self._lost = True
        return with_timeout(FAREWELL, self._roll_call) or f"{self._keeper} does not answer"

    def _how_ended(self, rank: int) -> str:
        if not self.store.check([f"ended/{rank}"]):
            return ""
        return f"rank {rank} {self.store.get(f'ended/{rank}').decode(errors='replace')}"

    def _roll_call(self) -> str:
        self._note("heard", "")
        self._note("lost", "")
        silent, deadline = set(self._others), time.monotonic() + ROLL_CALL
        try:
            while silent and time.monotonic() < deadline:
                for rank in silent:
                    if ended := self._how_ended(rank):
                        return ended
                silent = {rank for rank in silent if not self.store.check([f"lost/{rank}"])}
                threading.Event().wait(ROLL_CALL / 20)
            # a rank that has missed others, perhaps long ago, is blamed only if no other rank is silent
            silent = {rank for rank in silent if not self.store.check([f"heard/{rank}"])} or silent
        except RuntimeError:
            return f"{self._keeper} ended or cannot be reached"
        if not silent:
            return "the ranks lost each other"
        return f"no sign of life came from {', '.join(f'rank {rank}' for rank in sorted(silent))}"

    def wait_for_the_others(self, seconds: float) -> None:
        """Until every other rank has left, or knows that some are lost; at most so long."""
        if not self._lost:
            self._stay(seconds)

    def outlast(self, seconds: float = FAREWELL) -> None:
        """Let the others find the notes, if they are kept in this process."""
        if self._keeps:
            self.wait_for_the_others(seconds)

    def _stay(self, seconds: float) -> None:
        ended = threading.Event()
        with_timeout(seconds, lambda: self._watch_the_others(ended))
        ended.set()
        threading.Event().wait(ROLL_CALL / 10)  # for the thread: one that asks when Python ends would abort the process

    def _watch_the_others(self, ended: threading.Event) -> None:
        staying = set(self._others)
        with suppress(RuntimeError):  # who keeps the notes has left too
            while staying and not ended.wait(ROLL_CALL / 20):
                staying = {rank for rank in staying if not self._is_gone(rank)}

    def _is_gone(self, rank: int) -> bool:
        return any(self.store.check([f"{kind}/{rank}"]) for kind in ("ended", "lost"))

    def _note(self, kind: str, text: str) -> None:
        with suppress(RuntimeError):  # whoever keeps the notes may itself be gone
            self.store.set(f"{kind}/{self._rank}", text)
            if kind == "ended":
                self.store.set("gone", f"{self._rank} {text}")


def meet(place: RankInfo, seconds: float, *, kind: str = "rank", saying: str | None = None) -> Rendezvous:
    """Wait until all ranks are here, and keep their notes: beside the user's own process group, or where they meet."""
    notes = Rendezvous(place, _notes_of_this_time(place, seconds, kind), kind)
    notes.arrive(this_host() if saying is None else saying, seconds)
    return notes


def _notes_of_this_time(place: RankInfo, seconds: float, kind: str) -> PrefixStore:
    """Apart from those of earlier times: a process may close its context and make another."""
    deadline = time.monotonic() + seconds
    while True:
        if place.source == "group":
            store = PrefixStore("hoploom", _get_default_store())
        else:
            meeting = meeting_point(place, timedelta(seconds=seconds), kind)
            store = PrefixStore(f"hoploom/{kind}/{place.restarts}", meeting)
        times = _joined(store, place, kind, is_last=time.monotonic() > deadline)
        if times:
            return PrefixStore(str(times), store)
        del meeting, store  # rank 0 has yet to close what it held the last time
        threading.Event().wait(PAUSES[1])


def _joined(store: PrefixStore, place: RankInfo, kind: str, *, is_last: bool) -> int:
    """How often this rank has come here; 0: what is here is of the last time, and rank 0 is closing it."""
    is_another = place.hosted or place.source == "group" or is_last
    try:
        if place.source != "group":
            _claim(store, place, kind)
        times = store.add(f"joined/{place.rank}", 1)
    except RuntimeError as error:
        if is_another or place.rank == 0:
            raise PeerError(
                f"{kind} {place.rank} of {place.world_size} was meeting the others, and {_keeper(place, kind)} ended "
                "or cannot be reached"
            ) from error
        return 0
    return times if times == 1 or is_another else 0


def _claim(store: PrefixStore, place: RankInfo, kind: str = "rank") -> None:
    """Refuse a second process with the same rank."""
    own = f"{os.getpid()} on {this_host()}"
    holder = store.compare_set(f"process/{place.rank}", "", own).decode()
    if holder != own:
        there, here = (text.rpartition(" ")[0] for text in (holder, own))
        raise ConfigError(
            f"{kind} {place.rank} of {place.world_size} is taken already: by process {there}, and this is process "
            f"{here}; give each a {kind} of its own"
        )


def adopted(place: RankInfo) -> RankInfo:
    """With the address where the user's own group has met, as far as that is known."""
    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return replace(place, address=store.host, port=store.port) if isinstance(store, TCPStore) else place


def this_host() -> str:
    """What processes of one host have in common: its name, and where the system tells, which start of it this is."""
    return f"{socket.gethostname()} {BOOT.read_text().strip() if BOOT.exists() else '?'}"


def address_towards(host: str, port: int) -> str:
    """Return the address of this host that packets to another one leave from. Nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no way from this host to {host}: {error}; check the network's set-up") from error


def interface_of(address: str) -> str | None:
    """Return the name of this host's network interface that has an address; None if the system does not tell."""
    names = [name for _, name in socket.if_nameindex()]
    if is_loopback(address):
        return next((name for name in LOOPBACK_INTERFACES if name in names), None)
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((row[5] for row in rows if int(row[0], 16) == int(wanted)), None)
    with socket.socket(type=socket.SOCK_DGRAM) as asking:
        for name in names:
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(asking, READ_ADDRESS, IFREQ.pack(name.encode(), socket.AF_INET, 0, wanted.packed))
                if IFREQ.unpack(found)[3] == wanted.packed:
                    return name
    return None


def own_client(store: Store) -> Store:
    """Return the store with a connection of its own, which does not wait for long calls of other threads."""
    return store.clone() if hasattr(store, "clone") else store  # older versions of torch have no such method


def is_reachable(store: Store) -> bool:
    """Return whether the process that holds the store is there: otherwise torch would print a page of warnings."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return not isinstance(store, TCPStore) or _listens(store.host, store.port)


def with_timeout(seconds: float, call: Callable[[], Answer]) -> Answer | None:
    """Return the result of `call`, or None after a timeout or a RuntimeError: some calls of torch have no deadline."""
    answers: list[Answer] = []

    def calling() -> None:
        with suppress(RuntimeError):  # the other side is gone, as the ranks will notice when they next talk
            answers.append(call())

    thread = threading.Thread(target=calling, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def hold_meeting_point(port: int, wait: timedelta) -> TCPStore:
    """Where ranks of this host find each other: held by this process, on loopback only; port 0: any that is free."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(512)
        port = listener.getsockname()[1]
        make = partial(TCPStore, LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=wait)
        is_new = torch.__version__ >= "2.8"  # before, torch's server with libuv takes over no socket
        return make(master_listen_fd=listener.detach(), use_libuv=is_new)


def _held_again(port: int, wait: timedelta) -> TCPStore:
    """Hold it, also where an earlier context's is still there, because a model that it wrapped awaits collection."""
    try:
        return hold_meeting_point(port, wait)
    except OSError:
        gc.collect()
        return hold_meeting_point(port, wait)


def meeting_point(place: RankInfo, wait: timedelta, kind: str = "rank") -> TCPStore:
    """The store that all ranks reach, held by rank 0 where no launcher holds it."""
    holds = place.rank == 0 and not place.hosted
    is_near = (place.on_one_host or is_loopback(place.address)) and not place.hosted
    address = LOOPBACK if is_near else place.address
    where, seconds = join_address(address, place.port), wait.total_seconds()
    try:
        if holds and is_near:
            return _held_again(place.port, wait)
        return _store_at(address, place.port, wait, holds=holds)
    except (RuntimeError, OSError) as error:
        if not _resolves(address):
            raise ConfigError(
                f"{kind} {place.rank} of {place.world_size} was given {where}, and this host knows no {address}: the "
                "name does not resolve; give the name or the IP address of the first host"
            ) from error
        if holds:
            raise ConfigError(
                f"{kind} 0 cannot listen on {where}; set MASTER_PORT, or address, to a port that is free there, and "
                f"see that no other process is {kind} 0, too"
            ) from error
        who, keeper = f"{kind} {place.rank} of {place.world_size}", _keeper(place, kind)
        if STRANGER in str(error) or _listens(address, place.port):
            raise PeerError(
                f"{who} reached {where}, but what answers there is not {keeper}; another program may have the port: "
                "set MASTER_PORT, or address, to one that is free on that host"
            ) from error
        raise PeerError(
            f"{who} cannot reach {keeper} at {where} within {seconds:g} seconds; see whether it runs, and "
            "whether this host may connect to it"
        ) from error


def _store_at(address: str, port: int, wait: timedelta, *, holds: bool) -> TCPStore:
    """Made in attempts: by itself torch goes on asking one who answers nonsense until `wait` is over."""
    deadline, pause = time.monotonic() + wait.total_seconds(), PAUSES[0]
    while not holds and time.monotonic() < deadline and not _listens(address, port):  # torch would print a page
        threading.Event().wait(pause)
        pause = min(2 * pause, PAUSES[1])
    while True:
        left = deadline - time.monotonic()
        attempt = timedelta(seconds=max(0.1, min(ATTEMPT, left)))
        make = partial(TCPStore, address, port, is_master=holds, wait_for_workers=False, timeout=attempt)
        try:
            store = _made_within(max(0.1, min(SILENCE, left)) + ATTEMPT_ENDS, make)
        except RuntimeError as error:
            if holds or STRANGER in str(error) or time.monotonic() >= deadline:
                raise
        else:
            store.set_timeout(wait)
            return store


def _made_within(seconds: float, make: Callable[[], TCPStore]) -> TCPStore:
    """What it makes. torch waits for ever for one who accepts connections and says nothing, so it is left behind."""

    def attempt() -> TCPStore | Exception:
        try:
            return make()
        except (RuntimeError, OSError) as error:
            return error

    made = with_timeout(seconds, attempt)
    if isinstance(made, TCPStore):
        return made
    raise made or TimeoutError("no answer")


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), ROLL_CALL):
            return True
    except OSError:
        return False


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host.strip("[]"), None))
    except OSError:
        return False


def _keeper(place: RankInfo, kind: str) -> str:
    return "the launcher" if place.hosted else f"{kind} 0"
