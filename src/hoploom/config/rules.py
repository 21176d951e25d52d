"""Keys as dataclass fields with a default, a rule and a help text; and the rules for their values.

Readers, templates and the tables of the documentation derive from them. A rule checks one value; the owner of a file
checks conditions between keys.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hoploom.config.values import as_fanouts, as_toml, parse_bytes, parse_share_or_bytes, read_addresses, split_address
from hoploom.errors import ConfigError

Headings = Mapping[str, type[Any]]  # "train", "hosts.NAME", "" above the sections -> the dataclass with the keys
MOST = 2**31 - 1  # of a count
MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class KeyRule:
    """A reader of values that returns None for a wrong one, and the text that messages show of it."""

    expects: str
    read: Callable[[Any], Any]
    words: tuple[str, ...] = ()  # all accepted words, for rules of words
    is_text: bool = False  # `--set key=12` means "12"
    entry: "KeyRule | None" = None  # of the entries of a list, to name the wrong one


# --- keys ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyCondition:
    """A condition on another key (the selector) under which a key has an effect."""

    selector: str  # "task.kind"
    words: tuple[str, ...] = ()  # values of the selector; (): any
    absent: bool = False  # only if the selector is not given

    def allows(self, value: Any) -> bool:
        if self.absent:
            return value is None
        return value in self.words if self.words else value is not None

    def refusal(self, value: Any) -> str:
        """Return the message for a key that has no effect with this value of the selector."""
        if self.absent:
            return f"has no effect with {self.selector}; leave it out"
        if not self.words:
            return f"has no effect without {self.selector}; leave it out"
        listed = " or ".join(f'"{word}"' for word in self.words)
        return f'is for {self.selector} = {listed}, and that is "{value}"; leave it out'

    def condition(self) -> str:
        """Return the condition for the tables of the documentation."""
        if self.absent:
            return f"not with `{self.selector}`"
        return f"only with `{self.selector}`" + (
            f" = {' or '.join(f'`{word}`' for word in self.words)}" if self.words else ""
        )


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    help: str
    rule: KeyRule
    example: Any = None  # shown in templates if there is no default
    only: KeyCondition | None = None


def key(default: Any, help: str, rule: KeyRule, *, example: Any = None, only: KeyCondition | None = None) -> Any:
    """Return a dataclass field for a key. default=REQUIRED: it must be given; None: it may be missing."""
    described = {"key": Key(help, rule, example, only)}
    if default is REQUIRED:
        return field(metadata=described)
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=described)
    return field(default=default, metadata=described)


class _Required:
    """The default of a key that must be given."""


REQUIRED = _Required()


def key_of(described: "Field[Any]") -> Key:
    """Return the Key in the metadata of a dataclass field."""
    found: Key = described.metadata["key"]
    return found


def keys_in(owner: type[Any]) -> dict[str, "Field[Any]"]:
    """Return the keys of a dataclass by name."""
    return {described.name: described for described in fields(owner) if "key" in described.metadata}


def default_of(described: "Field[Any]") -> Any:
    """Return the default of a key, or REQUIRED if it has none."""
    if described.default_factory is not MISSING:
        return described.default_factory()
    return REQUIRED if described.default is MISSING else described.default


def problem(where: Mapping[str, str], name: str, message: str) -> ConfigError:
    """Return an error that begins with the place where a key is set, or with the file (the name "")."""
    place = where.get(name) or where.get("")
    return ConfigError(f"{place}: {message}" if place else message)


def key_table(keys: Iterable[tuple[str, "Field[Any]"]], *, under: KeyCondition | None = None) -> list[str]:
    """Return a Markdown table of keys for the documentation, without the condition `under` that all of them share."""
    rows = ["| Key | Default | Value | Meaning |", "|---|---|---|---|"]
    for name, described in keys:
        key, default = key_of(described), default_of(described)
        shown = "required" if default is REQUIRED else "" if default in (None, (), {}) else f"`{as_toml(default)}`"
        condition = "" if key.only is None or key.only == under else f"; {key.only.condition()}"
        rows.append(f"| `{name}` | {shown} | {key.rule.expects} | {key.help}{condition} |")
    return rows


# --- kinds of rules ------------------------------------------------------------------------------


def whole(least: int, most: int = MOST) -> KeyRule:
    """Return a rule for a whole number."""
    limits = f"of at least {least}" if most == MOST else f"from {least} to {most}"

    def read(value: Any) -> int | None:
        given = isinstance(value, int) and not isinstance(value, bool)
        return value if given and least <= value <= most else None

    return KeyRule(f"a whole number {limits}", read)


def number(least: float = 0.0, most: float = math.inf, *, open_ends: bool = False) -> KeyRule:
    """Return a rule for a finite number; with open_ends, the limits themselves are excluded."""
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


def parsed(
    expects: str, parse: Callable[[Any], Any], *, kinds: Any = str, words: tuple[str, ...] = (), is_text: bool = False
) -> KeyRule:
    """Return a rule that parses values of these types; `parse` rejects one with a ConfigError or None."""

    def read(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, kinds) else None
        except ConfigError:
            return None

    return KeyRule(expects, read, words, is_text)


def accepted(expects: str, check: Callable[[Any], Any], *, kinds: Any = str, words: tuple[str, ...] = ()) -> KeyRule:
    """Return a rule for unchanged values of these types; `check` rejects one with a ConfigError or False."""
    is_text = kinds is str
    return parsed(expects, lambda v: v if check(v) is not False else None, kinds=kinds, words=words, is_text=is_text)


def choice(*words: str) -> KeyRule:
    """Return a rule for one of these words."""
    listed = ", ".join(f'"{word}"' for word in words)
    return accepted(f"one of {listed}", lambda value: value in words, words=words)


def choices(*words: str) -> KeyRule:
    """Return a rule for a list of some of these words, each once, or for one word."""
    one, listed_words = choice(*words), ", ".join(f'"{word}"' for word in words)

    def read(value: Any) -> tuple[str, ...] | None:
        listed = value if isinstance(value, list) else [value]
        return tuple(listed) if all(one.read(entry) for entry in listed) and len(listed) == len(set(listed)) else None

    return KeyRule(f"a list of some of {listed_words}, each once", read, entry=one)


def matching(expects: str, pattern: str) -> KeyRule:
    """Return a rule for text that matches a whole pattern."""
    return accepted(expects, lambda value: re.fullmatch(pattern, value) is not None)


def texts(expects: str, *, single: bool = False) -> KeyRule:
    """Return a rule for a list of texts; with `single`, also one text, and no empty list."""

    def read(value: Any) -> tuple[str, ...] | None:
        listed = [value] if single and not isinstance(value, list) else value
        given = isinstance(listed, list) and all(TEXT.read(entry) is not None for entry in listed)
        return tuple(listed) if given and (listed or not single) else None

    return KeyRule(expects, read)


def ids(what: str, *, least: int = 0) -> KeyRule:
    """Return a rule for a list of at least `least` whole numbers from 0, each once; also for text such as "0,1"."""
    one = whole(0)

    def read(value: Any) -> tuple[int, ...] | None:
        if isinstance(value, str):
            words = [word.strip() for word in value.split(",")]
            value = [int(word) if word.isascii() and word.isdigit() else None for word in words]
        elif isinstance(value, int):
            value = [value]
        good = isinstance(value, list) and all(one.read(entry) is not None for entry in value)
        return tuple(value) if good and least <= len(value) == len(set(value)) else None

    return KeyRule(f"a list of {what}, each once, e.g. [0, 1]", read)


def table_of(entry: KeyRule, expects: str) -> KeyRule:
    """Return a rule for a table whose values follow the rule `entry`."""

    def read(value: Any) -> dict[str, Any] | None:
        entries = {name: entry.read(given) for name, given in value.items()} if isinstance(value, dict) else {"": None}
        return None if None in entries.values() else entries

    return KeyRule(expects, read)


# --- readers of the rules below ------------------------------------------------------------------


def _read_fanouts(value: list[Any]) -> tuple[int, ...] | None:
    counts = as_fanouts(value)
    return counts if counts and max(counts) <= MOST else None


def _is_address(value: str) -> bool:
    """Return whether this is host:port with a port above 0."""
    name, port = split_address(value)
    return port > 0 and HOST.read(name) is not None


def _read_variable(value: Any) -> str | None:
    """Return the text of an environment variable, which may be given as a number."""
    given = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if given and "\0" not in str(value) else None


def _read_variables(value: Any) -> dict[str, str] | None:
    read: dict[str, str] | None = table_of(KeyRule("", _read_variable), "").read(value)
    return read if read is not None and all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in read) else None


# --- rules ---------------------------------------------------------------------------------------

FLAG = accepted("true or false", lambda value: True, kinds=bool)
SHARE = KeyRule("a number from 0 to below 1", lambda value: None if value == 1 else number(0.0, 1.0).read(value))
PORT = whole(1, 65535)
FANOUTS = parsed("a list with a count per layer (-1: all neighbours), e.g. [15, 10, 5]", _read_fanouts, kinds=list)
SIZE = accepted('a size in quotes, e.g. "4GB"', lambda value: parse_bytes("size", value))
SHARE_OR_SIZE = accepted(
    'a share or a size in quotes, e.g. "20%" or "4GB"', lambda value: parse_share_or_bytes("size", value, "") > 0
)

TEXT = accepted("text in quotes", lambda value: bool(value) and value.isprintable())  # of one line
TEXT_OR_EMPTY = accepted("text in quotes", str.isprintable)
PATH = replace(TEXT, expects="a path in quotes", read=lambda value: None if TEXT.read(value) is None else Path(value))
HOST_PATH = accepted(  # other hosts do not expand ~
    "a path in quotes, written out without ~", lambda value: TEXT.read(value) is not None and value[0] != "~"
)
FUNCTION = matching('"module:function", e.g. "my_model:make"', r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
TABLE = accepted("a table, e.g. { width = 64 }", lambda value: True, kinds=dict)
VARIABLES = KeyRule('a table of variables with text or numbers, e.g. { NCCL_DEBUG = "INFO" }', _read_variables)

HOST = matching(  # a name, an IPv4 or an IPv6 address
    'a host name or an IP address, e.g. "10.0.0.1"', r"[A-Za-z0-9_]([A-Za-z0-9_.:-]*[A-Za-z0-9_])?"
)
LOGIN = matching(  # ssh must not take it for an option
    '"host" or "user@host", as ssh takes it', r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]*"
)
LABEL = matching(  # a name that Slurm and Kubernetes accept, with space for our suffix
    "lower-case letters, digits and dashes, at most 53 characters", r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?"
)
ADDRESS = accepted('"host:port", e.g. "10.0.0.1:29500"', _is_address)
ADDRESSES = parsed(
    'a list of host:port, e.g. ["10.0.0.1:7000", "10.0.0.2:7000"]', lambda v: tuple(read_addresses(v)), kinds=str | list
)
