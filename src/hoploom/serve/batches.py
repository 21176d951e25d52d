"""A trainer's side of whole batches: each is asked of any server, and arrives in recycled or pinned memory.

Weights of negatives, a number for each node, go with a batch once a server says that it needs them.
"""

import threading
from typing import Protocol

from hoploom.errors import PeerError
from hoploom.load.assemble import Batch
from hoploom.load.elsewhere import Asked
from hoploom.serve.codec import unpacked
from hoploom.serve.wire import Message


class Asks(Protocol):
    """What is needed of the servers: any of them answers."""

    @property
    def num_servers(self) -> int: ...

    def ask(self, request: Message, part: int | None = None, *, pinned: bool = False) -> Message: ...


class RemoteBatches:
    """Batches of any of the servers: a store's `elsewhere`."""

    def __init__(self, peers: Asks) -> None:
        self._peers = peers
        self._sending = threading.Lock()  # so that not every thread of a loader sends the same weights

    @property
    def num_servers(self) -> int:
        return self._peers.num_servers

    def make(self, asked: Asked, *, pinned: bool) -> Batch:
        """The batch that was asked for, wherever it is made."""
        answer = self._ask(asked, [], pinned=pinned)
        if answer.header.get("error") == "need":
            with self._sending:
                answer = self._ask(asked, [], pinned=pinned)  # another thread may have sent them by now
                if answer.header.get("error") == "need":
                    answer = self._ask(asked, list(asked.weights), pinned=pinned)
        if "error" in answer.header:
            raise PeerError(f"no batch came: {answer.header['error']!r:.80}; use the same Hoploom on both sides")
        return unpacked(answer, pinned=pinned)

    def _ask(self, asked: Asked, attached: list[str], *, pinned: bool) -> Message:
        header = {"ask": "batch", **asked.header(attached)}
        return self._peers.ask(Message(header, asked.tensors(attached)), pinned=pinned)
