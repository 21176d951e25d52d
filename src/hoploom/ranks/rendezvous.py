"""The rendezvous of ranks: a key-value store (torch's TCPStore), in which each rank also posts why it ends."""

import fcntl
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from hoploom.config.values import is_loopback, join_address
from hoploom.errors import ConfigError, PeerError
from hoploom.ranks.environment import LOOPBACK, LOOPBACK_INTERFACES, RankInfo
from hoploom.system import boot_id

Answer = TypeVar("Answer")

FAREWELL = 3.0  # seconds for the posts of a rank that ends; a process that hangs can delay them
ROLL_CALL = 1.0  # seconds to find out which rank was lost
LOOK = ROLL_CALL / 20  # seconds between two looks at what other ranks have posted
PAUSES = 0.001, 0.25  # seconds between two looks for other ranks or the store: first and longest
SILENCE = 60.0  # seconds for a process that has accepted a connection to answer: it may look up names
STRANGER = "Ping failed"  # torch's message if a program other than its store answers
READ_ADDRESS, IFREQ = 0x8915, struct.Struct("16sHH4s16x")  # SIOCGIFADDR, and its fields: name, family, port, address


class Rendezvous:
    """One rank's access to the rendezvous store: to meet the other ranks, post why it ends, and find lost ranks."""

    def __init__(self, info: RankInfo, store: PrefixStore) -> None:
        self.store = store
        self._rank, self._world_size = info.rank, info.world_size
        self._holder, self._holds = _holder(info), info.rank == 0 and not info.hosted
        self._others = [rank for rank in range(info.world_size) if rank != info.rank]
        self.has_lost = False  # whether a call failed because another rank was lost

    def arrive(self, text: str, seconds: float) -> None:
        """Post `text` and wait until all ranks have arrived. Raise PeerError after a timeout, or if a rank leaves."""
        reason = ""
        try:
            size = self.store.compare_set("size", "", str(self._world_size)).decode()
            self.store.set(f"here/{self._rank}", text)
            if size != str(self._world_size):
                reason = f"the others count {size} ranks; start the same number of processes on all hosts"
            elif self.store.add("arrived", 1) == self._world_size:
                self.store.set("complete", "")
            else:  # torch's own wait would print a message after a timeout
                poll(lambda: self.store.check(["complete"]) or self.store.check(["gone"]), seconds)
            if not reason and not self.store.check(["complete"]):  # a rank may also have left after all were complete
                absent = ", ".join(f"rank {rank}" for rank in self._others if not self._has("here", rank))
                reason = f"{absent} did not connect in time; check that it was started, and read its own output"
                if self.store.check(["gone"]):
                    reason = f"rank {self.store.get('gone').decode(errors='replace')}"
        except RuntimeError:
            reason = f"{self._holder} ended or cannot be reached"
        if reason:
            self.leave(f"gave up, as {reason}", stays=True)
            raise PeerError(f"rank {self._rank} of {self._world_size} was meeting the others, and {reason}")

    def texts(self) -> list[str]:
        """Return the text that each rank gave to `arrive`, in the order of ranks."""
        return [text.decode() for text in self.store.multi_get([f"here/{i}" for i in range(self._world_size)])]

    def own_address(self, info: RankInfo) -> str:
        """Return the address of this host that other hosts can reach, also where its name resolves to loopback.

        All ranks must call this.
        """
        own = address_towards(info.address, info.port)
        self.store.set(f"address/{self._rank}", own)
        if is_loopback(own):
            others = [text.decode() for text in self.store.multi_get([f"address/{rank}" for rank in self._others])]
            far = next((address for address in others if not is_loopback(address)), None)
            own = own if far is None else address_towards(far, info.port)
        return own

    def leave(
        self, why: str | BaseException, close: Callable[[], object] = lambda: None, *, stays: bool = False
    ) -> None:
        """Post why this rank ends, unless it has lost another rank; then call `close`.

        If this rank holds the store, and `stays` is true or a rank was lost, then wait until the others have read it.
        """
        farewell = why if isinstance(why, str) else f"ended with {type(why).__name__}: {why}"[:300]

        def post() -> None:
            self.store.set(f"ended/{self._rank}", farewell)
            self.store.compare_set("gone", "", f"{self._rank} {farewell}")  # only the first rank's: it is the reason

        if not self.has_lost:
            with_timeout(FAREWELL, post)
        with_timeout(FAREWELL, close)
        if self._holds and (stays or self.has_lost):
            self.wait_for_the_others(FAREWELL)

    def missing(self) -> str:
        """Return a text about a rank that has ended; if none has, about the ranks that do not respond in a second."""
        self.has_lost = True
        return with_timeout(FAREWELL, self._roll_call) or f"{self._holder} does not answer"

    def _roll_call(self) -> str:
        silent, deadline = set(self._others), time.monotonic() + ROLL_CALL
        try:
            self.store.set(f"lost/{self._rank}", "")
            while silent and time.monotonic() < deadline:
                for rank in silent:
                    if self._has("ended", rank):
                        return f"rank {rank} {self.store.get(f'ended/{rank}').decode(errors='replace')}"
                silent = {rank for rank in silent if not self._has("lost", rank)}
                threading.Event().wait(LOOK)
        except RuntimeError:
            return f"{self._holder} ended or cannot be reached"
        if not silent:
            return "the ranks lost each other"
        return f"no sign of life came from {', '.join(f'rank {rank}' for rank in sorted(silent))}"

    def wait_for_the_others(self, seconds: float) -> None:
        """Wait at most `seconds` until every other rank that had arrived has left, or knows that a rank is lost."""

        def have_left() -> bool:
            staying = [rank for rank in self._others if self._has("here", rank)]
            return all(self._has("ended", rank) or self._has("lost", rank) for rank in staying)

        with_timeout(seconds, lambda: poll(have_left, seconds))
        threading.Event().wait(2 * LOOK)  # for the thread: if it still asks when Python ends, the process aborts

    def _has(self, kind: str, rank: int) -> bool:
        """Return whether `rank` has posted `kind`: "here", "ended" or "lost"."""
        return bool(self.store.check([f"{kind}/{rank}"]))


def meet(info: RankInfo, seconds: float) -> Rendezvous:
    """Wait until all ranks use one store, that of the user's process group or a new one; return the Rendezvous."""
    deadline, is_group = time.monotonic() + seconds, info.source == "group"
    while True:
        is_last = is_group or info.hosted or info.rank == 0 or time.monotonic() > deadline
        held = _get_default_store() if is_group else rendezvous_store(info, timedelta(seconds=seconds))
        store = PrefixStore("hoploom" if is_group else f"hoploom/rank/{info.restarts}", held)
        try:
            if not is_group:
                _claim(store, info)
            times = store.add(f"joined/{info.rank}", 1)
        except RuntimeError as error:
            times = 0
            if is_last:
                raise PeerError(
                    f"rank {info.rank} of {info.world_size} was meeting the others, and {_holder(info)} ended or "
                    "cannot be reached"
                ) from error
        if times == 1 or (times and is_last):
            rendezvous = Rendezvous(info, PrefixStore(str(times), store))
            rendezvous.arrive(host_identity(), seconds)
            return rendezvous
        del held, store
        threading.Event().wait(PAUSES[1])


def _claim(store: PrefixStore, info: RankInfo) -> None:
    """Post that this process has the rank of `info`; raise ConfigError if another process has it already."""
    own = f"{os.getpid()} on {host_identity()}"
    holder = store.compare_set(f"process/{info.rank}", "", own).decode()
    if holder != own:
        there, here = (text.rpartition(" ")[0] for text in (holder, own))
        raise ConfigError(
            f"rank {info.rank} of {info.world_size} is taken already: by process {there}, and this is process {here}; "
            "give each a rank of its own"
        )


def adopted(info: RankInfo) -> RankInfo:
    """Return `info` with the address and port of the user's process group, if its store is a TCPStore."""
    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return replace(info, address=store.host, port=store.port) if isinstance(store, TCPStore) else info


def host_identity() -> str:
    """Return this host's name and boot id, which changes at a restart; "?" if the system has no boot id."""
    return f"{socket.gethostname()} {boot_id() or '?'}"


def address_towards(host: str, port: int) -> str:
    """Return the address of this host from which packets to `host` would leave. Nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no way from this host to {host}: {error}; check the network's set-up") from error


def interface_of(address: str) -> str | None:
    """Return the name of this host's network interface that has the IPv4 address `address`, or None."""
    names = [name for _, name in socket.if_nameindex()]
    if is_loopback(address):
        return next((name for name in LOOPBACK_INTERFACES if name in names), None)
    with socket.socket(type=socket.SOCK_DGRAM) as asking:
        for name in names:
            with suppress(OSError):  # an interface without an address, or a system that is not Linux
                found = fcntl.ioctl(asking, READ_ADDRESS, IFREQ.pack(name.encode(), socket.AF_INET, 0, bytes(4)))
                if socket.inet_ntoa(IFREQ.unpack(found)[3]) == address:
                    return name
    return None


def with_timeout(seconds: float, call: Callable[[], Answer]) -> Answer | None:
    """Return the result of `call`, or None after a timeout or RuntimeError. Some calls of torch have no timeout."""
    answers: list[Answer] = []

    def calling() -> None:
        with suppress(RuntimeError):  # the store's process is gone: the next call of the ranks fails
            answers.append(call())

    thread = threading.Thread(target=calling, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def poll(look: Callable[[], Answer | None], seconds: float) -> Answer | None:
    """Call `look` at growing intervals until its result is true or `seconds` have passed; return the last result."""
    deadline, pause = time.monotonic() + seconds, PAUSES[0]
    while not (found := look()) and (left := deadline - time.monotonic()) > 0:
        threading.Event().wait(min(pause, left))
        pause = min(1.5 * pause, PAUSES[1])
    return found


def is_reachable(store: Store) -> bool:
    """Return whether the store accepts connections. If not, a request would make torch print a page of warnings."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return not isinstance(store, TCPStore) or _listens(store.host, store.port)


def hold_local_store(port: int, wait: timedelta) -> TCPStore:
    """Return a new store for the ranks of this host. It listens on loopback only; port 0 means any free port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(512)
        port = listener.getsockname()[1]
        make = partial(TCPStore, LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=wait)
        is_new = torch.__version__ >= "2.8"  # before 2.8, torch's libuv server takes no given socket
        return make(master_listen_fd=listener.detach(), use_libuv=is_new)


def rendezvous_store(info: RankInfo, wait: timedelta) -> TCPStore:
    """Return the store of all ranks. Rank 0 makes it, unless the launcher holds it; the other ranks connect to it."""
    holds = info.rank == 0 and not info.hosted
    is_local = (info.on_one_host or is_loopback(info.address)) and not info.hosted
    address = LOOPBACK if is_local else info.address
    where, seconds = join_address(address, info.port), wait.total_seconds()
    try:
        if not (holds and is_local):
            return _store_at(address, info.port, wait, holds=holds)
        with suppress(OSError):
            return hold_local_store(info.port, wait)
        gc.collect()  # frees the port of an earlier context's store, which a wrapped model may keep alive
        return hold_local_store(info.port, wait)
    except (RuntimeError, OSError) as error:
        me, holder = f"rank {info.rank} of {info.world_size}", _holder(info)
        try:
            socket.getaddrinfo(address.strip("[]"), None)
        except OSError:
            raise ConfigError(
                f"{me} was given {where}, and this host knows no {address}: the name does not resolve; give the name "
                "or the IP address of the first host"
            ) from error
        if holds:
            raise ConfigError(
                f"rank 0 cannot listen on {where}; set MASTER_PORT to a port that is free there, and see "
                "that no other process is rank 0, too"
            ) from error
        if _listens(address, info.port):
            raise PeerError(
                f"{me} reached {where}, but what answers there is not {holder}; another program may have the port: "
                "set MASTER_PORT to one that is free on that host"
            ) from error
        raise PeerError(
            f"{me} cannot reach {holder} at {where} within {seconds:g} seconds; see whether it runs, and "
            "whether this host may connect to it"
        ) from error


def _store_at(address: str, port: int, wait: timedelta, *, holds: bool) -> TCPStore:
    """Make a store if `holds`. Else connect to one when its port is open: before, torch would print many warnings."""
    deadline = time.monotonic() + wait.total_seconds()
    if not holds:
        poll(lambda: _listens(address, port), wait.total_seconds())

    def attempt(seconds: float) -> TCPStore | Exception:
        try:
            made = TCPStore(address, port, is_master=holds, wait_for_workers=False, timeout=timedelta(seconds=seconds))
            made.set_timeout(wait)
            return made
        except (RuntimeError, OSError) as error:
            return error

    while True:
        seconds = max(0.1, min(SILENCE, deadline - time.monotonic()))
        made = with_timeout(seconds + 1, partial(attempt, seconds))  # torch has no timeout if another program answers
        if isinstance(made, TCPStore):
            return made
        if holds or made is None or STRANGER in str(made) or time.monotonic() >= deadline:
            raise made or TimeoutError("no answer")


def _listens(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), ROLL_CALL):
            return True
    except OSError:
        return False


def _holder(info: RankInfo) -> str:
    return "the launcher" if info.hosted else "rank 0"
