"""Peers introduce themselves: which store, which parts. One thread for each, until it has answered.

Who starts while a replica is away does not wait for it: it joins when it is back.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoploom.errors import ConfigError, HoploomError, PeerError, StoreError
from hoploom.serve.client import LostError, Peer, whole
from hoploom.serve.wire import PROTOCOL, Message
from hoploom.store.disk import check_manifest
from hoploom.store.layout import Manifest, from_json


@dataclass(frozen=True)
class About:
    """What a server says of itself."""

    address: str
    identity: str
    manifest: Manifest
    parts: tuple[int, ...]
    answers: tuple[str, ...]


MAKES = "batch"  # the answer of those that make whole batches
LATECOMERS = 1.0  # seconds to wait for the rest once all parts are there
PAUSE = 0.2  # seconds between attempts to reach a peer that is away


class Meeting:
    """Who has been met so far."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._known: dict[Peer, About] = {}
        self._errors: list[HoploomError] = []
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._peers = peers
        for peer in peers:
            threading.Thread(target=self._meet, args=[peer], name=f"hoploom-{peer.address}", daemon=True).start()

    def known(self) -> dict[Peer, About]:
        with self._changed:
            return dict(self._known)

    def wait(self, missing: Callable[[Mapping[Peer, About]], str | None], seconds: float) -> About:
        """Until nothing is missing; a moment longer for the rest. Raises what a peer was refused for."""
        peers = self._peers
        with self._changed:
            self._changed.wait_for(lambda: self._errors or missing(self._known) is None, seconds)
            self._changed.wait_for(lambda: self._errors or len(self._known) == len(peers), LATECOMERS)
            if self._errors:
                raise self._errors[0]
            reason = missing(self._known)
            if reason is not None:
                silent = "; ".join(peer.last_loss for peer in peers if peer not in self._known and peer.last_loss)
                raise PeerError(f"{reason}{f' ({silent})' if silent else ''}")
            return next(iter(self._known.values()))

    def _meet(self, peer: Peer) -> None:
        while not self._closed.is_set():
            try:
                header = peer.begin(Message({"ask": "info"})).read(whole).header
                if "error" in header:
                    raise LostError(f"{peer.address}: {header.get('message')!r:.200}")
                self._add(peer, about_of(header, peer.address))
                return
            except LostError as error:
                peer.last_loss = str(error)
                self._closed.wait(PAUSE)
            except HoploomError as error:
                with self._changed:
                    self._errors.append(error)
                    self._changed.notify_all()
                return

    def _add(self, peer: Peer, about: About) -> None:
        with self._changed:
            first = next(iter(self._known.values()), about)
            if about.identity != first.identity:
                raise StoreError(
                    f"{about.address} serves another store ({about.identity[:12]}) than {first.address} "
                    f"({first.identity[:12]}); start them with copies of one store"
                )
            self._known[peer] = about
            self._changed.notify_all()

    def close(self) -> None:
        self._closed.set()


def about_of(header: Mapping[str, Any], address: str) -> About:
    """An answer to "info", checked."""
    if header.get("protocol") != PROTOCOL:
        raise ConfigError(
            f"{address} speaks protocol {header.get('protocol')!r:.20} (Hoploom {header.get('hoploom')!r:.20}), this "
            f"process {PROTOCOL}; install the same Hoploom on both"
        )
    try:
        manifest = from_json(header["store"])
        check_manifest(Path(address), manifest)
        parts, answers, identity = header["parts"], header["answers"], header["identity"]
        assert isinstance(identity, str)
        assert all(type(part) is int and 0 <= part < len(manifest.parts) for part in parts)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise StoreError(f"what {address} says of its store cannot be read ({error}); see whether it is one") from error
    return About(address, identity, manifest, tuple(parts), tuple(answers))
