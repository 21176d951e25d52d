"""Ports for programs that cannot take any port and say which."""

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, one after the other: slurm.conf takes a range.

    They are below those that the kernel itself gives to connections and listeners: it would give them again before the
    program is there, or while a server that was killed is away.
    """
    end = int(EPHEMERAL.read_text().split()[0]) - count
    for _ in range(1000):
        base = random.SystemRandom().randrange(min(10_000, end // 2), end)
        with ExitStack() as stack, suppress(OSError):
            for port in range(base, base + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(base, base + count))
    raise AssertionError("no free ports")
