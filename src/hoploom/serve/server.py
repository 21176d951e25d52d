"""The server: it listens, and answers each admitted client in a separate thread, without state between requests.

Clients get heartbeats while their responses are made. If a client leaves, the work for it ends; if it stops reading, it
is cut off. A stop is graceful: requests in flight are finished, later requests are refused.
"""

import contextlib
import math
import os
import resource
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hoploom import ops
from hoploom.config.values import is_loopback, join_address, split_address
from hoploom.errors import BatchError, ConfigError, HoploomError, PeerError, StoreError
from hoploom.serve import handshake, wire
from hoploom.serve.acceptor import BACKLOG, Acceptor, NewConnection, Steps
from hoploom.serve.connection import Connection
from hoploom.serve.handshake import Handshake, RefusedError
from hoploom.serve.memory_budget import WAIT, BusyError, CancelledError, MemoryBudget, RequestContext, Reservation
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import ServerSecurity
from hoploom.serve.service import Service
from hoploom.serve.shared_memory import ServerSegments, can_share
from hoploom.serve.wire import DRAINING, BrokenError, IncomingMessage, MalformedError, Message, TooLargeError
from hoploom.system import Closing, allow_open_files

GRACE = 30.0  # seconds that requests in flight get at a stop
MAX_CONNECTIONS = 4096
MAX_NEW = 1024  # connections that are not admitted yet
LOOK_UP = 1.0  # seconds after which a waiting main thread notices a signal that another thread has caught
HEADER = 40  # bytes of memory that a byte of a header may take once it is decoded
FREE = 1 << 16  # bytes of a header, and of tensors, that take none of the budget: the connection itself takes more
WITHOUT_TENSORS = ("info", "split")  # kinds of requests that have no tensors
TRIM_FROM, TRIM_AFTER = 64 << 20, 10.0  # free unused memory so many seconds after requests took so many bytes
TICK = 0.1  # seconds between two checks for clients that have left
LEFT = getattr(select, "POLLRDHUP", 0)  # the event that the other side has closed; not every system has it
END_TIMEOUT = 2.0  # seconds for threads to end
FAILED = (PeerError.__name__, BatchError.__name__, StoreError.__name__)  # faults of the server, not of the client


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the time and memory that clients may take from a server."""

    stall: float = 60.0  # seconds in which the client must read or send the next bytes of a message
    beat: float = 0.5  # seconds between heartbeats
    request: int = wire.MAX_REQUEST  # bytes of a request's tensors
    shared: int = 2 << 30  # bytes of memory that is shared with clients on this host
    memory: MemoryBudget = field(default_factory=lambda: MemoryBudget(2 << 30, WAIT, "requests"))


class ClientConnection:
    """The connection of one client, and the context of its request in flight, if any."""

    def __init__(self, connection: Connection, budget: MemoryBudget) -> None:
        self.connection = connection
        self.segments = ServerSegments(budget) if connection.is_local and can_share() else None
        self.context: RequestContext | None = None  # of the response that is being made
        self._last_beat = 0.0
        self._lock = threading.Lock()  # held by the thread that writes

    @contextlib.contextmanager
    def making(self, num_bytes: int) -> Iterator[RequestContext]:
        """Yield the context of a request of `num_bytes` bytes. During the `with` block, the client gets heartbeats."""
        self._last_beat = time.monotonic()
        self.context = RequestContext(self.empty, is_shared=self.segments is not None, num_bytes=num_bytes)
        try:
            yield self.context
        finally:
            with self._lock:
                self.context = None

    def beat(self, seconds: float) -> None:
        """Send a heartbeat to a client that waits for a response, at most once every `seconds`."""
        with self._lock, contextlib.suppress(OSError):
            if self.context is not None and time.monotonic() - self._last_beat >= seconds:
                self._last_beat = time.monotonic()
                wire.send_heartbeat(self.connection)

    def cancel(self) -> None:
        """Cancel the request in flight, because the client has left."""
        context = self.context
        if context is not None:
            context.is_cancelled = True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor for the response, in memory shared with the client if possible."""
        found = None if self.segments is None else self.segments.empty(shape, dtype)
        return ops.empty(shape, dtype) if found is None else found

    def close(self) -> None:
        self.connection.close()
        if self.segments is not None:
            self.segments.close()


class Server(Closing):
    """A server that listens until it is closed. Each admitted client has a thread; another one watches all clients."""

    def __init__(
        self,
        service: Service,
        address: str,
        security: ServerSecurity,
        metrics: Metrics,
        limits: ServerLimits | None = None,
    ) -> None:
        self._service, self._metrics, self._limits = service, metrics, limits or ServerLimits()
        listener = listen(*split_address(address))
        self.host, self.port = split_address(address)[0], int(listener.getsockname()[1])
        unix, name = _listen_on_unix()
        self._handshake = Handshake(security, name)
        self._shared = MemoryBudget(self._limits.shared, 0, "shared memory")
        self._clients: set[ClientConnection] = set()
        self._trim_at = math.inf  # when memory that requests have taken is returned to the system
        self._lock, self._closed = threading.Lock(), threading.Event()
        files = allow_open_files()
        most = MAX_NEW if files == resource.RLIM_INFINITY else min(MAX_NEW, files // 4)
        listeners = [listener] if unix is None else [listener, unix]
        self._acceptor = Acceptor(listeners, self._admit, most, handshake.TIMEOUT, "hoploom-accept")
        threading.Thread(target=self._watch_clients, name="hoploom-watch", daemon=True).start()

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    def drain(self, grace: float = GRACE) -> bool:
        """Refuse new requests and wait `grace` seconds for those in flight; return whether all were finished."""
        self._metrics.draining = True
        end = time.monotonic() + grace
        while not (idle := self._metrics.wait_until_idle(min(LOOK_UP, grace))) and time.monotonic() < end:
            pass
        return idle

    def close(self) -> None:
        """Stop listening and cut off all clients. Call `drain` first to finish their requests."""
        self._metrics.draining = True
        self._closed.set()
        self._acceptor.close()
        for client in self._present():
            client.cancel()
            client.connection.cut()
        deadline = time.monotonic() + END_TIMEOUT
        while self._present() and time.monotonic() < deadline:
            time.sleep(TICK / 10)

    def _admit(self, new: NewConnection) -> Steps[None]:
        """Admit a client and start its thread, or refuse it. A generator for the acceptor's loop."""
        if len(self._clients) >= MAX_CONNECTIONS:
            reason = f"{MAX_CONNECTIONS} connections are open already; lower the clients' threads"
            yield from handshake.refuse(new, RefusedError(handshake.FULL, reason))
        elif (yield from self._handshake.admit(new)):
            client = ClientConnection(Connection(new.socket, self._limits.stall), self._shared)
            with self._lock:
                self._clients.add(client)
            try:
                threading.Thread(target=self._serve, args=[client], name="hoploom-client", daemon=True).start()
                new.is_admitted = True
            except RuntimeError:  # no thread is left: others may end meanwhile
                self._forget(client)

    def _serve(self, client: ClientConnection) -> None:
        """Answer a client's requests, one after the other, until it leaves."""
        budget = self._limits.memory
        try:
            with self._metrics.stream():
                while True:
                    client.connection.wait()
                    memory = Reservation(budget, of="a request")
                    try:
                        self._exchange(client, memory)
                    finally:
                        if budget.taken >= TRIM_FROM and self._trim_at == math.inf:
                            self._trim_at = time.monotonic() + TRIM_AFTER
                        memory.close()
        except (OSError, EOFError):
            pass  # it has left, or was cut off
        finally:
            self._forget(client)

    def _forget(self, client: ClientConnection) -> None:
        client.close()
        with self._lock:
            self._clients.discard(client)

    def _watch_clients(self) -> None:
        """Send heartbeats to waiting clients, cancel the work for clients that left, and free unused memory."""
        while not self._closed.wait(min(TICK, self._limits.beat)):
            if self._trim_at <= time.monotonic():
                self._trim_at = math.inf
                ops.pool_trim()
            waiting = [client for client in self._present() if client.context is not None]
            poll = select.poll()
            of_file = {client.connection.fileno(): client for client in waiting}
            for file in of_file:
                if file >= 0:
                    poll.register(file, LEFT | select.POLLOUT)
            for file, events in poll.poll(0) if waiting else ():
                if events & ~select.POLLOUT:
                    of_file[file].cancel()
                if events & select.POLLOUT:  # a client that does not read would block the others
                    of_file[file].beat(self._limits.beat)

    def _present(self) -> list[ClientConnection]:
        with self._lock:
            return list(self._clients)

    def _exchange(self, client: ClientConnection, memory: Reservation) -> None:
        """Read a request, once the budget has memory for it, and send the response."""

        def reserve(amount: int) -> None:
            if amount > FREE:
                memory.take(amount)

        connection, refusal = client.connection, None
        connection.begin(wire.MAX_HEADER)
        try:
            limit = self._limits.request
            incoming = IncomingMessage(connection, limit, None, lambda length: reserve(HEADER * length))
            if incoming.num_bytes and incoming.header.get("ask") in WITHOUT_TENSORS:
                raise MalformedError(f"tensors of {incoming.num_bytes} bytes; {incoming.header['ask']} takes none")
            try:
                reserve(incoming.widened_bytes)
                request = incoming.into()
            except (BusyError, ConfigError) as error:
                refusal = error_response(error)
                incoming.skip()
                request = Message(incoming.header)
        except (MalformedError, BrokenError, BusyError, ConfigError) as error:
            shown = error if isinstance(error, HoploomError) else ConfigError(f"a request is malformed: {error}")
            wire.write_message(connection, error_response(shown))
            connection.hang_up()
            raise ConnectionAbortedError from error
        with self._metrics.request(str(request.header.get("ask"))) as count:
            count.received = incoming.num_bytes
            freed = request.header.pop("freed", None)
            if client.segments is not None and isinstance(freed, list):
                client.segments.free(number for number in freed if type(number) is int)
            with client.making(memory.taken) as context:
                response = refusal or self._answer(request, context)
            error_name = response.header.get("error")
            count.outcome = "ok" if error_name is None else "failed" if error_name in FAILED else "refused"
            try:
                try:
                    prepared = wire.prepare_message(response, client.segments)
                except Exception as error:  # too large, say
                    count.outcome = "failed"
                    prepared = wire.prepare_message(error_response(error), client.segments)
                count.sent = wire.send_message(connection, prepared)
            except Exception as error:
                if isinstance(error, OSError | EOFError) and not isinstance(error, HoploomError):
                    raise  # an error of the connection
                wire.send_broken(connection, error_response(error).header)  # in place of the next piece
                raise ConnectionAbortedError from error
            finally:
                if response.done is not None:
                    response.done()

    def _answer(self, request: Message, context: RequestContext) -> Message:
        if self._metrics.draining:
            return Message({"error": DRAINING, "message": "the server is stopping; ask another"})
        try:
            return self._service.answer(request, context)
        except CancelledError as error:
            raise ConnectionAbortedError from error
        except Exception as error:  # the client gets the error, as it waits for a response
            return error_response(error)


def error_response(error: Exception) -> Message:
    """Return the response that reports an error to the client."""
    if isinstance(error, TooLargeError):
        error = BatchError(f"an answer would have {error}; ask for less at once")
    elif not isinstance(error, HoploomError):
        error = BatchError(f"{type(error).__name__}: {error}")
    return Message({"error": type(error).__name__, "message": str(error)[:2000]})


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise ConfigError if the address is unusable, or a host name resolves to loopback."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
        with contextlib.ExitStack() as stack:
            stack.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(BACKLOG)
            stack.pop_all()
    except OSError as error:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error}; give another address") from error
    if not is_loopback(host) and all(is_loopback(str(one[4][0])) for one in found):
        listener.close()
        raise ConfigError(
            f"{host} is {found[0][4][0]} on this host (/etc/hosts may say so), which no other host reaches; give the "
            "address that others reach it by, or 127.0.0.1 where none is to"
        )
    return listener


def _listen_on_unix() -> tuple[socket.socket, str] | tuple[None, None]:
    """Return a listening Unix socket without a file, and its random name; (None, None) if that is impossible."""
    if not can_share():
        return None, None
    name = f"hoploom-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
    except OSError:  # not allowed here: clients use TCP
        listener.close()
        return None, None
    return listener, name
