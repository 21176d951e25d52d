"""Finds out which server holds which parts of which store. Each server has a thread that asks until it answers.

A server that is lost is asked again in the same way. What answers at its address must be of the same store.
"""

import json
import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from hoploom.errors import ConfigError, HoploomError, PeerError, StoreError
from hoploom.serve.client import Peer, read_message
from hoploom.serve.dial import LostError
from hoploom.serve.requests import read_integer, read_text
from hoploom.serve.wire import PROTOCOL, Message
from hoploom.store.format import Manifest, manifest_from_json
from hoploom.store.mapping import check_manifest

Found = TypeVar("Found")


@dataclass(frozen=True)
class ServerInfo:
    """What a server has, by its answer to `info`."""

    address: str
    identity: str
    manifest: Manifest
    parts: tuple[int, ...]
    answers: tuple[str, ...]


MAKES = "batch"  # what servers answer that make whole batches
PATIENCE = 5.0  # seconds of waiting before a warning says for what
LATECOMERS = 1.0  # seconds to wait for the other servers once all parts are there
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between attempts to reach a peer that is away
ENDING = 2.0  # seconds to wait for threads at the end; one that still connects ends later, by itself
TICK = 0.05  # seconds between two looks for a peer that may be asked again


class Discovery:
    """Which servers have answered so far, and which of them can be asked now."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers
        self._known: dict[Peer, ServerInfo] = {}
        self._away: set[Peer] = set()
        self._present: dict[Peer, ServerInfo] = {}
        self._error: HoploomError | None = None  # one that waiting does not solve
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._threads: list[threading.Thread] = []
        for peer in peers:
            self.lose(peer)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def known(self) -> dict[Peer, ServerInfo]:
        """All servers that have ever answered, also those that are lost now."""
        with self._changed:
            return dict(self._known)

    def present(self) -> Mapping[Peer, ServerInfo]:
        """The servers that can be asked now. Each change makes a new dict, so reading it needs no lock."""
        return self._present

    def _note_present(self) -> None:
        self._present = {peer: about for peer, about in self._known.items() if peer not in self._away}

    def wait(self, missing: Callable[[Mapping[Peer, ServerInfo]], str | None], seconds: float) -> ServerInfo:
        """Wait until nothing is missing, and a moment longer for the other servers. Raises the error of a refusal."""

        def is_over() -> bool:
            return self._error is not None or len(self._known) == len(self._peers)

        with self._changed:
            found = self._changed.wait_for(lambda: is_over() or missing(self._known) is None, min(seconds, PATIENCE))
            if not found and seconds > PATIENCE:
                said = self._losses() or missing(self._known)
                warnings.warn(f"still waiting for graph servers, {seconds:g} seconds at most: {said}", stacklevel=4)
                self._changed.wait_for(lambda: is_over() or missing(self._known) is None, seconds - PATIENCE)
            if self._known:
                self._changed.wait_for(is_over, LATECOMERS)
            if self._error:
                raise self._error
            losses = self._losses()
            if not self._known:
                told = (
                    losses or f"{', '.join(peer.address for peer in self._peers)} did not answer; give a longer timeout"
                )
                raise PeerError(f"no graph server answers within {seconds:g} seconds: {told}")
            reason = missing(self._known)
            if reason is not None:
                raise PeerError(f"{reason} ({losses})" if losses else reason)
            return next(iter(self._known.values()))

    def _losses(self) -> str:
        """Why servers that have never answered could not be reached."""
        return "; ".join(peer.last_loss for peer in self._peers if peer not in self._known and peer.last_loss)

    def wait_for(self, find: Callable[[Mapping[Peer, ServerInfo]], Found | None], deadline: float) -> Found | None:
        """Wait until `find` finds something among the present servers; None at the deadline, or after `close`."""
        with self._changed:
            while not self.closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                if (found := find(self.present())) is not None:
                    return found
                self._changed.wait(min(left, TICK))
            return None

    def lose(self, peer: Peer) -> None:
        """A server is lost: nothing is asked of it until it answers `info` again."""
        with self._changed:
            if peer in self._away or self.closed:
                return
            self._away.add(peer)
            self._note_present()
            thread = threading.Thread(target=self._meet, args=[peer], name=f"hoploom-{peer.address}", daemon=True)
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()

    def _meet(self, peer: Peer) -> None:
        pause = FIRST_PAUSE
        while not self.closed:
            try:
                answer = peer.begin(Message({"ask": "info"})).read(read_message)
                if "error" in answer.header:
                    raise LostError(f"{peer.address}: {answer.header.get('message')!r:.200}")
                self._add(peer, read_info(answer, peer.address))
                return
            except HoploomError as error:
                peer.last_loss = str(error)
                with self._changed:
                    self._error = self._error if isinstance(error, LostError) else error
                    self._changed.notify_all()
            self._closed.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _add(self, peer: Peer, about: ServerInfo) -> None:
        with self._changed:
            first = next(iter(self._known.values()), about)
            if about.identity != first.identity:
                raise StoreError(
                    f"{about.address} serves another store ({about.identity[:12]}) than {first.address} "
                    f"({first.identity[:12]}); start them with copies of one store"
                )
            self._known[peer] = about
            self._away.discard(peer)
            self._note_present()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop asking, and end all waits."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the threads, which end once their connections are closed."""
        deadline = time.monotonic() + ENDING
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def read_info(answer: Message, address: str) -> ServerInfo:
    """Read and check an answer to `info`: the header is about the server, a tensor has the manifest as text."""
    header = answer.header
    if header.get("protocol") != PROTOCOL:
        raise ConfigError(
            f"{address} speaks protocol {header.get('protocol')!r:.20} (Hoploom {header.get('hoploom')!r:.20}), this "
            f"process {PROTOCOL}; install the same Hoploom on both"
        )
    try:
        (text,) = answer.tensors
        assert isinstance(text, Tensor)
        manifest = manifest_from_json(json.loads(text.numpy().tobytes()))
        check_manifest(Path(address), manifest)
        parts = tuple(read_integer("parts", part, 0, len(manifest.parts)) for part in header["parts"])
        answers = tuple(read_text({"answers": kind}, "answers") for kind in header["answers"])
        return ServerInfo(address, read_text(header, "identity"), manifest, parts, answers)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise StoreError(f"what {address} says of its store cannot be read ({error}); see whether it is one") from error
