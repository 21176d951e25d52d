"""Conversations that take long: a client hears that its answer is being made, one that stops reading is cut off.

So a client can tell a slow server from a lost one, and a stopped client does not keep memory that others wait for.
pyarrow can cancel no call of a server, so the connection under it is shut down, found by the client's address; that is
Linux's way, elsewhere a stopped client is only let go when its connection ends.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from hoploom.serve import wire

TICK = 0.5  # seconds between two looks for clients that have stopped
OPEN_FILES = "/proc/self/fd"
CLIENT = re.compile(r"ipv[46]:(?:\[([^\]]+)\]|([^:]+)):(\d+)")


class Conversation:
    """One stream's reader and writer, watched."""

    def __init__(self, client: str, reader: Any, writer: Any) -> None:
        self._client, self._reader, self._writer = client, reader, writer
        self.moving_since: float | None = None  # a piece is on its way to or from the client
        self.making_since: float | None = None
        self._within = False  # a request has begun to come
        self._lock = threading.Lock()  # whoever holds it may write

    def read_chunk(self) -> Any:
        """Between requests a client may take as long as it likes; within one it may not."""
        self.moving_since = time.monotonic() if self._within else None
        try:
            chunk = self._reader.read_chunk()
            self._within = True
            return chunk
        finally:
            self.moving_since = None

    def write_with_metadata(self, batch: pa.RecordBatch, metadata: bytes) -> None:
        self._within = False
        self.moving_since = time.monotonic()
        self._writer.write_with_metadata(batch, metadata)
        self.moving_since = None

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self.moving_since = time.monotonic()
        self._writer.write_batch(batch)
        self.moving_since = None

    @contextmanager
    def making(self) -> Iterator[None]:
        """An answer is being made: the client hears of it while it lasts."""
        self.making_since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self.making_since = None

    def beat(self) -> None:
        """Tell the client, if the answer is still being made."""
        with self._lock:
            if self.making_since is not None:
                self._writer.write_metadata(wire.BEAT)

    def cut(self) -> None:
        """Shut the connection down; what is under way on it fails."""
        found = CLIENT.match(unquote(self._client))
        if found is None or not os.path.isdir(OPEN_FILES):
            return
        where = found[1] or found[2], int(found[3])
        for number in os.listdir(OPEN_FILES):
            with suppress(OSError):
                _shut_down(int(number), where)


def _shut_down(descriptor: int, where: tuple[str, int]) -> None:
    """Shut down a socket, if it is one whose other end is there."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        host, port = same.getpeername()[:2]
        if (host.removeprefix("::ffff:"), port) == (where[0].removeprefix("::ffff:"), where[1]):
            same.shutdown(socket.SHUT_RDWR)


class StallWatch:
    """Looks after all conversations of a server: one thread tells, another one cuts off."""

    def __init__(self, stall: float, beat: float) -> None:
        self._stall, self._beat = stall, beat
        self._all: set[Conversation] = set()
        self._lock, self._closed = threading.Lock(), threading.Event()
        for look in (self._tell, self._cut):
            threading.Thread(target=look, name=f"hoploom{look.__name__}", daemon=True).start()

    @contextmanager
    def watching(self, conversation: Conversation) -> Iterator[Conversation]:
        """Look after it for as long as the block lasts."""
        with self._lock:
            self._all.add(conversation)
        try:
            yield conversation
        finally:
            with self._lock:
                self._all.discard(conversation)

    def _present(self) -> list[Conversation]:
        with self._lock:
            return list(self._all)

    def _tell(self) -> None:
        while not self._closed.wait(self._beat):
            begun = time.monotonic() - self._beat
            for one in self._present():
                if one.making_since is not None and one.making_since < begun:
                    with suppress(pa.ArrowException, OSError):  # the client has left; its own thread finds out
                        one.beat()

    def _cut(self) -> None:
        while not self._closed.wait(TICK):
            begun = time.monotonic() - self._stall
            for one in self._present():
                if one.moving_since is not None and one.moving_since < begun:
                    one.cut()

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
