"""What a key of run.toml takes: how its value is read, and how to say what is expected.

A rule checks one value by itself; what must hold between keys is in checks.py.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field
from difflib import get_close_matches
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


@dataclass(frozen=True)
class Only:
    """A key that is for some choices of another key only."""

    selector: str  # "task.kind"
    words: tuple[str, ...] = ()  # its values; (): any that is given
    absent: bool = False  # where the selector is left out

    def allows(self, value: Any) -> bool:
        if self.absent:
            return value is None
        return value in self.words if self.words else value is not None

    def refusal(self, value: Any) -> str:
        """Why a key has no say where the selector has this value."""
        if self.absent:
            return f"has no say beside {self.selector}; leave it out"
        if not self.words:
            return f"has no say without {self.selector}; leave it out"
        listed = " or ".join(f'"{word}"' for word in self.words)
        return f'is for {self.selector} = {listed}, and that is "{value}"; leave it out'


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    help: str
    rule: Rule
    example: Any = None  # what the template shows where there is no default
    only: Only | None = None


def key(default: Any, help: str, rule: Rule, *, example: Any = None, only: Only | None = None) -> Any:
    """A dataclass field that is a key. default=REQUIRED: it must be given; None: it may be left out."""
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
    """What key() said of a dataclass field."""
    found: Key = described.metadata["key"]
    return found


def nearest(name: str, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The known word most like this one."""
    lowered = {word.lower(): word for word in known}
    found = get_close_matches(name.lower(), list(lowered), n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None


# --- rules ---------------------------------------------------------------------------------------


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


def fanouts() -> Rule:
    """A list of fanouts."""
    expects = "a list with a count per layer (-1: all neighbours), e.g. [15, 10, 5]"
    return Rule(expects, _read_fanouts)


def _read_fanouts(value: Any) -> tuple[int, ...] | None:
    one = whole(-1)
    if not isinstance(value, list) or not value or any(one.read(count) is None for count in value):
        return None
    return tuple(value)


def relation_fanouts() -> Rule:
    """Lists of fanouts by relation."""

    def read(value: Any) -> dict[str, tuple[int, ...]] | None:
        if not isinstance(value, dict):
            return None
        lists = {name: _read_fanouts(counts) for name, counts in value.items()}
        return None if None in lists.values() else lists  # type: ignore[return-value]

    return Rule('a table of lists by relation, e.g. { "author writes paper" = [5, 5] }', read)


def factory() -> Rule:
    """A function's address."""

    def read(value: Any) -> str | None:
        module, colon, function = value.partition(":") if isinstance(value, str) else ("", "", "")
        named = colon and all(part.isidentifier() for part in module.split(".")) and function.isidentifier()
        return value if named else None

    return Rule('"module:function", e.g. "my_model:make"', read, is_text=True)


def options() -> Rule:
    """A table with any content."""
    return Rule("a table, e.g. { width = 64 }", lambda value: value if isinstance(value, dict) else None)
