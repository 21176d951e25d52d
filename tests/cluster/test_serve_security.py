"""Who may ask a server, and what a client is told that may not."""

import hmac
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certificates import TOKEN, certificates, mutual_client, mutual_server, token_file, write
from support.proxy import Proxy
from support.wires import frame, plain

from hoploom import BatchError, PeerError
from hoploom.serve import handshake
from hoploom.serve.client import Peer, read_message
from hoploom.serve.handshake import LostError, explain, one_line
from hoploom.serve.memory_budget import RequestContext
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import (
    ClientSecurity,
    Reloading,
    ServerSecurity,
    is_same,
    proof_of,
    read_server_security,
    towards_peers,
)
from hoploom.serve.server import Server, ServerLimits
from hoploom.serve.wire import PREFIX, Message

DEADLINE = 10.0  # seconds within which each failure must show
WRONG = "another-token-of-the-tests-98765"


class Echo:
    def answer(self, request: Message, call: RequestContext) -> Message:
        if request.header["ask"] == "fail":
            raise ValueError("it was to\n\x1b[2Jfail" + "x" * 100_000)
        return Message({}, request.tensors)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of servers of every kind of security."""
    folder = tmp_path_factory.mktemp("servers")
    token, ours = token_file(folder / "token"), write(folder / "ours", certificates())
    elsewhere = write(folder / "elsewhere", certificates(("elsewhere.example",)))
    pair, other = ({"cert": of / "server.pem", "key": of / "server.key"} for of in (ours, elsewhere))
    secured = {
        "free": ServerSecurity(),
        "token": read_server_security(token_file=token),
        "tls": read_server_security(**pair),
        "mutual": read_server_security(**pair, client_ca=ours / "ca.pem"),
        "all": read_server_security(token, **pair, client_ca=ours / "ca.pem"),
        "elsewhere": read_server_security(**other),
        "expired": changed(
            read_server_security(**pair), certificates(days=-1), certificate="server.pem", key="server.key"
        ),
    }
    echo: Any = Echo()
    with ExitStack() as stack:
        started = {name: Server(echo, "127.0.0.1:0", one, Metrics(), ServerLimits()) for name, one in secured.items()}
        yield {name: stack.enter_context(server).address for name, server in started.items()}


def changed(security: Any, made: dict[str, bytes], **files: str) -> Any:
    """This with other PEM texts: who reads a file that has expired is told."""
    for field, name in files.items():
        object.__setattr__(security, field, made[name])
    return security


def exchange(address: str, security: ClientSecurity, kind: str = "echo") -> list[int]:
    with Peer(address, Reloading(security), DEADLINE) as peer:
        (sent,) = peer.request(Message({"ask": kind}, [torch.arange(3)]), read_message).tensors
        assert isinstance(sent, torch.Tensor)
        return list(sent.tolist())


def failure(address: str, security: ClientSecurity) -> PeerError:
    begun = time.monotonic()
    with pytest.raises(PeerError) as raised:
        exchange(address, security)
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
@pytest.mark.parametrize("here", [True, False], ids=["nearby", "over TCP"])
def test_who_shows_what_is_asked_for_is_answered(
    servers: dict[str, str],
    server: str,
    security: Callable[[], ClientSecurity],
    here: bool,
    request: pytest.FixtureRequest,
) -> None:
    if not here:
        request.getfixturevalue("tcp_alone")
    address = servers[server]
    assert exchange(address, security()) == [0, 1, 2]
    assert exchange(address.replace("127.0.0.1", "localhost"), security()) == [0, 1, 2]


def expired() -> ClientSecurity:
    security = ClientSecurity(ca=certificates()["ca.pem"])
    return changed(security, certificates(days=-1), certificate="client.pem", key="client.key")


def trusts_expired() -> ClientSecurity:
    return changed(ClientSecurity(ca=certificates()["ca.pem"]), certificates(days=-1), ca="ca.pem")


def another_client() -> ClientSecurity:
    other = certificates(which=1)
    return ClientSecurity(None, certificates()["ca.pem"], other["client.pem"], other["client.key"])


REFUSED: dict[str, tuple[str, Callable[[], ClientSecurity], str]] = {
    "no token": ("token", ClientSecurity, "asks for a token; give the token file"),
    "wrong token": ("token", lambda: ClientSecurity(WRONG), "refuses the token; give the token file that it was"),
    "part of the token": ("token", lambda: ClientSecurity(TOKEN[:-1]), "refuses the token"),
    "more than the token": ("token", lambda: ClientSecurity(TOKEN + "x"), "refuses the token"),
    "certificate, no token": ("all", lambda: mutual_client(certificates()), "asks for a token"),
    "token, no certificate": ("all", ours, "asks for a certificate; give one that its --client-ca has signed"),
    "no certificate": ("mutual", lambda: ClientSecurity(ca=certificates()["ca.pem"]), "asks for a certificate; give"),
    "certificate of another CA": ("mutual", another_client, "refuses the certificate given: its --client-ca has not "),
    "certificate expired": ("mutual", expired, "refuses the certificate given: it"),
    "plain to TLS": ("tls", ClientSecurity, "speaks TLS; give its CA here"),
    "plain to TLS, with the token": ("all", lambda: ClientSecurity(TOKEN), "speaks TLS; give its CA here"),
    "TLS to plain": ("token", ours, "does not speak TLS; start it with --cert and --key, or give no CA here"),
    "TLS to nothing asked for": ("free", ours, "does not speak TLS; start it with --cert and --key"),
    "server of another CA": ("tls", lambda: with_the_ca_of(certificates(which=1)), "that the CA given has not signed"),
    "server of another name": (
        "elsewhere",
        lambda: with_the_ca_of(certificates(("elsewhere.example",))),
        "shows a certificate for other hosts; use a name that is in it",
    ),
    "server expired": ("expired", trusts_expired, "shows a certificate that has expired; give the server one"),
}


@pytest.mark.parametrize(("server", "security", "told"), REFUSED.values(), ids=REFUSED)
def test_who_does_not_is_told_why_at_once_and_for_good(
    servers: dict[str, str],
    server: str,
    security: Callable[[], ClientSecurity],
    told: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    address = servers[server]
    error = failure(address, security())
    assert_explained(error, address, told)
    assert not isinstance(error, LostError)  # so it is not asked again
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert TOKEN not in said


def assert_explained(error: PeerError, address: str, told: str) -> None:
    message = str(error)
    assert told in message
    assert message.startswith(f"peer {address} ")
    assert "\n" not in message
    assert len(message) < 500
    assert not any(secret in message for secret in (TOKEN, WRONG, "PRIVATE KEY", "_ssl.c", "Traceback"))


def said_to(address: str, said: bytes) -> bytes:
    found = b""
    with plain(address, DEADLINE) as talking:
        talking.sendall(said)
        while some := talking.recv(1 << 16):
            found += some
    return found


def greeted(talking: socket.socket, content: dict[str, Any]) -> dict[str, Any]:
    talking.sendall(handshake.encode_greeting(content))
    answer = talking.recv(1 << 12)
    assert answer.startswith(handshake.OPENING + PREFIX.pack(handshake.HELLO, len(answer) - 16))
    return dict(json.loads(answer[16:]))


def test_no_request_is_answered_without_a_greeting_and_its_proof(servers: dict[str, str]) -> None:
    request, address = frame({"ask": "echo", "tensors": []}), servers["token"]
    hello, wrong = handshake.encode_greeting({}), handshake.encode_greeting({"proof": proof_of(WRONG, "")})
    for said in (request, hello + request, hello + wrong + request, wrong + hello + request, handshake.OPENING * 9):
        answer = said_to(address, said)
        *challenges, refusal = [json.loads(one[8:]) for one in answer.split(handshake.OPENING)[1:]]
        assert refusal["error"] in (handshake.TOKEN, handshake.STRANGER)
        assert [list(one) for one in challenges] in ([], [["challenge"]])


@pytest.mark.usefixtures("tcp_alone")
@pytest.mark.parametrize("server", ["free", "token", "tls", "all"])
def test_a_token_never_travels_in_plain(servers: dict[str, str], server: str) -> None:
    security = ClientSecurity(TOKEN)
    with Proxy(servers[server]) as proxy:
        if server in ("tls", "all"):
            assert_explained(failure(proxy.address, security), proxy.address, "speaks TLS; give its CA here")
        else:
            assert exchange(proxy.address, security) == [0, 1, 2]
        assert handshake.HELLO in proxy.seen
        assert TOKEN.encode() not in proxy.seen


def test_a_proof_is_of_no_use_a_second_time(servers: dict[str, str]) -> None:
    with plain(servers["token"], DEADLINE) as first, plain(servers["token"], DEADLINE) as second:
        proof = {"proof": proof_of(TOKEN, greeted(first, {})["challenge"])}
        assert "error" not in greeted(first, proof)
        greeted(second, {})
        assert greeted(second, proof)["error"] == handshake.TOKEN


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this host has no address besides loopback")
        return str(asking.getsockname()[0])


def test_clients_on_the_same_host_alone_are_told_of_the_unix_socket() -> None:
    address = own_address()
    service: Any = None
    with Server(service, "0.0.0.0:0", ServerSecurity(), Metrics()) as server:
        for source, target, is_told in (
            ("127.0.0.1", "127.0.0.1", True),
            (address, address, True),
            (address, "127.0.0.1", False),  # two addresses, as those of two hosts are
        ):
            with socket.create_connection((target, server.port), DEADLINE, (source, 0)) as talking:
                told = {"host", "unix", "password"} if is_told else set()
                assert set(greeted(talking, {})) == {"hoploom"} | told


def test_the_unix_socket_lets_nobody_in_who_was_not_let_in_over_tcp(servers: dict[str, str]) -> None:
    """Whoever is on this host sees its name, and so may greet it."""
    names = re.findall(r"@(hoploom-\d+-\w+)$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    own = [name for name in names if name.startswith(f"hoploom-{os.getpid()}-")]
    assert len(own) == len(servers)
    for name in own:
        for token in ("", TOKEN, WRONG):
            with socket.socket(socket.AF_UNIX) as talking:
                talking.settimeout(DEADLINE)
                talking.connect(f"\0{name}")
                challenge = greeted(talking, {})["challenge"]
                assert greeted(talking, {"proof": proof_of(token, challenge)})["error"] == handshake.TOKEN
                assert talking.recv(1) == b""


def test_the_refusal_does_not_tell_what_was_wrong(servers: dict[str, str]) -> None:
    def refusal(prove: Callable[[str], object]) -> str:
        with plain(servers["token"], DEADLINE) as talking:
            challenge = greeted(talking, {})["challenge"]
            return str(greeted(talking, {"proof": prove(challenge)}))

    tokens = [WRONG, TOKEN[:-1], TOKEN.upper(), ""]
    attempts = [refusal(lambda challenge, token=token: proof_of(token, challenge)) for token in tokens]  # type: ignore[misc]
    assert len({*attempts, refusal(lambda _: 7), refusal(lambda _: TOKEN)}) == 1


def test_damaged_greetings_are_refused_and_the_server_goes_on(servers: dict[str, str]) -> None:
    address = servers["token"]
    text = json.dumps({"proof": TOKEN}).encode()
    hello = handshake.OPENING + PREFIX.pack(handshake.HELLO, len(text))
    cut = [hello[:end] for end in range(1, len(hello))] + [hello + text[:-1]]
    damaged = [b"[]", b"null", b"{", b"\xff\xfe", b"[" * 4000]
    for said in [handshake.OPENING + PREFIX.pack(handshake.HELLO, len(one)) + one for one in damaged]:
        for first in (b"", handshake.encode_greeting({})):
            assert b'"error": ' in said_to(address, first + said)
    assert b'"error": "token"' in said_to(
        address, handshake.encode_greeting({}) + handshake.encode_greeting({"proof": ["x"]})
    )
    assert b"a greeting of kind b'HELO' and 4097 bytes" in said_to(address, hello[:12] + (4097).to_bytes(4, "little"))
    for said in cut:
        with plain(address) as talking:
            talking.sendall(said)
    assert exchange(address, ClientSecurity(TOKEN)) == [0, 1, 2]


def test_a_server_that_fails_is_quoted_without_its_traceback(servers: dict[str, str]) -> None:
    address = servers["free"]
    with pytest.raises(BatchError) as raised:
        exchange(address, ClientSecurity(), "fail")
    message = str(raised.value)
    assert message.startswith(f"{address}: ValueError: it was to ")
    assert len(message) < 2200
    assert not any(character in message for character in "\n\x1b")


def unreached(error: OSError, monkeypatch: pytest.MonkeyPatch) -> PeerError:
    def refuse(*_: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", refuse)
    return failure("host9:1", ClientSecurity())


def test_what_the_system_says_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "has a name that is not known here; check its spelling": socket.gaierror(-2, "Name or service not known"),
        "is not reached; see whether the host is up": OSError(113, "No route to host"),
        "is not reached; see whether the host is up, and no": TimeoutError("timed out"),
    }
    for told, error in said.items():
        assert_explained(unreached(error, monkeypatch), "host9:1", told)


def test_a_certificate_of_the_future_is_told_from_one_of_another_ca() -> None:
    for code, told in ((9, "not valid yet; set the clocks"), (18, "that the CA given has not signed")):
        error = ssl.SSLCertVerificationError("certificate verify failed")
        error.verify_code = code
        assert_explained(explain(error, "host9:1", ours()), "host9:1", told)
    new = ssl.SSLError("something new")
    new.reason = "NEW"
    assert isinstance(explain(new, "h:1", ours()), LostError)
    assert_explained(explain(OSError("odd"), "h:1", ours()), "h:1", "the connection broke; see in its own output")


def test_a_peer_cannot_write_to_the_terminal_nor_without_end() -> None:
    shown = one_line(Exception("a\x1b[2Jb\n\tc" + "d" * 10_000))
    assert shown.startswith("a?[2Jb c")
    assert len(shown) < 300


def test_tokens_are_compared_in_constant_time_whatever_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    really = hmac.compare_digest

    def watch(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return really(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watch)
    for given in (WRONG, "", "x" * 9000, TOKEN.upper(), "\udcff", f" {TOKEN}"):
        assert not is_same(given, TOKEN)
    assert is_same(TOKEN, TOKEN)
    assert (len(compared), {len(side) for pair in compared for side in pair}) == (7, {32})
