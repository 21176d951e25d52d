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

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hoploom.errors import ConfigError

MAX_DAYS = 3650
CLOCKS_DIFFER = timedelta(minutes=5)
LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
HOST_NAME = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*", re.IGNORECASE)
OTHER_USAGES = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
USAGES = (*OTHER_USAGES, "digital_signature", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")


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
            mode = 0o600 if name.endswith(".key") else 0o644  # from the first moment on
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(unfinished / name, flags, mode), "wb") as file:
                file.write(content)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return [folder / name for name in contents]


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts in the form that certificates have, each once; raise ConfigError for a wrong one."""
    hint = "give names or addresses without ports, e.g. host1,10.0.0.1"
    found: dict[str, None] = {}
    for host in filter(None, map(str.strip, hosts)):
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        try:
            found[str(ipaddress.ip_address(bare))] = None
        except ValueError:
            if len(host) > 253 or not HOST_NAME.fullmatch(host) or re.fullmatch(r"[0-9.]+", host):
                raise ConfigError(f"hosts has {host!r:.80}, which is no host's name and no address; {hint}") from None
            found[host.lower()] = None
    if not found:
        raise ConfigError("hosts is empty; give the names and addresses of the servers, e.g. host1,10.0.0.1")
    return tuple(found)


def make_certificates(hosts: Sequence[str], *, days: float = 30) -> Mapping[str, bytes]:
    """Return PEM texts by file name. With negative `days`, the certificates have expired, which tests need."""
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    times = min(now, ends) - CLOCKS_DIFFER, ends
    ca_key, server_key, client_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca = _builder("hoploom test CA", "hoploom test CA", (ca_key, ca_key), times, is_ca=True).sign(
        ca_key, hashes.SHA256()
    )
    found = {"ca.pem": ca.public_bytes(Encoding.PEM)}
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]  # a server is also its peers' client
    for name, key, usages in (("server", server_key, both), ("client", client_key, both[1:])):
        builder = _builder(f"hoploom {name}", "hoploom test CA", (key, ca_key), times, is_ca=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if name == "server" and hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        found[f"{name}.pem"] = builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)
        found[f"{name}.key"] = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return found


def _builder(
    subject: str,
    issuer: str,
    keys: tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePrivateKey],
    times: tuple[datetime, datetime],
    *,
    is_ca: bool,
) -> x509.CertificateBuilder:
    """Return an unsigned certificate. `keys` are those of the subject and of the issuer."""
    own, signing = (key.public_key() for key in keys)
    allowed = ("key_cert_sign", "crl_sign") if is_ca else ("digital_signature",)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(own)
        .serial_number(x509.random_serial_number())
        .not_valid_before(times[0])
        .not_valid_after(times[1])
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.KeyUsage(**{usage: usage in allowed for usage in USAGES}), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing), critical=False)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
