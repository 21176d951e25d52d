"""A line between client and server that a test can cut and mend: TCP, forwarded by two threads a connection."""

import socket
import threading
from contextlib import suppress

from hoploom.config.values import split_address

MOST = 64  # connections
CLOSING = 5.0  # seconds for a thread to end


class Proxy:
    """Forwards to `target` until it is cut; mended, it listens at the same address again. `seen` is all that passed."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.seen = b""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._port = 0
        self.mend()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def mend(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listening.getsockname()[1]
        self._start(self._accept, self._listening)

    def cut(self) -> None:
        """Break every connection, and refuse new ones."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        with self._lock:
            for one in (end for pair in self._pairs for end in pair):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(CLOSING)
            assert not thread.is_alive()

    def _start(self, target: object, *given: object) -> None:
        thread = threading.Thread(target=target, args=given, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listening.accept()
                with self._lock:
                    if len(self._pairs) >= MOST or listening.fileno() < 0:
                        near.close()
                        continue
                    self._join(near)

    def _join(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(split_address(self.target), CLOSING)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        pair = near, far
        self._pairs.append(pair)
        left = [2]
        self._start(self._forward, near, far, pair, left)
        self._start(self._forward, far, near, pair, left)

    def _forward(
        self, one: socket.socket, other: socket.socket, pair: tuple[socket.socket, socket.socket], left: list[int]
    ) -> None:
        with suppress(OSError):
            while some := one.recv(1 << 16):
                with self._lock:
                    self.seen += some
                other.sendall(some)
        for end in pair:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left[0] -= 1
            if left[0] == 0:
                self._pairs.remove(pair)
                for end in pair:
                    end.close()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *error: object) -> None:
        self.cut()
