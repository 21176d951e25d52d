"""One peer: persistent streams to one address, each with one request under way at a time.

A read on a stream has no deadline of its own in Flight. A watch, one thread for all peers, cancels a stream on which
nothing has come for too long; that is what a stopped server or a cut line looks like. Streams that are not in use are
kept for the next request; a stream that failed is never used again, nor is the channel under it.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from hoploom import ops
from hoploom.closing import Closing
from hoploom.errors import HoploomError, PeerError
from hoploom.serve import wire
from hoploom.serve.explain import explain, is_passing
from hoploom.serve.security import ClientSecurity
from hoploom.serve.token_auth import client_arguments
from hoploom.serve.wire import Incoming, MalformedError, Message

Read = TypeVar("Read")
TICK = 0.1  # seconds between two looks of the watch
ARRIVED = 1.0  # seconds for the beginning of an answer that should be here by now
MAX_IDLE = 64  # streams to one peer that are kept; as many are open as requests are under way
FAILURES = (pa.ArrowException, OSError, StopIteration, MalformedError)
# A channel of its own, so that a new attempt does not wait for the pause after an earlier one.
CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 1000),
]


class LostError(PeerError):
    """The peer did not answer: another one may, or this one later."""


class Stream:
    """One conversation."""

    def __init__(self, connection: flight.FlightClient) -> None:
        self.due: float | None = None  # when the watch cancels it
        self.sent = 0.0  # when the last request had gone out
        self.late = False
        descriptor = flight.FlightDescriptor.for_command(wire.COMMAND)
        self.writer, self.reader = connection.do_exchange(descriptor)
        self.begun = False

    def send(self, request: Message) -> int:
        if not self.begun:
            self.writer.begin(wire.SCHEMA)
            self.begun = True
        return wire.write(self.writer, request)

    def cancel(self) -> None:
        """End it at once, from any thread; a read or write that is under way fails."""
        with contextlib.suppress(*FAILURES):
            self.reader.cancel()

    def close(self) -> None:
        """End it, when nobody reads or writes any more."""
        self.cancel()
        with contextlib.suppress(*FAILURES):
            self.writer.close()  # or Arrow complains on stderr that nobody did


class Watch:
    """The thread that cancels streams on which nothing comes."""

    def __init__(self) -> None:
        self._streams: set[Stream] = set()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="hoploom-watch", daemon=True)
        self._thread.start()

    def add(self, stream: Stream) -> None:
        with self._lock:
            self._streams.add(stream)
        if self._closed.is_set():
            stream.cancel()

    def remove(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def _look(self) -> None:
        while not self._closed.wait(TICK):
            now = time.monotonic()
            with self._lock:
                late = [stream for stream in self._streams if stream.due is not None and stream.due < now]
            for stream in late:
                stream.late = True
                stream.cancel()

    def close(self) -> None:
        """End the thread, and all conversations: nobody would any more."""
        self._closed.set()
        self._thread.join(10 * TICK)
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()


class Peer(Closing):
    """One address, asked over as many streams as requests are under way."""

    def __init__(self, address: str, security: ClientSecurity, watch: Watch, silence: float) -> None:
        self.address = address
        self.bytes_received = self.bytes_sent = self.requests = 0
        self.wait_seconds = 0.0  # for answers, their reading included, over all threads
        self._security, self._watch, self._silence = security, watch, silence
        self._idle: list[Stream] = []
        self._lock = threading.Lock()
        self.under_way = 0
        self.last_loss = ""  # why it was lost the last time

    def begin(self, request: Message) -> "PendingAnswer":
        """Send a request now; the answer is read later. LostError if it cannot be sent."""
        with self._lock:
            self.under_way += 1
            stream = self._idle.pop() if self._idle else None
        try:
            stream = self._new() if stream is None else stream
            stream.due = time.monotonic() + self._silence
            sent = stream.send(request)
            stream.sent, stream.due = time.monotonic(), None  # an answer may lie there until somebody reads it
        except BaseException as error:
            self._done(None)
            if stream is not None:
                self._drop(stream)
            if isinstance(error, FAILURES):
                raise self._lost(error, late=stream is not None and stream.late) from error
            raise
        with self._lock:
            self.requests, self.bytes_sent = self.requests + 1, self.bytes_sent + sent
        return PendingAnswer(self, stream)

    def _new(self) -> Stream:
        arguments = client_arguments(self._security, self.address)
        arguments["generic_options"] += CHANNEL
        stream = Stream(flight.FlightClient(**arguments))
        self._watch.add(stream)
        return stream

    def read(self, stream: Stream, reading: Callable[[Incoming], Read]) -> Read:
        """Read an answer by `reading`; raises what the server refused with, LostError if none comes."""
        kept: Stream | None = None
        began = time.perf_counter()
        try:
            incoming = Incoming(_Watched(stream, self._silence), wire.MAX_ANSWER)
            found = reading(incoming)
            with self._lock:
                self.bytes_received += sum(one.num_bytes for one in incoming.described)
            kept = stream
            return found
        except FAILURES as error:
            raise self._lost(error, late=stream.late) from error
        finally:
            with self._lock:
                self.wait_seconds += time.perf_counter() - began
            self._done(kept)
            if kept is None:
                self._drop(stream)

    def _lost(self, error: Exception, *, late: bool) -> HoploomError:
        self.close()  # the channel may be waiting out a pause, and what is idle on it is lost too
        if late:
            return LostError(f"{self.address} has not answered for {self._silence:g} seconds; see whether it runs")
        if isinstance(error, StopIteration):
            return LostError(f"{self.address} closed the connection; read the output of that server")
        if isinstance(error, MalformedError):
            return LostError(f"{self.address} sent something unexpected: {error}")
        explained = explain(error, self.address, self._security)
        return LostError(str(explained)) if is_passing(error) else explained

    def _drop(self, stream: Stream) -> None:
        self._watch.remove(stream)
        stream.close()

    def _done(self, stream: Stream | None) -> None:
        with self._lock:
            self.under_way -= 1
            kept = stream is not None and len(self._idle) < MAX_IDLE
            if stream is not None and kept:
                stream.due = None
                self._idle.append(stream)
        if stream is not None and not kept:
            self._drop(stream)

    def close(self) -> None:
        """End all conversations that are idle. What is asked next begins a new connection."""
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            self._drop(stream)


class _Watched:
    """A stream's reader, whose every read moves the deadline; the first one counts from when the request went out."""

    def __init__(self, stream: Stream, silence: float) -> None:
        self._stream, self._silence = stream, silence
        self._due = max(stream.sent + silence, time.monotonic() + min(silence, ARRIVED))

    def read_chunk(self) -> Any:
        while True:
            self._stream.due = self._due
            chunk = self._stream.reader.read_chunk()
            self._due = time.monotonic() + self._silence
            if chunk.app_metadata is None or not chunk.app_metadata.equals(wire.BEAT):
                return chunk


class PendingAnswer:
    """A request that is under way: its answer has to be read, once."""

    def __init__(self, peer: Peer, stream: Stream) -> None:
        self._peer, self._stream = peer, stream

    def read(self, reading: Callable[[Incoming], Read]) -> Read:
        """The answer, by what reads it."""
        return self._peer.read(self._stream, reading)


def read_message(incoming: Incoming, *, pinned: bool = False) -> Message:
    """The reading of an answer into recycled or pinned memory."""
    return incoming.into(partial(ops.empty, pinned=True) if pinned else None)
