"""Keys as dataclass fields: each stands once, with its default, its rule and its help.

Readers, templates and the tables of the documentation are made from them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from hoploom.config.rules import KeyRule
from hoploom.config.toml import as_toml
from hoploom.errors import ConfigError

Headings = Mapping[str, type[Any]]  # "train", "hosts.NAME", "" above the sections -> the dataclass with the keys


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
        """Why a key has no effect where the selector has this value."""
        if self.absent:
            return f"has no effect with {self.selector}; leave it out"
        if not self.words:
            return f"has no effect without {self.selector}; leave it out"
        listed = " or ".join(f'"{word}"' for word in self.words)
        return f'is for {self.selector} = {listed}, and that is "{value}"; leave it out'

    def condition(self) -> str:
        """For the tables of the documentation."""
        if self.absent:
            return f"; not with `{self.selector}`"
        return f"; with `{self.selector}`" + (
            f" {' or '.join(f'`{word}`' for word in self.words)}" if self.words else ""
        )


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    help: str
    rule: KeyRule
    example: Any = None  # what the template shows where there is no default
    only: Only | None = None


def key(default: Any, help: str, rule: KeyRule, *, example: Any = None, only: Only | None = None) -> Any:
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


def keys_in(owner: type[Any]) -> dict[str, "Field[Any]"]:
    """The keys of a dataclass by name."""
    return {described.name: described for described in fields(owner) if "key" in described.metadata}


def default_of(described: "Field[Any]") -> Any:
    """What a key is where it is left out; REQUIRED if it must not be."""
    if described.default_factory is not MISSING:
        return described.default_factory()
    return REQUIRED if described.default is MISSING else described.default


def problem(where: Mapping[str, str], name: str, message: str) -> ConfigError:
    """An error that begins with where a key was set, or where the whole is from (the name "")."""
    place = where.get(name) or where.get("")
    return ConfigError(f"{place}: {message}" if place else message)


def key_table(keys: Iterable[tuple[str, "Field[Any]"]]) -> list[str]:
    """The rows of a table of keys for the documentation, in Markdown: names, and what they declare."""
    rows = ["| Key | Default | Takes | What it says |", "|---|---|---|---|"]
    for name, described in keys:
        key, default = key_of(described), default_of(described)
        shown = "required" if default is REQUIRED else "" if default in (None, (), {}) else f"`{as_toml(default)}`"
        condition = "" if key.only is None else key.only.condition()
        rows.append(f"| `{name}` | {shown} | {key.rule.expects} | {key.help}{condition} |")
    return rows
