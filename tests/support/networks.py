"""Hosts of their own on one machine: network namespaces, each with a wire to a switch in one more of them."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

DEADLINE = 30.0  # seconds for a command of ip or tc
WIRE = "eth0"  # what a host calls its end


@dataclass(frozen=True)
class Host:
    """A namespace with an address."""

    name: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """A command as it runs on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def plug(self, *, into: bool) -> None:
        """Pull the wire, or put it back."""
        _run("ip", "-n", self.name, "link", "set", WIRE, "up" if into else "down")

    def impair(self, *how: str) -> str:
        """Make the wire bad, e.g. by ("delay", "5ms"); what the kernel has against it."""
        words = ["tc", "-n", self.name, "qdisc", "add", "dev", WIRE, "root", "netem", *how]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=False)
        return done.stderr.strip()


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts on one switch; the test is skipped where that is not permitted."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here (Debian: iproute2)")
    switch = f"hl{os.getpid()}s"
    with ExitStack() as stack:
        _add(switch, stack)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        found = [Host(f"hl{os.getpid()}h{number}", f"10.79.0.{number + 1}") for number in range(count)]
        for number, host in enumerate(found):
            _add(host.name, stack)
            plug = f"port{number}"
            _run("ip", "-n", host.name, "link", "add", WIRE, "type", "veth", "peer", "name", plug, "netns", switch)
            _run("ip", "-n", switch, "link", "set", plug, "master", "br0", "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", WIRE)
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            host.plug(into=True)
        yield found


def _add(name: str, stack: ExitStack) -> None:
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    stack.callback(_run, "ip", "netns", "delete", name)


def _run(*words: str) -> None:
    subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=True)
