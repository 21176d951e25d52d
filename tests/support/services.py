"""Services that tests make up: a server of one in this process, and a client of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from hoploom.serve.client import Peer
from hoploom.serve.memory_budget import RequestContext
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import ClientSecurity, Reloading, read_server_security
from hoploom.serve.server import Server, ServerLimits
from hoploom.serve.wire import Message

Answer = Callable[[Message, RequestContext], Message]


def at_once(request: Message, call: RequestContext) -> Message:
    return Message({})


@contextmanager
def answering(
    answer: Answer, limits: ServerLimits | None = None, silence: float = 30.0
) -> Iterator[tuple[Server, Peer]]:
    service: Any = SimpleNamespace(answer=answer)
    with (
        Server(service, "127.0.0.1:0", read_server_security(), Metrics(), limits) as server,
        Peer(server.address, Reloading(ClientSecurity()), silence) as peer,
    ):
        yield server, peer
