"""Certificates for the tests that need them; without the package that makes them those tests are skipped."""

import ipaddress
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest

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
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    ends = datetime.now(UTC) + timedelta(days=days)
    begins = min(datetime.now(UTC), ends) - timedelta(minutes=5)
    ca_key, *keys = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))

    def certificate(name: str, key: ec.EllipticCurvePrivateKey, names: Sequence[str] = ()) -> bytes:
        subject, issuer = (
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)]) for one in (name, "hoploom test CA")
        )
        builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number(), begins, ends)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        for extension in (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), signer):
            builder = builder.add_extension(extension, critical=False)
        builder = builder.add_extension(x509.BasicConstraints(key is ca_key, None), critical=True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(n) for n in names]), False)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def _general_name(host: str) -> x509.GeneralName:
        return x509.DNSName(host) if host[-1].isalpha() else x509.IPAddress(ipaddress.ip_address(host))

    found = {"ca.pem": certificate("hoploom test CA", ca_key)}
    for name, key, names in zip(("server", "client"), keys, (hosts, ()), strict=True):
        found[f"{name}.pem"] = certificate(name, key, names)
        found[f"{name}.key"] = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return found


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
