"""Arrow Flight's side of security: what a server and a client are made with, and the check of the token.

The token is compared on every call, as digests and in constant time, so neither its text nor its length can be
measured. TLS is gRPC's own.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.flight as flight

from hoploom.config.values import join_address
from hoploom.serve.security import ClientSecurity, ServerSecurity

HEADER = "authorization"
REFUSAL = "this server asks for a token, and the call had none, or not the right one"


NO_PROXY = ("grpc.enable_http_proxy", 0)  # else gRPC sends rows and token through the proxy that http_proxy names


class TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """Refuses every call, of any kind, that does not carry the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = expected_header(token)

    def start_call(self, call: object, headers: Mapping[str, Sequence[str | bytes]]) -> None:
        given = headers.get(HEADER, ())
        if len(given) != 1 or not carries(given[0], self._expected):
            raise flight.FlightUnauthenticatedError(REFUSAL)


class TokenSender(flight.ClientMiddlewareFactory):  # type: ignore[misc]
    """Adds the token to every call. FlightCallOptions could, but their `repr` shows it."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def start_call(self, call: object) -> "_TokenHeader":
        return _TokenHeader(self._token)


class _TokenHeader(flight.ClientMiddleware):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def sending_headers(self) -> dict[str, str]:
        return {HEADER: f"Bearer {self._token}"}


def expected_header(token: str) -> bytes:
    """What `carries` compares an authorization header with."""
    return _digest(f"Bearer {token}")


def carries(given: str | bytes, expected: bytes) -> bool:
    """Whether an authorization header holds the token, in a time that tells nothing about it."""
    return hmac.compare_digest(_digest(given), expected)


def _digest(value: str | bytes) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value).digest()


def server_arguments(security: ServerSecurity, host: str, port: int) -> dict[str, Any]:
    """What a FlightServerBase is made with: FlightServerBase(**server_arguments(...))."""
    address = join_address(host.strip("[]"), port)
    found: dict[str, Any] = {"location": location(address, tls=security.tls)}
    if security.tls:
        found["tls_certificates"] = [(security.certificate, security.key)]
    if security.client_ca is not None:
        found |= {"verify_client": True, "root_certificates": security.client_ca}
    if security.token is not None:
        found["middleware"] = {"token": TokenCheck(security.token)}
    return found


def client_arguments(security: ClientSecurity, address: str) -> dict[str, Any]:
    """What a FlightClient is made with, so that it can ask the server at host:port."""
    found: dict[str, Any] = {"location": location(address, tls=security.tls), "generic_options": [NO_PROXY]}
    if security.tls:
        found["tls_root_certs"] = security.ca
    if security.certificate is not None:
        found |= {"cert_chain": security.certificate, "private_key": security.key}
    if security.token is not None:
        found["middleware"] = [TokenSender(security.token)]
    return found


def location(address: str, *, tls: bool) -> str:
    """host:port as Flight's address."""
    return f"{'grpc+tls' if tls else 'grpc'}://{address}"
