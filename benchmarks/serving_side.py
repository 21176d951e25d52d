"""One contender of serving.py: asked in lines of JSON, it answers with seconds. Uses what both commits have.

python serving_side.py store ADDRESS [tcp]   # rows of a graph server, through the store
python serving_side.py unix|tcp ADDRESS      # as many bytes over a bare socket
python serving_side.py serve unix|tcp        # the other end of that
"""

import json
import mmap
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

CORES = 2
ROW_BYTES = 400
PIECE = 1 << 20
REQUEST = struct.Struct("<QQ")  # bytes of ids that follow, and of rows that are asked for


Ask = Callable[[torch.Tensor], Any]


def through_the_store(address: str, over: str) -> tuple[Ask, int]:
    """A gather of a store whose parts are all remote, and how many nodes there are."""
    import hoploom
    from hoploom.store import Wanted

    if over == "tcp":  # as if the server were on another host
        with suppress(ImportError):  # Flight is over TCP as it is
            from hoploom.serve import handshake

            handshake.can_share = lambda: False
    store = hoploom.connect(address, made="here")
    return lambda ids: store.features.gather([Wanted("node", "x", ids)]), store.schema.node_types[0].num_nodes


def over_a_socket(kind: str, address: str) -> Ask:
    """The ids go from where they lie, the rows come to memory that is there: no server does less."""
    connected = _connected(kind, address)
    memory: dict[int, memoryview] = {}

    def ask(ids: torch.Tensor) -> None:
        size = len(ids) * ROW_BYTES
        if size not in memory:
            memory[size] = memoryview(_large(size))
        left = memory[size]
        _send(connected, [REQUEST.pack(ids.nbytes, size), memoryview(ids.numpy()).cast("B")])
        while left.nbytes:
            left = left[connected.recv_into(left) :]

    return ask


def _large(size: int) -> mmap.mmap:
    """Memory in huge pages where the kernel has them."""
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _connected(kind: str, address: str) -> socket.socket:
    if kind == "unix":
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(f"\0{address}")
        return connected
    host, _, port = address.rpartition(":")
    connected = socket.create_connection((host, int(port)))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _send(connected: socket.socket, views: list[Any]) -> None:
    """All of it, in as few calls as the system takes."""
    sent = connected.sendmsg(views)
    for view in map(memoryview, views):
        if sent < view.nbytes:
            connected.sendall(view[sent:])
        sent = max(0, sent - view.nbytes)


def serve(kind: str) -> None:
    """Answer every request with as many bytes as it asks for, which lie ready."""
    if kind == "unix":
        listening = socket.socket(socket.AF_UNIX)
        listening.bind("")  # a name that the system chooses
        listening.listen()
        name = listening.getsockname()[1:].decode()
    else:
        listening = socket.create_server(("127.0.0.1", 0))
        name = f"127.0.0.1:{listening.getsockname()[1]}"
    print(json.dumps({"ready": name}), flush=True)
    while True:
        accepted, _ = listening.accept()
        if kind == "tcp":
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(accepted,), daemon=True).start()


def _answer(accepted: socket.socket) -> None:
    rows, asked = memoryview(b""), bytearray(1 << 16)
    while head := accepted.recv(REQUEST.size, socket.MSG_WAITALL):
        left, size = REQUEST.unpack(head)
        while left:
            left -= accepted.recv_into(asked, min(left, len(asked)))
        if len(rows) < size:
            rows = memoryview(_large(size))
            rows[:] = bytes(range(256)) * (size // 256) + bytes(size % 256)
        for begin in range(0, size, PIECE):
            accepted.sendall(rows[begin : min(begin + PIECE, size)])


def measured(ask: Ask, ids: torch.Tensor, trips: int) -> float:
    """The median of so many round trips, in seconds."""
    taken = []
    for _ in range(trips):
        begin = time.perf_counter()
        ask(ids)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main() -> None:
    kind, address, over = (*sys.argv[1:], "")[:3]
    if kind == "serve":
        serve(address)
        return
    torch.set_num_threads(CORES)
    num_nodes = 0
    if kind == "store":
        ask, num_nodes = through_the_store(address, over)
    else:
        ask = over_a_socket(kind, address)
    for line in sys.stdin:
        asked = json.loads(line)
        count = int(asked["rows"])
        ids = torch.randint(0, num_nodes or 1 << 20, (count,), generator=torch.Generator().manual_seed(1))
        seconds = measured(ask, ids, int(asked["trips"]))
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
