"""Connects a client to a server: TCP, TLS and the greeting, or the server's Unix socket. Errors say what went wrong.

A LostError means that another attempt may help. Any other PeerError is final, such as a wrong token, certificate,
version or port.
"""

import errno
import socket
import ssl
from contextlib import suppress
from typing import Any, NamedTuple

from hoploom.config.values import split_address
from hoploom.errors import PeerError
from hoploom.serve import greeting
from hoploom.serve.connection import Connection
from hoploom.serve.greeting import NAME, OPENING
from hoploom.serve.security import ClientSecurity, proof_of
from hoploom.serve.shared_memory import is_possible
from hoploom.serve.tls import Renewed
from hoploom.serve.wire import PREFIX, PROTOCOL

LONGEST = 240  # characters of another program's message in an error
SHOWN = 19  # bytes of an answer that is no greeting, in an error
CONNECT_SECONDS = 5.0


class LostError(PeerError):
    """The peer did not answer: another one may, or this one later."""


class NoGraphServerError(PeerError):
    """Another program answers at this address."""


class NearBy(NamedTuple):
    """The Unix socket of a server on this host."""

    name: str
    password: str


class Reached(NamedTuple):
    """A connection that the server has accepted, and its Unix socket if it is on this host."""

    connection: Connection
    near_by: NearBy | None


def reach(address: str, security: Renewed[ClientSecurity], silence: float) -> Reached:
    """Connect to a server. Raises LostError if another attempt may help, and another PeerError if not."""
    shown, context = security.now()
    host, port = split_address(address)
    try:
        connected = socket.create_connection((host, port), min(silence, CONNECT_SECONDS))
    except OSError as error:
        raise _unreached(address, error) from error
    try:
        connected.settimeout(silence)
        if context is not None:
            connected = context.wrap_socket(connected, server_hostname=host)
        connection = Connection(connected, silence)
        welcome = _greet(connection, shown.token)
    except (OSError, EOFError, ValueError, _AnswerError) as error:
        connected.close()
        raise explain(error, address, shown) from error
    except BaseException:
        connected.close()
        raise
    return Reached(connection, _near_by(welcome))


def reach_near_by(near_by: NearBy, silence: float) -> Connection | None:
    """A connection to the Unix socket of a server on this host; None if it cannot be reached, as from a container."""
    with suppress(OSError, EOFError, ValueError, _AnswerError):
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(silence)
            connected.connect(f"\0{near_by.name}")
            connection = Connection(connected, silence, takes_files=True)
            _greet(connection, near_by.password)
            return connection
        except BaseException:
            connected.close()
            raise
    return None


def _greet(connection: Connection, token: str | None) -> dict[str, Any]:
    """The server's welcome. If the server asks for a token, it gets a proof of it, and never the token itself."""
    answer = _answer_to(connection, {})
    if "challenge" not in answer:
        return answer
    if token is None:
        raise _AnswerError(OPENING, {"error": greeting.TOKEN})
    return _answer_to(connection, {"proof": proof_of(token, str(answer["challenge"]))})


def _answer_to(connection: Connection, content: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a greeting; _AnswerError if it is a refusal, or is not from a graph server."""
    connection.begin(greeting.MOST)
    spoken = greeting.said(content)
    connection.send([spoken])
    first = b""
    while len(first) < len(OPENING):
        try:
            first += connection.take(1)
        except (EOFError, ConnectionError):
            raise _AnswerError(first) from None
        if not (NAME.startswith(first) or first.startswith(NAME)):
            with suppress(OSError, EOFError):
                while len(first) < SHOWN:
                    first += connection.take(1)
            raise _AnswerError(first)
    said = greeting.read(connection.take(greeting.length_of(connection.take(PREFIX.size))))
    if "error" in said or first != OPENING:
        raise _AnswerError(first, said)
    return said


def _near_by(welcome: dict[str, Any]) -> NearBy | None:
    name, password = welcome.get("unix"), welcome.get("password")
    is_here = welcome.get("host") == greeting.this_host() != ""
    fits = isinstance(name, str) and isinstance(password, str)
    return NearBy(str(name), str(password)) if is_here and fits and is_possible() else None


class _AnswerError(Exception):
    """The answer is a refusal, or comes from another program."""

    def __init__(self, first: bytes, refusal: dict[str, Any] | None = None) -> None:
        super().__init__(str({} if refusal is None else refusal.get("message", "")))
        self.first, self.refusal = first, refusal


# --- what went wrong -----------------------------------------------------------------------------

SEE_TOKEN = "give the token file that it was started with"
SPEAKS_TLS = "speaks TLS; give its CA here"
SEE_PORT = "give the port of `hoploom serve`"
TOO_MANY_FILES = "cannot be asked: this process has too many files open; raise `ulimit -n`"
SEE_OUTPUT = "see in its own output whether it ended"
IS_SILENT = (
    "takes connections and does not answer: the server is busy or stopped, or another program has this port; see its "
    f"own output, or {SEE_PORT}"
)
OF_CERTIFICATE = {  # X509_V_ERR_...
    10: "shows a certificate that has expired; give the server one that is valid now, see `hoploom certs`",
    9: "shows a certificate that is not valid yet; set the clocks of both hosts",
    62: "shows a certificate for other hosts; use a name that is in it, or make one with this name: "
    "`hoploom certs FOLDER --hosts ...`",
}
OF_CERTIFICATE[64] = OF_CERTIFICATE[62]  # an address instead of a name
OF_ALERT = (  # what OpenSSL's reason holds
    ("CERTIFICATE_REQUIRED", "asks for a certificate; give one that its --client-ca has signed, and its key"),
    ("UNKNOWN_CA", "refuses the certificate given: its --client-ca has not signed it; give one that it has signed"),
    ("CERTIFICATE_EXPIRED", "refuses the certificate given: it has expired; give one that is valid now"),
    ("CERTIFICATE", "refuses the certificate given; give one that its --client-ca has signed, and that is valid now"),
)


def explain(error: Exception, address: str, security: ClientSecurity) -> PeerError:
    """The error that the user gets."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError):
        error = _AnswerError(b"")
    if isinstance(error, _AnswerError):
        return _other_answer(error, address, security)
    if isinstance(error, ssl.SSLError):
        return _tls_failed(error, address)
    if isinstance(error, TimeoutError):
        return LostError(f"{address} {IS_SILENT}")
    if isinstance(error, EOFError):
        return LostError(f"peer {address} is lost: it closed the connection; {SEE_OUTPUT}")
    if isinstance(error, ValueError):
        return NoGraphServerError(f"{address} is no graph server: {essence(error)}; {SEE_PORT}")
    return LostError(f"peer {address} is lost: the connection broke; {SEE_OUTPUT} ({essence(error)})")


def has_too_many_files(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _unreached(address: str, error: OSError) -> PeerError:
    if has_too_many_files(error):
        told = TOO_MANY_FILES
    elif isinstance(error, socket.gaierror):
        told = "has a name that is not known here; check its spelling, or give an address"
    elif isinstance(error, ConnectionRefusedError):
        told = "does not listen; see whether `hoploom serve` runs there, and the port is right"
    else:
        told = "is not reached; see whether the host is up, and no firewall stands between"
    return LostError(f"peer {address} {told} ({essence(error)})")


def _other_answer(error: _AnswerError, address: str, security: ClientSecurity) -> PeerError:
    if error.refusal is None:
        if not error.first:
            return LostError(
                f"{address} is no graph server: it takes connections and closes them without an answer; {SEE_PORT}"
            )
        shown = (error.first.splitlines() or [b""])[0].decode("ascii", "replace")
        return NoGraphServerError(f"{address} is no graph server: it answers with {shown!r}; {SEE_PORT}")
    reason, version = error.refusal.get("error"), str(error.refusal.get("hoploom"))[:20]
    if error.first != OPENING:
        return PeerError(
            f"peer {address} speaks another version of the protocol, {error.first[-1]} (Hoploom {version}), this "
            f"process {PROTOCOL}; install the same Hoploom on both"
        )
    if reason == greeting.TOKEN:
        asks = "asks for a token" if security.token is None else "refuses the token"
        return PeerError(f"peer {address} {asks}; {SEE_TOKEN}")
    if reason == greeting.TLS:
        told = "does not speak TLS; start it with --cert and --key, or give no CA here"
        return PeerError(f"peer {address} {told if security.tls else SPEAKS_TLS}")
    if reason == greeting.FULL:
        return LostError(f"{address}: {essence(error)}")
    return PeerError(f"peer {address} refuses this client: {essence(error)}")


def _tls_failed(error: ssl.SSLError, address: str) -> PeerError:
    if isinstance(error, ssl.SSLCertVerificationError):
        told = "shows a certificate that the CA given has not signed; give the CA that has signed it"
        return PeerError(f"peer {address} {OF_CERTIFICATE.get(error.verify_code, told)}")
    reason = error.reason or ""
    if any(word in reason for word in ("WRONG_VERSION", "RECORD_LAYER", "UNKNOWN_PROTOCOL", "PACKET_LENGTH")):
        return _without_tls(address)
    for word, told in OF_ALERT:
        if word in reason:
            return PeerError(f"peer {address} {told}")
    return LostError(f"peer {address} is lost: TLS failed; {SEE_OUTPUT} ({essence(error)})")


def _without_tls(address: str) -> PeerError:
    """The error for a server without TLS. It is greeted in plain first, for it may be no graph server at all."""
    try:
        reach(address, Renewed(ClientSecurity()), CONNECT_SECONDS).connection.close()
    except (NoGraphServerError, LostError) as error:  # it is full, say, or ends just now
        return error
    except PeerError as error:
        if SPEAKS_TLS in str(error):  # it was full, which is told before TLS begins
            return LostError(f"peer {address} could not be met; try again")
    return PeerError(f"peer {address} does not speak TLS; start it with --cert and --key, or give no CA here")


def essence(said: object, longest: int = LONGEST) -> str:
    """A message of a server or of the system, on one line that a terminal can show."""
    text = " ".join(str(said).split())
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if len(shown) <= longest else f"{shown[:longest]}..."
