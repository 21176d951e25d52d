"""What listens at an address where no graph server answers: asked without gRPC, whose errors speak of other things."""

import socket
import ssl

from hoploom.config.values import split_address
from hoploom.errors import HoploomError, PeerError
from hoploom.serve.client import LostError

SECONDS = 1.0  # for each of the two questions
# How HTTP/2 begins, and how a server's first frame does: 3 bytes of length, then its type, SETTINGS.
PREFACE, SETTINGS, TYPE_AT = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5), b"\x04", 3
SHOWN = 19  # bytes of another answer
SAYS_NOTHING, HANGS_UP = "takes connections and says nothing", "closes every connection at once"


def stranger(address: str) -> HoploomError | None:
    """The error that tells of what is no graph server; None where nothing is reached, or what may be one.

    What answers otherwise never becomes one, so it is lasting; a proxy that hangs up may have its server later.
    """
    found = _answers(address)
    if found is None or (found != SAYS_NOTHING and _speaks_tls(address)):  # who speaks TLS hangs up at plain text
        return None
    kind = LostError if found in (SAYS_NOTHING, HANGS_UP) else PeerError
    return kind(f"{address} is no graph server: it {found}; give the port of `hoploom serve`")


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
            return SAYS_NOTHING
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
