"""One connected socket, be it TCP, TLS or a Unix socket: bytes go out from where they lie, and come in to where they
belong.

Every wait has a limit: so many seconds for the next bytes, and for a whole message as many more as it takes at a slow
but steady rate. A small message costs one call of the system on either side; while that waits, other threads run.
"""

import array
import os
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hoploom.closing import Closing

BUFFERED = 1 << 16  # bytes that are read ahead: a small message comes in one piece
SLOWEST = 1 << 16  # bytes a second that a message has to come or go at, besides the seconds of silence
MOST_BUFFERS = 512  # that go out in one call; Linux takes 1024
MOST_FILES = 64  # that come along with one message
KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))  # so that a host that is gone is noticed
FILE = array.array("i").itemsize


class Connection(Closing):
    """A socket; whoever reads or writes has it for himself."""

    def __init__(self, connected: socket.socket, silence: float) -> None:
        self.silence = silence  # seconds
        self.files: list[int] = []  # descriptors that have come along and were not taken yet
        self.is_local = connected.family == getattr(socket, "AF_UNIX", None)
        self._socket, self._is_tls = connected, isinstance(connected, ssl.SSLSocket)
        self._buffer = bytearray(BUFFERED)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0  # of what was read ahead
        self._until = 0.0  # when a message has to be through
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
        silence = self.silence if silence is None else silence
        self._socket.settimeout(silence)
        self._until = time.monotonic() + silence + num_bytes / SLOWEST

    def _in_time(self) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError(f"a message has come or gone at less than {SLOWEST} bytes a second")

    # --- out -------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Any], files: Sequence[int] = ()) -> None:
        """All of these bytes; on a Unix socket, descriptors go along."""
        views = [memoryview(one).cast("B") for one in buffers if memoryview(one).nbytes]
        if self._is_tls:
            self._send_over_tls(views)
            return
        along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        first = 0
        while first < len(views):
            sent = self._socket.sendmsg(views[first : first + MOST_BUFFERS], along)
            along = []
            while first < len(views) and sent >= views[first].nbytes:
                sent -= views[first].nbytes
                first += 1
            if sent:
                views[first] = views[first][sent:]
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

    def wait(self, seconds: float | None = None) -> None:
        """Until something comes, however long that is."""
        if self._begin == self._end:
            self._socket.settimeout(seconds)
            self._read_ahead()

    def take(self, count: int) -> bytes:
        """The next bytes; not many."""
        while self._end - self._begin < count <= BUFFERED:
            self._read_ahead()
            self._in_time()
        if count <= BUFFERED:
            begin, self._begin = self._begin, self._begin + count
            return bytes(self._view[begin : begin + count])
        taken = bytearray(count)
        self.receive(memoryview(taken))
        return bytes(taken)

    def receive(self, target: memoryview) -> None:
        """As many bytes as the target holds."""
        ahead = min(self._end - self._begin, target.nbytes)
        if ahead:
            target[:ahead] = self._view[self._begin : self._begin + ahead]
            self._begin += ahead
            target = target[ahead:]
        while target.nbytes:
            came = self._socket.recv_into(target)
            if came == 0:
                raise EOFError("the connection was closed in the middle of a message")
            target = target[came:]
            if target.nbytes:
                self._in_time()

    def _read_ahead(self) -> None:
        """What has come by now, behind what was not taken yet; at least a byte."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == BUFFERED:
            left = self._end - self._begin
            self._view[:left] = bytes(self._view[self._begin : self._end])
            self._begin, self._end = 0, left
        target = self._view[self._end :]
        if self.is_local:  # where descriptors may come along
            came, along, _, _ = self._socket.recvmsg_into([target], socket.CMSG_SPACE(MOST_FILES * FILE))
            for level, kind, content in along:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    whole = content[: len(content) - len(content) % FILE]
                    self.files.extend(array.array("i", whole))
        else:
            came = self._socket.recv_into(target)
        if came == 0:
            raise EOFError("the connection was closed")
        self._end += came

    # --- the end ---------------------------------------------------------------------------------

    def cut(self) -> None:
        """End it at once, from any thread: whoever waits on it meets an error."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not TLS's own: that is for its own thread

    def close(self) -> None:
        """When nobody reads or writes any more."""
        self.cut()
        self._socket.close()
        while self.files:
            os.close(self.files.pop())
