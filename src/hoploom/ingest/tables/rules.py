"""What only graph.toml's keys take: files, columns, splits, a reverse relation. The others: hoploom.config."""

import math
from typing import Any

from hoploom.config.rules import Rule, number, text


def texts(expects: str) -> Rule:
    """A string, or a list of strings; a tuple either way."""
    one = text()

    def read(value: Any) -> tuple[str, ...] | None:
        listed = value if isinstance(value, list) else [value]
        return tuple(listed) if listed and all(one.read(entry) is not None for entry in listed) else None

    return Rule(expects, read)


def named_columns() -> Rule:
    """Columns by the name of the field."""

    def read(value: Any) -> dict[str, str] | None:
        given = isinstance(value, dict) and all(text().read(column) is not None for column in value.values())
        return dict(value) if given else None

    return Rule('a table of columns by field, e.g. { rank = "pagerank" }', read)


def split() -> Rule:
    """A column, or the share of the nodes by split."""

    def read(value: Any) -> str | dict[str, float] | None:
        if not isinstance(value, dict):
            return text().read(value)  # type: ignore[no-any-return]
        shares = {name: number(0, 1).read(share) for name, share in value.items()}
        return shares if shares and all(shares.values()) and math.fsum(shares.values()) <= 1 + 1e-9 else None

    example = "{ train = 0.8, val = 0.1, test = 0.1 }"
    return Rule(f"a column in quotes, or shares above 0 that add up to at most 1, e.g. {example}", read)


def reverse() -> Rule:
    """Whether, or the name."""

    def read(value: Any) -> bool | str | None:
        return value if isinstance(value, bool) or text().read(value) is not None else None

    return Rule('true, false or the name of the reverse relation, e.g. "written_by"', read)


def fill() -> Rule:
    """What stands for nulls."""

    def read(value: Any) -> float | int | str | None:
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            return None
        return value if isinstance(value, int | float | str) else None

    return Rule("a number or text", read)
