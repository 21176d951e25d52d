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
BLANK = " \t"
BARE_END = BLANK + ".=]\n"  # what ends a bare key
SCALAR_END = ",]}#\n"  # what ends a number, a boolean or a date
ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}

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
    """The line, from 1, of every key and table header.

    >>> lines_of("a = 1\\n[b]\\nc.d = 2\\n")
    {('a',): 1, ('b',): 2, ('b', 'c'): 3, ('b', 'c', 'd'): 3}
    """
    walk = _Walk(text.replace("\r\n", "\n"))
    table: KeyPath = ()
    while walk.to_next_statement():
        if walk.here == "[":
            table = _header(walk)
        else:
            _pair(walk, table)
    return walk.lines


@dataclass
class _Walk:
    """A place in the text, and the keys met so far."""

    text: str
    at: int = 0
    lines: dict[KeyPath, int] = field(default_factory=dict)
    line: int = 1

    @property
    def here(self) -> str:
        return self.text[self.at : self.at + 1]

    def step(self, count: int = 1) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def skip(self, characters: str) -> None:
        while self.here and self.here in characters:
            self.step()

    def to_next_statement(self) -> bool:
        """Over blanks, line ends and comments; False at the end of the text."""
        while self.here and self.here in BLANK + "\n#":
            self.step(self._comment() if self.here == "#" else 1)
        return bool(self.here)

    def _comment(self) -> int:
        end = self.text.find("\n", self.at)
        return (len(self.text) if end < 0 else end) - self.at

    def note(self, path: KeyPath, first: int) -> None:
        """This line sets the key, and the tables that its dots go through."""
        for length in range(first + 1, len(path) + 1):
            self.lines.setdefault(path[:length], self.line)


def _header(walk: _Walk) -> KeyPath:
    walk.skip("[" + BLANK)
    path = _key(walk)
    walk.note(path, 0)
    walk.skip(BLANK + "]")
    return path


def _pair(walk: _Walk, table: KeyPath) -> None:
    path = (*table, *_key(walk))
    walk.note(path, len(table))
    walk.skip(BLANK + "=")
    _value(walk, path)


def _key(walk: _Walk) -> KeyPath:
    names = [_name(walk)]
    walk.skip(BLANK)
    while walk.here == ".":
        walk.skip("." + BLANK)
        names.append(_name(walk))
        walk.skip(BLANK)
    return tuple(names)


def _name(walk: _Walk) -> str:
    if walk.here in ('"', "'"):
        return _string(walk)
    begin = walk.at
    while walk.here and walk.here not in BARE_END:
        walk.step()
    return walk.text[begin : walk.at]


def _value(walk: _Walk, path: KeyPath) -> None:
    if walk.here in ('"', "'"):
        _string(walk)
    elif walk.here == "[":
        _array(walk, path)
    elif walk.here == "{":
        _inline_table(walk, path)
    else:
        while walk.here and walk.here not in SCALAR_END:
            walk.step()


def _array(walk: _Walk, path: KeyPath) -> None:
    walk.step()
    while walk.to_next_statement() and walk.here != "]":
        if walk.here == ",":
            walk.step()
        else:
            _value(walk, path)
    walk.step()


def _inline_table(walk: _Walk, path: KeyPath) -> None:
    walk.step()
    while walk.to_next_statement() and walk.here != "}":
        if walk.here == ",":
            walk.step()
        else:
            _pair(walk, path)
    walk.step()


def _string(walk: _Walk) -> str:
    """Over a string of any of the four kinds; what a one-line one says."""
    quote = walk.here
    if walk.text.startswith(quote * 3, walk.at):
        return _long_string(walk, quote)
    walk.step()
    characters: list[str] = []
    while walk.here and walk.here != quote:
        characters.append(_character(walk, escapes=quote == '"'))
    walk.step()
    return "".join(characters)


def _long_string(walk: _Walk, quote: str) -> str:
    begin = walk.at
    walk.step(3)
    while walk.here and not walk.text.startswith(quote * 3, walk.at):
        _character(walk, escapes=quote == '"')
    while walk.here == quote:  # up to two quotes may stand before the closing three
        walk.step()
    return walk.text[begin : walk.at]


def _character(walk: _Walk, *, escapes: bool) -> str:
    character = walk.here
    walk.step()
    if character != "\\" or not escapes:
        return character
    letter = walk.here
    walk.step()
    if letter not in HEX_DIGITS:
        return ESCAPES.get(letter, letter)
    digits = walk.text[walk.at : walk.at + HEX_DIGITS[letter]]
    walk.step(len(digits))
    return chr(int(digits, 16))


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
