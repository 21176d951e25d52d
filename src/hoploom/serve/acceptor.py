"""One thread holds new connections until they are admitted, so that unknown clients take no threads.

Each has a few seconds; if too many wait, the one idle for longest is closed.
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
from contextlib import suppress
from typing import Any, TypeVar

from hoploom.system import Closing

Value = TypeVar("Value")
Steps = Generator[int, None, Value]  # a generator that yields the event of `selectors` to wait for
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
BACKLOG = 4096  # connections that wait to be accepted; the system may lower this
AT_ONCE = 64  # connections that are accepted before others get a turn
TICK = 0.1  # seconds between two checks for connections whose time is over
DISCARDED = 1 << 12  # bytes that one call reads and discards after the last message
JOIN_TIMEOUT = 2.0  # seconds for the thread to end
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class NewConnection:
    """A connection not yet admitted. Its methods are generators, which yield where they would block."""

    def __init__(
        self, accepted: socket.socket, deadline: float, admit: Callable[["NewConnection"], Steps[None]]
    ) -> None:
        accepted.setblocking(False)
        self.socket, self.file, self.deadline = accepted, accepted.fileno(), deadline
        self.is_admitted = False  # afterwards the socket belongs to another thread
        self.steps, self.event = admit(self), READ  # the event that `steps` waits for

    def retry(self, event: int, call: Callable[..., Value], *arguments: object) -> Steps[Value]:
        """Repeat `call` until it does not block; return its result. Before a retry, yield the event to wait for."""
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
        """Return the next `count` bytes and read no further; raise EOFError if the connection ends first."""
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

    def start_tls(self, context: ssl.SSLContext) -> Steps[None]:
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        try:
            yield from self.retry(READ, self.socket.do_handshake)
        except OSError:
            yield from self.hang_up()  # so that the client reads the alert
            raise

    def hang_up(self, content: bytes = b"") -> Steps[None]:
        """Send a last message, then read until the client closes: closing with unread bytes could lose the message."""
        yield from self.send(content)
        self.socket.shutdown(socket.SHUT_WR)  # also ends TLS
        while (yield from self.retry(READ, self.socket.recv, DISCARDED)):
            yield READ


class Acceptor(Closing):
    """A thread that runs `admit(connection)` for up to `most` new connections at once, each for at most `seconds`."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        admit: Callable[[NewConnection], Steps[None]],
        most: int,
        seconds: float,
        name: str,
    ) -> None:
        self._listeners, self._admit, self._most, self._seconds = listeners, admit, most, seconds
        self._waiting: OrderedDict[int, NewConnection] = OrderedDict()  # by file descriptor, the longest idle first
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
        """End the thread and close the listeners and all connections that were not admitted."""
        self._closed.set()
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the loop
        self._thread.join(JOIN_TIMEOUT)

    def _loop(self) -> None:
        next_check = 0.0
        while not self._closed.is_set():
            events = self._selector.select(TICK)
            for key, _ in events:
                if key.data is not None:
                    self._advance(key.data)
            for key, _ in events:  # last, because new connections may replace others
                if key.data is None and not self._closed.is_set():
                    self._accept(key.fileobj)
            if (now := time.monotonic()) >= next_check:
                next_check = now + TICK
                for late in [one for one in self._waiting.values() if one.deadline <= now]:
                    self._drop(late)
        while self._waiting:
            self._drop()
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _accept(self, listener: Any) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, _ = listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_FILES:  # other connections may end meanwhile
                    self._drop() if self._waiting else self._closed.wait(TICK)
                return
            if len(self._waiting) >= self._most:
                self._drop()
            connection = NewConnection(accepted, time.monotonic() + self._seconds, self._admit)
            self._selector.register(connection.file, READ, connection)
            self._waiting[connection.file] = connection

    def _advance(self, connection: NewConnection) -> None:
        """Resume a connection's generator until it waits again; drop the connection if the generator ends or fails."""
        try:
            event = next(connection.steps)
        except (StopIteration, OSError, EOFError, ValueError):  # done, or the client left or sent nonsense
            self._drop(connection)
            return
        except Exception as error:  # a bug must not end the loop
            at = traceback.extract_tb(error.__traceback__)[-1]
            dropped = f"{self._thread.name} dropped a connection, {at.filename}:{at.lineno}"
            print(f"hoploom: warning: {dropped}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._drop(connection)
            return
        if connection.event != event:
            connection.event = event
            self._selector.modify(connection.file, event, connection)
        self._waiting.move_to_end(connection.file)

    def _drop(self, connection: NewConnection | None = None) -> None:
        """Stop polling a connection, by default the longest idle one; close its socket unless it was admitted."""
        connection = connection or next(iter(self._waiting.values()))
        self._selector.unregister(connection.file)
        del self._waiting[connection.file]
        if not connection.is_admitted:
            connection.socket.close()
