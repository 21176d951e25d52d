"""The token, certificate, key and CA of a server or a client. They are checked as soon as they are given.

Secrets are read from files only, because `ps` shows command lines. Neither `repr` nor an error shows a secret.
Loopback needs no protection: every user of this host is trusted.
"""

import hashlib
import hmac
import os
import re
import secrets
import ssl
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from hoploom.config.extras import needs
from hoploom.config.values import is_loopback
from hoploom.errors import ConfigError

MIN_TOKEN, MAX_TOKEN = 16, 1024  # characters: hard to guess, and short enough for an HTTP header
MAX_FILE = 1 << 20
REMAKE = "`hoploom certs FOLDER --hosts ...` makes new ones for tests"
PathLike = str | os.PathLike[str]


class Files(NamedTuple):
    """The files that security was read from, to be read again when they change."""

    paths: tuple[PathLike, ...]
    read: Callable[[], Any]


class _Secret:
    """Its repr names the fields that are given, without their values."""

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "files"}
        given = ", ".join(f"{name}=..." for name, value in shown.items() if value is not None)
        return f"{type(self).__name__}({given})"


@dataclass(frozen=True, repr=False)
class ServerSecurity(_Secret):
    """What a server has and what it asks of clients; certificates and keys are PEM texts."""

    token: str | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    client_ca: bytes | None = None  # if given, clients need a certificate of this CA
    files: Files | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_token(self.token, "token")
        _check_both(self.certificate, self.key)
        if self.client_ca is not None:
            check_certificates(self.client_ca, "client_ca")
            if not self.tls:
                raise ConfigError("client_ca is given without a certificate; give the server's --cert and --key too")

    @property
    def tls(self) -> bool:
        return self.certificate is not None


@dataclass(frozen=True, repr=False)
class ClientSecurity(_Secret):
    """What a client has and whom it trusts; certificates and keys are PEM texts."""

    token: str | None = None
    ca: bytes | None = None  # if given, TLS, and servers need a certificate of this CA
    certificate: bytes | None = None
    key: bytes | None = None
    files: Files | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_token(self.token, "token")
        _check_both(self.certificate, self.key)
        if self.ca is not None:
            check_certificates(self.ca, "ca")
        elif self.certificate is not None:
            raise ConfigError("a client's certificate is given without a CA; give the CA of the servers too")

    @property
    def tls(self) -> bool:
        return self.ca is not None


def towards_peers(server: ServerSecurity, ca: bytes | None = None) -> ClientSecurity:
    """The security of a server as a client of its peers. It trusts `ca`, by default its own client CA."""
    trusted = server.client_ca if ca is None else ca
    if server.tls and trusted is None:
        raise ConfigError("peers use TLS, but no CA is given to check their certificates; give --client-ca or --ca")
    of_server = server.files
    files = None if of_server is None else Files(of_server.paths, lambda: towards_peers(of_server.read(), ca))
    if server.client_ca is None:  # servers ask for no certificates
        return ClientSecurity(server.token, trusted, files=files)
    return ClientSecurity(server.token, trusted, server.certificate, server.key, files)


def is_same(given: object, token: str) -> bool:
    """Whether it is the token. As digests and in constant time, so neither its text nor its length can be measured."""
    return isinstance(given, str) and hmac.compare_digest(_digest(given), _digest(token))


def proof_of(token: str, challenge: str) -> str:
    """Shows that its sender has the token without revealing it. It is of no use for another challenge."""
    return hmac.new(token.encode(), challenge.encode(), hashlib.sha256).hexdigest()


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest()


def new_token() -> str:
    """A token nobody can guess."""
    return secrets.token_urlsafe(32)


# --- from files ----------------------------------------------------------------------------------


def read_server_security(
    token_file: PathLike | None = None,
    cert: PathLike | None = None,
    key: PathLike | None = None,
    client_ca: PathLike | None = None,
    *,
    token: str | None = None,
) -> ServerSecurity:
    """A server's token, certificate, key and client CA, from files that are checked. `token` is in no file."""
    given = (token_file, cert, key, client_ca)
    read = ServerSecurity(token or _read_token(token_file), *_read_pair(cert, key), read_ca(client_ca))
    return replace(read, files=_files(lambda: read_server_security(*given, token=token), given))


def read_client_security(
    token_file: PathLike | None = None,
    ca: PathLike | None = None,
    cert: PathLike | None = None,
    key: PathLike | None = None,
    *,
    token: str | None = None,
) -> ClientSecurity:
    """A client's token, CA, certificate and key, from files that are checked. `token` is in no file."""
    given = (token_file, ca, cert, key)
    read = ClientSecurity(token or _read_token(token_file), read_ca(ca), *_read_pair(cert, key))
    return replace(read, files=_files(lambda: read_client_security(*given, token=token), given))


def _files(read: Callable[[], Any], given: tuple[PathLike | None, ...]) -> Files | None:
    paths = tuple(path for path in given if path is not None)
    return Files(paths, read) if paths else None


def _read_token(path: PathLike | None) -> str | None:
    if path is None:
        return None
    named = f"token file {os.fspath(path)}"
    token = _read(path, named, secret=True).strip(b" \t\r\n").decode("ascii", "replace")
    _check_token(token, named)
    return token


def _read_pair(cert: PathLike | None, key: PathLike | None) -> tuple[bytes | None, bytes | None]:
    if cert is None or key is None:
        if cert is not key:
            given, absent = ("cert", "key") if key is None else ("key", "cert")
            raise ConfigError(f"{given} is {cert or key}, but no {absent} is given; give both --cert and --key")
        return None, None
    named = (f"certificate {os.fspath(cert)}", f"key {os.fspath(key)}")
    certificate, private = _read(cert, named[0]), _read(key, named[1], secret=True)
    check_pair(certificate, private, named)
    return certificate, private


def read_ca(path: PathLike | None) -> bytes | None:
    """A CA from a file that is checked."""
    if path is None:
        return None
    named = f"CA {os.fspath(path)}"
    content = _read(path, named)
    check_certificates(content, named)
    return content


def _read(path: PathLike, named: str, *, secret: bool = False) -> bytes:
    """The bytes of a small file; of a secret one only when it is kept secret."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            status = os.fstat(file.fileno())  # of what was opened, so that nothing can be put in its place
            _check_file(status, Path(path), named, secret=secret)
            content = file.read(MAX_FILE + 1)
    except ConfigError:  # which is a ValueError as well
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{named} cannot be read: {reason}; give a file that this user may read") from error
    if not content.strip():
        raise ConfigError(f"{named} is empty; give one that holds something")
    if len(content) > MAX_FILE:
        raise ConfigError(f"{named} has {status.st_size:,} bytes, at most {MAX_FILE:,} are read; give the right file")
    return content


def _open_nonblocking(path: str, flags: int) -> int:
    """Without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_file(status: os.stat_result, path: Path, named: str, *, secret: bool) -> None:
    """As ssh does. A group may read what another user owns: so are secrets mounted for a container's user."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{named} is not a file; give the path of one")
    open_to = stat.S_IRWXO | (stat.S_IRWXG if status.st_uid == os.geteuid() else stat.S_IWGRP)
    if secret and status.st_mode & open_to:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"{named} has mode {mode:04o}, others than its owner have access; set it: chmod 600 {path}")


def _check_token(token: str | None, named: str) -> None:
    """Never shows the token, not even a wrong one: that may be the right one with a typing error."""
    if token is None:
        return
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise ConfigError(
            f"{named} has {len(token)} characters; give {MIN_TOKEN} to {MAX_TOKEN}, e.g. openssl rand -hex 32 > token"
        )
    if not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(f"{named} has characters that no header can hold; give letters, digits and signs, no spaces")


def _check_both(certificate: bytes | None, key: bytes | None) -> None:
    if (certificate is None) != (key is None):
        raise ConfigError("a certificate and its key go together; give both, or neither")
    if certificate is not None and key is not None:
        check_pair(certificate, key)


# --- certificates and keys -----------------------------------------------------------------------


def check_pair(certificate: bytes, key: bytes, named: tuple[str, str] = ("the certificate", "the key")) -> None:
    """Refuse a certificate that is damaged, not valid now, or of another key."""
    check_certificates(certificate, named[0])
    if b"ENCRYPTED" in key:  # OpenSSL would ask at the terminal, and the server has nobody to ask
        raise ConfigError(
            f"{named[1]} is locked with a passphrase; give it without one: openssl pkey -in locked.key -out server.key"
        )
    try:
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{named[1]} is not the key of {named[0]}; give the two that belong together") from error
        reason = error.reason or "no PEM text"
        raise ConfigError(f"{named[1]} with {named[0]} cannot be used: {reason}; give PEM files; {REMAKE}") from error


def check_certificates(text: bytes, named: str) -> None:
    """Refuse a text without certificates, or whose first one is not valid now. The others may have expired."""
    with needs("cluster"):
        from cryptography import x509
    if b"-----BEGIN CERTIFICATE-----" not in text:
        raise ConfigError(f"{named} holds no PEM certificate; give a file with -----BEGIN CERTIFICATE----- in it")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode("ascii", "replace"))
        first = x509.load_pem_x509_certificate(text)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"{named} holds a damaged certificate: {reason}; copy it again") from error
    now, begins, ends = datetime.now(UTC), first.not_valid_before_utc, first.not_valid_after_utc
    if now > ends:
        raise ConfigError(f"{named} has expired on {ends:%Y-%m-%d %H:%M} UTC; give one that is valid now; {REMAKE}")
    if now < begins:
        raise ConfigError(f"{named} is valid only from {begins:%Y-%m-%d %H:%M} UTC; wait, or set this host's clock")


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Give a context its certificate and key. It reads files only, so they go into two temporary files without names.

    Others cannot open a file without a name, and it is gone however this process ends.
    """
    with _unnamed(certificate) as certificate_path, _unnamed(key) as key_path:
        context.load_cert_chain(certificate_path, key_path, password="")


@contextmanager
def _unnamed(content: bytes) -> Iterator[str]:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)  # flushes, and systems other than Linux share the position with whoever opens the path
        folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
        yield os.path.join(folder, str(file.fileno()))


# --- where a server may listen -------------------------------------------------------------------


def check_listen(host: str, security: ServerSecurity, *, insecure: bool = False, flag: str = "--listen") -> str | None:
    """Raise ConfigError for an address beyond loopback without TLS or a token; return the warning to print, if any."""
    if is_loopback(host):
        return None
    where = f"{flag} {host or '(every address)'}"
    if not security.tls and security.token is None:
        if not insecure:
            raise ConfigError(
                f"{where} is reached from other hosts, and nothing protects it; give --cert and --key "
                "(`hoploom certs` makes them for tests), or --token-file, or listen on 127.0.0.1; "
                "--insecure lets everybody in"
            )
        return f"{where} with --insecure: whoever reaches it reads all, and so may others on the way"
    if not security.tls:
        return f"{where} without TLS: others on the network path can read what is sent; give --cert and --key as well"
    if security.token is None and security.client_ca is None:
        return f"{where} asks nobody for proof: whoever reaches it reads all; give --token-file or --client-ca"
    return None
