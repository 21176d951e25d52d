"""Connections to one peer, which is a graph server. Each connection has one request in flight at a time.

A server that sends nothing for too long counts as lost; while it makes a response, it sends heartbeats. Idle
connections are kept for later requests; a connection that failed is never used again.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from hoploom import errors, ops
from hoploom.errors import ConfigError, HoploomError, PeerError
from hoploom.serve import wire
from hoploom.serve.connection import Connection
from hoploom.serve.handshake import TOO_MANY_FILES, LostError, connect_tcp, connect_unix, has_too_many_files, one_line
from hoploom.serve.memory_budget import BusyError
from hoploom.serve.security import ClientSecurity, Reloading
from hoploom.serve.shared_memory import ClientSegments
from hoploom.serve.wire import BrokenError, IncomingMessage, MalformedError, Message, StillPendingError, TooLargeError
from hoploom.system import Closing

Read = TypeVar("Read")
Reader = Callable[[IncomingMessage], Read]
LATE = 0.1  # fraction of the idle timeout after which a read counts as late
ARRIVED = 1.0  # seconds for the beginning of a late response, which should have arrived by now
MAX_REASON = 2000  # characters of a server's error
MAX_IDLE = 64  # idle connections that are kept
FAILURES = (OSError, EOFError, MalformedError, BrokenError)
RETRIED = (BusyError.__name__, PeerError.__name__)  # errors after which another server, or a later request, may succeed


class UnavailableError(LostError):
    """The peer can be reached, but cannot answer this request now."""


def error_from(header: Mapping[str, Any], address: str) -> HoploomError:
    """Rebuild the exception from a server's error response."""
    name, message = str(header["error"]), f"{address}: {one_line(header.get('message', ''), MAX_REASON)}"
    if name == wire.DRAINING:
        return LostError(message)
    if name in RETRIED:
        return UnavailableError(message)
    kind = getattr(errors, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, HoploomError) else PeerError(message)


def read_message(incoming: IncomingMessage, *, pinned: bool = False) -> Message:
    """Read all tensors of a response, into pinned memory if `pinned`; return the message with them."""
    return incoming.into(partial(ops.empty, pinned=True) if pinned else None)


class PooledConnection:
    """A connection to a server, and the segments of shared memory that the server has sent over it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.segments = ClientSegments() if connection.is_local else None
        self.sent_at = 0.0  # when the last request had been sent

    def send(self, request: Message) -> int:
        freed = None if self.segments is None else self.segments.take_freed()
        if freed:
            request = request._replace(header={**request.header, "freed": freed})
        prepared = wire.prepare_message(request)
        if prepared.num_bytes > wire.MAX_REQUEST:
            raise TooLargeError(f"tensors of {prepared.num_bytes} bytes; at most {wire.MAX_REQUEST}")
        sent = wire.send_message(self.connection, prepared)
        self.sent_at = time.monotonic()
        return sent

    def receive(self) -> IncomingMessage:
        """Wait for a response and read its header. The caller must next read the tensors of the returned message."""
        timeout, waited = self.connection.idle_timeout, time.monotonic() - self.sent_at
        # settimeout() is a system call: skip it unless the response is read late.
        self.connection.begin(0, None if waited < LATE * timeout else max(timeout - waited, min(timeout, ARRIVED)))
        return IncomingMessage(self.connection, wire.MAX_RESPONSE, self.segments)

    def close(self) -> None:
        self.connection.close()
        if self.segments is not None:
            self.segments.close()


class Peer(Closing):
    """A client of one server. Each request in flight has a connection of its own."""

    def __init__(self, address: str, security: Reloading[ClientSecurity], idle_timeout: float) -> None:
        self.address = address
        self.bytes_received = self.bytes_sent = self.requests = 0
        self.wait_seconds = 0.0  # for responses, including their transfer, over all threads
        self._security, self._idle_timeout = security, idle_timeout
        self._process = os.getpid()
        self._open: set[PooledConnection] = set()
        self._idle: list[PooledConnection] = []
        self._closed = False
        self._lock = threading.Lock()
        self.in_flight = 0
        self.last_loss = ""  # the message of the last error

    def request(self, message: Message, reader: Reader[Read]) -> Read:
        """Send a request; return `reader(response)`."""
        return self.read(self.send(message), reader)

    def send(self, request: Message) -> PooledConnection:
        """Send a request; the caller must pass the returned connection to `read`. Raise LostError if sending fails."""
        if os.getpid() != self._process:  # either process could read the other's response
            raise PeerError(
                f"this process was forked from one that is connected to {self.address}; call connect() here, or start "
                "processes with 'spawn'"
            )
        with self._lock:
            self.in_flight += 1
        pooled = None
        try:
            pooled = self._connected()
            sent = pooled.send(request)
        except BaseException as error:
            self._end_request(pooled, keep=False)
            if isinstance(error, TooLargeError):
                raise ConfigError(f"a request has {error}; ask for less at once") from error
            if isinstance(error, FAILURES):
                raise self._lost(error) from error
            raise
        with self._lock:
            self.requests, self.bytes_sent = self.requests + 1, self.bytes_sent + sent
        return pooled

    def read(self, pooled: PooledConnection, reader: Reader[Read], deadline: float = math.inf) -> Read:
        """Return `reader(response)`. Raise the server's error, or LostError if the response is late or incomplete."""
        keep, incoming = False, None
        pooled.connection.deadline = deadline
        began = time.perf_counter()
        try:
            incoming = pooled.receive()
            if "error" in incoming.header:
                raise error_from(incoming.header, self.address)
            found = reader(incoming)
            with self._lock:
                self.bytes_received += incoming.num_bytes
            keep = True
            return found
        except HoploomError:  # StoreError is an OSError too
            keep = incoming is not None and "error" in incoming.header and not incoming.num_bytes  # it was read whole
            raise
        except FAILURES as error:
            if time.monotonic() < deadline or not isinstance(error, TimeoutError):
                raise self._lost(error) from error
            state = "is still making its answer" if isinstance(error, StillPendingError) else "has not answered in full"
            raise UnavailableError(f"{self.address} {state}; ask for less at once, or give more time") from error
        finally:
            with self._lock:
                self.wait_seconds += time.perf_counter() - began
            self._end_request(pooled, keep=keep)

    def _connected(self) -> PooledConnection:
        """Return an idle connection that is still open, or a new one.

        A TCP handshake comes first: another program may have taken a dead server's socket name.
        """
        while self._idle:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            if idle is not None and idle.connection.is_idle():
                return idle
            if idle is not None:
                self._drop(idle)
        connection, unix_endpoint = connect_tcp(self.address, self._security, self._idle_timeout)
        if unix_endpoint is not None and (local := connect_unix(unix_endpoint, self._idle_timeout)) is not None:
            connection.close()
            connection = local
        pooled = PooledConnection(connection)
        with self._lock:
            if not self._closed:
                self._open.add(pooled)
                return pooled
        pooled.close()
        raise LostError("the store was closed")

    def _lost(self, error: Exception) -> HoploomError:
        """Return the error to raise for a failed connection. Close all idle connections, which have failed too."""
        self._drop_idle()
        if isinstance(error, TimeoutError):
            return LostError(f"{self.address} has not answered for {self._idle_timeout:g} seconds; see whether it runs")
        if has_too_many_files(error):
            return LostError(f"{self.address} {TOO_MANY_FILES}")
        if isinstance(error, EOFError | OSError):
            return LostError(f"{self.address} closed the connection; read the output of that server")
        if isinstance(error, BrokenError):
            return error_from({"error": "", **error.header}, self.address)
        return LostError(f"{self.address} sent something unexpected: {one_line(error)}")

    def _end_request(self, pooled: PooledConnection | None, *, keep: bool) -> None:
        with self._lock:
            self.in_flight -= 1
            keep = keep and not self._closed and len(self._idle) < MAX_IDLE and pooled in self._open
            if pooled is not None and keep:
                pooled.connection.deadline = math.inf  # the next request sets its own
                self._idle.append(pooled)
        if pooled is not None and not keep:
            self._drop(pooled)

    def _drop(self, pooled: PooledConnection) -> None:
        with self._lock:
            self._open.discard(pooled)
        pooled.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for pooled in idle:
            self._drop(pooled)

    def close(self) -> None:
        """End all connections; threads that wait for a response get an error. In a forked process, do nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
        self._drop_idle()
        with self._lock:
            in_use, self._open = self._open, set()
        for pooled in in_use:
            pooled.connection.cut()  # the thread that reads closes it
