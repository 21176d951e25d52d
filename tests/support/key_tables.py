"""Tables of keys in Markdown, as the pages of the documentation have them."""

from collections.abc import Iterable
from dataclasses import Field
from typing import Any

from hoploom.config.rules import REQUIRED, KeyCondition, default_of, key_of
from hoploom.config.values import as_toml


def condition_of(only: KeyCondition) -> str:
    """Return a condition in words."""
    words = " or ".join(f"`{word}`" for word in only.words)
    others = f", or with `{only.other}`" if only.other else ""
    return f"{'not' if only.absent else 'only'} with `{only.selector}`" + (f" = {words}" if words else "") + others


def key_table(keys: Iterable[tuple[str, "Field[Any]"]], *, under: KeyCondition | None = None) -> list[str]:
    """Return a table of keys, without the condition `under` that all of them share."""
    rows = ["| Key | Default | Value | Meaning |", "|---|---|---|---|"]
    for name, described in keys:
        key, default = key_of(described), default_of(described)
        shown = "required" if default is REQUIRED else "" if default in (None, (), {}) else f"`{as_toml(default)}`"
        condition = "" if key.only is None or key.only == under else f"; {condition_of(key.only)}"
        rows.append(f"| `{name}` | {shown} | {key.rule.expects} | {key.help}{condition} |")
    return rows
