"""Servers that make batches in this process, behind the bytes that would go over the wire."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hoploom import NeighborLoader, PeerError
from hoploom.serve.batch_service import BatchService
from hoploom.serve.connect import Connected
from hoploom.serve.graph_server import BatchOptions, GraphServer
from hoploom.serve.memory_budget import RequestContext
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import ServerSecurity
from hoploom.serve.server import Server, ServerLimits
from hoploom.serve.service import Service
from hoploom.serve.wire import Message
from hoploom.store import Store
from support.shards import spread
from support.wires import over_the_wire


@dataclass
class Servers:
    makers: list[BatchService]
    identity: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    _turns: Any = field(default_factory=count)

    @property
    def num_servers(self) -> int:
        return len(self.makers)

    def ask(self, request: Message, part: int | None = None, *, pinned: bool = False) -> Message:
        self.requests.append(json.loads(json.dumps(request.header)))
        answer = self.makers[next(self._turns) % len(self.makers)].answer(over_the_wire(request))
        self.answers.append(str(answer.header.get("error", "ok")))
        try:
            return over_the_wire(answer)
        finally:
            sent(answer)


def sent(answer: Message) -> None:
    """What a server does once an answer is on its way."""
    if answer.done is not None:
        answer.done()


def makers_of(store: Store, **options: Any) -> BatchService:
    given: dict[str, Any] = {"threads": 2, "memory": 1 << 28, **options}
    return BatchService(store, **given)


def without_graph(store: Store, *makers: BatchService) -> tuple[Store, Servers]:
    """A trainer's store, whose parts all lie elsewhere, and the servers that make its batches."""
    servers = Servers(list(makers) or [makers_of(store)], store.identity)
    return replace(spread(store, 2, ()), deployment=served_by(servers)), servers


def served_by(servers: Any) -> Connected:
    return Connected(peers=servers, by_servers=True, look_ahead=1)


class Recorder:
    num_servers = 1

    def __init__(self, identity: str) -> None:
        self.identity, self.request = identity, Message({})

    def ask(self, request: Message, part: int | None = None, *, pinned: bool = False) -> Message:
        self.request = request
        raise PeerError("recorded")


def request_of(store: Store, size: int, batch_size: int) -> Message:
    """What a loader asks servers for a batch of the first of so many nodes."""
    recorder = Recorder(store.identity)
    recording = replace(store, deployment=served_by(recorder))
    seeds = torch.arange(min(size, batch_size))  # one step: threads ask for a second one at the same time
    with pytest.raises(PeerError, match="recorded"):
        next(iter(NeighborLoader(recording, [1], seeds, batch_size=batch_size, num_workers=0)))
    return recorder.request


LISTENING: list[Store] = []  # of the servers in this process that listen


class Listening(NamedTuple):
    address: str
    metrics: Metrics


@contextmanager
def listening(
    path: Path,
    options: BatchOptions | None = None,
    limits: ServerLimits | None = None,
    seconds: float = 0.0,
    security: ServerSecurity | None = None,
    parts: Sequence[int] | None = None,
) -> Iterator[Listening]:
    """A server of these parts, or of all, in this process. It takes so many seconds to answer for rows."""
    over = threading.Event()
    with GraphServer(path, parts, options or BatchOptions()) as held:
        LISTENING.append(held.store)
        service: Any = _Late(held.service, seconds, over)
        with Server(service, "127.0.0.1:0", security or ServerSecurity(), held.metrics, limits) as server:
            try:
                yield Listening(server.address, held.metrics)
            finally:
                LISTENING.remove(held.store)
                over.set()


@dataclass
class _Late:
    service: Service
    seconds: float
    over: threading.Event

    def answer(self, request: Message, call: RequestContext) -> Message:
        if request.header.get("ask") == "gather":
            self.over.wait(self.seconds)
        return self.service.answer(request, call)
