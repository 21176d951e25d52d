"""How a connection begins: both sides name their protocol, and the client proves that it has the token.

The token is never sent: the server sends a challenge, and the client answers with a proof, for one more round trip. A
client that is refused is told why, even if it speaks no TLS, another version or another protocol. One on this host is
told where the Unix socket is, and a password for it, so only who was let in over TCP gets in there.
"""

import json
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import hoploom
from hoploom.config.values import is_loopback
from hoploom.errors import PeerError
from hoploom.serve.arrivals import READ, Arrival, Steps
from hoploom.serve.security import ServerSecurity, is_same, new_token, proof_of
from hoploom.serve.tls import Renewed
from hoploom.serve.wire import PREFIX, PROTOCOL

NAME = b"HOPLOOM"
OPENING = NAME + bytes([PROTOCOL])
HELLO = b"HELO"
MOST = 1 << 12  # bytes of a greeting's header
PATIENCE = 10.0  # seconds for a client to finish its greetings
TLS_FIRST = b"\x16"  # the first byte of TLS
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # changes when the host restarts
TOKEN, TLS, VERSION, STRANGER, FULL = "token", "tls", "version", "stranger", "full"  # why a client is refused


class RefusedError(PeerError):
    """A client is refused; the reason is sent to it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def this_host() -> str:
    """The boot id of this host, the same in all its containers; empty if the system has none."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def said(content: dict[str, Any]) -> bytes:
    """The bytes of a greeting. They end with a newline, so that an HTTP server answers, and the client can tell."""
    text = json.dumps(content).encode() + b"\n"
    return OPENING + PREFIX.pack(HELLO, len(text)) + text


def length_of(prefix: bytes | bytearray) -> int:
    """Return the length of a greeting's header; ValueError if it is no greeting."""
    kind, length = PREFIX.unpack(prefix)
    if kind != HELLO or length > MOST:
        raise ValueError(f"a greeting of kind {kind!r} and {length} bytes")
    return int(length)


def read(text: bytes | bytearray) -> dict[str, Any]:
    """Return the content of a greeting's header; ValueError if it has none."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("a greeting of too many brackets") from error
    if not isinstance(content, dict):
        raise ValueError("a greeting that is no object")
    return content


class Door:
    """Admits clients to a server, or refuses them. Its methods are steps of the poll loop."""

    def __init__(self, security: ServerSecurity, unix: str | None) -> None:
        self._security = Renewed(security)
        self._unix, self._password = unix, secrets.token_urlsafe(32)

    def admit(self, arrival: Arrival) -> Steps[bool]:
        """Return whether the client may send requests; it is told why not."""
        is_local = arrival.socket.family == getattr(socket, "AF_UNIX", None)
        try:
            yield from self._secure(arrival, is_local=is_local)
            yield from self._check(arrival, is_local=is_local)
            yield from arrival.send(said(self._welcome(is_near_by=not is_local and _is_same_host(arrival.socket))))
            return True
        except RefusedError as error:
            yield from refuse(arrival, error)
            return False

    def _secure(self, arrival: Arrival, *, is_local: bool) -> Steps[None]:
        """Begin TLS, if the server has TLS. Its Unix socket has none."""
        first = yield from arrival.retry(READ, arrival.socket.recv, 1, socket.MSG_PEEK)
        _, context = self._security.now()
        if context is None or is_local:
            if first == TLS_FIRST:
                raise RefusedError(TLS, "this server does not speak TLS")
        elif first != TLS_FIRST:
            raise RefusedError(TLS, "this server speaks TLS")
        else:
            yield from arrival.secure(context)

    def _check(self, arrival: Arrival, *, is_local: bool) -> Steps[None]:
        """Raise RefusedError unless the client speaks this protocol and has the token."""
        yield from _client_says(arrival)  # only its protocol matters so far
        token = self._password if is_local else self._security.now()[0].token
        if token is None:
            return
        challenge = new_token()
        yield from arrival.send(said({"challenge": challenge}))
        proof = (yield from _client_says(arrival)).get("proof")
        if not is_same(proof, proof_of(token, challenge)):
            raise RefusedError(TOKEN, "this server asks for a token, and there was none, or not the right one")

    def _welcome(self, *, is_near_by: bool) -> dict[str, Any]:
        welcome: dict[str, Any] = {"hoploom": hoploom.__version__}
        if self._unix is not None and is_near_by:
            welcome |= {"host": this_host(), "unix": self._unix, "password": self._password}
        return welcome


def _client_says(arrival: Arrival) -> Steps[dict[str, Any]]:
    """Return one greeting of a client; RefusedError if it is of another version, or not a greeting."""
    opening = yield from arrival.take(len(OPENING))
    if not opening.startswith(NAME):
        raise RefusedError(STRANGER, "this is a graph server of Hoploom, which is asked in another way")
    if opening != OPENING:
        raise RefusedError(VERSION, f"this server speaks protocol {PROTOCOL}, the client {opening[-1]}")
    try:
        length = length_of((yield from arrival.take(PREFIX.size)))
        return read((yield from arrival.take(length)))
    except ValueError as error:
        raise RefusedError(STRANGER, f"a greeting that cannot be read: {error}") from error


def _is_same_host(accepted: socket.socket) -> bool:
    """Whether a client's address is one of this host. A tunnel may end on this host: the client checks the boot id."""
    client = str(accepted.getpeername()[0])
    return is_loopback(client) or client == accepted.getsockname()[0]


def refuse(arrival: Arrival, error: RefusedError) -> Steps[None]:
    """Tell a client why it is refused, and end the connection."""
    told = {"error": error.reason, "message": str(error), "hoploom": hoploom.__version__}
    yield from arrival.hang_up(said(told))
