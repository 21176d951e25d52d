"""Flight's errors in our words: who does not answer, why, and what to do. The one place that maps them.

gRPC tells most reasons by text alone, so the text is searched for what its versions say; the rest is passed on.
"""

import re
from typing import NamedTuple

import pyarrow
import pyarrow.flight as flight

from hoploom.errors import ConfigError, HoploomError, PeerError, StoreError
from hoploom.serve.security import ClientSecurity

LONGEST = 240  # characters of gRPC's own words
NOISE = re.compile(
    r"^Flight [\w ]*?, with message: |\.? ?(gRPC client debug context|Detail):.*"
    r"|failed to connect to all addresses; last error: (\w+: \S+:\d+: )?",
    re.DOTALL,
)


class Reason(NamedTuple):
    """What went wrong, and the way out; `lasting` when neither time nor another attempt helps."""

    what: str
    way_out: str
    lasting: bool = False


SAID = (  # the first that gRPC's text matches, in lower case, without underscores
    (
        r"certificate has expired",
        Reason(
            "shows a certificate that has expired", "give the server one that counts now, see `hoploom certs`", True
        ),
    ),
    (
        r"certificate is not yet valid",
        Reason("shows a certificate of the future", "set the clocks of both hosts right", True),
    ),
    (
        r"peer name .* is not in peer certificate|hostname verification",
        Reason(
            "shows a certificate for other hosts",
            "name it as its certificate does, or make one with its name: `hoploom certs FOLDER --hosts ...`",
            True,
        ),
    ),
    (
        r"certificate verify failed|unable to get local issuer",
        Reason("shows a certificate that is not of the CA given", "give the CA that the server's is of", True),
    ),
    (
        r"wrong version number|unknown protocol|packet length too long",
        Reason("does not speak TLS", "start it with --cert and --key, or give no CA here", True),
    ),
    (r"failed parsing http/2|http1\.x", Reason("is no graph server", "give the port of `hoploom serve`", True)),
    (
        r"connection refused",
        Reason("does not listen", "see whether `hoploom serve` runs there, and the port is right"),
    ),
    (
        r"resolving|domain name not found|dns",
        Reason("has a name that is not known here", "check its spelling, or give an address"),
    ),
    (
        r"unreachable|no route|timed? ?out",
        Reason("is not reached", "see whether the host is up, and no firewall stands between"),
    ),
)
KINDS = (
    (
        flight.FlightTimedOutError,
        "TimedOut",
        Reason("has not answered in time", "see whether it is up and not overloaded, or give more time"),
    ),
    (
        flight.FlightCancelledError,
        "Cancelled",
        Reason("was asked, and the call was cancelled", "see whether the peer is up, or give more time"),
    ),
    (
        flight.FlightUnauthorizedError,
        "Unauthorized",
        Reason("forbids this client what it asks", "give the token file that it was started with", True),
    ),
    (
        pyarrow.ArrowNotImplementedError,
        "Unimplemented",
        Reason("does not know this call", "give a graph server of the same version of Hoploom", True),
    ),
    (
        pyarrow.ArrowInvalid,
        "Invalid",
        Reason("does not understand, or is not understood", "use one version of Hoploom everywhere", True),
    ),
)
EARLY = "an answer ends early: "  # what our own servers say when a file cannot be read while its rows are sent
LOST = Reason("is lost: the connection broke", "see in its own output whether it ended")


VERSIONS = "install the same Hoploom on both"
OURS = (  # what our own servers say when they end a conversation
    ("the client speaks", Reason("speaks another version of the protocol", VERSIONS, True)),
    ("a request is malformed", Reason("does not understand a request", VERSIONS, True)),
)


def explain(error: Exception, address: str, security: ClientSecurity | None = None) -> HoploomError:
    """The error of ours that tells what a call to a peer met; `security` is what the call was made with."""
    if isinstance(error, HoploomError):
        return error
    said = essence(error)
    if EARLY in said:
        return StoreError(f"{address}: {said.partition(EARLY)[2]}")
    if isinstance(error, pyarrow.ArrowInvalid) and "URI" in said:
        return ConfigError(f"address is {address!r:.80}: {said}; give host:port, e.g. host1:9000")
    reason = _reason(error, security)
    return PeerError(f"peer {address} {reason.what}; {reason.way_out}" + (f" ({said})" if said else ""))


def is_passing(error: Exception) -> bool:
    """Whether asking again, or a replica, may help: it never does for a wrong token, certificate or port."""
    return not isinstance(error, HoploomError) and EARLY not in str(error) and not _reason(error, None).lasting


def essence(error: Exception) -> str:
    """What gRPC or the server says, on one line that a terminal can show, without addresses and tracebacks."""
    text = " ".join(NOISE.sub("", str(error)).split())
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."


def _reason(error: Exception, security: ClientSecurity | None) -> Reason:
    for said, reason in OURS:
        if said in str(error):
            return reason
    for kind, detail, reason in KINDS:  # some calls of pyarrow raise OSError for all of them
        if isinstance(error, kind) or (isinstance(error, OSError) and f"Detail: {detail}" in str(error)):
            return reason
    if isinstance(error, flight.FlightUnauthenticatedError) or "Detail: Unauthenticated" in str(error):
        return _refused(security)
    if isinstance(error, flight.FlightUnavailableError) or "Detail: Unavailable" in str(error):
        return _unavailable(str(error), security)
    return Reason("has failed", "see its own output for the cause")


def _refused(security: ClientSecurity | None) -> Reason:
    if security is not None and security.token is None:
        return Reason("asks for a token", "give the token file that it was started with", True)
    return Reason("refuses the token", "give the token file that it was started with", True)


def _unavailable(text: str, security: ClientSecurity | None) -> Reason:
    plain = text.lower().replace("_", " ")
    for pattern, reason in SAID:
        if re.search(pattern, plain):
            return reason
    if "failed to connect" in plain and re.search(r"socket closed|connection reset|broken pipe", plain):
        return Reason("closes every connection at once", _ways_in(security))
    return LOST


def _ways_in(security: ClientSecurity | None) -> str:
    """A server that speaks TLS hangs up without a word on plain text, and on who shows no certificate."""
    if security is None or not security.tls:
        return "if it was started with --cert, give its CA here"
    if security.certificate is None:
        return "if it was started with --client-ca, give a certificate and key of that CA"
    return "see that the certificate given is of the server's --client-ca, and counts now"
