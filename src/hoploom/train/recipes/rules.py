"""What only run.toml's keys take: fanouts, and a function's address. The other rules are in hoploom.toml."""

from typing import Any

from hoploom.toml.rules import Rule, whole


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
