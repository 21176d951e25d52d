"""TLS 1.3 for connections. Certificates, keys and tokens are read again when their files change.

A renewed certificate is used for the next connection, without a restart. If a file cannot be used, for example because
it is half written, there is a warning, and the old one stays in use.
"""

import os
import ssl
import threading
import warnings
from collections.abc import Callable
from typing import Generic, TypeVar

from hoploom.errors import ConfigError
from hoploom.serve.security import ClientSecurity, ServerSecurity, load_pair

Kind = TypeVar("Kind", ServerSecurity, ClientSecurity)
Stamp = tuple[object, ...]


class Renewed(Generic[Kind]):
    """The security of a server or a client, as its files are now."""

    def __init__(self, security: Kind, context_of: Callable[[Kind], ssl.SSLContext | None] | None = None) -> None:
        """`context_of` makes the TLS context."""
        self._security: Kind = security
        self._files = security.files
        self._context_of: Callable[[Kind], ssl.SSLContext | None] = context_of or of_connections
        self._stamp = self._look()
        self._context: ssl.SSLContext | None = self._context_of(security) if security.tls else None
        self._lock = threading.Lock()

    def now(self) -> tuple[Kind, ssl.SSLContext | None]:
        """The security of a new connection, and its TLS context; None without TLS."""
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp and self._files is not None:
                self._stamp = stamp
                try:
                    renewed = self._files.read()
                    self._context = self._context_of(renewed) if renewed.tls else None
                    self._security = renewed
                except (ConfigError, OSError) as error:
                    warnings.warn(f"{error}; the old one stays in use", stacklevel=2)
            return self._security, self._context

    def _look(self) -> Stamp:
        """What changes when a file is written or replaced, also if the path is a link."""
        found: list[object] = []
        for path in () if self._files is None else self._files.paths:
            try:
                status = os.stat(path)
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
            except OSError:
                found.append(None)
        return tuple(found)


def of_connections(security: ServerSecurity | ClientSecurity) -> ssl.SSLContext:
    """The TLS context of a server or a client."""
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
