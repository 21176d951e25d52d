"""One connected socket, be it TCP, TLS or a Unix socket: bytes go out from where they lie, and come in to where they
belong.

Every wait has a limit: so many seconds for the next bytes, and for a whole message as many more as it takes at a slow
but steady rate. A small message costs one call of the system on either side; while that waits, other threads run.
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
from hoploom.closing import Closing

BUFFERED = 1 << 16  # bytes that are read ahead: a small message comes in one piece
LAST_WORDS = 1.0  # seconds for the other side to read why a conversation ends
SPIN = 200  # microseconds of polling before a wait: a processor that falls asleep wakes up later than most answers come
SHORT = 400e-6  # seconds: where the last wait was shorter, the next one begins with polling
LEAST = 1e-3  # seconds that a wait may take, even if the deadline has passed: what has come by then is read
LARGE, TOGETHER = 1 << 18, 1 << 20  # bytes of a tensor from which on so many are waited for at once
SLOWEST = 1 << 16  # bytes a second that a message has to come or go at, besides the seconds of silence
MOST_BUFFERS = 512  # that go out in one call; Linux takes 1024
MOST_FILES = 64  # that come along with one message
KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))  # so that a host that is gone is noticed
FILE = array.array("i").itemsize


class Connection(Closing):
    """A socket; whoever reads or writes has it for himself."""

    def __init__(self, connected: socket.socket, silence: float, *, takes_files: bool = False) -> None:
        self.silence = silence  # seconds
        self.files: list[int] = []  # descriptors that have come along and were not taken yet
        self.is_local = connected.family == getattr(socket, "AF_UNIX", None)
        self._socket, self._is_tls = connected, isinstance(connected, ssl.SSLSocket)
        self._is_tcp = not self.is_local and not self._is_tls
        self._takes_files = takes_files  # else the kernel closes descriptors that come along
        self._buffer = bytearray(BUFFERED)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0  # of what was read ahead
        self.deadline = math.inf  # of an answer, however often the server says that it is being made
        self._until = 0.0  # when a message has to be through
        self._waits_are_short = True
        self._timeout, self._file = silence, connected.fileno()
        connected.settimeout(silence)
        if not self.is_local:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                if hasattr(socket, name):
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin(self, num_bytes: int, silence: float | None = None) -> None:
        """From now on a message of so many bytes is on its way, in either direction."""
        now = time.monotonic()
        silence = max(LEAST, min(self.silence if silence is None else silence, self.deadline - now))
        if silence != self._timeout:  # to set it is a call of the system
            self._timeout = silence
            self._socket.settimeout(silence)
        self._until = min(self.deadline, now + silence + num_bytes / SLOWEST)

    def _in_time(self) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError(f"a message has come or gone at less than {SLOWEST} bytes a second")

    # --- out -------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Any], files: Sequence[int] = ()) -> None:
        """All of these bytes; on a Unix socket, descriptors go along."""
        sent, along = 0, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        if not self._is_tls and len(buffers) <= MOST_BUFFERS:
            sent, along = self._socket.sendmsg(buffers, along), []
        views = [memoryview(one) for one in buffers]
        if sent < sum([view.nbytes for view in views]):
            self._send_rest([view.cast("B") for view in views if view.nbytes], sent, along)

    def _send_rest(self, views: list[memoryview], sent: int, along: list[Any]) -> None:
        """What is left of these bytes when the first ones have gone out."""
        if self._is_tls:
            self._send_over_tls(views)
            return
        first = 0
        while first < len(views):
            sent, along = sent or self._socket.sendmsg(views[first : first + MOST_BUFFERS], along), []
            while first < len(views) and sent >= views[first].nbytes:
                sent -= views[first].nbytes
                first += 1
            if sent:
                views[first], sent = views[first][sent:], 0
            if first < len(views):
                self._in_time()

    def _send_over_tls(self, views: Sequence[memoryview]) -> None:
        """What is small goes in one record."""
        if len(views) > 1 and sum(view.nbytes for view in views) <= BUFFERED:
            views = [memoryview(b"".join(views))]
        for view in views:
            while view.nbytes:
                view = view[self._socket.send(view) :]
                self._in_time()

    # --- in --------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until something comes, however long that is."""
        while self._begin == self._end:
            with suppress(TimeoutError):
                self._read_ahead()

    def is_over(self) -> bool:
        """Whether the other side, which has nothing to say now, has closed it, or says something all the same."""
        return self._begin != self._end or ops.wait_readable(self._file, 0)

    def take(self, count: int) -> bytearray:
        """The next bytes; not many."""
        if count > BUFFERED:
            taken = bytearray(count)
            self.receive(memoryview(taken))
            return taken
        while self._end - self._begin < count:
            self._read_ahead()
            if self._end - self._begin < count:
                self._in_time()
        begin, self._begin = self._begin, self._begin + count
        return self._buffer[begin : begin + count]

    def skip(self, count: int) -> None:
        """Read so many bytes, and drop them."""
        for begin in range(0, count, BUFFERED):
            self.take(min(BUFFERED, count - begin))

    def receive(self, target: memoryview) -> None:
        """As many bytes as the target holds."""
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
        came = self._socket.recv_into(target)
        if came == 0:
            raise EOFError("the connection was closed in the middle of a message")
        if came < target.nbytes:
            self._in_time()
        return came

    def _receive_large(self, target: memoryview) -> None:
        """Much at once, as long as it comes quickly: each time to wake up costs more than what there is to copy."""
        at = 0
        try:
            while target.nbytes:
                if at == 0 or target.nbytes < at:
                    self._wake_up_at(at := min(TOGETHER, target.nbytes))
                try:
                    target = target[self._receive_some(target) :]
                except TimeoutError:
                    if at == 1:
                        raise
                    self._wake_up_at(at := 1)
                    if not ops.wait_readable(self._file, 0):  # else they come, and slowly
                        raise
        finally:
            self._wake_up_at(1)

    def _wake_up_at(self, num_bytes: int) -> None:
        """Whoever waits is woken up once so many bytes are there, or no more will come."""
        with suppress(OSError):  # not every system can
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _read_ahead(self) -> None:
        """What has come by now, behind what was not taken yet; at least a byte."""
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
        if self._takes_files:
            came, along, flags, _ = self._socket.recvmsg_into([target], socket.CMSG_SPACE(MOST_FILES * FILE))
            for level, kind, content in along:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    whole = content[: len(content) - len(content) % FILE]
                    self.files.extend(array.array("i", whole))
            if flags & socket.MSG_CTRUNC:  # the kernel has closed those that this process may not have
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        else:
            came = self._socket.recv_into(target)
        self._waits_are_short = time.monotonic() - began < SHORT
        if came == 0:
            raise EOFError("the connection was closed")
        self._end += came

    # --- the end ---------------------------------------------------------------------------------

    def cut(self) -> None:
        """End it at once, from any thread: whoever waits on it meets an error."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not TLS's own: that is for its own thread

    def hang_up(self) -> None:
        """Close it once the other side has read the last message, which unread bytes would discard."""
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket = socket.socket(fileno=self._socket.detach())
        end = time.monotonic() + LAST_WORDS
        with self._socket, suppress(OSError):
            self._socket.settimeout(LAST_WORDS)
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(BUFFERED) and time.monotonic() < end:
                pass

    def close(self) -> None:
        """When nobody reads or writes any more."""
        self.cut()
        self._socket.close()
        while self.files:
            os.close(self.files.pop())
