"""Makes a CA, and a certificate for servers and one for clients, for tests and closed networks.

The key of the CA is not kept: nobody can sign more certificates with it. So a new host needs a new set.
"""

import ipaddress
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from hoploom.errors import ConfigError

MAX_DAYS = 3650
CLOCKS_DIFFER = timedelta(minutes=5)
LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
NAME = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*", re.IGNORECASE)


class Certified(NamedTuple):
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


class Subject(NamedTuple):
    """What a certificate says: its name, its hosts, and whether it is for a CA or a server."""

    name: str
    hosts: tuple[str, ...] = ()
    ca: bool = False
    serves: bool = False


def write_certificates(folder: Path, hosts: Sequence[str], days: int = 30) -> list[Path]:
    """Write ca.pem, server.pem, server.key, client.pem and client.key to a new folder; the keys have mode 0600."""
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"days is {days}; give 1 to {MAX_DAYS}")
    named = check_hosts(hosts)
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists, and certificates are not overwritten; give a new folder, or delete it")
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {folder.absolute().parent} to make {folder.name} in; make it first")
    contents = make_certificates(named, days=days)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.absolute().parent))  # mode 0700
    try:
        for name, content in contents.items():
            _write(unfinished / name, content, 0o600 if name.endswith(".key") else 0o644)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return [folder / name for name in contents]


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """The hosts as a certificate has them, each once; ConfigError for what is no name and no address."""
    found = dict.fromkeys(_host(host.strip()) for host in hosts if host.strip())
    if not found:
        raise ConfigError("hosts is empty; give the names and addresses of the servers, e.g. host1,10.0.0.1")
    return tuple(found)


def _host(host: str) -> str:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        if len(host) <= 253 and NAME.fullmatch(host) and not re.fullmatch(r"[0-9.]+", host):
            return host.lower()
    way_out = "give names or addresses without ports, e.g. host1,10.0.0.1"
    raise ConfigError(f"hosts has {host!r:.80}, which is no host's name and no address; {way_out}")


def make_certificates(hosts: Sequence[str], *, days: float = 30) -> Mapping[str, bytes]:
    """File name -> PEM text. With negative `days`, the certificates have expired, which tests need."""
    ends = datetime.now(UTC) + timedelta(days=days)
    begins = min(datetime.now(UTC), ends) - CLOCKS_DIFFER
    authority = _certified(Subject("hoploom test CA", ca=True), None, (begins, ends))
    server = _certified(Subject("hoploom server", tuple(hosts), serves=True), authority, (begins, ends))
    client = _certified(Subject("hoploom client"), authority, (begins, ends))
    found = {"ca.pem": authority.certificate.public_bytes(Encoding.PEM)}
    for name, one in (("server", server), ("client", client)):
        found[f"{name}.pem"] = one.certificate.public_bytes(Encoding.PEM)
        found[f"{name}.key"] = one.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return found


def _certified(subject: Subject, issuer: Certified | None, times: tuple[datetime, datetime]) -> Certified:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject.name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.certificate.subject if issuer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(times[0])
        .not_valid_after(times[1])
    )
    signer = issuer.key if issuer else key
    for extension, critical in _extensions(subject, key, signer):
        builder = builder.add_extension(extension, critical=critical)
    return Certified(builder.sign(signer, hashes.SHA256()), key)


def _extensions(
    subject: Subject, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> list[tuple[x509.ExtensionType, bool]]:
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = dict.fromkeys((*names, "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False)
    usage |= {"key_cert_sign": True, "crl_sign": True} if subject.ca else {"digital_signature": True}
    found: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=subject.ca, path_length=0 if subject.ca else None), True),
        (x509.KeyUsage(**usage), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
    ]
    if not subject.ca:  # a server is also its peers' client
        uses = [ExtendedKeyUsageOID.SERVER_AUTH] if subject.serves else []
        found.append((x509.ExtendedKeyUsage([*uses, ExtendedKeyUsageOID.CLIENT_AUTH]), False))
    if subject.hosts:
        found.append((x509.SubjectAlternativeName([_general_name(host) for host in subject.hosts]), False))
    return found


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, content: bytes, mode: int) -> None:
    """A new file that has its mode from the first moment on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)
