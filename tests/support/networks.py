"""Hosts of their own on one machine: network namespaces, each with a wire to a switch in one more of them.

benchmarks/lines.py uses them too.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

DEADLINE = 30.0  # seconds for a command of ip or tc
WIRE = "eth0"  # what a host calls its end
OWN_NAMES = 'mount --bind "$0" /etc/hosts && exec "$@"'
BURST, QUEUED = "128kb", "1mb"  # of a wire with a limit: what goes at once, and what waits before some is lost


@dataclass(frozen=True)
class Host:
    """A namespace with an address."""

    name: str
    address: str
    switch: str  # the namespace at the other end of its wire
    plug_there: str  # what the switch calls its end
    names: Path  # its /etc/hosts, as Debian makes it: its own name is 127.0.1.1, and the others' are their addresses

    def command(self, words: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, "sh", "-c", OWN_NAMES, str(self.names), *words]

    def limit(self, gigabits: float) -> None:
        """So many Gb/s, in each direction."""
        for name, device in ((self.name, WIRE), (self.switch, self.plug_there)):
            shape = ["tbf", "rate", f"{gigabits * 1000:.0f}mbit", "burst", BURST, "limit", QUEUED]
            _run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *shape)

    def add_address(self, address: str) -> None:
        """One more, that only this host itself reaches."""
        _run("ip", "-n", self.name, "addr", "add", f"{address}/32", "dev", "lo")

    def carried(self) -> tuple[int, int]:
        """The bytes that its wire has brought and taken so far."""
        words = ["ip", "-n", self.name, "-s", "-j", "link", "show", WIRE]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=True)
        (found,) = json.loads(done.stdout)
        return found["stats64"]["rx"]["bytes"], found["stats64"]["tx"]["bytes"]


class HostsError(Exception):
    """There are no hosts to be had here."""


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts on one switch; the test is skipped where that is not permitted."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(hosts_or_error(count))
        except HostsError as error:
            pytest.skip(str(error))
        yield found


@contextmanager
def hosts_or_error(count: int) -> Iterator[list[Host]]:
    """The same; HostsError where that is not permitted."""
    if shutil.which("ip") is None:
        raise HostsError("there is no `ip` here (Debian: iproute2)")
    switch = f"hl{os.getpid()}s"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        _add(switch, stack)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        found = [
            Host(f"hl{os.getpid()}h{number}", f"10.79.0.{number + 1}", switch, f"port{number}", folder / str(number))
            for number in range(count)
        ]
        for host in found:
            others = [f"{other.address} {other.name}" for other in found if other is not host]
            own = ["127.0.0.1 localhost", f"127.0.1.1 {socket.gethostname()} {host.name}"]
            host.names.write_text("\n".join([*own, *others, ""]))
            _add(host.name, stack)
            ends = [WIRE, "type", "veth", "peer", "name", host.plug_there, "netns", switch]
            _run("ip", "-n", host.name, "link", "add", *ends)
            _run("ip", "-n", switch, "link", "set", host.plug_there, "master", "br0", "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", WIRE)
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _run("ip", "-n", host.name, "link", "set", WIRE, "up")
        yield found


def _add(name: str, stack: ExitStack) -> None:
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        raise HostsError(f"network namespaces are not permitted here: {error.stderr.strip()}") from error
    stack.callback(_run, "ip", "netns", "delete", name)


def _run(*words: str) -> None:
    subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE, check=True)
