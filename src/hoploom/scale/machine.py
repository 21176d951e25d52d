"""What the machine itself does per second: memory, disk, loopback. Each takes a fraction of a second to some seconds.

The page cache is asked to drop a file before it is read; where it may not (some container file systems), reading is
as fast as memory and the figure says so.
"""

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PAGE = 4096
PIECE = 1 << 20
PATIENCE = 30.0  # seconds that a socket may keep silent


def seconds_of(work: Callable[[], object], budget: float, least: int = 3) -> float:
    """The faster quarter's slowest of as many runs as the budget allows, after one that does not count.

    Not the median: what others do on the machine only ever adds.
    """
    work()
    spent: list[float] = []
    while len(spent) < least or sum(spent) < budget:
        begin = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begin)
    return max(sorted(spent)[len(spent) // 4], 1e-9)


def copy_bytes(size: int, budget: float) -> float:
    """Bytes per second of copying in one piece, one thread."""
    source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    return size / seconds_of(lambda: np.copyto(target, source), budget)


def write_file(path: Path, size: int) -> float:
    """Bytes per second of writing a file that is then on the disk; random bytes, so that nothing compresses them."""
    piece = random.Random(0).randbytes(PIECE)
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // PIECE):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return size / (time.perf_counter() - begin)


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_file(path: Path) -> float:
    """Bytes per second of reading a file from the disk, in order."""
    forget(path)
    buffer = bytearray(PIECE)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return path.stat().st_size / (time.perf_counter() - begin)


def read_pages(path: Path, budget: float) -> float:
    """Pages per second at random places of a file on the disk, one after the other."""
    forget(path)
    places = random.Random(1)
    num_pages = path.stat().st_size // PAGE
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < budget and count < num_pages // 4:  # few are met twice
            os.pread(file.fileno(), PAGE, places.randrange(num_pages) * PAGE)
            count += 1
        return count / (time.perf_counter() - begin)


def loopback(budget: float) -> tuple[float, float]:
    """Bytes per second of one TCP connection, and seconds of a round trip."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)
        echo = threading.Thread(target=_answer, args=(server,), daemon=True)
        echo.start()
        with socket.create_connection(server.getsockname(), timeout=PATIENCE) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trip = seconds_of(lambda: _ask(client), budget / 4)
            piece, sent = bytes(PIECE), 0
            begin = time.perf_counter()
            while time.perf_counter() - begin < budget:
                client.sendall(piece)
                sent += PIECE
            client.shutdown(socket.SHUT_WR)
            client.recv(1)  # the other end has read all
            seconds = time.perf_counter() - begin
        echo.join(PATIENCE)
    return sent / seconds, trip


def _ask(client: socket.socket) -> None:
    client.sendall(b"?")
    client.recv(1)


def _answer(server: socket.socket) -> None:
    """Send back single bytes until more comes at once, then read to the end."""
    connection, _ = server.accept()
    with connection:
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(PIECE)
        while connection.recv_into(buffer) == 1:
            connection.sendall(b"!")
        while connection.recv_into(buffer):
            pass
        connection.sendall(b".")
