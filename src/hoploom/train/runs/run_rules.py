"""What only run.toml's keys take: fanouts, a function's address, servers. The other rules are in hoploom.config."""

import re
from collections.abc import Callable
from typing import Any

from hoploom.config.amounts import parse_bytes
from hoploom.config.rules import Rule, choice, whole
from hoploom.errors import ConfigError
from hoploom.gpu.place.request import NARROW, read_features, read_topology
from hoploom.serve.address import read_addresses


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


def addresses() -> Rule:
    """Where servers listen: a list, or a text with commas."""

    def read(value: Any) -> tuple[str, ...] | None:
        if not isinstance(value, str | list) or not value or not all(isinstance(one, str) for one in value):
            return None
        try:
            return tuple(read_addresses(value))
        except ConfigError:
            return None

    return Rule('a list of host:port, e.g. ["10.0.0.1:7000", "10.0.0.2:7000"]', read)


def parts() -> Rule:
    """Numbers of parts."""
    one = whole(0)

    def read(value: Any) -> tuple[int, ...] | None:
        numbers = value if isinstance(value, list) else [value]
        return tuple(sorted(set(numbers))) if numbers and all(one.read(n) is not None for n in numbers) else None

    return Rule("a list of numbers from 0 on, e.g. [0]", read)


def topology() -> Rule:
    """Where topology is placed."""
    words = ("cuda", "host", "auto")
    return Rule('"cuda", "host" or "auto"', _unless_refused(read_topology), words, is_text=True)


def features() -> Rule:
    """Where features are placed, or how many of them on the device."""
    words = ("cuda", "host", "auto", "spread")
    expects = '"cuda", "host", "auto", "spread", a share such as "20%" or 0.2, or a size such as "4GB"'
    return Rule(expects, _unless_refused(read_features, str | float), words)


def narrow() -> Rule:
    """What float features are kept in."""
    return choice(*NARROW)


def _unless_refused(check: Callable[[object], object], kinds: Any = str) -> Callable[[Any], Any]:
    """The value as it stands, where it is of these types and a check of it does not raise."""

    def read(value: Any) -> Any:
        if not isinstance(value, kinds):
            return None
        try:
            check(value)
        except ConfigError:
            return None
        return value

    return read


def size() -> Rule:
    """A share, or bytes."""

    def read(value: Any) -> str | None:
        if not isinstance(value, str):
            return None
        percent = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", value.strip())
        if percent is not None:
            return value.strip() if 0 < float(percent[1]) <= 100 else None
        try:
            parse_bytes("size", value)
        except ConfigError:
            return None
        return value.strip()

    return Rule('a share or a size in quotes, e.g. "20%" or "4GB"', read, is_text=True)
