"""The token, certificate, key and CA of a server or a client. They are checked as soon as they are given.

Secrets are read from files only, because `ps` shows command lines. Neither `repr` nor an error shows a secret. Files
are read again when they change. Loopback needs no protection: every user of this host is trusted.
"""

import hashlib
import hmac
import os
import re
import ssl
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

from hoploom.config.values import is_loopback
from hoploom.errors import ConfigError
from hoploom.system import needs

MIN_TOKEN, MAX_TOKEN = 16, 1024  # characters: hard to guess, and short enough for an HTTP header
MAX_FILE = 1 << 20  # bytes
HINT = "docs/security.md has the commands that make new ones"
PathLike = str | os.PathLike[str]


class _Secret:
    """Base class whose repr shows which fields are given, but not their values."""

    def __repr__(self) -> str:
        given = [f"{name}=..." for name, value in vars(self).items() if name != "files" and value is not None]
        return f"{type(self).__name__}({', '.join(given)})"


class SecurityFiles(NamedTuple):
    """The files of a security object, and the function that reads them again."""

    paths: tuple[PathLike | None, ...]  # None: not given
    read: Callable[[], Any]


@dataclass(frozen=True, repr=False)
class ServerSecurity(_Secret):
    """The secrets of a server, and what it requires of clients; certificates and keys are PEM texts."""

    token: str | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    client_ca: bytes | None = None  # if given, clients need a certificate of this CA
    files: SecurityFiles | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_secrets(self)
        if self.client_ca is not None:
            check_certificates(self.client_ca, "client_ca")
            if not self.tls:
                raise ConfigError("client_ca is given without a certificate; give the server's --cert and --key too")

    @property
    def tls(self) -> bool:
        return self.certificate is not None


@dataclass(frozen=True, repr=False)
class ClientSecurity(_Secret):
    """The secrets of a client, and the CA that it trusts; certificates and keys are PEM texts."""

    token: str | None = None
    ca: bytes | None = None  # if given, use TLS; servers need a certificate of this CA
    certificate: bytes | None = None
    key: bytes | None = None
    files: SecurityFiles | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_secrets(self)
        if self.ca is not None:
            check_certificates(self.ca, "ca")
        elif self.certificate is not None:
            raise ConfigError("a client's certificate is given without a CA; give the CA of the servers too")

    @property
    def tls(self) -> bool:
        return self.ca is not None


Kind = TypeVar("Kind", ServerSecurity, ClientSecurity)


def _check_secrets(security: ServerSecurity | ClientSecurity) -> None:
    certificate, key = security.certificate, security.key
    if security.token is not None:
        _check_token(security.token, "token")
    if (certificate is None) != (key is None):
        raise ConfigError("a certificate and its key go together; give both, or neither")
    if certificate is not None and key is not None:
        check_pair(certificate, key)


def towards_peers(server: ServerSecurity, ca: bytes | None = None) -> ClientSecurity:
    """Return the secrets with which a server connects to its peers. `ca` is the peers' CA, by default `client_ca`."""
    trusted = server.client_ca if ca is None else ca
    if server.tls and trusted is None:
        raise ConfigError("peers use TLS, but no CA is given to check their certificates; give --client-ca or --ca")
    own = server.files
    files = None if own is None else SecurityFiles(own.paths, lambda: towards_peers(own.read(), ca))
    if server.client_ca is None:  # servers ask for no certificates
        return ClientSecurity(server.token, trusted, files=files)
    return ClientSecurity(server.token, trusted, server.certificate, server.key, files)


def is_same(given: object, token: str) -> bool:
    """Return whether `given` is the token. Digests are compared in constant time, so that timing does not reveal it."""
    if not isinstance(given, str):
        return False
    ours, theirs = (hashlib.sha256(one.encode("utf-8", "surrogateescape")).digest() for one in (token, given))
    return hmac.compare_digest(ours, theirs)


def proof_of(token: str, challenge: str) -> str:
    """Return a proof for this `challenge` that the sender has the token. The proof does not reveal the token."""
    return hmac.new(token.encode(), challenge.encode(), hashlib.sha256).hexdigest()


def read_server_security(
    token_file: PathLike | None = None,
    cert: PathLike | None = None,
    key: PathLike | None = None,
    client_ca: PathLike | None = None,
    *,
    token: str | None = None,
) -> ServerSecurity:
    """Read and check a server's token, certificate, key and client CA. If `token` is given, no token file is read."""
    given = (token_file, cert, key, client_ca)
    files = SecurityFiles(given, lambda: read_server_security(*given, token=token))
    return ServerSecurity(token or _read_token(token_file), *_read_pair(cert, key), read_ca(client_ca), files)


def read_client_security(
    token_file: PathLike | None = None,
    ca: PathLike | None = None,
    cert: PathLike | None = None,
    key: PathLike | None = None,
    *,
    token: str | None = None,
) -> ClientSecurity:
    """Read and check a client's token, CA, certificate and key. If `token` is given, no token file is read."""
    given = (token_file, ca, cert, key)
    files = SecurityFiles(given, lambda: read_client_security(*given, token=token))
    return ClientSecurity(token or _read_token(token_file), read_ca(ca), *_read_pair(cert, key), files)


def _read_token(path: PathLike | None) -> str | None:
    if path is None:
        return None
    named = f"token file {os.fspath(path)}"
    token = _read_file(path, named, secret=True).strip(b" \t\r\n").decode("ascii", "replace")
    _check_token(token, named)
    return token


def _read_pair(cert: PathLike | None, key: PathLike | None) -> tuple[bytes | None, bytes | None]:
    if cert is None or key is None:
        if cert is not key:
            given, absent = ("cert", "key") if key is None else ("key", "cert")
            raise ConfigError(f"{given} is {cert or key}, but no {absent} is given; give both --cert and --key")
        return None, None
    named = (f"certificate {os.fspath(cert)}", f"key {os.fspath(key)}")
    certificate, private = _read_file(cert, named[0]), _read_file(key, named[1], secret=True)
    check_pair(certificate, private, named)
    return certificate, private


def read_ca(path: PathLike | None) -> bytes | None:
    """Read and check the certificate of a CA; None if no path is given."""
    if path is None:
        return None
    named = f"CA {os.fspath(path)}"
    content = _read_file(path, named)
    check_certificates(content, named)
    return content


def _read_file(path: PathLike, named: str, *, secret: bool = False) -> bytes:
    """Return the content of a small file. Raise ConfigError if it is unusable, or is a `secret` open to other users."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())  # of the opened file, which cannot be replaced meanwhile
            if not stat.S_ISREG(status.st_mode):  # O_NONBLOCK: opening a pipe would wait for its writer
                raise ConfigError(f"{named} is not a file; give the path of one")
            # As ssh does. A group may read another user's file: secrets are mounted so in containers.
            open_to = stat.S_IRWXO | (stat.S_IRWXG if status.st_uid == os.geteuid() else stat.S_IWGRP)
            if secret and status.st_mode & open_to:
                mode = f"{stat.S_IMODE(status.st_mode):04o}, others than its owner have access"
                raise ConfigError(f"{named} has mode {mode}; set it: chmod 600 {os.fspath(path)}")
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


def _check_token(token: str, named: str) -> None:
    """Raise ConfigError for an unusable token. The message hides it: it may be the right token with a typing error."""
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise ConfigError(
            f"{named} has {len(token)} characters; give {MIN_TOKEN} to {MAX_TOKEN}, e.g. openssl rand -hex 32 > token"
        )
    if not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(f"{named} has characters that no header can hold; give letters, digits and signs, no spaces")


class Reloading(Generic[Kind]):
    """A security object whose files are read again when they change. If that fails, the old content stays in use."""

    def __init__(self, security: Kind, make_context: Callable[[Kind], ssl.SSLContext | None] | None = None) -> None:
        """`make_context` makes the TLS context of a security object; the default is `tls_context`."""
        self._security: Kind = security
        self._files = security.files
        self._make_context: Callable[[Kind], ssl.SSLContext | None] = make_context or tls_context
        self._version = self._look()
        self._context: ssl.SSLContext | None = self._make_context(security) if security.tls else None
        self._lock = threading.Lock()

    def now(self) -> tuple[Kind, ssl.SSLContext | None]:
        """Return the current security object and its TLS context, which is None without TLS."""
        with self._lock:
            version = self._look()
            if version != self._version and self._files is not None:
                self._version = version
                try:
                    security = self._files.read()
                    self._context = self._make_context(security) if security.tls else None
                    self._security = security
                except (ConfigError, OSError) as error:  # half written, say
                    warnings.warn(f"{error}; the old one stays in use", stacklevel=2)
            return self._security, self._context

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Return each file's inode, modification time and size, or None if it is missing. Links are followed."""
        found: list[tuple[int, int, int] | None] = []
        paths = () if self._files is None else self._files.paths
        for path in [path for path in paths if path is not None]:
            found.append(None)
            with suppress(OSError):
                status = os.stat(path)
                found[-1] = (status.st_ino, status.st_mtime_ns, status.st_size)
        return found


def tls_context(security: ServerSecurity | ClientSecurity) -> ssl.SSLContext:
    """Return the TLS 1.3 context of a graph server or its client."""
    serves = isinstance(security, ServerSecurity)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    trusted = security.client_ca if isinstance(security, ServerSecurity) else security.ca
    if trusted is not None:
        context.load_verify_locations(cadata=trusted.decode("ascii", "replace"))
        context.verify_mode = ssl.CERT_REQUIRED
    if security.certificate is not None and security.key is not None:
        load_pair(context, security.certificate, security.key)
    if serves:
        context.num_tickets = 0
    return context


def check_pair(certificate: bytes, key: bytes, named: tuple[str, str] = ("the certificate", "the key")) -> None:
    """Raise ConfigError if a certificate is damaged, is not valid now, or does not belong to the key."""
    check_certificates(certificate, named[0])
    if b"ENCRYPTED" in key:  # OpenSSL would ask at the terminal
        raise ConfigError(
            f"{named[1]} is locked with a passphrase; give it without one: openssl pkey -in locked.key -out server.key"
        )
    try:
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{named[1]} is not the key of {named[0]}; give the two that belong together") from error
        reason = error.reason or "no PEM text"
        raise ConfigError(f"{named[1]} with {named[0]} cannot be used: {reason}; give PEM files; {HINT}") from error


def check_certificates(text: bytes, named: str) -> None:
    """Raise ConfigError if a text has no certificate, or its first one is not valid now. Others may have expired."""
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
        raise ConfigError(f"{named} has expired on {ends:%Y-%m-%d %H:%M} UTC; give one that is valid now; {HINT}")
    if now < begins:
        raise ConfigError(f"{named} is valid only from {begins:%Y-%m-%d %H:%M} UTC; wait, or set this host's clock")


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a certificate and its key into a TLS context, through unnamed temporary files: ssl reads only files."""
    with _unnamed(certificate) as certificate_path, _unnamed(key) as key_path:
        context.load_cert_chain(certificate_path, key_path, password="")


@contextmanager
def _unnamed(content: bytes) -> Iterator[str]:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)  # flushes; systems other than Linux share the position with the reader
        folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
        yield os.path.join(folder, str(file.fileno()))


def check_listen(host: str, security: ServerSecurity, *, insecure: bool = False, flag: str = "--listen") -> str | None:
    """Return a warning about a server's address, or None. Unless `insecure`, raise ConfigError without protection."""
    if is_loopback(host):
        return None
    where = f"{flag} {host or '(every address)'}"
    if not security.tls and security.token is None:
        if not insecure:
            raise ConfigError(
                f"{where} is reached from other hosts, and nothing protects it; give --cert and --key "
                "(docs/security.md has the commands), or --token-file, or listen on 127.0.0.1; "
                "--insecure lets everybody in"
            )
        return f"{where} with --insecure: whoever reaches it reads all, and so may others on the way"
    if not security.tls:
        return f"{where} without TLS: others on the network path can read what is sent; give --cert and --key as well"
    if security.token is None and security.client_ca is None:
        return f"{where} asks nobody for proof: whoever reaches it reads all; give --token-file or --client-ca"
    return None
