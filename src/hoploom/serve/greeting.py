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
from hoploom.serve.connection import LAST_WORDS, Connection, hang_up
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


def hear(connection: Connection) -> dict[str, Any]:
    """Read a greeting after its opening; ValueError if it is not one."""
    kind, length = PREFIX.unpack(connection.take(PREFIX.size))
    if kind != HELLO or length > MOST:
        raise ValueError(f"a greeting of kind {kind!r} and {length} bytes")
    try:
        content = json.loads(connection.take(length))
    except RecursionError as error:
        raise ValueError("a greeting of too many brackets") from error
    if not isinstance(content, dict):
        raise ValueError("a greeting that is no object")
    return content


class Door:
    """Lets clients in to a server, or refuses them."""

    def __init__(self, security: ServerSecurity, unix: str | None) -> None:
        self._security = Renewed(security)
        self._unix, self._password = unix, secrets.token_urlsafe(32)

    def admit(self, accepted: socket.socket, silence: float) -> Connection | None:
        """A connection that may send requests; None if the client was refused, and told why."""
        connection: Connection | None = None
        try:
            accepted.settimeout(PATIENCE)
            accepted = self._secured(accepted)
            connection = Connection(accepted, silence)
            connection.begin(MOST, PATIENCE)
            self._check(connection)
            _say(connection, self._welcome(is_near_by=not connection.is_local and _is_same_host(accepted)))
            return connection
        except RefusedError as error:
            refuse(accepted, error)
        except (OSError, EOFError, ValueError):
            hang_up(accepted)
        return None

    def _secured(self, accepted: socket.socket) -> socket.socket:
        """The same connection with TLS, if the server has TLS. Its Unix socket has none."""
        _, context = self._security.now()
        speaks_tls = accepted.recv(1, socket.MSG_PEEK) == TLS_FIRST
        if context is None or accepted.family == getattr(socket, "AF_UNIX", None):
            if speaks_tls:
                raise RefusedError(TLS, "this server does not speak TLS")
            return accepted
        if not speaks_tls:
            raise RefusedError(TLS, "this server speaks TLS")
        wrapped = context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        try:
            wrapped.do_handshake()
        except OSError:
            hang_up(socket.socket(fileno=wrapped.detach()))  # which the alert has been sent on
            raise
        return wrapped

    def _check(self, connection: Connection) -> None:
        """Raise RefusedError unless the client speaks this protocol and has the token."""
        _client_says(connection)  # only its protocol matters so far
        token = self._password if connection.is_local else self._security.now()[0].token
        if token is None:
            return
        challenge = new_token()
        _say(connection, {"challenge": challenge})
        if not is_same(_client_says(connection).get("proof"), proof_of(token, challenge)):
            raise RefusedError(TOKEN, "this server asks for a token, and there was none, or not the right one")

    def _welcome(self, *, is_near_by: bool) -> dict[str, Any]:
        welcome: dict[str, Any] = {"hoploom": hoploom.__version__}
        if self._unix is not None and is_near_by:
            welcome |= {"host": this_host(), "unix": self._unix, "password": self._password}
        return welcome


def _say(connection: Connection, content: dict[str, Any]) -> None:
    spoken = said(content)
    connection.send([spoken])


def _client_says(connection: Connection) -> dict[str, Any]:
    """One greeting of a client; RefusedError if it is of another version, or not a greeting."""
    opening = connection.take(len(OPENING))
    if not opening.startswith(NAME):
        raise RefusedError(STRANGER, "this is a graph server of Hoploom, which is asked in another way")
    if opening != OPENING:
        raise RefusedError(VERSION, f"this server speaks protocol {PROTOCOL}, the client {opening[-1]}")
    try:
        return hear(connection)
    except ValueError as error:
        raise RefusedError(STRANGER, f"a greeting that cannot be read: {error}") from error


def _is_same_host(accepted: socket.socket) -> bool:
    """Whether a client's address is one of this host. A tunnel may end on this host: the client checks the boot id."""
    client = str(accepted.getpeername()[0])
    return is_loopback(client) or client == accepted.getsockname()[0]


def refuse(accepted: socket.socket, error: RefusedError) -> None:
    """Tell a client why it is refused, and close the connection."""
    with suppress(OSError):
        accepted.settimeout(LAST_WORDS)
        accepted.sendall(said({"error": error.reason, "message": str(error), "hoploom": hoploom.__version__}))
    hang_up(accepted)
