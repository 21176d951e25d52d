"""The server: Arrow Flight around a Service. One thread a stream, which gRPC starts; no state between requests.

A stop is graceful: what is under way is finished, what comes after is refused. Streams of idle clients cannot be closed
from here: they break as the process ends, and the clients go to another server.
"""

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import Any

import pyarrow.flight as flight
from torch import Tensor

import hoploom
from hoploom.closing import Closing
from hoploom.config.values import is_loopback, join_address, split_address
from hoploom.errors import BatchError, ConfigError, HoploomError, PeerError, StoreError
from hoploom.serve import wire
from hoploom.serve.explain import EARLY
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import ServerSecurity
from hoploom.serve.service import Service
from hoploom.serve.stalls import Conversation, StallWatch
from hoploom.serve.token_auth import server_arguments
from hoploom.serve.wire import MalformedError, Message

GRACE = 30.0  # seconds that requests under way get at a stop
MAX_STREAMS = 1024
LOOK_UP = 1.0  # seconds after which a waiting main thread sees a signal that another thread has caught
LAST_WORDS = 1.0  # seconds for Flight to shut down; streams of idle clients would hold it up for ever


@dataclass(frozen=True)
class ServerLimits:
    """What a client may take of a server."""

    stall: float = 60.0  # seconds for a piece of a message to be read by the client, or to come from it
    beat: float = 2.0  # seconds after which, and then how often, a client hears that its answer is being made
    request: int = wire.MAX_REQUEST  # bytes of a request's tensors


class Server(Closing):
    """A listening server, from when it is made until it is closed."""

    def __init__(
        self,
        service: Service,
        address: str,
        security: ServerSecurity,
        metrics: Metrics,
        limits: ServerLimits | None = None,
    ) -> None:
        limits = limits or ServerLimits()
        host, port = split_address(address)
        check_free(host, port)
        self._metrics, self._stalls = metrics, StallWatch(limits.stall, limits.beat)
        arguments = server_arguments(security, host, port)
        self._flight = _Flight(service, metrics, arguments, self._stalls, limits.request)
        self.host, self.port = host, int(self._flight.port)

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def under_way(self) -> int:
        """How many requests are being answered."""
        return self._metrics.under_way

    def drain(self, grace: float = GRACE) -> bool:
        """Refuse what is new, wait for what is under way; whether all of it was finished."""
        self._metrics.draining = True
        return self._metrics.wait_until_idle(grace)

    def close(self) -> None:
        """Stop listening. Requests under way are cut off; `drain` comes first where that matters."""
        self._metrics.draining = True
        closing = threading.Thread(target=self._flight.shutdown, daemon=True)
        closing.start()
        closing.join(LAST_WORDS)
        self._stalls.close()


class _Flight(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow ships no types
    def __init__(
        self, service: Service, metrics: Metrics, arguments: dict[str, Any], stalls: StallWatch, max_request: int
    ) -> None:
        self._stalls, self._max_request = stalls, max_request
        self._service, self._metrics = service, metrics
        self._streams = threading.BoundedSemaphore(MAX_STREAMS)
        super().__init__(**arguments)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """A conversation: requests are answered one after the other until the client leaves."""
        if descriptor.command != wire.COMMAND:
            raise flight.FlightServerError(
                f"the client speaks {descriptor.command!r:.40}, this server {wire.COMMAND.decode()} (Hoploom "
                f"{hoploom.__version__}); install the same Hoploom on both"
            )
        if not self._streams.acquire(blocking=False):
            raise flight.FlightUnavailableError(f"{MAX_STREAMS} streams are open already; lower the clients' threads")
        try:
            writer.begin(wire.SCHEMA)
            conversation = Conversation(context.peer(), reader, writer)
            with self._metrics.stream(), self._stalls.watching(conversation), contextlib.suppress(StopIteration):
                while True:
                    self._converse(conversation)
        finally:
            self._streams.release()

    def _converse(self, conversation: Conversation) -> None:
        """One request and its answer."""
        try:
            request = wire.read(conversation, self._max_request)
        except MalformedError as error:
            wire.write(conversation, refusal(ConfigError(f"a request is malformed: {error}")))
            raise flight.FlightServerError(f"a request is malformed: {error}") from error
        with self._metrics.request(str(request.header.get("ask"))) as count:
            count.received = sum(tensor.nbytes for tensor in request.tensors if isinstance(tensor, Tensor))
            with conversation.making():
                answer = self._answer(request)
            error_name = answer.header.get("error")
            count.outcome = "ok" if error_name in (None, "need") else "failed" if error_name in FAILED else "refused"
            try:
                count.sent = wire.write(conversation, answer)
            except HoploomError as error:  # of rows that are read while they are sent
                raise flight.FlightServerError(f"{EARLY}{error}") from error
            finally:
                if answer.done is not None:
                    answer.done()

    def _answer(self, request: Message) -> Message:
        if self._metrics.draining:
            return Message({"error": "draining", "message": "the server is stopping; ask another"})
        try:
            return self._service.answer(request)
        except HoploomError as error:
            return refusal(error)
        except Exception as error:  # it belongs to the client, which waits for an answer
            return refusal(BatchError(f"{type(error).__name__}: {error}"))


FAILED = (PeerError.__name__, BatchError.__name__, StoreError.__name__)


def refusal(error: HoploomError) -> Message:
    """An answer that says why there is none."""
    return Message({"error": type(error).__name__, "message": str(error)[:2000]})


def check_free(host: str, port: int) -> None:
    """Raise ConfigError where nobody could listen: gRPC itself would share a port that is taken, in silence."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error}; give another address") from error
    if not is_loopback(host) and all(is_loopback(str(one[4][0])) for one in found):
        raise ConfigError(
            f"{host} is {found[0][4][0]} on this host (/etc/hosts may say so), which no other host reaches; give the "
            "address that others reach it by, or 127.0.0.1 where none is to"
        )
