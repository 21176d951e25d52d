"""A recipe as text: the resolved run.toml that a run leaves behind, and the table of the documentation."""

from typing import Any

from hoploom.config.keys import REQUIRED, default_of
from hoploom.config.text import as_toml
from hoploom.train.runs.run_file import KEYS, SECTIONS, Recipe, all_keys, applies, full_name, keys_of


def to_toml(recipe: Recipe) -> str:
    """Every key that has a say, so that `read_recipe` gives an equal recipe."""
    values = values_of(recipe)
    lines: list[str] = []
    for section in ("", *SECTIONS):
        lines += [f"\n[{section}]"] if section else []
        for name in keys_of(section):
            key = full_name(section, name)
            if applies(key, values) and values[key] is not None:
                lines.append(f"{name} = {as_toml(values[key])}")
    return "\n".join(lines) + "\n"


def values_of(recipe: Recipe) -> dict[str, Any]:
    """Every key's value by its full name."""
    values: dict[str, Any] = {}
    for key, _ in all_keys():
        section, _, name = key.rpartition(".")
        values[key] = getattr(getattr(recipe, section) if section else recipe, name)
    return values


def reference() -> str:
    """The table of every key, in Markdown."""
    lines = ["| Key | Default | Takes | What it says |", "|---|---|---|---|"]
    for key, described in all_keys():
        default = default_of(described)
        shown = "required" if default is REQUIRED else "" if default in (None, {}) else f"`{as_toml(default)}`"
        lines.append(f"| `{key}` | {shown} | {KEYS[key].rule.expects} | {KEYS[key].help}{_condition(key)} |")
    return "\n".join(lines) + "\n"


def _condition(key: str) -> str:
    only = KEYS[key].only
    if only is None:
        return ""
    if only.absent:
        return f"; not beside `{only.selector}`"
    return f"; with `{only.selector}`" + (f" {' or '.join(f'`{word}`' for word in only.words)}" if only.words else "")
