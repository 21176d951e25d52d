"""What a key takes: how its value is read, and how to say what is expected.

A rule checks one value by itself; what must hold between keys is for who owns the file.
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hoploom.config.values import as_fanouts, parse_bytes, parse_share_or_bytes, read_addresses, split_address
from hoploom.errors import ConfigError

MOST = 2**31 - 1  # of a count
MOST_SEED = 2**63 - 1
HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.:-]*[A-Za-z0-9_])?")  # a name, an IPv4 or an IPv6 address
LOGIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]*")  # nothing that ssh could take for an option
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?")  # what Kubernetes takes for a name, with room for ours
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass(frozen=True)
class KeyRule:
    """How a value is read, or None where it will not do."""

    expects: str
    read: Callable[[Any], Any]
    words: tuple[str, ...] = ()  # all that may be given, where that is a list
    is_text: bool = False  # `--set key=12` then means "12"


# --- numbers and truth ---------------------------------------------------------------------------


def whole(least: int, most: int = MOST) -> KeyRule:
    """A whole number."""
    limits = f"of at least {least}" if most == MOST else f"from {least} to {most}"

    def read(value: Any) -> int | None:
        given = isinstance(value, int) and not isinstance(value, bool)
        return value if given and least <= value <= most else None

    return KeyRule(f"a whole number {limits}", read)


def number(least: float = 0.0, most: float = math.inf, *, open_ends: bool = False) -> KeyRule:
    """A finite number; open_ends: neither of its limits."""
    if most == math.inf:
        limits = f"above {least:g}" if open_ends else f"of at least {least:g}"
    else:
        limits = f"between {least:g} and {most:g}" if open_ends else f"from {least:g} to {most:g}"

    def read(value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        inside = least < value < most if open_ends else least <= value <= most
        return float(value) if inside and value <= sys.float_info.max else None

    return KeyRule(f"a number {limits}", read)


def share() -> KeyRule:
    """A number from 0 to below 1."""
    inside = number(0.0, 1.0)
    return KeyRule("a number from 0 to below 1", lambda value: None if value == 1 else inside.read(value))


def flag() -> KeyRule:
    """true or false."""
    return KeyRule("true or false", lambda value: value if isinstance(value, bool) else None)


def port() -> KeyRule:
    """A port."""
    return whole(1, 65535)


# --- text ----------------------------------------------------------------------------------------


def text(expects: str = "text in quotes", *, empty: bool = False) -> KeyRule:
    """A string without line ends."""

    def read(value: Any) -> str | None:
        return value if isinstance(value, str) and (value or empty) and value.isprintable() else None

    return KeyRule(expects, read, is_text=True)


def choice(*words: str) -> KeyRule:
    """One of these words."""
    listed = ", ".join(f'"{word}"' for word in words)
    return KeyRule(f"one of {listed}", lambda value: value if value in words else None, words, is_text=True)


def matching(expects: str, pattern: re.Pattern[str]) -> KeyRule:
    """Text that is all of a pattern."""

    def read(value: Any) -> str | None:
        return value if isinstance(value, str) and pattern.fullmatch(value) else None

    return KeyRule(expects, read, is_text=True)


def accepted(expects: str, check: Callable[[Any], Any], *, kinds: Any = str, words: tuple[str, ...] = ()) -> KeyRule:
    """A value of these types, as it stands, that a check of its owner does not refuse with a ConfigError."""

    def read(value: Any) -> Any:
        if not isinstance(value, kinds):
            return None
        try:
            check(value)
        except ConfigError:
            return None
        return value

    return KeyRule(expects, read, words, is_text=kinds is str)


def path() -> KeyRule:
    """A path of this machine."""
    given = text("a path in quotes")
    return KeyRule(given.expects, lambda value: None if given.read(value) is None else Path(value), is_text=True)


def path_on_hosts() -> KeyRule:
    """A path on other hosts; nothing there expands a ~."""
    given = text("a path in quotes, written out without ~")

    def read(value: Any) -> str | None:
        return None if given.read(value) is None or value.startswith("~") else str(value)

    return KeyRule(given.expects, read, is_text=True)


def function() -> KeyRule:
    """A function's place in a module."""
    return matching('"module:function", e.g. "my_model:make"', FUNCTION)


# --- hosts ---------------------------------------------------------------------------------------


def host() -> KeyRule:
    """A host's name or address."""
    return matching('a host name or an IP address, e.g. "10.0.0.1"', HOST)


def login() -> KeyRule:
    """What ssh is told to connect to."""
    return matching('"host" or "user@host", as ssh takes it', LOGIN)


def label() -> KeyRule:
    """A name that Kubernetes and Slurm take."""
    return matching("lower-case letters, digits and dashes, at most 53 characters", LABEL)


def address() -> KeyRule:
    """Where one listens, at a port of its own choice."""

    def check(value: str) -> None:
        name, port = split_address(value)
        if not port or not HOST.fullmatch(name):
            raise ConfigError(f"the address is {value!r:.100}; give HOST:PORT")

    return accepted('"host:port", e.g. "10.0.0.1:29500"', check)


def addresses() -> KeyRule:
    """Where several listen: a list, or a text with commas."""
    given = accepted('a list of host:port, e.g. ["10.0.0.1:7000", "10.0.0.2:7000"]', read_addresses, kinds=str | list)
    return replace(given, read=lambda value: None if given.read(value) is None else tuple(read_addresses(value)))


# --- amounts -------------------------------------------------------------------------------------


def size() -> KeyRule:
    """An amount of bytes."""
    return accepted('a size in quotes, e.g. "4GB"', lambda value: parse_bytes("size", value))


def share_or_size() -> KeyRule:
    """A share in percent, or an amount of bytes; more than nothing."""

    def check(value: str) -> None:
        if not parse_share_or_bytes("size", value, "give more than 0"):
            raise ConfigError("size is 0; give more")

    return accepted('a share or a size in quotes, e.g. "20%" or "4GB"', check)


def fanouts() -> KeyRule:
    """A list of fanouts."""

    def read(value: Any) -> tuple[int, ...] | None:
        try:
            counts = as_fanouts(value) if isinstance(value, list) else ()
        except ConfigError:
            return None
        return counts if counts and max(counts) <= MOST else None

    return KeyRule("a list with a count per layer (-1: all neighbours), e.g. [15, 10, 5]", read)


# --- lists and tables ----------------------------------------------------------------------------


def texts(expects: str, *, single: bool = False) -> KeyRule:
    """A list of texts, and with `single` one that stands for a list of itself and must not be empty."""
    one = text()

    def read(value: Any) -> tuple[str, ...] | None:
        listed = [value] if single and not isinstance(value, list) else value
        given = isinstance(listed, list) and all(one.read(entry) is not None for entry in listed)
        return tuple(listed) if given and (listed or not single) else None

    return KeyRule(expects, read)


def ids(what: str) -> KeyRule:
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

    return KeyRule(f"a list of {what}, each once, e.g. [0, 1]", read)


def table_of(entry: KeyRule, expects: str) -> KeyRule:
    """A table whose values follow a rule."""

    def read(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            return None
        entries = {name: entry.read(given) for name, given in value.items()}
        return None if None in entries.values() else entries

    return KeyRule(expects, read)


def variables() -> KeyRule:
    """A table of environment variables; numbers become text, as a shell has them."""

    def read(value: Any) -> dict[str, str] | None:
        if not isinstance(value, dict):
            return None
        names = all(isinstance(name, str) and VARIABLE.fullmatch(name) for name in value)
        plain = all(isinstance(entry, str | int | float) and not isinstance(entry, bool) for entry in value.values())
        written = {name: str(entry) for name, entry in value.items()}
        return written if names and plain and not any("\0" in entry for entry in written.values()) else None

    return KeyRule('a table of variables with text or numbers, e.g. { NCCL_DEBUG = "INFO" }', read)


def options() -> KeyRule:
    """A table with any content."""
    return KeyRule("a table, e.g. { width = 64 }", lambda value: value if isinstance(value, dict) else None)
