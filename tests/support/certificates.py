"""Certificates for the tests that need them; without the package that makes them those tests are skipped."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from hoploom.serve.certs import make_certificates
from hoploom.serve.security import ClientSecurity, ServerSecurity

TOKEN = "a-token-of-the-tests-0123456789"


def certificates(
    hosts: Sequence[str] = ("127.0.0.1", "localhost"), which: int = 0, days: float = 1
) -> dict[str, bytes]:
    """File name -> PEM text, the same for the same arguments; another `which` is another CA's."""
    pytest.importorskip("cryptography", reason="certificates are made with the package cryptography")
    return _made(tuple(hosts), which, days)


@cache
def _made(hosts: tuple[str, ...], which: int, days: float) -> dict[str, bytes]:
    return dict(make_certificates(hosts, days=days))


def server_pair(made: Mapping[str, bytes]) -> tuple[bytes, bytes]:
    return made["server.pem"], made["server.key"]


def mutual_server(made: Mapping[str, bytes], token: str | None = None) -> ServerSecurity:
    return ServerSecurity(token, *server_pair(made), client_ca=made["ca.pem"])


def mutual_client(made: Mapping[str, bytes], token: str | None = None) -> ClientSecurity:
    return ClientSecurity(token, made["ca.pem"], made["client.pem"], made["client.key"])


def write(folder: Path, made: Mapping[str, bytes]) -> Path:
    folder.mkdir()
    for name, text in made.items():
        (folder / name).write_bytes(text)
        (folder / name).chmod(0o600)
    return folder


def token_file(path: Path, content: bytes = TOKEN.encode() + b"\n", mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path
