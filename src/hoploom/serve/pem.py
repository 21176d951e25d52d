"""Are a certificate and its key what they should be? Asked when they are given, not when the first peer calls.

OpenSSL, through the standard library, says whether they can be read and belong together. It does not tell dates of a
certificate that is no CA, so those are read here from the DER, of which only the few fields on the way are understood.
"""

import os
import re
import ssl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NamedTuple

from hoploom.errors import ConfigError

CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
EXPLICIT_VERSION, UTC_TIME, GENERALIZED_TIME = 0xA0, 0x17, 0x18  # DER tags
REMAKE = "`hoploom certs FOLDER --hosts ...` makes new ones for tests"


class Validity(NamedTuple):
    """From when to when a certificate counts."""

    begins: datetime
    ends: datetime


def check_pair(certificate: bytes, key: bytes, named: tuple[str, str] = ("the certificate", "the key")) -> None:
    """Refuse a certificate that is damaged, out of date, or of another key."""
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
    """Refuse what holds no certificate, or whose first one does not count now; the rest of it may be of any age."""
    found = CERTIFICATE.findall(text)
    if not found:
        raise ConfigError(f"{named} holds no PEM certificate; give a file with -----BEGIN CERTIFICATE----- in it")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode("ascii", "replace"))
        begins, ends = validity(found[0])
    except (ssl.SSLError, ValueError, IndexError) as error:
        raise ConfigError(f"{named} holds a damaged certificate: {_reason(error)}; copy it again") from error
    now = datetime.now(UTC)
    if now > ends:
        raise ConfigError(f"{named} has expired on {ends:%Y-%m-%d %H:%M} UTC; give one that counts now; {REMAKE}")
    if now < begins:
        raise ConfigError(f"{named} counts only from {begins:%Y-%m-%d %H:%M} UTC; wait, or set this host's clock right")


def validity(certificate: bytes) -> Validity:
    """From when to when a PEM certificate counts."""
    der = ssl.PEM_cert_to_DER_cert(certificate.decode("ascii"))
    (_, signed), *_ = _elements(der)
    (_, contents), *_ = _elements(signed)
    fields = [content for tag, content in _elements(contents) if tag != EXPLICIT_VERSION]
    _serial, _algorithm, _issuer, times, *_ = fields
    begins, ends = (_time(tag, content) for tag, content in _elements(times))
    return Validity(begins, ends)


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element in a row of them."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length >= 0x80:  # then it tells how many bytes the length takes
            width = length - 0x80
            length, at = int.from_bytes(der[at : at + width], "big"), at + width
        yield tag, der[at : at + length]
        at += length


def _time(tag: int, content: bytes) -> datetime:
    form = {UTC_TIME: "%y%m%d%H%M%SZ", GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}.get(tag)
    if form is None:
        raise ValueError(f"tag {tag:#x} where a time should stand")
    return datetime.strptime(content.decode("ascii"), form).replace(tzinfo=UTC)


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Give a context its certificate and key, which it reads from files only: from two without a name, so none is left.

    A key in an unnamed file of mode 0600 is never to be seen by others, however this process ends.
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


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
