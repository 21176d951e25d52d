"""What listens at an address where no graph server answers. It asks without gRPC, whose errors name other causes."""

import socket
import ssl

from hoploom.config.values import split_address
from hoploom.errors import HoploomError, PeerError
from hoploom.serve.client import LostError

SECONDS = 1.0  # for each of the two questions
# How HTTP/2 begins, and how a server's first frame does: 3 bytes of length, then its type, SETTINGS.
PREFACE, SETTINGS, TYPE_AT = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5), b"\x04", 3
SHOWN = 19  # bytes of another answer
SILENT, HANGS_UP = "does not answer", "closes them without an answer"  # it takes connections, and then


def wrong_port(address: str) -> HoploomError | None:
    """The error that says what else listens at an address; None where nothing is reached, or what may be a server.

    What gives another answer never becomes a server, so its error is lasting. A server that is stopped or busy may go
    on, and a proxy that closes connections may have its server later: these errors are passing.
    """
    found = _answers(address)
    if found is None or (found != SILENT and _speaks_tls(address)):  # who speaks TLS hangs up at plain text
        return None
    if found == SILENT:
        return LostError(
            f"{address} takes connections and {SILENT}: the server is busy or stopped, or another program has this "
            "port; see its own output, or give the port of `hoploom serve`"
        )
    if found == HANGS_UP:
        return LostError(
            f"{address} is no graph server: it takes connections and {HANGS_UP}; give the port of `hoploom serve`"
        )
    return PeerError(f"{address} is no graph server: it {found}; give the port of `hoploom serve`")


def _answers(address: str) -> str | None:
    """What it does when HTTP/2 begins; None if that is what it speaks, and where nothing is reached."""
    try:
        connection = socket.create_connection(split_address(address), SECONDS)
    except OSError:
        return None
    with connection:
        try:
            connection.sendall(PREFACE)
            first = connection.recv(SHOWN)
        except TimeoutError:
            return SILENT
        except OSError:  # reset
            return HANGS_UP
    if not first:
        return HANGS_UP
    if first[TYPE_AT : TYPE_AT + 1] == SETTINGS:
        return None
    return f"answers with {first.splitlines()[0].decode('ascii', 'replace')!r}"


def _speaks_tls(address: str) -> bool:
    """Whether it shakes hands, whatever certificate it shows; nothing is sent to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(split_address(address), SECONDS) as connection, context.wrap_socket(connection):
            return True
    except OSError:
        return False
