"""The graph servers of one store: which one to ask for a part, and what to do if it does not answer.

A request has all that it needs, so any server that holds the part can answer it: first the one with the fewest requests
under way, then others, until the deadline. Servers that are lost are tried again in the background.
"""

import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from hoploom.closing import Closing
from hoploom.errors import PeerError, StoreError
from hoploom.serve.client import NotNowError, Peer, PendingAnswer, read_message, refusal_of
from hoploom.serve.dial import LostError
from hoploom.serve.discovery import MAKES, Discovery, ServerInfo
from hoploom.serve.incoming import Incoming
from hoploom.serve.security import ClientSecurity
from hoploom.serve.tls import Renewed
from hoploom.serve.wire import Message
from hoploom.store.format import Manifest

Read = TypeVar("Read")
TIMEOUT = 60.0  # seconds that a request may take, all attempts together
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds without requests for a peer that was too busy to answer


class Peers(Closing):
    """The graph servers of one store."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: ClientSecurity,
        timeout: float = TIMEOUT,
        *,
        own: Sequence[int] | None = None,
    ) -> None:
        """`own` are the parts that need no peer. None: one peer that makes whole batches is enough."""
        self._timeout, self._own = timeout, own
        silence = timeout / 3 if len(addresses) > 1 else timeout / 2  # so that there is time for another attempt
        renewed = Renewed(security)
        self._peers = [Peer(address, renewed, silence) for address in addresses]
        self._rests_until = dict.fromkeys(self._peers, 0.0)
        self._pause = dict.fromkeys(self._peers, FIRST_PAUSE)
        self._unreadable: set[Peer] = set()  # with files that cannot be read, of which a warning has told
        self._lock = threading.Lock()
        self._discovery = Discovery(self._peers)
        try:
            self.about = self._discovery.wait(self._enough, timeout)
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

    def traffic(self) -> dict[str, float]:
        """What was sent and received so far, and how long threads waited for answers."""
        return {
            "requests": sum(peer.requests for peer in self._peers),
            "bytes_sent": sum(peer.bytes_sent for peer in self._peers),
            "bytes_received": sum(peer.bytes_received for peer in self._peers),
            "wait_seconds": sum(peer.wait_seconds for peer in self._peers),
        }

    def ask(self, request: Message, part: int | None = None, *, pinned: bool = False) -> Message:
        """The answer of any peer that holds the part; if the part is None, of any that makes whole batches."""
        return self.begin(request, part, partial(read_message, pinned=pinned))()

    def begin(self, request: Message, part: int | None, reading: Callable[[Incoming], Read]) -> Callable[[], Read]:
        """Send a request now; the function that comes back reads the answer."""
        if self._discovery.closed:
            raise self._lost(part)
        pending: PendingAnswer | None = None
        peer = self._choose(part, self._discovery.present())
        if peer is not None:
            try:
                pending = peer.begin(request)
            except LostError as error:
                self._note_lost(peer, error)

        def finish() -> Read:
            deadline = time.monotonic() + self._timeout  # it may have been asked for long before anybody reads it
            if peer is not None and pending is not None:
                try:
                    return self._answer(peer, pending, reading, deadline)
                except LostError as error:
                    self._note_lost(peer, error)
                except StoreError as error:
                    return self._of_a_replica(request, part, reading, (peer, error), deadline)
            return self._insist(request, part, reading, deadline)

        return finish

    def _of_a_replica(
        self,
        request: Message,
        part: int | None,
        reading: Callable[[Incoming], Read],
        first: tuple[Peer, StoreError],
        deadline: float,
    ) -> Read:
        """The answer of another peer, after the first one could not read its files; its error if there is none."""
        peer, error = first
        self._note_lost(peer, NotNowError(str(error)))
        unable = {peer}

        def choose(present: Mapping[Peer, ServerInfo]) -> Peer | None:
            return self._choose(part, {other: about for other, about in present.items() if other not in unable})

        while any(other not in unable and holds(about, part) for other, about in self._discovery.known().items()):
            if (other := self._discovery.wait_for(choose, deadline)) is None:
                break
            try:
                found = self._answer(other, other.begin(request), reading, deadline)
            except LostError as lost:  # busy, say
                self._note_lost(other, lost)
            except StoreError:
                unable.add(other)
            else:
                self._say_unreadable(peer, error)
                return found
            if time.monotonic() >= deadline:
                break
        raise error

    def _say_unreadable(self, peer: Peer, error: StoreError) -> None:
        with self._lock:
            is_known = peer in self._unreadable
            self._unreadable.add(peer)
        if not is_known:
            warnings.warn(f"{error}; other servers answer for it as long as they can", stacklevel=5)

    def _insist(self, request: Message, part: int | None, reading: Callable[[Incoming], Read], deadline: float) -> Read:
        """Ask one peer after the other until one answers, or the deadline has passed."""
        while (peer := self._wait_for(part, deadline)) is not None:
            try:
                return self._answer(peer, peer.begin(request), reading, deadline)
            except LostError as error:
                self._note_lost(peer, error)
            except StoreError as error:
                return self._of_a_replica(request, part, reading, (peer, error), deadline)
            if time.monotonic() >= deadline:
                break
        raise self._lost(part)

    def _wait_for(self, part: int | None, deadline: float) -> Peer | None:
        """The next peer to ask; waits until there is one."""
        known = self._discovery.known()
        if len(known) == len(self._peers) and not any(holds(about, part) for about in known.values()):
            return None  # there will never be one
        return self._discovery.wait_for(lambda present: self._choose(part, present), deadline)

    def _answer(self, peer: Peer, pending: PendingAnswer, reading: Callable[[Incoming], Read], deadline: float) -> Read:
        def checked(incoming: Incoming) -> Read:
            if "error" in incoming.header and incoming.header["error"] != "need":
                raise refusal_of(incoming.header, peer.address)
            return reading(incoming)

        found = pending.read(checked, deadline)
        self._pause[peer] = FIRST_PAUSE
        return found

    def _enough(self, known: Mapping[Peer, ServerInfo]) -> str | None:
        """What is still missing before work can begin; None if nothing is."""
        if self._own is None:
            makes = any(holds(about, None) for about in known.values())
            return None if makes else "no server makes whole batches; start them with --peers"
        held = {part for about in known.values() for part in about.parts}.union(self._own)
        num_parts = max((len(about.manifest.parts) for about in known.values()), default=0)
        missing = [part for part in range(num_parts) if part not in held]
        if missing or not known:
            return f"no server holds part {missing[0] if missing else 0}; start hoploom serve --part K for it"
        return None

    def _choose(self, part: int | None, present: Mapping[Peer, ServerInfo]) -> Peer | None:
        """The peer with the fewest requests under way, of those that hold a part and were not just too busy."""
        now = time.monotonic()
        ready = [peer for peer, about in present.items() if holds(about, part) and self._rests_until[peer] <= now]
        if len(ready) <= 1:
            return ready[0] if ready else None
        return min(ready, key=lambda peer: (peer.under_way, random.random()))

    def _note_lost(self, peer: Peer, error: LostError) -> None:
        peer.last_loss = str(error)
        if not isinstance(error, NotNowError):
            self._discovery.lose(peer)
            return
        with self._lock:
            pause = self._pause[peer]
            self._rests_until[peer] = time.monotonic() + pause * random.uniform(0.5, 1.0)
            self._pause[peer] = min(2 * pause, LONGEST_PAUSE)

    def _lost(self, part: int | None) -> PeerError:
        what = "a batch" if part is None else f"part {part}"
        if self._discovery.closed:
            return PeerError(f"the store was closed while {what} was asked for; close it when its loaders are done")
        known = self._discovery.known()
        able = [peer for peer in self._peers if peer not in known or holds(known[peer], part)]
        if not able:
            return PeerError(f"no server here holds {what}; name one that does, or give those named more --part")
        reasons = "; ".join(peer.last_loss for peer in able if peer.last_loss)
        return PeerError(
            f"no answer for {what} within {self._timeout:g} seconds from {', '.join(p.address for p in able)} "
            f"({reasons}); start the server again, or give a replica of it, then go on from the last checkpoint"
        )

    def close(self) -> None:
        self._discovery.close()
        for peer in self._peers:
            peer.close()
        self._discovery.join()


def holds(about: ServerInfo, part: int | None) -> bool:
    """Whether a server holds a part; for None, whether it makes whole batches."""
    return MAKES in about.answers if part is None else part in about.parts
