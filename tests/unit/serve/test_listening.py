"""host:port, where a server may listen and how it stops; tokens, keys and certificates as they are given."""

import errno
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.certificates import TOKEN, certificates, mutual_client, mutual_server, server_pair, token_file, write
from support.until import until
from support.wires import over_tcp, plain

from hoploom import ConfigError
from hoploom.cli import main
from hoploom.config.values import join_address, split_address
from hoploom.serve.client import Peer
from hoploom.serve.handshake import Handshake, LostError, connect_tcp
from hoploom.serve.memory_budget import RequestContext
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import (
    ClientSecurity,
    Reloading,
    ServerSecurity,
    check_listen,
    read_client_security,
    read_server_security,
    towards_peers,
)
from hoploom.serve.server import Server, listen
from hoploom.serve.wire import Message


@pytest.mark.parametrize(("written", "parts"), [("gpu1:7", ("gpu1", 7)), ("[::1]:65535", ("::1", 65535))])
def test_an_address_is_read_as_it_is_written(written: str, parts: tuple[str, int]) -> None:
    assert (split_address(written), join_address(*parts)) == (parts, written)


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


def test_nothing_shows_a_token_or_a_key() -> None:
    made = certificates()
    server, client = mutual_server(made, TOKEN), mutual_client(made, TOKEN)
    assert repr(server) == "ServerSecurity(token=..., certificate=..., key=..., client_ca=...)"
    assert repr(ClientSecurity(TOKEN)) == str(ClientSecurity(TOKEN)) == "ClientSecurity(token=...)"
    shown = (
        f"{server} {client!r} {Reloading(server)!r} {Handshake(server, None)!r} {Peer('h:1', Reloading(client), 1.0)!r}"
    )
    assert TOKEN not in shown
    assert "PRIVATE" not in shown


BAD_TOKENS = {
    "empty": (b"", "is empty"),
    "only a line end": (b" \n", "is empty"),
    "short": (b"fifteen-letters\n", r"has 15 characters; give 16 to 1024, e\.g\. openssl rand"),
    "long": (b"x" * 1025, "has 1025 characters"),
    "spaces": (b"a token with spaces in it", "characters that no header can hold"),
    "not ascii": ("ein-schönes-langes-token".encode(), "characters that no header can hold"),
    "two lines": (TOKEN.encode() + b"\n" + TOKEN.encode(), "characters that no header can hold"),
    "a big file": (b"x" * (1 << 21), "has 2,097,152 bytes"),
}


@pytest.mark.parametrize(("content", "told"), BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_a_token_that_cannot_be_one_is_refused_and_not_shown(tmp_path: Path, content: bytes, told: str) -> None:
    path = token_file(tmp_path / "token", content)
    for read in (read_server_security, read_client_security):
        with pytest.raises(ConfigError, match=f"token file {path} .*{told}") as raised:
            read(token_file=path)
        shown = content.strip()[:15].decode("utf-8", "replace")
        assert not shown or shown not in str(raised.value)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    for mode in (0o644, 0o640, 0o604, 0o620, 0o602):
        path = token_file(tmp_path / "token", mode=mode)
        with pytest.raises(ConfigError, match=rf"has mode {mode:04o}, others .* set it: chmod 600 {path}"):
            read_server_security(token_file=path)
    folder = write(tmp_path / "certs", certificates())
    (folder / "server.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"key .*server\.key has mode 0644"):
        read_server_security(cert=folder / "server.pem", key=folder / "server.key")
    for mode in (0o600, 0o400):
        assert read_server_security(token_file=token_file(tmp_path / "token", mode=mode)).token == TOKEN


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_group_may_read_the_secret_of_another_owner(tmp_path: Path) -> None:
    """As secrets are mounted for the user of a container."""
    path = token_file(tmp_path / "token", mode=0o440)
    os.chown(path, 12345, 12345)
    assert read_server_security(token_file=path).token == TOKEN
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="has mode 0444"):
        read_server_security(token_file=path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, told in (("absent", "No such file"), ("", "is not a file|directory"), ("pipe", "is not a file")):
        for arguments in ({"token_file": tmp_path / path}, {"client_ca": tmp_path / path}):
            with pytest.raises(ConfigError, match=told):
                read_server_security(**arguments)


def test_security_from_files_is_what_the_files_hold(tmp_path: Path) -> None:
    made = certificates()
    folder, token = write(tmp_path / "certs", made), token_file(tmp_path / "token")
    server = read_server_security(token, folder / "server.pem", folder / "server.key", folder / "ca.pem")
    assert server == mutual_server(made, TOKEN)
    client = read_client_security(token, folder / "ca.pem", folder / "client.pem", folder / "client.key")
    assert (client, read_server_security()) == (mutual_client(made, TOKEN), ServerSecurity())


def test_a_pair_that_is_none_is_refused_with_the_names_of_its_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "certs", certificates())
    old = write(tmp_path / "old", certificates(days=-1))
    (folder / "junk").write_bytes(b"junk\n")
    body = certificates()["server.pem"].splitlines()
    (folder / "cut.pem").write_bytes(b"\n".join(body[:3] + body[-1:]))
    (folder / "locked.key").write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    (folder / "locked.key").chmod(0o600)
    (folder / "junk").chmod(0o600)
    pem, key = folder / "server.pem", folder / "server.key"
    cases: list[tuple[Path | None, Path | None, str]] = [
        (pem, None, "cert is .*server.pem, but no key is given; give both --cert and --key"),
        (None, key, "key is .*server.key, but no cert is given"),
        (pem, folder / "client.key", r"key .*client\.key is not the key of certificate .*server\.pem; give the two"),
        (folder / "junk", key, "certificate .*junk holds no PEM certificate"),
        (folder / "cut.pem", key, "certificate .*cut.pem holds a damaged certificate"),
        (pem, folder / "junk", "key .*junk with certificate .* cannot be used"),
        (pem, folder / "locked.key", "locked.key is locked with a passphrase; give it without one: openssl pkey"),
        (old / "server.pem", old / "server.key", r"old/server\.pem has expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC; give"),
    ]
    for cert, private, told in cases:
        with pytest.raises(ConfigError, match=told) as raised:
            read_server_security(cert=cert, key=private)
        assert "PRIVATE" not in str(raised.value)


def test_security_made_without_files_is_checked_as_well() -> None:
    made, old = certificates(), certificates(days=-1)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: ServerSecurity("short"), "token has 5 characters"),
        (lambda: ServerSecurity(certificate=made["server.pem"]), "go together"),
        (lambda: ServerSecurity(client_ca=made["ca.pem"]), "client_ca is given without a certificate"),
        (lambda: ServerSecurity(None, *server_pair(old)), "the certificate has expired on"),
        (lambda: ServerSecurity(None, made["server.pem"], made["client.key"]), "is not the key of"),
        (lambda: ClientSecurity(ca=b"junk"), "ca holds no PEM certificate"),
        (lambda: ClientSecurity(ca=old["ca.pem"]), "ca has expired on"),
        (lambda: ClientSecurity(None, None, made["client.pem"], made["client.key"]), "given without a CA"),
        (lambda: towards_peers(ServerSecurity(None, *server_pair(made))), "give --client-ca or --ca"),
    ]
    for make, told in cases:
        with pytest.raises(ConfigError, match=told):
            make()


def test_peers_are_asked_as_what_the_server_is() -> None:
    made = certificates()
    assert towards_peers(ServerSecurity(TOKEN)) == ClientSecurity(TOKEN)
    assert towards_peers(ServerSecurity(TOKEN, *server_pair(made)), made["ca.pem"]) == ClientSecurity(
        TOKEN, made["ca.pem"]
    )
    assert towards_peers(mutual_server(made)) == ClientSecurity(None, made["ca.pem"], *server_pair(made))


LOOPBACK = ("127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "LOCALHOST.", "::ffff:127.0.0.1")
BEYOND = ("0.0.0.0", "::", "[::]", "", "10.0.0.1", "host1")
BEYOND += ("localhost.example.org", "::ffff:10.0.0.1", "127.1", "fe80::1%eth0")


def test_loopback_needs_nothing() -> None:
    assert [check_listen(host, ServerSecurity()) for host in LOOPBACK] == [None] * len(LOOPBACK)


@pytest.mark.parametrize("host", BEYOND)
def test_beyond_loopback_something_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match=r"give --cert and --key \(docs/security.md .*--token-file, or listen on 127"):
        check_listen(host, ServerSecurity())
    warning = check_listen(host, ServerSecurity(), insecure=True)
    assert warning is not None
    assert "with --insecure: whoever reaches it reads all" in warning
    assert re.search("without TLS: others on the network path can read", str(check_listen(host, ServerSecurity(TOKEN))))


def test_beyond_loopback_tls_with_proof_is_enough() -> None:
    made = certificates()
    tls = ServerSecurity(None, *server_pair(made))
    assert "asks nobody for proof" in str(check_listen("10.0.0.1", tls))
    assert check_listen("10.0.0.1", ServerSecurity(TOKEN, *server_pair(made))) is None
    assert check_listen("10.0.0.1", mutual_server(made)) is None


def test_the_command_refuses_to_listen_beyond_loopback(sound_stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(sound_stores / "ring"), "--listen", "0.0.0.0:0"]) == 2
    assert "--listen 0.0.0.0 is reached from other hosts, and nothing protects it" in capsys.readouterr().err
