"""Real graph servers in processes of their own, on loopback, ended with the block that started them."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hoploom.serve import Ready
from support.ports import free_ports

START_DEADLINE = 120.0  # seconds: importing torch on a busy machine
STOP_DEADLINE = 60.0


@dataclass
class Server:
    process: subprocess.Popen[str]
    address: str
    command: Sequence[str]
    said: str = ""
    metrics: str | None = None

    def stop(self) -> int:
        """SIGTERM, as a supervisor sends it; the exit code."""
        self.resume()
        self.process.terminate()
        return self.process.wait(STOP_DEADLINE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_DEADLINE)

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)

    def status(self, name: str) -> int:
        """A number in what the kernel tells of the process, a size in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        ((number, unit),) = re.findall(rf"^{name}:\s+(\d+)( kB)?$", text, re.MULTILINE)
        return int(number) * (1024 if unit else 1)

    def restart(self) -> None:
        """The same server again, at the same address."""
        self.kill()
        restart_dead([self])


def restart_dead(servers: Sequence[Server]) -> None:
    """Start those again that have ended, all at once, at their addresses."""
    dead = [server for server in servers if server.process.poll() is not None]
    end(dead)
    for server in dead:
        again = _started([*server.command[:-1], server.address])
        server.process, server.said = again.process, again.said
    for server in dead:
        _wait_until_serving(server, time.monotonic() + START_DEADLINE)


def command_of(store: Path, parts: Sequence[int], listen: str, more: Sequence[str]) -> list[str]:
    chosen = [word for part in parts for word in ("--part", str(part))]
    return [sys.executable, "-m", "hoploom", "serve", str(store), *chosen, *more, "--listen", listen]


def _started(command: Sequence[str]) -> Server:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return Server(process, "", command)


def _wait_until_serving(server: Server, deadline: float) -> None:
    assert server.process.stdout is not None
    output = server.process.stdout.fileno()  # select does not see what a buffer holds
    while time.monotonic() < deadline:
        if not select.select([output], [], [], 1.0)[0]:
            continue
        some = os.read(output, 1 << 16).decode()
        server.said += some
        if "\n" in server.said:
            ready = Ready.read(server.said)
            assert ready is not None, server.said
            server.address, server.metrics = ready.address, ready.metrics
            return
        if not some:
            break
    server.process.kill()
    _, errors = server.process.communicate(timeout=STOP_DEADLINE)
    raise AssertionError(f"the server did not start: {server.said}{errors}")


@contextmanager
def serving(
    store: Path, parts: Sequence[Sequence[int]], *more: str, listen: str = "127.0.0.1:0"
) -> Iterator[list[Server]]:
    """A server for each of these lists of parts (an empty list: all), all started at once."""
    with serving_by([command_of(store, own, listen, more) for own in parts]) as servers:
        yield servers


@contextmanager
def serving_together(store: Path, parts: Sequence[Sequence[int]], *more: str) -> Iterator[list[Server]]:
    """The same, each with all the others as peers, so that any of them makes whole batches."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(parts))]
    peers = ["--peers", ",".join(addresses), *more]
    commands = [command_of(store, own, address, peers) for own, address in zip(parts, addresses, strict=True)]
    with serving_by(commands) as servers:
        yield servers


@contextmanager
def serving_by(commands: Sequence[Sequence[str]]) -> Iterator[list[Server]]:
    servers: list[Server] = []
    try:
        for command in commands:
            servers.append(_started(command))
        for server in servers:
            _wait_until_serving(server, time.monotonic() + START_DEADLINE)
        yield servers
    finally:
        end(servers)


class OneProcess:
    """Servers of any number of stores in another process, all in one: see main."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.loaded: list[str] = []  # the modules of ours that it had loaded when it last began to serve

    def serve(
        self,
        store: Path,
        parts: Sequence[Sequence[int]],
        *,
        together: bool = False,
        memory: int = 4 << 30,
        store_memory: int | None = None,
    ) -> list[str]:
        """The addresses of a server for each of these lists of parts (an empty one: all).

        Together they make whole batches; one that holds all parts does so alone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        peers = [f"127.0.0.1:{port}" for port in free_ports(len(parts))] if together else []
        print(json.dumps([str(store), parts, peers, memory, store_memory]), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], START_DEADLINE)
        assert ready
        addresses, self.loaded = json.loads(self._process.stdout.readline())
        return list(addresses)


@contextmanager
def one_process() -> Iterator[OneProcess]:
    """Started with the block and ended with it. Tests that do not end it share the fixture server_process."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield OneProcess(process)
        finally:
            process.kill()


def end(servers: Sequence[Server]) -> None:
    for server in servers:
        server.resume()
        with suppress(ProcessLookupError):
            server.process.kill()
    for server in servers:
        server.process.wait(STOP_DEADLINE)
        for stream in (server.process.stdout, server.process.stderr):
            if stream is not None:
                stream.close()


def addresses_of(servers: Sequence[Server]) -> list[str]:
    return [server.address for server in servers]


def main() -> None:
    """Serve any number of stores in this process: to import takes longer than to serve.

    Reads a line of JSON for each fleet: a store, the parts of each of its servers, the address of each where they are
    to make whole batches, the memory of each, and how much of the store each holds. Answers with their addresses and
    with the modules of ours that are loaded, and reads on.
    """
    import hoploom.cli.serving  # noqa: F401  # for who asks what a server loads
    from hoploom.serve.graph_server import BatchOptions, GraphServer
    from hoploom.serve.security import ServerSecurity
    from hoploom.serve.server import Server

    with ExitStack() as stack:
        for line in sys.stdin:
            path, fleet, peers, memory, store_memory = json.loads(line)
            addresses = []
            for parts, listen in zip(fleet, peers or ["127.0.0.1:0"] * len(fleet), strict=True):
                options = BatchOptions(peers=tuple(peers), memory=memory, store_memory=store_memory)
                held = stack.enter_context(GraphServer(path, parts or None, options))
                server = Server(held.service, listen, ServerSecurity(), held.metrics)
                addresses.append(stack.enter_context(server).address)
            loaded = sorted(name for name in sys.modules if name.split(".")[0] == "hoploom")
            print(json.dumps([addresses, loaded]), flush=True)


if __name__ == "__main__":
    main()
