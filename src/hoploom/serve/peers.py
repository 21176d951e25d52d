"""Peers together: who holds which part, whom to ask, and what happens when one does not answer.

A request carries all it needs, so any peer that holds the part can answer it, now or later. It is asked of the peer
with the least under way; one that is lost is asked again after a pause, others in the meantime, until the deadline.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from hoploom import errors
from hoploom.errors import HoploomError, PeerError
from hoploom.serve.client import Asked, LostError, Peer, Watch, whole
from hoploom.serve.meeting import MAKES, About, Meeting
from hoploom.serve.security import ClientSecurity
from hoploom.serve.wire import Incoming, Message
from hoploom.store.layout import Manifest

Read = TypeVar("Read")
TIMEOUT = 60.0  # seconds that a request may take, all attempts together
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between attempts
RETRIED = ("draining", "busy", "PeerError")  # answers that say: another one, or later


class Peers:
    """The graph servers of one store."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: ClientSecurity,
        timeout: float = TIMEOUT,
        *,
        own: Sequence[int] | None = None,
    ) -> None:
        """`own` are parts that need no peer; None: one that makes whole batches is enough."""
        self._timeout, self._own = timeout, own
        self._watch = Watch()
        silence = timeout / 3 if len(addresses) > 1 else timeout / 2  # so that there is time for another attempt
        self._peers = [Peer(address, security, self._watch, silence) for address in addresses]
        self._down_until = dict.fromkeys(self._peers, 0.0)
        self._pause = dict.fromkeys(self._peers, FIRST_PAUSE)
        self._lock = threading.Lock()
        self._met = Meeting(self._peers)
        try:
            self.about = self._met.wait(self._enough, timeout)
        except BaseException:
            self.close()
            raise

    @property
    def manifest(self) -> Manifest:
        return self.about.manifest

    @property
    def identity(self) -> str:
        return self.about.identity

    @property
    def num_servers(self) -> int:
        return len(self._peers)

    def traffic(self) -> dict[str, int]:
        """What was asked and received so far."""
        return {
            "requests": sum(peer.requests for peer in self._peers),
            "bytes_sent": sum(peer.bytes_sent for peer in self._peers),
            "bytes_received": sum(peer.bytes_received for peer in self._peers),
        }

    def ask(self, request: Message, part: int | None = None, *, pinned: bool = False) -> Message:
        """The answer of any peer that holds the part; of any peer at all for None."""
        return self.read(request, part, lambda incoming: whole(incoming, pinned=pinned))

    def read(self, request: Message, part: int | None, reading: Callable[[Incoming], Read]) -> Read:
        """The same, read by `reading`."""
        return self.begin(request, part, reading)()

    def begin(self, request: Message, part: int | None, reading: Callable[[Incoming], Read]) -> Callable[[], Read]:
        """Send a request now, and read the answer when the call that comes back is made."""
        deadline = time.monotonic() + self._timeout
        asked: Asked | None = None
        peer = self._choose(self._candidates(part))
        if peer is not None:
            try:
                asked = peer.begin(request)
            except LostError as error:
                self._note_lost(peer, error)

        def finish() -> Read:
            if peer is not None and asked is not None:
                try:
                    return self._answer(peer, asked, reading)
                except LostError as error:
                    self._note_lost(peer, error)
            return self._insist(request, part, reading, deadline)

        return finish

    def _insist(self, request: Message, part: int | None, reading: Callable[[Incoming], Read], deadline: float) -> Read:
        """Ask until one answers, or time is over."""
        while True:
            candidates = self._candidates(part)
            peer = self._choose(candidates)
            if peer is not None:
                try:
                    return self._answer(peer, peer.begin(request), reading)
                except LostError as error:
                    self._note_lost(peer, error)
            if time.monotonic() >= deadline:
                raise self._lost(part)
            if peer is None:
                with self._lock:
                    ready = min((self._down_until[one] for one in candidates), default=deadline)
                threading.Event().wait(max(0.01, min(ready, deadline) - time.monotonic()))

    def _answer(self, peer: Peer, asked: Asked, reading: Callable[[Incoming], Read]) -> Read:
        def checked(incoming: Incoming) -> Read:
            if "error" in incoming.header and incoming.header["error"] != "need":
                raise_refusal(incoming.header, peer.address)
            return reading(incoming)

        found = asked.read(checked)
        self._pause[peer] = FIRST_PAUSE
        return found

    def _candidates(self, part: int | None) -> list[Peer]:
        """Those that hold a part; for None, those that make whole batches. A late one joins when it has been met."""
        known = self._met.known()
        if part is None:
            return [peer for peer, about in known.items() if MAKES in about.answers]
        return [peer for peer, about in known.items() if part in about.parts]

    def _enough(self, known: Mapping[Peer, About]) -> str | None:
        """What is still missing."""
        if self._own is None:
            makes = any(MAKES in about.answers for about in known.values())
            return None if makes else "no server makes whole batches; start them with --peers"
        held = {part for about in known.values() for part in about.parts}.union(self._own)
        num_parts = max((len(about.manifest.parts) for about in known.values()), default=0)
        missing = [part for part in range(num_parts) if part not in held]
        if missing or not known:
            return f"no server holds part {missing[0] if missing else 0}; start hoploom serve --part K for it"
        return None

    def _choose(self, candidates: Sequence[Peer]) -> Peer | None:
        """The one with the least under way of those that are not resting; any of the equal ones."""
        now = time.monotonic()
        with self._lock:
            ready = [peer for peer in candidates if self._down_until[peer] <= now]
        return min(ready, key=lambda peer: (peer.under_way, random.random()), default=None)

    def _note_lost(self, peer: Peer, error: LostError) -> None:
        with self._lock:
            pause = self._pause[peer]
            self._down_until[peer] = time.monotonic() + pause * random.uniform(0.5, 1.0)
            self._pause[peer] = min(2 * pause, LONGEST_PAUSE)
        peer.last_loss = str(error)

    def _lost(self, part: int | None) -> PeerError:
        candidates = self._candidates(part)
        reasons = "; ".join(peer.last_loss for peer in candidates if peer.last_loss)
        what = "a batch" if part is None else f"part {part}"
        return PeerError(
            f"no answer for {what} within {self._timeout:g} seconds from {', '.join(p.address for p in candidates)} "
            f"({reasons}); start the server again, or give a replica of it, then go on from the last checkpoint"
        )

    def close(self) -> None:
        self._met.close()
        for peer in self._peers:
            peer.close()
        self._watch.close()

    def __enter__(self) -> "Peers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def raise_refusal(header: Mapping[str, Any], address: str) -> None:
    """Raise what a server answered instead of an answer, as what it was there."""
    name, message = str(header["error"]), f"{address}: {str(header.get('message', ''))[:2000]}"
    if name in RETRIED:
        raise LostError(message)
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HoploomError):
        raise kind(message)
    raise PeerError(message)
