"""What a key takes: how its value is read, and how to say what is expected.

A rule checks one value by itself; what must hold between keys is for who owns the file.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST = 2**31 - 1  # of a count
MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Rule:
    """How a value is read, or None where it will not do."""

    expects: str
    read: Callable[[Any], Any]
    words: tuple[str, ...] = ()  # all that may be given, where that is a list
    is_text: bool = False  # `--set key=12` then means "12"


def whole(least: int, most: int = MOST) -> Rule:
    """A whole number."""
    limits = f"of at least {least}" if most == MOST else f"from {least} to {most}"

    def read(value: Any) -> int | None:
        given = isinstance(value, int) and not isinstance(value, bool)
        return value if given and least <= value <= most else None

    return Rule(f"a whole number {limits}", read)


def number(least: float = 0.0, most: float = math.inf, *, open_ends: bool = False) -> Rule:
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

    return Rule(f"a number {limits}", read)


def share() -> Rule:
    """A number from 0 to below 1."""
    inside = number(0.0, 1.0)
    return Rule("a number from 0 to below 1", lambda value: None if value == 1 else inside.read(value))


def flag() -> Rule:
    """true or false."""
    return Rule("true or false", lambda value: value if isinstance(value, bool) else None)


def text(expects: str = "text in quotes", *, empty: bool = False) -> Rule:
    """A string without line ends."""

    def read(value: Any) -> str | None:
        return value if isinstance(value, str) and (value or empty) and value.isprintable() else None

    return Rule(expects, read, is_text=True)


def choice(*words: str) -> Rule:
    """One of these words."""
    listed = ", ".join(f'"{word}"' for word in words)
    return Rule(f"one of {listed}", lambda value: value if value in words else None, words, is_text=True)


def path() -> Rule:
    """A path."""
    given = text("a path in quotes")
    return Rule(given.expects, lambda value: None if given.read(value) is None else Path(value), is_text=True)


def options() -> Rule:
    """A table with any content."""
    return Rule("a table, e.g. { width = 64 }", lambda value: value if isinstance(value, dict) else None)
