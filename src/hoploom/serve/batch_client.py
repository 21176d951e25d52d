"""A trainer's side of whole batches: each is asked of any server, and arrives in recycled or pinned memory.

Weights of negatives, a number for each node, go with a batch once a server says that it needs them.
"""

import threading
from typing import Protocol

from hoploom.config.amounts import as_bytes
from hoploom.errors import ConfigError, PeerError
from hoploom.load.assemble import Batch
from hoploom.load.batch_request import Asked
from hoploom.serve import wire
from hoploom.serve.batch_codec import unpacked
from hoploom.serve.wire import Message


class Asks(Protocol):
    """What is needed of the servers: any of them answers."""

    @property
    def num_servers(self) -> int: ...

    def ask(self, request: Message, part: int | None = None, *, pinned: bool = False) -> Message: ...


class RemoteBatches:
    """Batches of any of the servers of a store: its `elsewhere`."""

    def __init__(self, peers: Asks, identity: str) -> None:
        self._peers, self._identity = peers, identity
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
                    _check_size(asked)
                    answer = self._ask(asked, list(asked.weights), pinned=pinned)
        if "error" in answer.header:
            raise PeerError(f"no batch came: {answer.header['error']!r:.80}; use the same Hoploom on both sides")
        return unpacked(answer, pinned=pinned)

    def _ask(self, asked: Asked, attached: list[str], *, pinned: bool) -> Message:
        header = {"ask": "batch", "identity": self._identity, **asked.header(attached)}
        return self._peers.ask(Message(header, asked.tensors(attached)), pinned=pinned)


def _check_size(asked: Asked) -> None:
    """Refuse weights that no request can carry."""
    size = sum(tensor.nbytes for tensor in asked.tensors(list(asked.weights)))
    if size > wire.MAX_REQUEST:
        raise ConfigError(
            f"with the weights of negatives a request has {as_bytes(size)}, at most {as_bytes(wire.MAX_REQUEST)} go to "
            "a server; give them in a smaller dtype such as float16, or use connect(..., made='here')"
        )
