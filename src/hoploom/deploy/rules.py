"""What only the keys of cluster files take: lists, tables, addresses, paths on hosts. The rest is in hoploom.config."""

import re
from typing import Any

from hoploom.config.rules import Rule, text, whole
from hoploom.errors import ConfigError

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.:-]*[A-Za-z0-9_])?")  # a name, an IPv4 or an IPv6 address
LOGIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]*")  # nothing that ssh could take for an option
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?")  # what Kubernetes takes for a name, with room for ours
PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


def _matching(expects: str, pattern: re.Pattern[str]) -> Rule:
    def read(value: Any) -> str | None:
        return value if isinstance(value, str) and pattern.fullmatch(value) else None

    return Rule(expects, read, is_text=True)


def host() -> Rule:
    """A host's name or address."""
    return _matching('a host name or an IP address, e.g. "10.0.0.1"', HOST)


def login() -> Rule:
    """What ssh is told to connect to."""
    return _matching('"host" or "user@host", as ssh takes it', LOGIN)


def label() -> Rule:
    """A name that Kubernetes and Slurm take."""
    return _matching("lower-case letters, digits and dashes, at most 53 characters", LABEL)


def address() -> Rule:
    """host:port."""

    def read(value: Any) -> str | None:
        name, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        named = colon and HOST.fullmatch(name.removeprefix("[").removesuffix("]"))
        return value if named and port.isascii() and port.isdigit() and 0 < int(port) < 65536 else None

    return Rule('"host:port", e.g. "10.0.0.1:29500"', read, is_text=True)


def port() -> Rule:
    """A port."""
    return whole(1, 65535)


def amount() -> Rule:
    """An amount of bytes."""

    def read(value: Any) -> str | None:
        from hoploom.config.amounts import parse_bytes  # brings torch, which is loaded where somebody needs it

        try:
            return value if isinstance(value, str) and parse_bytes("size", value) else None
        except ConfigError:
            return None

    return Rule('a size in quotes, e.g. "4GB"', read, is_text=True)


def share_or_amount() -> Rule:
    """A share in percent, or an amount of bytes."""

    def read(value: Any) -> str | None:
        percent = PERCENT.fullmatch(value) if isinstance(value, str) else None
        if percent is None:
            found: str | None = amount().read(value)
            return found
        return percent[0] if 0 < float(percent[1]) <= 100 else None

    return Rule('a share or a size in quotes, e.g. "20%" or "4GB"', read, is_text=True)


def fanouts() -> Rule:
    """Picks per node, a count per hop."""
    one = whole(-1)

    def read(value: Any) -> tuple[int, ...] | None:
        good = isinstance(value, list) and all(one.read(count) is not None for count in value)
        return tuple(value) or None if good else None

    return Rule("a list with a count per layer (-1: all neighbours), e.g. [15, 10, 5]", read)


def place() -> Rule:
    """A path on a host; nothing there expands a ~."""
    given = text("a path in quotes, written out without ~")

    def read(value: Any) -> str | None:
        found: str | None = given.read(value)
        return None if found is None or found.startswith("~") else found

    return Rule(given.expects, read, is_text=True)


def texts(example: str) -> Rule:
    """A list of texts."""
    one = text()

    def read(value: Any) -> tuple[str, ...] | None:
        given = isinstance(value, list) and all(one.read(entry) is not None for entry in value)
        return tuple(value) if given else None

    return Rule(f"a list of texts, e.g. {example}", read)


def ids(what: str) -> Rule:
    """A list of whole numbers from 0, each once; "0,1" will do, too."""
    one = whole(0)

    def read(value: Any) -> tuple[int, ...] | None:
        if isinstance(value, str):
            words = [word.strip() for word in value.split(",")]
            value = [int(word) if word.isascii() and word.isdigit() else None for word in words]
        elif isinstance(value, int):
            value = [value]
        good = isinstance(value, list) and all(one.read(entry) is not None for entry in value)
        return tuple(value) if good and len(set(value)) == len(value) else None

    return Rule(f"a list of {what}, each once, e.g. [0, 1]", read)


def variables() -> Rule:
    """A table of environment variables; numbers become text, as a shell has them."""

    def read(value: Any) -> dict[str, str] | None:
        if not isinstance(value, dict):
            return None
        names = all(isinstance(name, str) and VARIABLE.fullmatch(name) for name in value)
        plain = all(isinstance(entry, str | int | float) and not isinstance(entry, bool) for entry in value.values())
        written = {name: str(entry) for name, entry in value.items()}
        return written if names and plain and not any("\0" in entry for entry in written.values()) else None

    return Rule('a table of variables with text or numbers, e.g. { NCCL_DEBUG = "INFO" }', read)
