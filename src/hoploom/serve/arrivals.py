"""One thread that meets all connections until they are admitted, so that strangers take neither threads nor places.

A connection has a few seconds in total. Where there are too many, the one that has been silent for longest is dropped.
"""

import errno
import selectors
import socket
import ssl
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from hoploom.closing import Closing

Value = TypeVar("Value")
Steps = Generator[int, None, Value]  # yields the event of `selectors` that it waits for
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
BACKLOG = 4096  # connections that wait to be accepted; the system may lower this
AT_ONCE = 64  # connections that are accepted before others are looked at again
TICK = 0.1  # seconds between two looks for connections whose time is over
PIECE = 1 << 12  # bytes that are read, and dropped, after the last message to a client
LAST_WORDS = 2.0  # seconds for the thread to end
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Arrival:
    """A connection in the poll loop. Its methods never block: they are generators."""

    def __init__(self, accepted: socket.socket, until: float, meet: Callable[["Arrival"], Steps[None]]) -> None:
        accepted.setblocking(False)
        self.socket, self.file, self.until = accepted, accepted.fileno(), until
        self.is_admitted = False  # then the socket belongs to another thread
        self.steps, self.event = meet(self), READ  # the event that it waits for

    def retry(self, event: int, call: Callable[..., Value], *arguments: object) -> Steps[Value]:
        """Return the result of a call of the socket, as soon as that need not wait."""
        while True:
            try:
                return call(*arguments)
            except ssl.SSLWantReadError:
                event = READ
            except ssl.SSLWantWriteError:
                event = WRITE
            except BlockingIOError:
                pass
            yield event

    def take(self, count: int) -> Steps[bytes]:
        """Return the next `count` bytes and read no further."""
        taken = b""
        while len(taken) < count:
            some: bytes = yield from self.retry(READ, self.socket.recv, count - len(taken))
            if not some:
                raise EOFError("the connection was closed")
            taken += some
        return taken

    def send(self, content: bytes) -> Steps[None]:
        while content:
            content = content[(yield from self.retry(WRITE, self.socket.send, content)) :]

    def secure(self, context: ssl.SSLContext) -> Steps[None]:
        """Do the handshake of TLS."""
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        try:
            yield from self.retry(READ, self.socket.do_handshake)
        except OSError:
            yield from self.hang_up()  # the client is to read the alert
            raise

    def hang_up(self, content: bytes = b"") -> Steps[None]:
        """Send a last message, and wait for the client to close: bytes that nobody reads would discard the message."""
        yield from self.send(content)
        self.socket.shutdown(socket.SHUT_WR)  # TLS ends here, too
        while (yield from self.retry(READ, self.socket.recv, PIECE)):
            yield READ


class Arrivals(Closing):
    """The loop. `meet` admits or refuses a connection, within `seconds`; at most `most` of them are met at a time."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        meet: Callable[[Arrival], Steps[None]],
        most: int,
        seconds: float,
        name: str,
    ) -> None:
        self._listeners, self._meet, self._most, self._seconds = listeners, meet, most, seconds
        self._waiting: OrderedDict[int, Arrival] = OrderedDict()  # by file; the one that is silent for longest first
        self._selector = selectors.DefaultSelector()
        self._closed = threading.Event()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, READ)
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """End the thread, the listeners, and all connections that were not admitted."""
        self._closed.set()
        for listener in self._listeners:
            try:
                listener.shutdown(socket.SHUT_RDWR)  # wakes the loop
            except OSError:
                continue
        self._thread.join(LAST_WORDS)

    def _loop(self) -> None:
        next_look = 0.0
        while not self._closed.is_set():
            events = self._selector.select(TICK)
            for key, _ in events:
                if key.data is not None:
                    self._go_on(key.data)
            for key, _ in events:  # at last, as new connections may take the place of others
                if key.data is None and not self._closed.is_set():
                    self._accept(key.fileobj)
            if (now := time.monotonic()) >= next_look:
                next_look = now + TICK
                for late in [one for one in self._waiting.values() if one.until <= now]:
                    self._drop(late)
        while self._waiting:
            self._drop_first()
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _accept(self, listener: Any) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, _ = listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_FILES:  # others may end meanwhile
                    self._drop_first() if self._waiting else self._closed.wait(TICK)
                return
            if len(self._waiting) >= self._most:
                self._drop_first()
            arrival = Arrival(accepted, time.monotonic() + self._seconds, self._meet)
            self._selector.register(arrival.file, READ, arrival)
            self._waiting[arrival.file] = arrival

    def _go_on(self, arrival: Arrival) -> None:
        """Meet a connection as far as that need not wait."""
        try:
            event = next(arrival.steps)
        except (StopIteration, OSError, EOFError, ValueError):  # it is over, or the client has left or sent nonsense
            self._drop(arrival)
            return
        except Exception as error:  # a bug: the others go on
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = (
                f"{self._thread.name} dropped a connection, {at.filename}:{at.lineno}: {type(error).__name__}: {error}"
            )
            print(f"hoploom: warning: {what}", file=sys.stderr, flush=True)
            self._drop(arrival)
            return
        if arrival.event != event:
            arrival.event = event
            self._selector.modify(arrival.file, event, arrival)
        self._waiting.move_to_end(arrival.file)

    def _drop_first(self) -> None:
        self._drop(next(iter(self._waiting.values())))

    def _drop(self, arrival: Arrival) -> None:
        self._selector.unregister(arrival.file)
        del self._waiting[arrival.file]
        if not arrival.is_admitted:
            arrival.socket.close()
