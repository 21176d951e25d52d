"""How long a bare byte takes there and back: what a line and two sockets cost by themselves.

>>> python benchmarks/echoing.py 10.0.0.2:7002 serve
>>> python benchmarks/echoing.py 10.0.0.2:7002
"""

import json
import socket
import statistics
import sys
import time

TRIPS = 500


def serve(host: str, port: int) -> None:
    """Whoever comes, one after the other."""
    with socket.create_server((host, port)) as listening:
        print(json.dumps({"ready": f"{host}:{port}"}), flush=True)
        while True:
            accepted, _ = listening.accept()
            with accepted:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while byte := accepted.recv(1):
                    accepted.sendall(byte)


def ask(host: str, port: int) -> float:
    """Seconds, the median."""
    with socket.create_connection((host, port), 5.0) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        taken = []
        for _ in range(TRIPS):
            begin = time.perf_counter()
            connected.sendall(b"1")
            connected.recv(1)
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


if __name__ == "__main__":
    name, _, number = sys.argv[1].rpartition(":")
    if sys.argv[2:] == ["serve"]:
        serve(name, int(number))
    else:
        print(json.dumps({"seconds": ask(name, int(number))}))
