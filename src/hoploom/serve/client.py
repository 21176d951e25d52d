"""One peer: connections to one address, each with one request under way at a time.

A server that is silent for too long is lost; while it makes an answer, it says so. Connections that are not in use are
kept for the next request; one that failed is never used again.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from hoploom import errors, ops
from hoploom.closing import Closing
from hoploom.errors import ConfigError, HoploomError, PeerError
from hoploom.serve import wire
from hoploom.serve.connection import Connection
from hoploom.serve.dial import TOO_MANY_FILES, LostError, essence, has_too_many_files, reach, reach_near_by
from hoploom.serve.incoming import Incoming
from hoploom.serve.memory_budget import BusyError
from hoploom.serve.security import ClientSecurity
from hoploom.serve.shared_memory import SharedMemory
from hoploom.serve.tls import Renewed
from hoploom.serve.wire import BrokenError, MalformedError, Message, StillMakingError, TooLargeError

Read = TypeVar("Read")
LATE = 0.1  # the part of the time of silence that may have passed when somebody begins to wait
ARRIVED = 1.0  # seconds for the beginning of an answer that should be here by now
MOST_SAID = 2000  # characters of why an answer is refused
MAX_IDLE = 64  # connections to one peer that are kept; as many are open as requests are under way
FAILURES = (OSError, EOFError, MalformedError, BrokenError)


DRAINING = "draining"  # the answer of a server that stops
RETRIED = (BusyError.__name__, PeerError.__name__)  # answers that say: another one, or later


class NotNowError(LostError):
    """The peer is there, and cannot answer now."""


def refusal_of(header: Mapping[str, Any], address: str) -> HoploomError:
    """What a server answered instead of an answer, as what it was there."""
    name, message = str(header["error"]), f"{address}: {essence(header.get('message', ''), MOST_SAID)}"
    if name == DRAINING:
        return LostError(message)
    if name in RETRIED:
        return NotNowError(message)
    kind = getattr(errors, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, HoploomError) else PeerError(message)


class Conversation:
    """A connection, and the memory that is shared over it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.shared = SharedMemory() if connection.is_local else None
        self.sent = 0.0  # when the last request had gone out

    def send(self, request: Message) -> int:
        freed = None if self.shared is None else self.shared.freed.take()
        if freed:
            request = request._replace(header={**request.header, "freed": freed})
        prepared = wire.prepare(request)
        if prepared.num_bytes > wire.MAX_REQUEST:
            raise TooLargeError(f"tensors of {prepared.num_bytes} bytes; at most {wire.MAX_REQUEST}")
        sent = wire.send(self.connection, prepared)
        self.sent = time.monotonic()
        return sent

    def incoming(self) -> Incoming:
        """The answer's header; it may have come while nobody read."""
        silence, waited = self.connection.silence, time.monotonic() - self.sent
        # To set another limit is a call of the system: not for an answer that is waited for from the beginning.
        self.connection.begin(0, None if waited < LATE * silence else max(silence - waited, min(silence, ARRIVED)))
        return Incoming(self.connection, wire.MAX_ANSWER, self.shared)

    def close(self) -> None:
        self.connection.close()
        if self.shared is not None:
            self.shared.close()


class Peer(Closing):
    """One address, asked over as many connections as requests are under way."""

    def __init__(self, address: str, security: Renewed[ClientSecurity], silence: float) -> None:
        self.address = address
        self.bytes_received = self.bytes_sent = self.requests = 0
        self.wait_seconds = 0.0  # for answers, their reading included, over all threads
        self._security, self._silence = security, silence
        self._process = os.getpid()
        self._open: set[Conversation] = set()
        self._closed = False
        self._idle: list[Conversation] = []
        self._lock = threading.Lock()
        self.under_way = 0
        self.last_loss = ""  # why it was lost the last time

    def begin(self, request: Message) -> "PendingAnswer":
        """Send a request now; the answer is read later. LostError if it cannot be sent."""
        conversation = self._take_idle()
        try:
            conversation = self._new() if conversation is None else conversation
            sent = conversation.send(request)
        except BaseException as error:
            self._done(conversation, keep=False)
            if isinstance(error, TooLargeError):
                raise ConfigError(f"a request has {error}; ask for less at once") from error
            if isinstance(error, FAILURES):
                raise self._lost(error) from error
            raise
        with self._lock:
            self.requests, self.bytes_sent = self.requests + 1, self.bytes_sent + sent
        return PendingAnswer(self, conversation)

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _take_idle(self) -> Conversation | None:
        """One that the server has not closed meanwhile, for a request that is under way from now on."""
        if self._is_forked:  # its answers would go to either, whoever reads first
            raise PeerError(
                f"this process was forked from one that is connected to {self.address}; call connect() here, or start "
                "processes with 'spawn'"
            )
        with self._lock:
            self.under_way += 1
        while True:
            with self._lock:
                conversation = self._idle.pop() if self._idle else None
            if conversation is None or not conversation.connection.is_over():
                return conversation
            self._drop(conversation)

    def _new(self) -> Conversation:
        """By its address first, each time: the name of a Unix socket whose server has ended is anybody's."""
        connection, near_by = reach(self.address, self._security, self._silence)
        if near_by is not None and (local := reach_near_by(near_by, self._silence)) is not None:
            connection.close()
            connection = local
        conversation = Conversation(connection)
        with self._lock:
            if not self._closed:
                self._open.add(conversation)
                return conversation
        conversation.close()
        raise LostError("the store was closed")

    def read(self, conversation: Conversation, reading: Callable[[Incoming], Read], deadline: float) -> Read:
        """Read an answer by `reading`; raises what the server refused with, LostError if none comes by the deadline."""
        keep, incoming = False, None
        conversation.connection.deadline = deadline
        began = time.perf_counter()
        try:
            incoming = conversation.incoming()
            found = reading(incoming)
            with self._lock:
                self.bytes_received += incoming.num_bytes
            keep = True
            return found
        except HoploomError:  # StoreError is an OSError too
            keep = incoming is not None and "error" in incoming.header and not incoming.num_bytes  # it was read whole
            raise
        except FAILURES as error:
            raise self._late(error) if time.monotonic() >= deadline else self._lost(error) from error
        finally:
            with self._lock:
                self.wait_seconds += time.perf_counter() - began
            self._done(conversation, keep=keep)

    def _late(self, error: Exception) -> HoploomError:
        """The server may be well; its answer takes longer than there was time for."""
        if not isinstance(error, TimeoutError):
            return self._lost(error)
        told = "is still making its answer" if isinstance(error, StillMakingError) else "has not answered in full"
        return NotNowError(f"{self.address} {told}; ask for less at once, or give more time")

    def _lost(self, error: Exception) -> HoploomError:
        self._drop_idle()  # they are lost too
        if isinstance(error, TimeoutError):
            return LostError(f"{self.address} has not answered for {self._silence:g} seconds; see whether it runs")
        if has_too_many_files(error):
            return LostError(f"{self.address} {TOO_MANY_FILES}")
        if isinstance(error, EOFError | OSError):
            return LostError(f"{self.address} closed the connection; read the output of that server")
        if isinstance(error, BrokenError):
            return refusal_of({"error": "", **error.header}, self.address)
        return LostError(f"{self.address} sent something unexpected: {essence(error)}")

    def _done(self, conversation: Conversation | None, *, keep: bool) -> None:
        with self._lock:
            self.under_way -= 1
            keep = keep and not self._closed and len(self._idle) < MAX_IDLE and conversation in self._open
            if conversation is not None and keep:
                conversation.connection.deadline = math.inf  # the next request has its own
                self._idle.append(conversation)
        if conversation is not None and not keep:
            self._drop(conversation)

    def _drop(self, conversation: Conversation) -> None:
        with self._lock:
            self._open.discard(conversation)
        conversation.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for conversation in idle:
            self._drop(conversation)

    def close(self) -> None:
        """End all conversations, for good; who waits for an answer meets an error. A fork's copies are not its own."""
        if self._is_forked:
            return
        with self._lock:
            self._closed = True
        self._drop_idle()
        with self._lock:
            busy, self._open = self._open, set()
        for conversation in busy:
            conversation.connection.cut()  # whoever reads closes it


class PendingAnswer:
    """A request that is under way: its answer has to be read, once."""

    def __init__(self, peer: Peer, conversation: Conversation) -> None:
        self._peer, self._conversation = peer, conversation

    def read(self, reading: Callable[[Incoming], Read], deadline: float = math.inf) -> Read:
        """The answer, by what reads it; LostError if it is not complete at the deadline."""
        return self._peer.read(self._conversation, reading, deadline)


def read_message(incoming: Incoming, *, pinned: bool = False) -> Message:
    """The reading of an answer into recycled or pinned memory, or where it lies in shared memory."""
    return incoming.into(partial(ops.empty, pinned=True) if pinned else None)
