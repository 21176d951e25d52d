"""A cluster file parsed, with the line of every key: TOML by hoploom.config, YAML by PyYAML's safe loader.

PyYAML is imported when the first YAML file is read, for nothing else needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hoploom.config.keys import problem
from hoploom.config.lines import KeyPath, lines_of
from hoploom.config.parse import parse, read_text
from hoploom.config.text import as_key
from hoploom.errors import ConfigError

YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Document:
    """What a file says, and where."""

    parsed: Mapping[str, Any]
    where: Mapping[str, str]  # full name of a key -> "cluster.toml:7"; "" -> the file
    folder: Path  # what its relative paths are relative to, absolute

    def problem(self, name: str, message: str) -> ConfigError:
        """An error about a key, to be raised: it begins with where that key was set."""
        return problem(self.where, name, message)


def read_document(path: str | Path) -> Document:
    """Read a .toml, .yaml or .yml."""
    file = Path(path)
    text = read_text(file, "write one; docs/cluster.md shows how", example="cluster.toml")
    name = str(file)
    if file.suffix in YAML_SUFFIXES:
        parsed, lines = _parse_yaml(text, name)
    elif file.suffix == ".toml":
        parsed = parse(text, name)
        lines = lines_of(text)
    else:
        raise ConfigError(f"{file} is no cluster file by its name; name it .toml, .yaml or .yml")
    where = {"": name} | {full_name(place): f"{name}:{line}" for place, line in lines.items()}
    return Document(parsed, where, file.absolute().parent)


def full_name(path: KeyPath) -> str:
    """As messages call a key: hosts.gpu1.devices, hosts."10.0.0.1".devices."""
    return ".".join(map(as_key, path))


def _parse_yaml(text: str, name: str) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    yaml = _library(name)
    lines: dict[KeyPath, int] = {}
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is not None:
            _note_lines(tree, (), lines, name)
        parsed = yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigError(f"{name}: brackets are nested too deep; close them") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that there is not
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark is not None else name
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{place}: not YAML: {reason}; check its indentation and quotes") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name} is {parsed!r:.60}; give keys and values, such as hosts: [gpu1, gpu2]")
    return parsed, lines


def _library(name: str) -> Any:
    try:
        return import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"{name} is YAML, and PyYAML is not installed; `pip install pyyaml`, or write TOML"
        ) from error


def _note_lines(node: Any, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    """The line of every key of mappings inside of mappings; a key twice is a mistake that YAML's loader passes over."""
    if node.id != "mapping":
        return
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.id != "scalar" or key.tag != "tag:yaml.org,2002:str":
            written = key.value if key.id == "scalar" else key.id
            raise ConfigError(f"{name}:{line}: the key {written!s:.60} is no text; put it in quotes")
        inside = (*path, key.value)
        if inside in lines:
            raise ConfigError(
                f"{name}:{line}: {full_name(inside)} is set in line {lines[inside]}, too; keep one of them"
            )
        lines[inside] = line
        _note_lines(value, inside, lines, name)
