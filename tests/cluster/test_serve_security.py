"""Who may ask a server: real Flight servers in another process, and what a client is told that may not."""

import hmac
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from support import TESTS
from support.certificates import TOKEN, certificates, mutual_client, mutual_server, token_file, write

from hoploom import ConfigError, PeerError
from hoploom.errors import HoploomError
from hoploom.serve.explain import essence, explain, is_passing
from hoploom.serve.security import (
    ClientSecurity,
    towards_peers,
)
from hoploom.serve.token_auth import TokenCheck, client_arguments

DEADLINE = 10.0  # seconds within which each failure must show
WRONG = "another-token-of-the-tests-98765"
SCHEMA = pa.schema([("byte", pa.uint8())])


# --- real servers --------------------------------------------------------------------------------


class Servers(NamedTuple):
    """Their process, and the port of each."""

    pid: int
    ports: dict[str, int]
    stderr: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    token_file(folder / "token")
    write(folder / "ours", certificates())
    write(folder / "elsewhere", certificates(("elsewhere.example",)))
    write(folder / "expired", certificates(days=-1))
    command = [sys.executable, str(TESTS / "support" / "guarded_servers.py"), str(folder)]
    with (
        open(folder / "stderr", "wb") as stderr,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], 60)
            assert ready, (folder / "stderr").read_text()
            yield Servers(process.pid, json.loads(process.stdout.readline()), folder / "stderr")
        finally:
            process.kill()


def exchange(address: str, security: ClientSecurity, seconds: float = DEADLINE) -> bytes:
    """One message there and back on a stream, as the graph server's clients do."""
    with flight.FlightClient(**client_arguments(security, address)) as client:
        options = flight.FlightCallOptions(timeout=seconds)
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b""), options)
        writer.begin(SCHEMA)
        writer.write_metadata(b"there and back")
        return bytes(reader.read_chunk().app_metadata.to_pybytes())


def action(address: str, security: ClientSecurity, body: bytes = b"there and back") -> bytes:
    with flight.FlightClient(**client_arguments(security, address)) as client:
        options = flight.FlightCallOptions(timeout=DEADLINE)
        (result,) = client.do_action(flight.Action("echo", body), options)
        return bytes(result.body.to_pybytes())


def failure(address: str, security: ClientSecurity, ask: Callable[..., bytes]) -> Exception:
    """What a call meets, within the deadline."""
    begun = time.monotonic()
    with pytest.raises((pa.ArrowException, OSError)) as raised:
        ask(address, security)
    assert time.monotonic() - begun < DEADLINE
    return raised.value


def ours() -> ClientSecurity:
    return ClientSecurity(TOKEN, ca=certificates()["ca.pem"])


def with_the_ca_of(made: dict[str, bytes]) -> ClientSecurity:
    return ClientSecurity(ca=made["ca.pem"])


ACCEPTED: dict[str, tuple[str, Callable[[], ClientSecurity]]] = {
    "nothing asked for": ("free", ClientSecurity),
    "a token that nobody asked for": ("free", lambda: ClientSecurity(TOKEN)),
    "the token": ("token", lambda: ClientSecurity(TOKEN)),
    "TLS": ("tls", lambda: ClientSecurity(ca=certificates()["ca.pem"])),
    "TLS both ways": ("mutual", lambda: mutual_client(certificates())),
    "TLS both ways, as a peer": ("mutual", lambda: towards_peers(mutual_server(certificates()))),
    "TLS both ways, and the token": ("all", lambda: mutual_client(certificates(), TOKEN)),
}


@pytest.mark.parametrize(("server", "security"), ACCEPTED.values(), ids=ACCEPTED)
def test_who_shows_what_is_asked_for_is_answered(
    servers: Servers, server: str, security: Callable[[], ClientSecurity]
) -> None:
    for ask in (exchange, action):
        assert ask(f"127.0.0.1:{servers.ports[server]}", security()) == b"there and back"
    assert exchange(f"localhost:{servers.ports[server]}", security()) == b"there and back"


def expired() -> ClientSecurity:
    """A client whose certificate has run out since it was read."""
    made = certificates(days=-1)
    security = ClientSecurity(ca=certificates()["ca.pem"])
    object.__setattr__(security, "certificate", made["client.pem"])
    object.__setattr__(security, "key", made["client.key"])
    return security


def trusts_expired() -> ClientSecurity:
    security = ClientSecurity(ca=certificates()["ca.pem"])
    object.__setattr__(security, "ca", certificates(days=-1)["ca.pem"])
    return security


def another_client() -> ClientSecurity:
    other = certificates(which=1)
    return ClientSecurity(None, certificates()["ca.pem"], other["client.pem"], other["client.key"])


# server, client, what it is told, whether another attempt may help
REFUSED: dict[str, tuple[str, Callable[[], ClientSecurity], str, bool]] = {
    "no token": ("token", ClientSecurity, "asks for a token; give the token file", False),
    "wrong token": ("token", lambda: ClientSecurity(WRONG), "refuses the token; give the token file that it", False),
    "part of the token": ("token", lambda: ClientSecurity(TOKEN[:-1]), "refuses the token", False),
    "more than the token": ("token", lambda: ClientSecurity(TOKEN + "x"), "refuses the token", False),
    "certificate, no token": ("all", lambda: mutual_client(certificates()), "asks for a token", False),
    "token, no certificate": ("all", ours, "closes every connection at once; if it was started with --client-ca", True),
    "no certificate": ("mutual", lambda: ClientSecurity(ca=certificates()["ca.pem"]), "give a certificate and", True),
    "certificate of another CA": ("mutual", another_client, "see that the certificate given is of the server's", True),
    "certificate expired": ("mutual", expired, "see that the certificate given is of", True),
    "plain to TLS": ("tls", ClientSecurity, "closes every connection at once; if it was started with --cert", True),
    "TLS to plain": ("token", ours, "does not speak TLS; start it with --cert and --key", False),
    "server of another CA": ("tls", lambda: with_the_ca_of(certificates(which=1)), "is not of the CA given", False),
    "server of another name": (
        "elsewhere",
        lambda: with_the_ca_of(certificates(("elsewhere.example",))),
        "shows a certificate for other hosts; name it as its certificate does",
        False,
    ),
    "server expired": ("expired", trusts_expired, "shows a certificate that has expired; give the server one", False),
}


@pytest.mark.parametrize(("server", "security", "told", "passing"), REFUSED.values(), ids=REFUSED)
def test_who_does_not_is_told_why_within_the_deadline(
    servers: Servers, server: str, security: Callable[[], ClientSecurity], told: str, passing: bool
) -> None:
    address = f"127.0.0.1:{servers.ports[server]}"
    for ask in (exchange, action):
        error = failure(address, security(), ask)
        explained = explain(error, address, security())
        assert_explained(explained, address, told)
        assert is_passing(error) is passing
    assert "Traceback" not in servers.stderr.read_text()


def assert_explained(explained: HoploomError, address: str, told: str) -> None:
    message = str(explained)
    assert type(explained) is PeerError
    assert told in message
    assert message.startswith(f"peer {address} ")
    assert "\n" not in message
    assert len(message) < 500
    assert not any(secret in message for secret in (TOKEN, WRONG, "PRIVATE KEY", "context:", "Traceback"))


def test_no_kind_of_call_is_answered_without_the_token(servers: Servers) -> None:
    descriptor, ticket = flight.FlightDescriptor.for_path("x"), flight.Ticket(b"x")
    with flight.FlightClient(f"grpc://127.0.0.1:{servers.ports['token']}") as client:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: list(client.list_flights()),
            lambda: client.get_flight_info(descriptor),
            lambda: client.do_get(ticket),
            lambda: client.do_put(descriptor, SCHEMA)[0].close(),
            lambda: client.do_exchange(descriptor)[1].read_chunk(),
            lambda: list(client.do_action(flight.Action("echo", b""))),
            lambda: client.list_actions(),
        )
        for call in calls:
            with pytest.raises(flight.FlightUnauthenticatedError, match="asks for a token"):
                call()
        with pytest.raises(OSError, match="asks for a token") as raised:  # this one has no error of Flight's
            client.get_schema(descriptor)
    assert_explained(explain(raised.value, "h:1", ClientSecurity()), "h:1", "asks for a token; give the token file")
    assert not is_passing(raised.value)


def test_the_refusal_does_not_tell_what_was_wrong(servers: Servers) -> None:
    address = f"127.0.0.1:{servers.ports['token']}"
    attempts = (ClientSecurity(), ClientSecurity(WRONG), ClientSecurity(TOKEN[:-1]), ClientSecurity(TOKEN.upper()))
    assert len({str(failure(address, security, action)) for security in attempts}) == 1


def test_nobody_sees_the_token_of_a_running_server(servers: Servers) -> None:
    """Neither `ps`, nor its environment, nor its output, after all that the tests above sent to it."""
    for file in ("cmdline", "environ"):
        assert TOKEN.encode() not in Path(f"/proc/{servers.pid}/{file}").read_bytes()
    assert TOKEN not in servers.stderr.read_text()


def test_damaged_headers_are_refused_and_the_server_goes_on(servers: Servers) -> None:
    address = f"127.0.0.1:{servers.ports['token']}"
    for value in (b"", b"Bearer", b"Bearer \xff\xfe", b"Basic " + TOKEN.encode(), b"x" * 7000):
        with flight.FlightClient(f"grpc://{address}") as client:
            options = flight.FlightCallOptions(timeout=DEADLINE, headers=[(b"authorization", value)])
            with pytest.raises((pa.ArrowException, OSError)):
                list(client.do_action(flight.Action("echo", b"x"), options))
    assert exchange(address, ClientSecurity(TOKEN)) == b"there and back"


# --- what else a call may meet -------------------------------------------------------------------


def test_a_server_that_fails_is_quoted_without_its_traceback(servers: Servers) -> None:
    address = f"127.0.0.1:{servers.ports['free']}"
    with flight.FlightClient(f"grpc://{address}") as client:
        with pytest.raises(pa.ArrowInvalid) as raised:
            list(client.do_action(flight.Action("echo", b"fail")))
        assert essence(raised.value) == "it was to fail"
        assert_explained(explain(raised.value, address), address, "does not understand")
        with pytest.raises(pa.ArrowNotImplementedError) as unknown:
            list(client.list_flights())
    assert_explained(explain(unknown.value, address), address, "does not know this call; give a graph server of")


def test_a_port_where_nobody_answers_is_named_when_its_time_is_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(flight.FlightTimedOutError) as raised:
            exchange(address, ClientSecurity(), seconds=0.2)
    assert_explained(explain(raised.value, address), address, "has not answered in time")
    assert is_passing(raised.value)


def test_a_port_that_nothing_listens_at_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    error = failure(address, ClientSecurity(), exchange)
    assert_explained(explain(error, address), address, "does not listen; see whether `hoploom serve` runs there")
    assert is_passing(error)


def unavailable(text: str) -> Exception:
    return flight.FlightUnavailableError(f"Flight returned unavailable error, with message: {text}")


SAID_BY_OTHERS = {  # what other versions and networks say
    "handshake failed: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED": "is not of the CA",
    "SSL_ERROR_SSL: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER": "does not speak TLS",
    "certificate verify failed: certificate is not yet valid": "certificate of the future; set the clocks",
    "errors resolving host9:1: Domain name not found": "has a name that is not known here; check its spelling",
    "DNS resolution failed for host9:1": "has a name that is not known here",
    "connect: No route to host (113)": "is not reached; see whether the host is up",
    "last error: UNAVAILABLE: Failed parsing HTTP/2 (Expected SETTINGS frame)": "is no graph server; give the port",
    "Stream removed (recvmsg:Connection reset by peer)": "is lost: the connection broke; see in its own output",
    "something new": "is lost: the connection broke; see in its own output whether it ended (something new)",
}


@pytest.mark.parametrize(("said", "told"), SAID_BY_OTHERS.items())
def test_what_other_versions_say_is_understood(said: str, told: str) -> None:
    assert_explained(explain(unavailable(said), "host9:1"), "host9:1", told)


def test_a_cancelled_call_and_an_unknown_failure_name_the_peer() -> None:
    assert "the call was cancelled" in str(explain(flight.FlightCancelledError("x"), "host9:1"))
    assert (
        str(explain(flight.FlightInternalError("odd"), "h:1"))
        == "peer h:1 has failed; see its own output for the cause (odd)"
    )
    known = PeerError("as it was")
    assert explain(known, "h:1") is known


def test_a_peer_cannot_write_to_the_terminal_nor_without_end() -> None:
    shown = essence(flight.FlightServerError("a\x1b[2Jb\n\tc" + "d" * 10_000))
    assert shown.startswith("a?[2Jb c")
    assert len(shown) < 300


def test_a_wrong_address_is_the_users_mistake() -> None:
    with pytest.raises(pa.ArrowInvalid) as raised:
        exchange("a b:1", ClientSecurity())
    explained = explain(raised.value, "a b:1")
    assert isinstance(explained, ConfigError)
    assert "address is 'a b:1'" in str(explained)
    assert "give host:port" in str(explained)


# --- the token -----------------------------------------------------------------------------------


def test_tokens_are_compared_in_constant_time_whatever_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    really = hmac.compare_digest

    def watch(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return really(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watch)
    check = TokenCheck(TOKEN)
    for given in (f"Bearer {WRONG}", "", "Bearer", "x" * 9000, f"bearer {TOKEN}", b"Bearer \xff", "Bearer \udcff"):
        with pytest.raises(flight.FlightUnauthenticatedError):
            check.start_call(None, {"authorization": [given]})
    assert check.start_call(None, {"authorization": [f"Bearer {TOKEN}"]}) is None
    assert len(compared) == 8
    assert {len(side) for pair in compared for side in pair} == {32}


def test_two_tokens_in_one_call_are_refused() -> None:
    check = TokenCheck(TOKEN)
    for headers in ({}, {"authorization": []}, {"authorization": [f"Bearer {TOKEN}"] * 2}):
        with pytest.raises(flight.FlightUnauthenticatedError):
            check.start_call(None, headers)
