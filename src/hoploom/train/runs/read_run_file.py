"""run.toml and --set become a recipe; what is wrong is named with its file and line, and with the nearest right word.

The first mistake ends the reading: one message is read, ten are not.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hoploom.config.keys import REQUIRED, default_of, nearest, problem
from hoploom.config.lines import KeyPath, lines_of
from hoploom.config.parse import parse, read_text
from hoploom.config.text import as_key, quoted
from hoploom.dist import environment
from hoploom.errors import ConfigError
from hoploom.train.runs.check_run_file import check
from hoploom.train.runs.run_file import (
    KEYS,
    SECTIONS,
    Recipe,
    all_keys,
    applies,
    full_name,
    keys_of,
)

SET = "--set "
Values = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """A value that a file or --set gives, as TOML has it."""

    value: Any
    where: str  # "run.toml:7", "--set train.epochs=3"
    folder: Path  # what relative paths are relative to
    raw: str | None = None  # as --set has it


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file; overrides are `section.key=value`.

    Relative paths are relative to the file, those of overrides to the current directory.
    """
    file = Path(path)
    text = read_text(file, f"`hoploom init {file}` writes one to start from", example="run.toml")
    return parse_recipe(text, overrides, name=str(file), folder=file.parent)


def parse_recipe(text: str, overrides: Sequence[str] = (), *, name: str = "run.toml", folder: Path = Path()) -> Recipe:
    """The recipe in a text. `name` is what messages call it, `folder` what its relative paths are relative to."""
    given = dict(_from_text(text, name, folder))
    for override in overrides:
        for key, entry in _from_override(override):
            given[key] = _merged(given.get(key), entry) if _is_table(key) else entry
    return _build(given, name, folder)


# --- what is given -------------------------------------------------------------------------------


def _from_text(text: str, name: str, folder: Path) -> Iterator[tuple[str, Given]]:
    parsed = parse(text, name)
    lines = lines_of(text)

    def where(path: KeyPath) -> str:
        return f"{name}:{lines[path]}"

    for path, value in sorted(_leaves(parsed, where), key=lambda leaf: lines[leaf[0]]):
        yield _known(path, where(path)), Given(value, where(path), folder)


def _leaves(parsed: Mapping[str, Any], where: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Every key outside and inside of the sections, and its value."""
    for name, value in parsed.items():
        if name not in SECTIONS:
            yield (name,), value
        elif isinstance(value, dict):
            yield from (((name, key), entry) for key, entry in value.items())
        else:
            raise ConfigError(
                f"{where((name,))}: {name} is {value!r:.60}; it is a section, write [{name}] and its keys"
            )


def _from_override(override: str) -> Iterator[tuple[str, Given]]:
    where, raw = f"{SET}{override}", override.partition("=")[2].strip()
    parsed = _parse_override(override)
    for path, value in _leaves(parsed, lambda path: where):
        yield _known(path, where), Given(value, where, Path(), raw)


def _parse_override(override: str) -> dict[str, Any]:
    """As TOML; what is no TOML value is text."""
    name, equals, raw = override.partition("=")
    if "\n" in override:
        raise ConfigError(f"{SET}{override.splitlines()[0]}: there is a line end behind it; give one --set per key")
    if not equals or not name.strip():
        raise ConfigError(f"{SET}{override}: there is no key=value; give one, e.g. --set train.epochs=3")
    for value in (raw, quoted(raw.strip())):
        try:
            return tomllib.loads(f"{name} = {value}")
        except (ValueError, RecursionError):
            if raw.strip()[:1] in ("[", "{", '"', "'"):
                break
    raise ConfigError(f"{SET}{override}: not TOML; give a key and a value, e.g. --set 'loader.fanouts=[10, 5]'")


def _is_table(name: str) -> bool:
    return name in ("model.options", "loader.relation_fanouts")


def _merged(before: Given | None, now: Given) -> Given:
    """--set of one option leaves the others."""
    if before is None or not isinstance(before.value, dict) or not isinstance(now.value, dict):
        return now
    return replace(now, value=before.value | now.value)


# --- keys that are not known ---------------------------------------------------------------------


def _known(path: KeyPath, where: str) -> str:
    section, name = path if len(path) > 1 else ("", path[0])
    if name in keys_of(section):
        return full_name(section, name)
    inside = f" in [{section}]" if section else ""
    raise ConfigError(f"{where}: unknown key {as_key(name)}{inside}; did you mean {_nearest_key(section, name)}?")


def _nearest_key(section: str, name: str) -> str:
    """The same name in another section, else one alike in this one, else one alike anywhere."""
    elsewhere = {known.rpartition(".")[2]: known for known in reversed(list(KEYS))}
    here = (*keys_of(section), *(() if section else SECTIONS))
    if name in elsewhere:
        return _written(section, elsewhere[name])
    if alike := nearest(name, here):
        return alike if section or alike in KEYS else f"[{alike}]"
    if alike := nearest(name, tuple(elsewhere)):
        return _written(section, elsewhere[alike])
    return nearest(name, here, cutoff=0.0) or here[0]


def _written(section: str, name: str) -> str:
    owner, _, key = name.rpartition(".")
    return f"{key} in [{owner}]" if owner else f"{key}, above the sections"


# --- values --------------------------------------------------------------------------------------


def _build(given: Mapping[str, Given], name: str, folder: Path) -> Recipe:
    where = {"": name} | {key: entry.where for key, entry in given.items()}
    values: Values = {}
    for key, described in all_keys():
        values[key] = _value(key, given[key]) if key in given else default_of(described)
        if values[key] is REQUIRED and key == "store" and _has_servers(given):
            values[key] = None  # they make the batches
        if values[key] is REQUIRED:
            raise problem(where, key, f"{key} is missing; add a line such as {key} = {quoted(KEYS[key].example)}")
    for key in given:
        if not applies(key, values):
            _check_asked_for(key, values, where)
    unused = {key: default_of(described) for key, described in all_keys() if not applies(key, values)}
    values |= unused
    values["output.folder"] = _absolute(folder / values["output.folder"])
    if values["model.factory"] is not None and values["model.modules"] is None:
        values["model.modules"] = _absolute(folder)
    check(values, where)
    return _assemble(values, where)


def _has_servers(given: Mapping[str, Given]) -> bool:
    return "cluster.servers" in given or bool(environment.read_deployment().servers)


def _value(key: str, given: Given) -> Any:
    rule = KEYS[key].rule
    value = given.value
    if rule.is_text and given.raw is not None and not isinstance(value, str):
        value = given.raw
    read = rule.read(value)
    if read is None:
        alike = nearest(value, rule.words) if isinstance(value, str) else None
        hint = f"; did you mean {quoted(alike)}?" if alike else ""
        raise ConfigError(f"{given.where}: {key} is {value!r:.80}; give {rule.expects}{hint}")
    return _absolute(given.folder / read) if isinstance(read, Path) else read


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _check_asked_for(key: str, values: Values, where: Mapping[str, str]) -> None:
    """A key without a say is a mistake, unless it was the other key that --set has changed since."""
    only = KEYS[key].only
    assert only is not None
    if not applies(only.selector, values):
        only = KEYS[only.selector].only or only
    if where.get(only.selector, "").startswith(SET) and not where[key].startswith(SET):
        return
    raise problem(where, key, f"{key} {only.refusal(values[only.selector])}")


def _assemble(values: Values, where: Mapping[str, str]) -> Recipe:
    sections = {
        section: owner(**{name: values[full_name(section, name)] for name in keys_of(section)})
        for section, owner in SECTIONS.items()
    }
    return Recipe(**{name: values[name] for name in keys_of("")}, **sections, where=where)
