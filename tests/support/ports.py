"""Ports for programs that cannot take any port and say which."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, one after the other: slurm.conf takes a range."""
    for _ in range(100):
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            base = int(first.getsockname()[1])
            try:
                for port in range(base + 1, base + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            return list(range(base, base + count))
    raise AssertionError("no free ports")
