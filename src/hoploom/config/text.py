"""TOML text from values: what tomllib reads back as the same. One line per value, nothing pretty."""

import re
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

BARE = re.compile(r"[A-Za-z0-9_-]+")
ESCAPED = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


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
