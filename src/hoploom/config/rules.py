"""Reader of configuration files, whose keys are dataclass fields with a default, a rule and a help text.

A rule checks the value of one key; conditions between keys are checked by the module that defines the keys. TOML and
YAML files have the same keys. Reading stops at the first mistake: people read one message, but not ten.
"""

import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hoploom.config.values import (
    as_fanouts,
    as_key,
    as_toml,
    nearest,
    parse_bytes,
    parse_share_or_bytes,
    quoted,
    read_addresses,
    split_address,
)
from hoploom.errors import ConfigError
from hoploom.system import needs

Headings = Mapping[str, type[Any]]  # "train", "hosts.NAME", or "" for keys above the sections -> dataclass
MOST = 2**31 - 1  # of a count
MOST_SEED = 2**63 - 1
REQUIRED: Any = MISSING  # the default of a key that must be given


@dataclass(frozen=True)
class KeyRule:
    """A check of a key's value. `read` returns the converted value, or None if it is wrong; messages show `expects`."""

    expects: str
    read: Callable[[Any], Any]
    words: tuple[str, ...] = ()  # all accepted words, for rules of words
    is_text: bool = False  # so `--set key=12` gives the text "12"
    entry: "KeyRule | None" = None  # rule of a list's entries, so that messages name the wrong entry


# --- keys ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyCondition:
    """A condition under which a key has an effect: another key, `selector`, has a value in `words`, or is absent."""

    selector: str  # "task.kind"
    words: tuple[str, ...] = ()  # values of the selector; (): any
    absent: bool = False  # only if the selector is not given
    other: str = ""  # a further key: where it is set, the selector may have any value

    def allows(self, value: Any) -> bool:
        if self.absent:
            return value is None
        return value in self.words if self.words else value is not None

    def refusal(self, value: Any) -> str:
        """Return the error message for a key that has no effect because the selector has this value."""
        if self.absent:
            return f"has no effect with {self.selector}; leave it out"
        if not self.words:
            return f"has no effect without {self.selector}; leave it out"
        listed = " or ".join(f'"{word}"' for word in self.words)
        way_out = f"set {self.other}, or leave it out" if self.other else "leave it out"
        return f'is for {self.selector} = {listed}, and that is "{value}"; {way_out}'


@dataclass(frozen=True)
class Key:
    """The description of one key of a section."""

    help: str
    rule: KeyRule
    example: Any = None  # shown in templates if there is no default
    only: KeyCondition | None = None


def key(default: Any, help: str, rule: KeyRule, *, example: Any = None, only: KeyCondition | None = None) -> Any:
    """Return a dataclass field for a key. With default=REQUIRED the key must be given; with None it may be missing."""
    described = {"key": Key(help, rule, example, only)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=described)
    return field(default=default, metadata=described)


def key_of(described: "Field[Any]") -> Key:
    """Return the Key in the metadata of a dataclass field."""
    found: Key = described.metadata["key"]
    return found


def keys_in(owner: type[Any]) -> dict[str, "Field[Any]"]:
    """Return, by name, the fields of a dataclass that are keys."""
    return {described.name: described for described in fields(owner) if "key" in described.metadata}


def default_of(described: "Field[Any]") -> Any:
    """Return the default of a key, or REQUIRED if it has none."""
    return described.default if described.default_factory is MISSING else described.default_factory()


def problem(where: Mapping[str, str], name: str, message: str) -> ConfigError:
    """Return an error about the key `name`. Its message begins with the key's file and line, from `where`, if known."""
    place = where.get(name) or where.get("")
    return ConfigError(f"{place}: {message}" if place else message)


# --- kinds of rules ------------------------------------------------------------------------------


def whole(least: int, most: int = MOST) -> KeyRule:
    """Return a rule for a whole number from `least` to `most`."""
    limits = f"of at least {least}" if most == MOST else f"from {least} to {most}"

    def read(value: Any) -> int | None:
        given = isinstance(value, int) and not isinstance(value, bool)
        return value if given and least <= value <= most else None

    return KeyRule(f"a whole number {limits}", read)


def number(least: float = 0.0, most: float = math.inf, *, open_ends: bool = False) -> KeyRule:
    """Return a rule for a finite number; with open_ends, the limits themselves are excluded."""
    if most == math.inf:
        limits = f"above {least:g}" if open_ends else f"of at least {least:g}"
    else:
        limits = f"between {least:g} and {most:g}" if open_ends else f"from {least:g} to {most:g}"

    def read(value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        inside = least < value < most if open_ends else least <= value <= most
        return float(value) if inside and value <= sys.float_info.max else None

    return KeyRule(f"a number {limits}", read)


def parsed(
    expects: str, parse: Callable[[Any], Any], *, kinds: Any = str, words: tuple[str, ...] = (), is_text: bool = False
) -> KeyRule:
    """Return a rule for values of type `kinds`. `parse` raises ConfigError or returns None for a wrong one.

    Errors name `expects` as the thing to give, and the accepted `words`, if any.
    """

    def read(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, kinds) else None
        except ConfigError:
            return None

    return KeyRule(expects, read, words, is_text)


def accepted(expects: str, check: Callable[[Any], Any], *, kinds: Any = str, words: tuple[str, ...] = ()) -> KeyRule:
    """Return a rule for values of type `kinds`. `check` raises ConfigError or returns False for a wrong value."""
    is_text = kinds is str
    return parsed(expects, lambda v: v if check(v) is not False else None, kinds=kinds, words=words, is_text=is_text)


def choice(*words: str) -> KeyRule:
    """Return a rule that accepts any one of `words`."""
    listed = ", ".join(f'"{word}"' for word in words)
    return accepted(f"one of {listed}", lambda value: value in words, words=words)


def choices(*words: str) -> KeyRule:
    """Return a rule that accepts any one of `words`, or a list of some of them without repetition."""
    one, listed_words = choice(*words), ", ".join(f'"{word}"' for word in words)

    def read(value: Any) -> tuple[str, ...] | None:
        listed = value if isinstance(value, list) else [value]
        return tuple(listed) if all(one.read(entry) for entry in listed) and len(listed) == len(set(listed)) else None

    return KeyRule(f"a list of some of {listed_words}, each once", read, entry=one)


def matching(expects: str, pattern: str) -> KeyRule:
    """Return a rule for text that a regular expression matches completely."""
    return accepted(expects, lambda value: re.fullmatch(pattern, value) is not None)


def texts(expects: str, *, single: bool = False) -> KeyRule:
    """Return a rule for a list of texts. With `single`, one text is accepted too, and an empty list is not."""

    def read(value: Any) -> tuple[str, ...] | None:
        listed = [value] if single and not isinstance(value, list) else value
        given = isinstance(listed, list) and all(TEXT.read(entry) is not None for entry in listed)
        return tuple(listed) if given and (listed or not single) else None

    return KeyRule(expects, read)


def ids(what: str, *, least: int = 0) -> KeyRule:
    """Return a rule for a list of at least `least` distinct whole numbers from 0, or for text such as "0,1"."""
    one = whole(0)

    def read(value: Any) -> tuple[int, ...] | None:
        if isinstance(value, str):
            words = [word.strip() for word in value.split(",")]
            value = [int(word) if word.isascii() and word.isdigit() else None for word in words]
        elif isinstance(value, int):
            value = [value]
        good = isinstance(value, list) and all(one.read(entry) is not None for entry in value)
        return tuple(value) if good and least <= len(value) == len(set(value)) else None

    return KeyRule(f"a list of {what}, each once, e.g. [0, 1]", read)


def table_of(entry: KeyRule, expects: str) -> KeyRule:
    """Return a rule for a table whose values all satisfy the rule `entry`."""

    def read(value: Any) -> dict[str, Any] | None:
        entries = {name: entry.read(given) for name, given in value.items()} if isinstance(value, dict) else {"": None}
        return None if None in entries.values() else entries

    return KeyRule(expects, read)


# --- rules ---------------------------------------------------------------------------------------


def _read_variables(value: dict[str, Any]) -> dict[str, str] | None:
    """Return environment variables with their values as text; None if a name or a value is invalid."""
    good = all(isinstance(given, str | int | float) and not isinstance(given, bool) for given in value.values())
    good = good and all("\0" not in str(given) for given in value.values())
    good = good and all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in value)
    return {name: str(given) for name, given in value.items()} if good else None


FLAG = accepted("true or false", lambda value: True, kinds=bool)
NORMS = True, False, "layer", "batch", "graph"
NORM = accepted('true, false, "layer", "batch" or "graph"', lambda value: value in NORMS, kinds=bool | str)
SHARE = KeyRule("a number from 0 to below 1", lambda value: None if value == 1 else number(0.0, 1.0).read(value))
PORT = whole(1, 65535)
FANOUTS = parsed(
    "a list with a count per layer (-1: all neighbours), e.g. [15, 10, 5]",
    lambda v: as_fanouts(v) if v and max(as_fanouts(v)) <= MOST else None,
    kinds=list,
)
SIZE = accepted('a size in quotes, e.g. "4GB"', lambda value: parse_bytes("size", value))
SHARE_OR_SIZE = accepted(
    'a share or a size in quotes, e.g. "20%" or "4GB"', lambda value: parse_share_or_bytes("size", value, "") > 0
)

TEXT = accepted("text in quotes", lambda value: bool(value) and value.isprintable())  # of one line
TEXT_OR_EMPTY = accepted("text in quotes", str.isprintable)
PATH = replace(TEXT, expects="a path in quotes", read=lambda value: None if TEXT.read(value) is None else Path(value))
HOST_PATH = accepted(  # other hosts do not expand ~
    "a path in quotes, written out without ~", lambda value: TEXT.read(value) is not None and value[0] != "~"
)
GPU = matching('a GPU, "cuda" or "cuda:1"', r"cpu|cuda(:\d+)?")  # cpu: in Triton's interpreter
FUNCTION = matching('"module:function", e.g. "my_model:make"', r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
METRICS = KeyRule(
    'a list of names, e.g. ["mrr", "hits@10"]',
    lambda value: tuple(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else None,
)
TABLE = accepted("a table, e.g. { width = 64 }", lambda value: True, kinds=dict)
VARIABLES = parsed(
    'a table of variables with text or numbers, e.g. { NCCL_DEBUG = "INFO" }', _read_variables, kinds=dict
)

HOST = matching(  # a name, an IPv4 or an IPv6 address
    'a host name or an IP address, e.g. "10.0.0.1"', r"[A-Za-z0-9_]([A-Za-z0-9_.:-]*[A-Za-z0-9_])?"
)
LOGIN = matching(  # ssh must not take it for an option
    '"host" or "user@host", as ssh takes it', r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]*"
)
LABEL = matching(  # a name that Slurm and Kubernetes accept, with space for our suffix
    "lower-case letters, digits and dashes, at most 53 characters", r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?"
)
ADDRESS = accepted(
    '"host:port", e.g. "10.0.0.1:29500"',
    lambda v: HOST.read(split_address(v)[0]) is not None and split_address(v)[1] > 0,
)
ADDRESSES = parsed(
    'a list of host:port, e.g. ["10.0.0.1:7000", "10.0.0.2:7000"]', lambda v: tuple(read_addresses(v)), kinds=str | list
)

# --- documents -----------------------------------------------------------------------------------

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
    """Return the dotted name of a key, as messages show it: hosts.gpu1.devices, hosts."10.0.0.1".devices."""
    return ".".join(map(as_key, path))


@dataclass(frozen=True)
class Document:
    """The contents of a file, the line of each key, and the keys that the file may have."""

    parsed: Mapping[str, Any]
    where: Mapping[str, str]  # full name of a key -> "run.toml:7" or "--set train.epochs=3"; "" -> the file
    folder: Path  # base of its relative paths
    headings: Headings

    def problem(self, name: str, message: str) -> ConfigError:
        """Return an error about the key `name`; its message begins with file and line of the key."""
        return problem(self.where, name, message)

    def table(self, path: KeyPath) -> Mapping[str, Any]:
        """Return the table at a path of names; {} if it is missing, or if it is a YAML section without keys."""
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
        """Return the values or defaults of a section, whose keys the dataclass `owner` has.

        `tables` are read separately; keys in `optional` may be missing.
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

    def _value(
        self, described: "Field[Any]", path: KeyPath, given: Mapping[str, Any], optional: Collection[str]
    ) -> Any:
        name, rule = full_name((*path, described.name)), key_of(described).rule
        value = given.get(described.name)
        if value is None:
            default = default_of(described)
            if default is not REQUIRED or name in optional:
                return None if default is REQUIRED else default
            equals = ": " if self.where[""].endswith(YAML_SUFFIXES) else " = "
            line = f"{described.name}{equals}{as_toml(key_of(described).example)}"
            raise self.problem(full_name(path), f"{name} is missing; add a line such as {line}")
        place = self.where.get(name, "")
        if rule.is_text and place.startswith(SET) and not isinstance(value, str):
            value = place.partition("=")[2].strip()  # --set task.label=12
        read = rule.read(value)
        if read is None:
            if rule.entry is not None and isinstance(value, list):
                for entry in (entry for entry in value if rule.entry.read(entry) is None):
                    raise self.problem(name, f"{name} has {entry!r:.80}; give {rule.entry.expects}")
            alike = nearest(value, rule.words) if isinstance(value, str) else None
            alike = "cuda" if value == "gpu" and alike == "cpu" else alike
            hint = f"; did you mean {quoted(alike)}?" if alike else ""
            raise self.problem(name, f"{name} is {value!r:.80}; give {rule.expects}{hint}")
        if isinstance(read, Path):
            return absolute(Path() if place.startswith(SET) else self.folder, read)
        return read

    def _check_known(self, given: Iterable[str], known: Sequence[str], path: KeyPath) -> None:
        unknown = [name for name in given if name not in known]
        for name in unknown if not path else ():
            if name in SECTION_OF and not self.where.get(name, SET).startswith(SET):
                kind, command = SECTION_OF[name]
                raise self.problem("", f"this is a {kind}, as it has {name!r}; use `{command}` with it")
        for name in unknown:
            inside = f" in [{full_name(path)}]" if path else ""
            # Suggest another section with this key, else a similar key of this or another section, else all known keys.
            homes = {key: heading for heading, owner in reversed(list(self.headings.items())) for key in keys_in(owner)}
            found = name if name in homes else nearest(name, known) or nearest(name, list(homes))
            if found is None:
                meant = f"one of {', '.join(known)}"
            elif found in known:
                meant = f"[{self._sections()[found]}]" if found in self._sections() else found
            else:
                meant = f"{found} in [{homes[found]}]" if homes[found] else f"{found}, above the sections"
            message = f"unknown key {as_key(name)}{inside}; did you mean {meant}?"
            raise self.problem(full_name((*path, name)), message)

    def _sections(self) -> dict[str, str]:
        """Return the headings by their first word, such as {"hosts": "hosts.NAME"}."""
        return {heading.partition(".")[0]: heading for heading in self.headings if heading}


def absolute(folder: Path, path: str | Path) -> Path:
    """Return the absolute path of a path relative to a folder, without resolving links."""
    return Path(os.path.abspath(folder / path))


# --- reading -------------------------------------------------------------------------------------


def read_document(path: str | Path, headings: Headings, *, absent: str, overrides: Sequence[str] = ()) -> Document:
    """Read and parse a file. `absent` is the hint if it does not exist; `overrides` are texts "section.key=value"."""
    file = Path(path)
    try:
        text = (content := file.read_bytes()).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist; {absent}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{file} is a folder; give a file: {absent}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give a file that can be read") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: byte {content[error.start]:#04x} is not UTF-8; save it as UTF-8") from error
    return parse_document(text, headings, name=str(file), folder=file.parent, overrides=overrides)


def parse_document(
    text: str, headings: Headings, *, name: str, folder: Path, overrides: Sequence[str] = ()
) -> Document:
    """Parse the text of a file. Messages show `name`, whose suffix tells YAML from TOML."""
    try:
        parsed, lines = (_parse_yaml if Path(name).suffix in YAML_SUFFIXES else _parse_toml)(text, name)
    except RecursionError as error:
        raise ConfigError(f"{name}: brackets or dotted keys are nested too deep; use fewer levels") from error
    where = {"": name} | {full_name(path): f"{name}:{line}" for path, line in lines.items()}
    for override in overrides:
        given, paths, depth = _parse_override(override)
        where |= dict.fromkeys(map(full_name, paths), f"{SET}{override}")
        parsed = _merged(parsed, given, depth)
    return Document(parsed, where, folder, headings)


def _parse_toml(text: str, name: str) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    try:
        return tomllib.loads(text), lines_of(text)
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        found = re.search(r"at line (\d+)", str(error))
        line = int(found[1]) if found else text.rstrip().count("\n") + 1
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"{name}:{line}: not TOML: {reason}; strings need quotes, tables a [header]") from error


def lines_of(text: str) -> Mapping[KeyPath, int]:
    """Return the line number, from 1, of each table header and each key outside of lists; tomllib does not tell it."""
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


def _parse_override(override: str) -> tuple[dict[str, Any], Sequence[KeyPath], int]:
    """Parse `key=value`; the value is TOML, or else text.

    Return it as nested tables, with the paths of all keys, and the number of words in the key itself.
    """
    name, equals, raw = override.partition("=")
    if "\n" in override:
        raise ConfigError(f"{SET}{override.splitlines()[0]}: there is a line end behind it; give one --set per key")
    if not equals or not name.strip():
        raise ConfigError(f"{SET}{override}: there is no key=value; give one, e.g. --set train.epochs=3")
    for value in (raw, quoted(raw.strip())):
        try:
            given = tomllib.loads(f"{name} = {value}")
            return given, list(_paths(given)), len(list(_paths(tomllib.loads(f"{name} = 0"))))
        except (ValueError, RecursionError):
            if raw.strip()[:1] in ("[", "{", '"', "'"):
                break
    raise ConfigError(f"{SET}{override}: not TOML; give a key and a value, e.g. --set 'loader.fanouts=[10, 5]'")


def _paths(table: Mapping[str, Any]) -> Iterable[KeyPath]:
    """Yield the path of every key, also of those in nested tables."""
    for name, value in table.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *inside) for inside in _paths(value))


def _merged(before: Mapping[str, Any], given: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return `before` updated with `given`, a key in `depth` tables: they keep their other keys, its value does not."""
    merged = dict(before)
    for name, value in given.items():
        had = merged.get(name)
        merged[name] = _merged(had, value, depth - 1) if depth > 1 and isinstance(had, dict) else value
    return merged


def _parse_yaml(text: str, name: str) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    with needs("cluster"):
        import yaml
    lines: dict[KeyPath, int] = {}
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is not None:
            _note_lines(tree, (), lines, name)
        parsed = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date or number
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark is not None else name
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{place}: not YAML: {reason}; check its indentation and quotes") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name} is {parsed!r:.60}; give keys and values, such as hosts: [gpu1, gpu2]")
    return parsed, lines


def _note_lines(node: Any, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    """Add the line of every key of nested mappings to `lines`. Raise ConfigError for a repeated key."""
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
