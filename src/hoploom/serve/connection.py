"""One connected socket: TCP, TLS or a Unix socket. Buffers are sent and received without copies.

Inside a message, every wait is bounded: the next bytes must come within the idle timeout, and the whole message at
SLOWEST bytes a second or faster. A small message costs one system call per side. Other threads run while a call waits.
"""

import array
import errno
import math
import os
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hoploom import ops
from hoploom.system import Closing

BUFFERED = 1 << 16  # bytes that are read ahead, so that a small message comes in one call
LINGER = 1.0  # seconds for the other side to read the last message
SPIN = 200  # microseconds of polling before a wait: most responses come sooner than a sleeping processor wakes up
SHORT = 400e-6  # seconds: after a shorter wait, the next wait begins with polling
MIN_TIMEOUT = 1e-3  # seconds: bytes that have arrived are read even if the deadline has passed
LARGE, TOGETHER = 1 << 18, 1 << 20  # bytes: a read of LARGE or more wakes up for TOGETHER at a time
SLOWEST = 1 << 16  # bytes a second: the least rate of a message, on top of the idle timeout
MAX_BUFFERS = 512  # of one system call; Linux takes 1024
MAX_FILES = 64  # descriptors that arrive with one message
KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))  # to notice that a host is gone
DESCRIPTOR_BYTES = array.array("i").itemsize


class Connection(Closing):
    """A connected socket. Not thread-safe, except `cut`: callers serialize reads and writes."""

    def __init__(self, connected: socket.socket, idle_timeout: float, *, takes_files: bool = False) -> None:
        self.idle_timeout = idle_timeout  # seconds
        self.files: list[int] = []  # received descriptors that nothing has taken yet
        self.is_local = connected.family == getattr(socket, "AF_UNIX", None)
        self._socket, self._is_tls = connected, isinstance(connected, ssl.SSLSocket)
        self._is_tcp = not self.is_local and not self._is_tls
        self._takes_files = takes_files  # otherwise the kernel closes descriptors that arrive
        self._buffer = bytearray(BUFFERED)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0  # of the bytes that were read ahead
        self.deadline = math.inf  # for a whole response; heartbeats do not extend it
        self._message_deadline = 0.0
        self._waits_are_short = True
        self._timeout, self._file = idle_timeout, connected.fileno()
        connected.settimeout(idle_timeout)
        if not self.is_local:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                if hasattr(socket, name):
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin(self, num_bytes: int, idle_timeout: float | None = None) -> None:
        """Set the timeouts for sending or receiving a message of `num_bytes` bytes."""
        now = time.monotonic()
        timeout = self.idle_timeout if idle_timeout is None else idle_timeout
        timeout = max(MIN_TIMEOUT, min(timeout, self.deadline - now))
        if timeout != self._timeout:  # settimeout() is a system call
            self._timeout = timeout
            self._socket.settimeout(timeout)
        self._message_deadline = min(self.deadline, now + timeout + num_bytes / SLOWEST)

    def _check_deadline(self) -> None:
        if time.monotonic() > self._message_deadline:
            raise TimeoutError(f"a message has come or gone at less than {SLOWEST} bytes a second")

    def send(self, buffers: Sequence[Any], files: Sequence[int] = ()) -> None:
        """Send all `buffers` and, over a Unix socket, the open file descriptors `files`."""
        sent, ancillary = 0, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        if not self._is_tls and len(buffers) <= MAX_BUFFERS:
            sent, ancillary = self._socket.sendmsg(buffers, ancillary), []
        views = [memoryview(buffer) for buffer in buffers]
        if sent >= sum([view.nbytes for view in views]):
            return
        views = [view.cast("B") for view in views if view.nbytes]
        if self._is_tls:  # small views in one record, large ones without a copy
            if len(views) > 1 and sum(view.nbytes for view in views) <= BUFFERED:
                views = [memoryview(b"".join(views))]
            for view in views:
                while view.nbytes:
                    view = view[self._socket.send(view) :]
                    self._check_deadline()
            return
        first = 0  # of the views that are left
        while first < len(views):
            sent, ancillary = sent or self._socket.sendmsg(views[first : first + MAX_BUFFERS], ancillary), []
            while first < len(views) and sent >= views[first].nbytes:
                sent -= views[first].nbytes
                first += 1
            if sent:
                views[first], sent = views[first][sent:], 0
            if first < len(views):
                self._check_deadline()

    def wait(self) -> None:
        """Wait for the first bytes of a message, without a time limit."""
        while self._begin == self._end:
            with suppress(TimeoutError):
                self._read_ahead()

    def is_idle(self) -> bool:
        """Return whether the connection is open and has no unread bytes, so that it can be used for a new request."""
        return self._begin == self._end and not ops.wait_readable(self._file, 0)

    def take(self, count: int) -> bytearray:
        """Return a copy of the next `count` bytes; for many bytes, `receive` is cheaper."""
        if count > BUFFERED:
            taken = bytearray(count)
            self.receive(memoryview(taken))
            return taken
        while self._end - self._begin < count:
            self._read_ahead()
            if self._end - self._begin < count:
                self._check_deadline()
        begin, self._begin = self._begin, self._begin + count
        return self._buffer[begin : begin + count]

    def skip(self, count: int) -> None:
        """Read and discard `count` bytes."""
        for begin in range(0, count, BUFFERED):
            self.take(min(BUFFERED, count - begin))

    def receive(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of the connection."""
        ahead = min(self._end - self._begin, target.nbytes)
        if ahead:
            target[:ahead] = self._view[self._begin : self._begin + ahead]
            self._begin += ahead
            target = target[ahead:]
        if self._is_tcp and target.nbytes >= LARGE:
            self._receive_large(target)
            return
        while target.nbytes:
            target = target[self._receive_some(target) :]

    def _receive_some(self, target: memoryview) -> int:
        received = self._socket.recv_into(target)
        if received == 0:
            raise EOFError("the connection was closed in the middle of a message")
        if received < target.nbytes:
            self._check_deadline()
        return received

    def _receive_large(self, target: memoryview) -> None:
        """Fill `target`. While bytes arrive quickly, let the kernel collect many before it wakes this thread."""
        low_mark = 0
        try:
            while target.nbytes:
                if low_mark == 0 or target.nbytes < low_mark:
                    low_mark = min(TOGETHER, target.nbytes)
                    self._set_low_mark(low_mark)
                try:
                    target = target[self._receive_some(target) :]
                except TimeoutError:
                    if low_mark == 1:
                        raise
                    low_mark = 1
                    self._set_low_mark(1)
                    if not ops.wait_readable(self._file, 0):  # otherwise bytes come, but slowly
                        raise
        finally:
            self._set_low_mark(1)

    def _set_low_mark(self, num_bytes: int) -> None:
        """Let the kernel wake up the reader only when `num_bytes` bytes have arrived, or the connection has ended."""
        with suppress(OSError):  # not every system can
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _read_ahead(self) -> None:
        """Wait for at least one byte, then read all that have arrived, as many as fit into the read-ahead buffer."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == BUFFERED:
            left = self._end - self._begin
            self._view[:left] = bytes(self._view[self._begin : self._end])
            self._begin, self._end = 0, left
        began = time.monotonic()
        if self._waits_are_short:
            ops.wait_readable(self._file, SPIN)
        target = self._view[self._end :]
        received = self._receive_with_files(target) if self._takes_files else self._socket.recv_into(target)
        self._waits_are_short = time.monotonic() - began < SHORT
        if received == 0:
            raise EOFError("the connection was closed")
        self._end += received

    def _receive_with_files(self, target: memoryview) -> int:
        received, ancillary, flags, _ = self._socket.recvmsg_into(
            [target], socket.CMSG_SPACE(MAX_FILES * DESCRIPTOR_BYTES)
        )
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = content[: len(content) - len(content) % DESCRIPTOR_BYTES]
                self.files.extend(array.array("i", whole))
        if flags & socket.MSG_CTRUNC:  # the kernel has closed descriptors above this process's limit
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return received

    def cut(self) -> None:
        """End the connection at once, from any thread. A thread that waits to read or write gets an error."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS's own shutdown needs the reading thread

    def hang_up(self) -> None:
        """Stop sending, and close after the peer has. Closing with unread bytes could lose the last message sent."""
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket = socket.socket(fileno=self._socket.detach())
        end = time.monotonic() + LINGER
        with self._socket, suppress(OSError):
            self._socket.settimeout(LINGER)
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(BUFFERED) and time.monotonic() < end:
                pass

    def close(self) -> None:
        """Close the socket and the received file descriptors in `files`. No other thread may still use either."""
        self.cut()
        self._socket.close()
        while self.files:
            os.close(self.files.pop())
