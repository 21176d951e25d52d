"""TOML as people write it: parsed, with the line of every key, and values written as TOML text.

tomllib does not say which line sets a key, so the text is walked once more; what tomllib has read is not checked again.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any

from hoploom.errors import ConfigError

KeyPath = tuple[str, ...]
TOKEN = re.compile(
    r"""(?P<blank>[ \t]+|\#[^\n]*)
      | "{3}(?:\\.|[^\\])*?"{3,5} | '{3}.*?'{3,5}  # up to two quotes may stand before the closing three
      | "(?:\\.|[^"\\])*" | '[^']*'
      | [\[\]{}=,\n]
      | [^\s\[\]{}=,\#"']+""",
    re.VERBOSE | re.DOTALL,
)
LINE = re.compile(r"at line (\d+)")
BARE = re.compile(r"[A-Za-z0-9_-]+")
ESCAPED = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The tables of a text; `name` is what messages call it."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{name}: brackets are nested too deep; close them") from error
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        found = LINE.search(str(error))
        line = int(found[1]) if found else text.rstrip().count("\n") + 1
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"{name}:{line}: not TOML: {reason}; strings need quotes, tables a [header]") from error


# --- lines ---------------------------------------------------------------------------------------


def lines_of(text: str) -> Mapping[KeyPath, int]:
    """The line, from 1, of every key and table header. The text must be one that tomllib has read.

    >>> lines_of("a = 1\\n[b]\\nc.d = 2\\n")
    {('a',): 1, ('b',): 2, ('b', 'c'): 3, ('b', 'c', 'd'): 3}
    """
    text = text.replace("\r\n", "\n") + "\n"
    walk = _Walk(text)
    for token in TOKEN.finditer(text):
        if token.lastgroup != "blank":
            walk.take(token[0], token.start())
        walk.line += token[0].count("\n")
    return walk.lines


@dataclass
class _Walk:
    """What has been met up to a place in the text."""

    text: str
    line: int = 1
    lines: dict[KeyPath, int] = field(default_factory=dict)
    table: KeyPath = ()  # of the last header
    path: KeyPath = ()  # of the key whose value is read
    nested: list[tuple[str, KeyPath]] = field(default_factory=list)  # open brackets, and whose value they are
    begin: int | None = None  # of the key or header that is read
    awaits_key: bool = True

    def take(self, token: str, at: int) -> None:
        if self.begin is not None:
            self._in_key(token, self.text[self.begin : at])
        elif token in ("]", "}"):
            self.path = self.nested.pop()[1]
            self.awaits_key = False
        elif self.awaits_key and token != "\n":
            self.begin = at
        elif token in ("[", "{"):
            self.nested.append((token, self.path))
            self.awaits_key = token == "{"
        elif token == "\n" and not self.nested:
            self.awaits_key = True
        elif token == ",":
            self.awaits_key = self.nested[-1][0] == "{"

    def _in_key(self, token: str, read: str) -> None:
        """A header ends with its line, a key at the equals sign."""
        is_header = not self.nested and read.startswith("[")
        if token != ("\n" if is_header else "="):
            return
        base = () if is_header else self.nested[-1][1] if self.nested else self.table
        self.path = (*base, *_path(read if is_header else f"{read} = 0"))
        for length in range(len(base) + 1, len(self.path) + 1):
            self.lines.setdefault(self.path[:length], self.line)
        self.table = self.path if is_header else self.table
        self.begin, self.awaits_key = None, is_header


def _path(statement: str) -> KeyPath:
    """The names in a statement with one key or header."""
    path: KeyPath = ()
    found: Any = tomllib.loads(statement)
    while found and isinstance(found, dict | list):
        if isinstance(found, dict):
            path += tuple(found)
            found = next(iter(found.values()))
        else:
            found = found[0]
    return path


# --- text from values ----------------------------------------------------------------------------


def as_toml(value: Any) -> str:
    """A value as it stands behind `key = `."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return quoted(str(value))
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        inside = ", ".join(f"{as_key(key)} = {as_toml(entry)}" for key, entry in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return f"[{', '.join(map(as_toml, value))}]"


def as_key(name: str) -> str:
    """A key, in quotes where it needs them."""
    return name if BARE.fullmatch(name) else quoted(name)


def quoted(text: str) -> str:
    """A basic string."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in ESCAPED:
        return ESCAPED[character]
    is_control = ord(character) < 0x20 or ord(character) == 0x7F
    return f"\\u{ord(character):04X}" if is_control else character
