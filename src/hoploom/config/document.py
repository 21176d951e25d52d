"""Parse TOML and YAML files with the line of every key, and read their sections into the dataclasses that declare them.

Both formats take the same keys. Reading stops at the first mistake: people read one message, but not ten.
"""

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

from hoploom.config.extras import needs
from hoploom.config.rules import REQUIRED, Headings, KeyRule, default_of, key_of, keys_in, problem
from hoploom.config.values import as_key, as_toml, nearest, quoted
from hoploom.errors import ConfigError

SET = "--set "
YAML_SUFFIXES = (".yaml", ".yml")
GRAPH, RUN = ("graph.toml", "hoploom build"), ("run.toml", "hoploom train")
SECTION_OF = {"nodes": GRAPH, "edges": GRAPH, "task": RUN, "loader": RUN, "optimizer": RUN}  # sections of one file only
SECTION_OF |= {"hosts": ("cluster file", "hoploom launch")}
TOKEN = re.compile(  # of TOML; up to two quotes may precede the closing three
    r"""[ \t]+ | \#[^\n]*
      | "{3}(?:\\.|[^\\])*?"{3,5} | '{3}.*?'{3,5}
      | "(?:\\.|[^"\\])*" | '[^']*'
      | [\[\]{}=,\n]
      | [^\s\[\]{}=,\#"']+""",
    re.VERBOSE | re.DOTALL,
)

KeyPath = tuple[str, ...]


def full_name(path: KeyPath) -> str:
    """Return the dotted name of a key, as in messages: hosts.gpu1.devices, hosts."10.0.0.1".devices."""
    return ".".join(map(as_key, path))


@dataclass(frozen=True)
class Document:
    """The contents of a file, the line of each key, and the keys that the file may have."""

    parsed: Mapping[str, Any]
    where: Mapping[str, str]  # full name of a key -> "run.toml:7" or "--set train.epochs=3"; "" -> the file
    folder: Path  # base of its relative paths
    headings: Headings

    def problem(self, name: str, message: str) -> ConfigError:
        """Return an error about a key that begins with the place where the key is set."""
        return problem(self.where, name, message)

    def table(self, path: KeyPath) -> Mapping[str, Any]:
        """Return the table at a path; {} if it is missing, or a section of YAML without keys."""
        found: Any = self.parsed
        for depth, name in enumerate(path, 1):
            found = found.get(name)
            if found is None:
                return {}
            if not isinstance(found, dict):
                at = full_name(path[:depth])
                raise self.problem(at, f"{at} is {found!r:.60}; it is a section, write [{at}] and its keys")
        return found  # type: ignore[no-any-return]

    def section(
        self, path: KeyPath, *, owner: type[Any], tables: Sequence[str] = (), optional: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the values of all keys of a section, defaults included.

        `tables` names subtables that are read separately; `optional` names required keys that may be missing.
        """
        given, known = self.table(path), keys_in(owner)
        self._check_known(given, (*known, *tables), path)
        return {name: self._value(described, path, given, optional) for name, described in known.items()}

    def top(self, *, optional: Collection[str] = ()) -> dict[str, Any]:
        """Return the values of the keys above the sections."""
        owner, sections = self.headings.get(""), list(self._sections())
        if owner is None:
            self._check_known(self.parsed, sections, ())
            return {}
        return self.section((), owner=owner, tables=sections, optional=optional)

    # --- values ----------------------------------------------------------------------------------

    def _value(
        self, described: "Field[Any]", path: KeyPath, given: Mapping[str, Any], optional: Collection[str]
    ) -> Any:
        name, rule = full_name((*path, described.name)), key_of(described).rule
        value = given.get(described.name)
        if value is None:
            return self._default(described, path, optional)
        place = self.where.get(name, "")
        if rule.is_text and place.startswith(SET) and not isinstance(value, str):
            value = place.partition("=")[2].strip()  # --set task.label=12
        read = rule.read(value)
        if read is None:
            raise self.problem(name, _message(name, value, rule))
        if isinstance(read, Path):
            return absolute(Path() if place.startswith(SET) else self.folder, read)
        return read

    def _default(self, described: "Field[Any]", path: KeyPath, optional: Collection[str]) -> Any:
        default, name = default_of(described), full_name((*path, described.name))
        if default is not REQUIRED:
            return default
        if name in optional:
            return None
        equals = ": " if self.where[""].endswith(YAML_SUFFIXES) else " = "
        line = f"{described.name}{equals}{as_toml(key_of(described).example)}"
        raise self.problem(full_name(path), f"{name} is missing; add a line such as {line}")

    # --- keys that are not known -----------------------------------------------------------------

    def _check_known(self, given: Iterable[str], known: Sequence[str], path: KeyPath) -> None:
        unknown = [name for name in given if name not in known]
        for name in unknown if not path else ():
            if name in SECTION_OF and not self.where.get(name, SET).startswith(SET):
                kind, command = SECTION_OF[name]
                raise self.problem("", f"this is a {kind}, as it has {name!r}; use `{command}` with it")
        for name in unknown:
            inside = f" in [{full_name(path)}]" if path else ""
            message = f"unknown key {as_key(name)}{inside}; did you mean {self._nearest(name, known)}?"
            raise self.problem(full_name((*path, name)), message)

    def _nearest(self, name: str, known: Sequence[str]) -> str:
        """Suggest the key of another section, else a similar one here or elsewhere, else list all known keys."""
        homes = {key: heading for heading, owner in reversed(list(self.headings.items())) for key in keys_in(owner)}
        found = name if name in homes else nearest(name, known) or nearest(name, list(homes))
        if found is None:
            return f"one of {', '.join(known)}"
        if found in known:
            return f"[{self._sections()[found]}]" if found in self._sections() else found
        return f"{found} in [{homes[found]}]" if homes[found] else f"{found}, above the sections"

    def _sections(self) -> dict[str, str]:
        """Return the headings by their first word."""
        return {heading.partition(".")[0]: heading for heading in self.headings if heading}


def _message(name: str, value: Any, rule: KeyRule) -> str:
    """Return the message about a wrong value, or about the first wrong entry of a list."""
    if rule.entry is not None and isinstance(value, list):
        for entry in value:
            if rule.entry.read(entry) is None:
                return f"{name} has {entry!r:.80}; give {rule.entry.expects}"
    alike = nearest(value, rule.words) if isinstance(value, str) else None
    alike = "cuda" if value == "gpu" and alike == "cpu" else alike
    hint = f"; did you mean {quoted(alike)}?" if alike else ""
    return f"{name} is {value!r:.80}; give {rule.expects}{hint}"


def absolute(folder: Path, path: str | Path) -> Path:
    """Return the absolute path of a path relative to a folder, without resolving links."""
    return Path(os.path.abspath(folder / path))


# --- reading -------------------------------------------------------------------------------------


def read_document(path: str | Path, headings: Headings, *, absent: str, overrides: Sequence[str] = ()) -> Document:
    """Read a file. `absent` is the hint for a missing file; overrides are `section.key=value`."""
    file = Path(path)
    text = _read_text(file, absent)
    return parse_document(text, headings, name=str(file), folder=file.parent, overrides=overrides)


def parse_document(
    text: str, headings: Headings, *, name: str, folder: Path, overrides: Sequence[str] = ()
) -> Document:
    """Parse a text. `name` is for messages, and its suffix tells YAML from TOML."""
    try:
        parsed, lines = (_parse_yaml if Path(name).suffix in YAML_SUFFIXES else _parse_toml)(text, name)
    except RecursionError as error:
        raise ConfigError(f"{name}: brackets or dotted keys are nested too deep; use fewer levels") from error
    where = {"": name} | {full_name(path): f"{name}:{line}" for path, line in lines.items()}
    for override in overrides:
        given, paths = _parse_override(override)
        where |= dict.fromkeys(map(full_name, paths), f"{SET}{override}")
        parsed = _merged(parsed, given)
    return Document(parsed, where, folder, headings)


def _read_text(file: Path, absent: str) -> str:
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist; {absent}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{file} is a folder; give a file: {absent}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give a file that can be read") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: byte {content[error.start]:#04x} is not UTF-8; save it as UTF-8") from error


# --- TOML ----------------------------------------------------------------------------------------


def _parse_toml(text: str, name: str) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    try:
        return tomllib.loads(text), lines_of(text)
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else text.rstrip().count("\n") + 1
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"{name}:{line}: not TOML: {reason}; strings need quotes, tables a [header]") from error


def lines_of(text: str) -> Mapping[KeyPath, int]:
    """Return the line, from 1, of every table header and of every key outside of lists: tomllib does not keep it.

    >>> lines_of("a = 1\\n[b]\\nc.d = 2\\n")
    {('a',): 1, ('b',): 2, ('b', 'c'): 3, ('b', 'c', 'd'): 3}
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    line, depth, statement = 1, 0, ""
    for token in TOKEN.findall(text.replace("\r\n", "\n") + "\n"):
        statement += token
        depth += (token in ("[", "{")) - (token in ("]", "}"))
        if token != "\n" or depth:
            continue
        paths = list(_paths(tomllib.loads(statement)))
        is_header = statement.lstrip().startswith("[")
        for path in paths:
            lines.setdefault(path if is_header else (*table, *path), line)
        if is_header:
            table = max(paths, key=len)
        line += statement.count("\n")
        statement = ""
    return lines


# --- --set ---------------------------------------------------------------------------------------


def _parse_override(override: str) -> tuple[dict[str, Any], Sequence[KeyPath]]:
    """Parse `key=value` as TOML, with values that are no TOML as text; return its tables and the paths of its keys."""
    name, equals, raw = override.partition("=")
    if "\n" in override:
        raise ConfigError(f"{SET}{override.splitlines()[0]}: there is a line end behind it; give one --set per key")
    if not equals or not name.strip():
        raise ConfigError(f"{SET}{override}: there is no key=value; give one, e.g. --set train.epochs=3")
    for value in (raw, quoted(raw.strip())):
        try:
            given = tomllib.loads(f"{name} = {value}")
            return given, list(_paths(given))
        except (ValueError, RecursionError):
            if raw.strip()[:1] in ("[", "{", '"', "'"):
                break
    raise ConfigError(f"{SET}{override}: not TOML; give a key and a value, e.g. --set 'loader.fanouts=[10, 5]'")


def _paths(table: Mapping[str, Any]) -> Iterable[KeyPath]:
    """Yield the path of every key, those of nested tables included."""
    for name, value in table.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *inside) for inside in _paths(value))


def _merged(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables: --set of one key keeps the other keys of its table."""
    merged = dict(before)
    for name, value in given.items():
        had = merged.get(name)
        merged[name] = _merged(had, value) if isinstance(had, dict) and isinstance(value, dict) else value
    return merged


# --- YAML ----------------------------------------------------------------------------------------


def _parse_yaml(text: str, name: str) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    with needs("cluster"):
        import yaml
    lines: dict[KeyPath, int] = {}
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is not None:
            _note_lines(tree, (), lines, name)
        parsed = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that there is not
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark is not None else name
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{place}: not YAML: {reason}; check its indentation and quotes") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name} is {parsed!r:.60}; give keys and values, such as hosts: [gpu1, gpu2]")
    return parsed, lines


def _note_lines(node: Any, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    """Note the line of every key of nested mappings; raise ConfigError for a repeated one, which YAML accepts."""
    if node.id != "mapping":
        return
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.id != "scalar" or key.tag != "tag:yaml.org,2002:str":
            written = key.value if key.id == "scalar" else key.id
            raise ConfigError(f"{name}:{line}: the key {written!s:.60} is no text; put it in quotes")
        inside = (*path, key.value)
        if inside in lines:
            at = f"{full_name(inside)} is set in line {lines[inside]}, too"
            raise ConfigError(f"{name}:{line}: {at}; keep one of them")
        lines[inside] = line
        _note_lines(value, inside, lines, name)
