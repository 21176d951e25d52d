"""host:port, read and written, where a server may listen, and how it stops."""

import errno
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.certificates import certificates
from support.until import until
from support.wires import over_tcp, plain

from hoploom import ConfigError
from hoploom.config.values import join_address, split_address
from hoploom.serve.handshake import LostError, connect_tcp
from hoploom.serve.memory_budget import RequestContext
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import ClientSecurity, Reloading, ServerSecurity
from hoploom.serve.server import Server, listen
from hoploom.serve.wire import Message


@pytest.mark.parametrize(("written", "parts"), [("gpu1:7", ("gpu1", 7)), ("[::1]:65535", ("::1", 65535))])
def test_an_address_is_read_as_it_is_written(written: str, parts: tuple[str, int]) -> None:
    assert split_address(written) == parts
    assert join_address(*parts) == written


@pytest.mark.parametrize("written", ["", "gpu1", ":7", "gpu1:", "gpu1:x", "gpu1:65536", "gpu1:-1", "gpu1:\u0663"])
def test_what_is_no_address_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        split_address(written)


def resolving(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    """Have every name stand for these addresses."""
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **named: entries)


def test_a_name_that_means_loopback_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's /etc/hosts has it for the host's own name: a server there would be reached by nobody else."""
    resolving(monkeypatch, "127.0.1.1")
    with pytest.raises(ConfigError, match=r"gpu1 is 127\.0\.1\.1 on this host .*; give the address that others reach"):
        listen("gpu1", 0)


def test_loopback_by_its_own_name_and_every_address_are_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        listen(host, 0).close()
    resolving(monkeypatch, "127.0.0.1", "10.0.0.7")
    listen("gpu1", 0).close()  # others reach it by the second


class Prompt:
    def answer(self, request: Message, call: RequestContext) -> Message:
        return Message({})


def test_a_server_goes_on_when_it_could_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    service: Any = Prompt()
    start, failures = threading.Thread.start, [2]

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "hoploom-client" and failures[0]:
            failures[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    with Server(service, "127.0.0.1:0", ServerSecurity(), Metrics()) as server:
        for _ in range(2):
            with over_tcp(server.address, silence=5.0) as connection, pytest.raises(EOFError):
                connection.wait()
        over_tcp(server.address, silence=5.0).close()


def test_the_client_that_is_silent_for_longest_makes_way_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them has a thread."""
    service: Any = Prompt()
    monkeypatch.setattr("hoploom.serve.server.MAX_NEW", 2)
    with Server(service, "127.0.0.1:0", ServerSecurity(), Metrics()) as server, ExitStack() as stack:
        threads = threading.active_count()
        first, second = (stack.enter_context(plain(server.address, 10.0)) for _ in range(2))
        until(lambda: server._acceptor.num_waiting == 2)
        first.sendall(b"HOP")
        until(lambda: next(iter(server._acceptor._waiting.values())).socket.getpeername() == second.getsockname())
        stack.enter_context(plain(server.address))
        assert second.recv(1) == b""
        until(lambda: server._acceptor.num_waiting == 2)
        assert threading.active_count() == threads
        over_tcp(server.address, silence=5.0).close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_a_server_with_too_many_clients_is_not_taken_for_another(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so before TLS begins; a client comes again later."""
    service: Any = Prompt()
    made = certificates()
    secured = ServerSecurity(certificate=made["server.pem"], key=made["server.key"]) if tls else ServerSecurity()
    shown = ClientSecurity(ca=made["ca.pem"]) if tls else ClientSecurity()
    with Server(service, "127.0.0.1:0", secured, Metrics()) as server:
        monkeypatch.setattr("hoploom.serve.server.MAX_CONNECTIONS", 0)
        with pytest.raises(LostError, match="0 connections are open already"):
            over_tcp(server.address, shown, silence=5.0)
        monkeypatch.undo()
        over_tcp(server.address, shown, silence=5.0).close()


def test_a_server_without_a_unix_socket_is_asked_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sandboxes allow none."""
    bind, service = socket.socket.bind, Prompt()

    def refuse(listener: socket.socket, where: Any) -> None:
        if listener.family == socket.AF_UNIX:
            raise PermissionError(errno.EACCES, "not allowed")
        bind(listener, where)

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with Server(service, "127.0.0.1:0", ServerSecurity(), Metrics()) as server:  # type: ignore[arg-type]
        connection, near_by = connect_tcp(server.address, Reloading(ClientSecurity()), 5.0)
        connection.close()
    assert near_by is None


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def server(metrics: Metrics) -> Iterator[Server]:
    """One without a service, whose requests the tests count themselves."""
    service: Any = None
    with Server(service, "127.0.0.1:0", ServerSecurity(), metrics) as server:
        yield server


def test_a_server_that_stops_waits_for_what_is_under_way(server: Server, metrics: Metrics) -> None:
    with ExitStack() as requests:
        for _ in range(2):
            requests.enter_context(metrics.request("gather"))
        assert metrics.value("hoploom_requests_under_way") == 2
        assert not server.drain(0.01)
        ending = threading.Timer(0.05, requests.pop_all().close)
        ending.start()
    assert server.drain(30.0)
    ending.join()
    assert metrics.value("hoploom_requests_under_way") == 0


def test_requests_that_come_and_are_refused_cut_nothing_off(server: Server, metrics: Metrics) -> None:
    """Clients go on asking while the server stops, so that some request begins right after the last has ended."""
    over, switching = threading.Event(), sys.getswitchinterval()

    def ask() -> None:
        while not over.is_set():
            with metrics.request("gather"):
                over.wait(1e-4)

    asking = threading.Thread(target=ask)
    sys.setswitchinterval(1e-5)  # seconds, so that threads take turns in the midst of everything
    asking.start()
    try:
        assert all(server.drain(30.0) for _ in range(100))
    finally:
        sys.setswitchinterval(switching)
        over.set()
        asking.join()
