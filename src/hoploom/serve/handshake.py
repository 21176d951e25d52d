"""The beginning of a connection: both sides name their protocol, and the client proves that it has the token.

The token is never sent: the server sends a challenge, and the client a proof. A refused client is told why, also
a client without TLS, or one of another version or protocol. A client on the server's host gets the name and password of
the server's Unix socket. So only clients that were admitted over TCP can use this socket.
"""

import errno
import json
import secrets
import socket
import ssl
from contextlib import suppress
from typing import Any, NamedTuple

import hoploom
from hoploom.config.values import is_loopback, split_address
from hoploom.errors import PeerError
from hoploom.serve.acceptor import READ, NewConnection, Steps
from hoploom.serve.connection import Connection
from hoploom.serve.security import ClientSecurity, Reloading, ServerSecurity, is_same, proof_of
from hoploom.serve.shared_memory import can_share
from hoploom.serve.wire import PREFIX, PROTOCOL
from hoploom.system import boot_id

NAME = b"HOPLOOM"
OPENING = NAME + bytes([PROTOCOL])
HELLO = b"HELO"
MAX_GREETING = 1 << 12  # bytes of a greeting's header
TIMEOUT = 10.0  # seconds for a client to be admitted
CONNECT_TIMEOUT = 5.0  # seconds
TLS_FIRST = b"\x16"  # the first byte of TLS
TOKEN, TLS, VERSION, STRANGER, FULL = "token", "tls", "version", "stranger", "full"  # why a client is refused
LONGEST = 240  # characters of another program's message in an error
SHOWN = 19  # bytes of another program's response in an error


class RefusedError(PeerError):
    """The server refuses a client. It sends `reason` and the message to the client."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LostError(PeerError):
    """The peer did not answer. Try another peer, or this one later; after other kinds of PeerError, do not retry."""


class NoGraphServerError(PeerError):
    """Another program listens at this address."""


class UnixEndpoint(NamedTuple):
    """The name of a server's Unix socket on this host, and the password for it."""

    name: str
    password: str


def encode_greeting(content: dict[str, Any]) -> bytes:
    """Return a greeting as bytes. The newline at its end makes an HTTP server reply, so the client can detect one."""
    text = json.dumps(content).encode() + b"\n"
    return OPENING + PREFIX.pack(HELLO, len(text)) + text


def _greeting_length(prefix: bytes | bytearray) -> int:
    """Return the length of a greeting's header; raise ValueError if `prefix` does not begin a greeting."""
    kind, length = PREFIX.unpack(prefix)
    if kind != HELLO or length > MAX_GREETING:
        raise ValueError(f"a greeting of kind {kind!r} and {length} bytes")
    return int(length)


def _decode_greeting(text: bytes | bytearray) -> dict[str, Any]:
    """Return the content of a greeting's header; raise ValueError if `text` is not a JSON object."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("a greeting of too many brackets") from error
    if not isinstance(content, dict):
        raise ValueError("a greeting that is no object")
    return content


class Handshake:
    """The server's side of a handshake. `admit` is a generator that the acceptor's loop resumes."""

    def __init__(self, security: ServerSecurity, unix: str | None) -> None:
        self._security = Reloading(security)
        self._unix, self._password = unix, secrets.token_urlsafe(32)

    def admit(self, connection: NewConnection) -> Steps[bool]:
        """Check the client's protocol and token; return whether it may send requests. If not, send it the reason."""
        is_local = connection.socket.family == getattr(socket, "AF_UNIX", None)
        try:
            security, context = self._security.now()
            first = yield from connection.retry(READ, connection.socket.recv, 1, socket.MSG_PEEK)
            if context is None or is_local:  # the Unix socket has no TLS
                if first == TLS_FIRST:
                    raise RefusedError(TLS, "this server does not speak TLS")
            elif first != TLS_FIRST:
                raise RefusedError(TLS, "this server speaks TLS")
            else:
                yield from connection.start_tls(context)
            yield from _read_greeting(connection)  # only the version of the greeting matters
            token = self._password if is_local else security.token
            if token is not None:
                challenge = secrets.token_urlsafe(32)
                yield from connection.send(encode_greeting({"challenge": challenge}))
                proof = (yield from _read_greeting(connection)).get("proof")
                if not is_same(proof, proof_of(token, challenge)):
                    raise RefusedError(TOKEN, "this server asks for a token, and there was none, or not the right one")
            welcome: dict[str, Any] = {"hoploom": hoploom.__version__}
            if self._unix is not None and not is_local:
                client, own = (
                    str(name[0]) for name in (connection.socket.getpeername(), connection.socket.getsockname())
                )
                if (
                    is_loopback(client) or client == own
                ):  # on this host, or a tunnel's end: the client checks the boot id
                    welcome |= {"host": boot_id(), "unix": self._unix, "password": self._password}
            yield from connection.send(encode_greeting(welcome))
            return True
        except RefusedError as error:
            yield from refuse(connection, error)
            return False


def _read_greeting(connection: NewConnection) -> Steps[dict[str, Any]]:
    """Read and return a client's greeting; raise RefusedError if its version differs or it is not a greeting."""
    opening = yield from connection.take(len(OPENING))
    if not opening.startswith(NAME):
        raise RefusedError(STRANGER, "this is a graph server of Hoploom, which is asked in another way")
    if opening != OPENING:
        raise RefusedError(VERSION, f"this server speaks protocol {PROTOCOL}, the client {opening[-1]}")
    try:
        length = _greeting_length((yield from connection.take(PREFIX.size)))
        return _decode_greeting((yield from connection.take(length)))
    except ValueError as error:
        raise RefusedError(STRANGER, f"a greeting that cannot be read: {error}") from error


def refuse(connection: NewConnection, error: RefusedError) -> Steps[None]:
    """Send a client the error that says why it is refused, and end the connection."""
    reply = {"error": error.reason, "message": str(error), "hoploom": hoploom.__version__}
    yield from connection.hang_up(encode_greeting(reply))


class _ReplyError(Exception):
    """The reply to a greeting refuses this client, or is from another program. `first` has the reply's first bytes."""

    def __init__(self, first: bytes, refusal: dict[str, Any] | None = None) -> None:
        super().__init__(str({} if refusal is None else refusal.get("message", "")))
        self.first, self.refusal = first, refusal


def connect_tcp(
    address: str, security: Reloading[ClientSecurity], idle_timeout: float
) -> tuple[Connection, UnixEndpoint | None]:
    """Connect to a server; raise PeerError on failure. Return the connection, and the server's Unix socket or None."""
    shown, context = security.now()
    host, port = split_address(address)
    try:
        connected = socket.create_connection((host, port), min(idle_timeout, CONNECT_TIMEOUT))
    except OSError as error:
        raise _unreached(address, error) from error
    try:
        connected.settimeout(idle_timeout)
        if context is not None:
            connected = context.wrap_socket(connected, server_hostname=host)
        connection = Connection(connected, idle_timeout)
        welcome = _greet(connection, shown.token)
    except (OSError, EOFError, ValueError, _ReplyError) as error:
        connected.close()
        raise explain(error, address, shown) from error
    except BaseException:
        connected.close()
        raise
    name, password = welcome.get("unix"), welcome.get("password")
    is_same_host = welcome.get("host") == boot_id() != ""
    if is_same_host and can_share() and isinstance(name, str) and isinstance(password, str):
        return connection, UnixEndpoint(name, password)
    return connection, None


def connect_unix(endpoint: UnixEndpoint, idle_timeout: float) -> Connection | None:
    """Return a connection to a server's Unix socket; None if it cannot be reached, e.g. from another container."""
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(idle_timeout)
        connected.connect(f"\0{endpoint.name}")
        connection = Connection(connected, idle_timeout, takes_files=True)
        _greet(connection, endpoint.password)
        return connection
    except (OSError, EOFError, ValueError, _ReplyError):
        connected.close()
        return None


def _greet(connection: Connection, token: str | None) -> dict[str, Any]:
    """Greet a server; return its last reply. If the server asks for a token, send a proof, not the token itself."""
    reply = _exchange_greeting(connection, {})
    if "challenge" not in reply:
        return reply
    if token is None:
        raise _ReplyError(OPENING, {"error": TOKEN})
    return _exchange_greeting(connection, {"proof": proof_of(token, str(reply["challenge"]))})


def _exchange_greeting(connection: Connection, content: dict[str, Any]) -> dict[str, Any]:
    """Send a greeting; return the reply. Raise _ReplyError if it refuses the client or is not from a graph server."""
    connection.begin(MAX_GREETING)
    connection.send([encode_greeting(content)])
    first = b""
    while len(first) < len(OPENING):
        try:
            first += connection.take(1)
        except (EOFError, ConnectionError):
            raise _ReplyError(first) from None
        if not (NAME.startswith(first) or first.startswith(NAME)):
            with suppress(OSError, EOFError):
                while len(first) < SHOWN:
                    first += connection.take(1)
            raise _ReplyError(first)
    reply = _decode_greeting(connection.take(_greeting_length(connection.take(PREFIX.size))))
    if "error" in reply or first != OPENING:
        raise _ReplyError(first, reply)
    return reply


SPEAKS_TLS = "speaks TLS; give its CA here"
WITHOUT_TLS = "does not speak TLS; start it with --cert and --key, or give no CA here"
SEE_PORT = "give the port of `hoploom serve`"
TOO_MANY_FILES = "cannot be asked: this process has too many files open; raise `ulimit -n`"
SEE_OUTPUT = "see in its own output whether it ended"
OTHER_HOSTS = (
    "shows a certificate for other hosts; use a name that is in it, or make one with this name: docs/security.md"
)
OF_CERTIFICATE = {  # X509_V_ERR_...
    10: "shows a certificate that has expired; give the server one that is valid now",
    9: "shows a certificate that is not valid yet; set the clocks of both hosts",
    62: OTHER_HOSTS,
    64: OTHER_HOSTS,  # an address instead of a name
}
OF_ALERT = (  # a word in OpenSSL's reason, and the meaning for the user
    ("CERTIFICATE_REQUIRED", "asks for a certificate; give one that its --client-ca has signed, and its key"),
    ("UNKNOWN_CA", "refuses the certificate given: its --client-ca has not signed it; give one that it has signed"),
    ("CERTIFICATE_EXPIRED", "refuses the certificate given: it has expired; give one that is valid now"),
    ("CERTIFICATE", "refuses the certificate given; give one that its --client-ca has signed, and that is valid now"),
)


def explain(error: Exception, address: str, security: ClientSecurity) -> PeerError:
    """Return the error to raise for a failed connection. Its message says what went wrong and what helps."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError):
        error = _ReplyError(b"")
    if isinstance(error, _ReplyError):
        return _refused(error, address, security)
    if isinstance(error, ssl.SSLError):
        return _tls_failed(error, address)
    if isinstance(error, TimeoutError):
        state = "the server is busy or stopped, or another program has this port; see its own output"
        return LostError(f"{address} takes connections and does not answer: {state}, or {SEE_PORT}")
    if isinstance(error, EOFError):
        return LostError(f"peer {address} is lost: it closed the connection; {SEE_OUTPUT}")
    if isinstance(error, ValueError):
        return NoGraphServerError(f"{address} is no graph server: {one_line(error)}; {SEE_PORT}")
    return LostError(f"peer {address} is lost: the connection broke; {SEE_OUTPUT} ({one_line(error)})")


def has_too_many_files(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _unreached(address: str, error: OSError) -> PeerError:
    if has_too_many_files(error):
        reason = TOO_MANY_FILES
    elif isinstance(error, socket.gaierror):
        reason = "has a name that is not known here; check its spelling, or give an address"
    elif isinstance(error, ConnectionRefusedError):
        reason = "does not listen; see whether `hoploom serve` runs there, and the port is right"
    else:
        reason = "is not reached; see whether the host is up, and no firewall stands between"
    return LostError(f"peer {address} {reason} ({one_line(error)})")


def _refused(error: _ReplyError, address: str, security: ClientSecurity) -> PeerError:
    if error.refusal is None:
        if not error.first:
            closes = "it takes connections and closes them without an answer"
            return LostError(f"{address} is no graph server: {closes}; {SEE_PORT}")
        shown = (error.first.splitlines() or [b""])[0].decode("ascii", "replace")
        return NoGraphServerError(f"{address} is no graph server: it answers with {shown!r}; {SEE_PORT}")
    reason, version = error.refusal.get("error"), str(error.refusal.get("hoploom"))[:20]
    if error.first != OPENING:
        return PeerError(
            f"peer {address} speaks another version of the protocol, {error.first[-1]} (Hoploom {version}), this "
            f"process {PROTOCOL}; install the same Hoploom on both"
        )
    if reason == TOKEN:
        asks = "asks for a token" if security.token is None else "refuses the token"
        return PeerError(f"peer {address} {asks}; give the token file that it was started with")
    if reason == TLS:
        return PeerError(f"peer {address} {WITHOUT_TLS if security.tls else SPEAKS_TLS}")
    if reason == FULL:
        return LostError(f"{address}: {one_line(error)}")
    return PeerError(f"peer {address} refuses this client: {one_line(error)}")


def _tls_failed(error: ssl.SSLError, address: str) -> PeerError:
    if isinstance(error, ssl.SSLCertVerificationError):
        unsigned = "shows a certificate that the CA given has not signed; give the CA that has signed it"
        return PeerError(f"peer {address} {OF_CERTIFICATE.get(error.verify_code, unsigned)}")
    reason = error.reason or ""
    if any(word in reason for word in ("WRONG_VERSION", "RECORD_LAYER", "UNKNOWN_PROTOCOL", "PACKET_LENGTH")):
        return _without_tls(address)
    for word, meaning in OF_ALERT:
        if word in reason:
            return PeerError(f"peer {address} {meaning}")
    return LostError(f"peer {address} is lost: TLS failed; {SEE_OUTPUT} ({one_line(error)})")


def _without_tls(address: str) -> PeerError:
    """Connect again, without TLS, to see what listens at this address; return the error to raise."""
    try:
        connect_tcp(address, Reloading(ClientSecurity()), CONNECT_TIMEOUT)[0].close()
    except (NoGraphServerError, LostError) as error:  # the server is full, say, or about to end
        return error
    except PeerError as error:
        if SPEAKS_TLS in str(error):  # the server was full, and refused before TLS began
            return LostError(f"peer {address} could not be met; try again")
    return PeerError(f"peer {address} {WITHOUT_TLS}")


def one_line(message: object, longest: int = LONGEST) -> str:
    """Return a message of a server or of the system as one printable line of about `longest` characters."""
    text = " ".join(str(message).split())
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if len(shown) <= longest else f"{shown[:longest]}..."
