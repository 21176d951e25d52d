"""The graph servers of one store: which of them hold which parts, and which one gets a request.

Any server that holds a part can answer any request for this part. The server with the fewest requests in flight gets
it; if that server fails, others get it until the deadline. A thread then repeats the request `info` until the failed
server answers again. All servers must hold the same store.
"""

import json
import random
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from hoploom.errors import ConfigError, HoploomError, PeerError, StoreError
from hoploom.serve.client import Peer, PooledConnection, Reader, UnavailableError, read_message
from hoploom.serve.handshake import LostError
from hoploom.serve.requests import read_integer, read_text
from hoploom.serve.security import ClientSecurity, Reloading
from hoploom.serve.wire import PROTOCOL, Message
from hoploom.store.format import Manifest, manifest_from_json
from hoploom.store.store import check_manifest
from hoploom.system import Closing

Read = TypeVar("Read")
TIMEOUT = 60.0  # seconds that a request may take, all attempts together
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds of rest, without requests, for a peer that was too busy
BATCH = "batch"  # the kind of request that only servers of whole batches answer
WARN_AFTER = 5.0  # seconds of waiting for servers
LATECOMERS = 1.0  # seconds to wait for the other servers once all parts are there
LONGEST_RECONNECT = 1.0  # seconds between attempts to reach a peer that is away
JOIN_TIMEOUT = 2.0  # seconds to wait for threads at the end; one that still connects ends later, by itself
TICK = 0.05  # seconds between two checks for a peer that may be asked again


@dataclass(frozen=True)
class ServerInfo:
    """A server's response to the request `info`: its store, its parts, and the kinds of requests that it answers."""

    address: str
    identity: str
    manifest: Manifest
    parts: tuple[int, ...]
    answers: tuple[str, ...]  # kinds of requests

    def holds(self, part: int | None) -> bool:
        """Return whether the server holds `part`; if `part` is None, whether it makes whole batches."""
        return BATCH in self.answers if part is None else part in self.parts


def read_info(response: Message, address: str) -> ServerInfo:
    """Read and check a response to `info`: a header that describes the server, and the manifest's text as a tensor."""
    header = response.header
    if header.get("protocol") != PROTOCOL:
        raise ConfigError(
            f"{address} speaks protocol {header.get('protocol')!r:.20} (Hoploom {header.get('hoploom')!r:.20}), this "
            f"process {PROTOCOL}; install the same Hoploom on both"
        )
    try:
        (text,) = response.whole_tensors
        manifest = manifest_from_json(json.loads(text.numpy().tobytes()))
        check_manifest(Path(address), manifest)
        parts = tuple(read_integer("parts", part, 0, len(manifest.parts)) for part in header["parts"])
        answers = tuple(read_text({"answers": kind}, "answers") for kind in header["answers"])
        return ServerInfo(address, read_text(header, "identity"), manifest, parts, answers)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"what {address} says of its store cannot be read ({error}); see whether it is one") from error


class Peers(Closing):
    """The graph servers of one store. Sends each request to one that can answer it, and to others if that fails."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: ClientSecurity,
        timeout: float = TIMEOUT,
        *,
        own: Sequence[int] | None = None,
    ) -> None:
        """Connect. Wait for peers that hold all parts not in `own`; if it is None, wait for one that makes batches."""
        self._timeout, self._own = timeout, own
        idle_timeout = timeout / 3 if len(addresses) > 1 else timeout / 2  # leaves time for another attempt
        reloading = Reloading(security)
        self._peers = [Peer(address, reloading, idle_timeout) for address in addresses]
        self._rests_until = dict.fromkeys(self._peers, 0.0)
        self._pause = dict.fromkeys(self._peers, FIRST_PAUSE)
        self._warned: set[Peer] = set()  # peers about whose unreadable files there was a warning
        self._known: dict[Peer, ServerInfo] = {}  # all that have answered `info` once
        self._away: set[Peer] = set()  # those that threads ask for `info` now
        self._present: dict[Peer, ServerInfo] = {}  # each change makes a new dict, so reading it needs no lock
        self._error: HoploomError | None = None  # an error that waiting does not solve
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._threads: list[threading.Thread] = []
        for peer in self._peers:
            self._look_for(peer)
        try:
            self._info = self._wait_for_all(timeout)
        except BaseException:
            self.close()
            raise

    @property
    def manifest(self) -> Manifest:
        return self._info.manifest

    @property
    def identity(self) -> str:
        return self._info.identity

    @property
    def num_servers(self) -> int:
        return len(self._peers)

    def traffic(self) -> dict[str, float]:
        """Return how many requests and bytes were sent and received, and how long threads waited for responses."""
        names = ("requests", "bytes_sent", "bytes_received", "wait_seconds")
        return {name: sum(getattr(peer, name) for peer in self._peers) for name in names}

    def close(self) -> None:
        """Close all connections and end all waits."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        for peer in self._peers:
            peer.close()
        deadline = time.monotonic() + JOIN_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _wait_for_all(self, seconds: float) -> ServerInfo:
        """Wait until no part is missing, and a moment for more peers; return one's ServerInfo.

        Raise the error of a server that can never be used, or one that names what is missing after `seconds`.
        """

        def is_over() -> bool:
            return self._error is not None or len(self._known) == len(self._peers)

        def is_enough() -> bool:
            return is_over() or self._missing() is None

        def losses() -> str:
            return "; ".join(peer.last_loss for peer in self._peers if peer not in self._known and peer.last_loss)

        with self._changed:
            if not self._changed.wait_for(is_enough, min(seconds, WARN_AFTER)) and seconds > WARN_AFTER:
                reason = losses() or self._missing()
                warnings.warn(f"still waiting for graph servers, {seconds:g} seconds at most: {reason}", stacklevel=4)
                self._changed.wait_for(is_enough, seconds - WARN_AFTER)
            if self._known:
                self._changed.wait_for(is_over, LATECOMERS)
            if self._error:
                raise self._error
            lost, reason = losses(), self._missing()
            if not self._known:
                addresses = ", ".join(peer.address for peer in self._peers)
                lost = lost or f"{addresses} did not answer; give a longer timeout"
                raise PeerError(f"no graph server answers within {seconds:g} seconds: {lost}")
            if reason is not None:
                raise PeerError(f"{reason} ({lost})" if lost else reason)
            return next(iter(self._known.values()))

    def _missing(self) -> str | None:
        """Return an error text if no server holds some part, or none makes batches; None if nothing is missing."""
        known = self._known.values()
        if self._own is None:
            makes = any(info.holds(None) for info in known)
            return (
                None if makes else "no server makes whole batches; start them with --peers, or connect with made='here'"
            )
        held = {part for info in known for part in info.parts}.union(self._own)
        num_parts = max((len(info.manifest.parts) for info in known), default=0)
        missing = [part for part in range(num_parts) if part not in held]
        if missing or not known:
            return f"no server holds part {missing[0] if missing else 0}; start hoploom serve --part K for it"
        return None

    def _look_for(self, peer: Peer) -> None:
        """Take a lost peer out of use, and start a thread that repeats the request `info` until it answers."""
        with self._changed:
            if peer in self._away or self._closed.is_set():
                return
            self._away.add(peer)
            self._present = {other: info for other, info in self._present.items() if other is not peer}
            thread = threading.Thread(target=self._meet, args=[peer], name=f"hoploom-{peer.address}", daemon=True)
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()

    def _meet(self, peer: Peer) -> None:
        """Repeat the request `info` until a peer answers; then the peer can be chosen again."""
        pause = FIRST_PAUSE
        while not self._closed.is_set():
            try:
                response = peer.request(Message({"ask": "info"}), read_message)
                self._add(peer, read_info(response, peer.address))
                return
            except HoploomError as error:
                peer.last_loss = str(error)
                with self._changed:
                    self._error = self._error if isinstance(error, LostError) else error
                    self._changed.notify_all()
            self._closed.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_RECONNECT)

    def _add(self, peer: Peer, info: ServerInfo) -> None:
        with self._changed:
            first = next(iter(self._known.values()), info)
            if info.identity != first.identity:
                raise StoreError(
                    f"{info.address} serves another store ({info.identity[:12]}) than {first.address} "
                    f"({first.identity[:12]}); start them with copies of one store"
                )
            self._known[peer] = info
            self._away.discard(peer)
            self._present = {**self._present, peer: info}
            self._changed.notify_all()

    def ask(self, request: Message, part: int | None = None, *, pinned: bool = False) -> Message:
        """Send a request to a peer that holds `part`, or that makes batches if `part` is None; return its response."""
        return self.begin(request, part, partial(read_message, pinned=pinned))()

    def begin(self, request: Message, part: int | None, reader: Reader[Read]) -> Callable[[], Read]:
        """Send a request now. Return a function that reads the response or, if this peer fails, asks other peers."""
        if self._closed.is_set():
            raise self._lost(part)
        sent: tuple[Peer, PooledConnection] | None = None
        if (first := self._choose(part)) is not None:
            try:
                sent = first, first.send(request)
            except LostError as error:
                self._note_loss(first, error)

        def finish() -> Read:
            nonlocal sent
            deadline = time.monotonic() + self._timeout  # from now: the request may have been sent long ago
            unreadable: dict[Peer, StoreError] = {}
            while True:
                peer = sent[0] if sent is not None else self._next_peer(part, unreadable, deadline)
                if peer is None:
                    break
                try:
                    pooled = peer.send(request) if sent is None else sent[1]
                    found = peer.read(pooled, reader, deadline)
                except LostError as error:
                    self._note_loss(peer, error)
                except StoreError as error:  # the peer cannot read its files: another peer may
                    self._note_loss(peer, UnavailableError(str(error)))
                    unreadable[peer] = error
                else:
                    self._pause[peer] = FIRST_PAUSE
                    for other in unreadable.keys() - self._warned:
                        self._warned.add(other)
                        told = "other servers answer for it as long as they can"
                        warnings.warn(f"{unreadable[other]}; {told}", stacklevel=3)
                    return found
                if sent is None and time.monotonic() >= deadline:
                    break
                sent = None
            raise next(iter(unreadable.values()), None) or self._lost(part)

        return finish

    def _next_peer(self, part: int | None, unreadable: Collection[Peer], deadline: float) -> Peer | None:
        """Wait for a peer that holds `part` and is not in `unreadable`; return it, or None if there is none in time."""
        with self._changed:
            while not self._closed.is_set() and (left := deadline - time.monotonic()) > 0:
                able = any(info.holds(part) and peer not in unreadable for peer, info in self._known.items())
                if not able and (unreadable or len(self._known) == len(self._peers)):
                    return None
                if (found := self._choose(part, unreadable)) is not None:
                    return found
                self._changed.wait(min(left, TICK))
            return None

    def _choose(self, part: int | None, excluded: Collection[Peer] = ()) -> Peer | None:
        """Return a peer that holds `part` and is not paused: the one with the fewest requests in flight. Else None."""
        now, able = time.monotonic(), [peer for peer, info in self._present.items() if info.holds(part)]
        ready = [peer for peer in able if self._rests_until[peer] <= now and peer not in excluded]
        if len(ready) <= 1:
            return ready[0] if ready else None
        return min(ready, key=lambda peer: (peer.in_flight, random.random()))

    def _note_loss(self, peer: Peer, error: LostError) -> None:
        """Pause requests to a busy peer for a while; try to reach a lost peer again in the background."""
        peer.last_loss = str(error)
        if not isinstance(error, UnavailableError):
            self._look_for(peer)
            return
        with self._changed:
            pause = self._pause[peer]
            self._rests_until[peer] = time.monotonic() + pause * random.uniform(0.5, 1.0)
            self._pause[peer] = min(2 * pause, LONGEST_PAUSE)

    def _lost(self, part: int | None) -> PeerError:
        what = "a batch" if part is None else f"part {part}"
        if self._closed.is_set():
            said = f"the store was closed before {what} arrived"
            return PeerError(f"{said}; close it, and stores made from it or for it, when all their loaders are done")
        known = self._known
        able = [peer for peer in self._peers if peer not in known or known[peer].holds(part)]
        if not able:
            return PeerError(f"no server here holds {what}; name one that does, or give those named more --part")
        reasons = "; ".join(peer.last_loss for peer in able if peer.last_loss)
        return PeerError(
            f"no answer for {what} within {self._timeout:g} seconds from {', '.join(p.address for p in able)} "
            f"({reasons}); start the server again, or give a replica of it, then go on from the last checkpoint"
        )
