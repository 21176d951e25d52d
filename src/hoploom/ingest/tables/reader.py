"""graph.toml becomes a GraphRecipe; what is wrong is named with its file and line, and with the nearest right word.

The first mistake ends the reading. What only the tables can tell (columns, types) is checked in files.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

from hoploom.config.keys import REQUIRED, default_of, key_of, keys_in, nearest, problem
from hoploom.config.lines import KeyPath, lines_of
from hoploom.config.parse import parse, read_text
from hoploom.config.text import as_key, as_toml, quoted
from hoploom.errors import ConfigError
from hoploom.ingest.tables.checks import check
from hoploom.ingest.tables.recipe import ColumnRule, EdgeTable, GraphRecipe, GraphSection, NodeTable
from hoploom.schema import RelationName

SECTIONS = ("graph", "nodes", "edges")
COLUMNS = "columns"
Where = Mapping[str, str]


def read_graph(path: str | Path) -> GraphRecipe:
    """The recipe in a file; its relative paths are relative to that file."""
    file = Path(path)
    text = read_text(
        file, f"`hoploom init --tables DIR {file}` drafts one from the tables in DIR", example="graph.toml"
    )
    return parse_graph(text, name=str(file), folder=file.parent)


def parse_graph(text: str, *, name: str = "graph.toml", folder: Path = Path()) -> GraphRecipe:
    """The recipe in a text. `name` is what messages call it, `folder` what its relative paths are relative to."""
    parsed = parse(text, name)
    where = {"": name} | {full_name(path): f"{name}:{line}" for path, line in lines_of(text).items()}
    for key in parsed:
        if key not in SECTIONS:
            hint = _heading(nearest(key, SECTIONS, cutoff=0.0) or "nodes")
            raise problem(where, full_name((key,)), f"unknown section or key {as_key(key)}; did you mean {hint}?")
    graph = GraphSection(**_values(GraphSection, ("graph",), _table(parsed, ("graph",), where), where))
    nodes = {key: _node_table(key, entry, where) for key, entry in _tables(parsed, "nodes", where).items()}
    edges = _edge_tables(parsed, nodes, where)
    recipe = GraphRecipe(nodes, edges, graph.seed, folder, where)
    check(recipe)
    return recipe


def full_name(path: KeyPath) -> str:
    """As messages call a key: nodes.paper.id, edges."author writes paper".source."""
    return ".".join(map(as_key, path))


def _heading(section: str) -> str:
    return {"graph": "[graph]", "nodes": "[nodes.<type>]"}.get(section, '[edges."<source> <name> <destination>"]')


# --- tables --------------------------------------------------------------------------------------


def _table(parsed: Mapping[str, Any], path: KeyPath, where: Where) -> dict[str, Any]:
    """The table under the last name of a path; {} where it is left out."""
    value = parsed.get(path[-1], {})
    if not isinstance(value, dict):
        name = full_name(path)
        raise problem(where, name, f"{name} is {value!r:.60}; it is a section, write [{name}] and its keys")
    return value


def _tables(parsed: Mapping[str, Any], section: str, where: Where) -> dict[str, dict[str, Any]]:
    """The node types or relations, by name."""
    given = _table(parsed, (section,), where)
    owner = NodeTable if section == "nodes" else EdgeTable
    for key, value in given.items():
        if key in keys_in(owner) and not isinstance(value, dict):
            name = full_name((section, key))
            raise problem(where, name, f"{name} stands outside of a table; write it below {_heading(section)}")
    if not given:
        what = "node type" if section == "nodes" else "relation"
        raise problem(where, section, f"there is no {what}; add a section {_heading(section)} with its files")
    return {key: _table(given, (section, key), where) for key in given}


def _node_table(name: str, given: Mapping[str, Any], where: Where) -> NodeTable:
    path = ("nodes", name)
    if not name.strip() or " " in name or not name.isprintable():
        raise problem(where, full_name(path), f"node type {quoted(name)} is no name; give a word without spaces")
    values = _values(NodeTable, path, given, where)
    return NodeTable(name=name, columns=_column_rules(path, given, where), **values)


def _edge_tables(
    parsed: Mapping[str, Any], nodes: Mapping[str, NodeTable], where: Where
) -> dict[RelationName, EdgeTable]:
    tables = {}
    for key, given in _tables(parsed, "edges", where).items():
        path = ("edges", key)
        relation = _relation(key, list(nodes), full_name(path), where)
        values = _values(EdgeTable, path, given, where)
        name = {True: f"rev_{relation[1]}", False: None}.get(values["reverse"], values["reverse"])
        columns = _column_rules(path, given, where)
        tables[relation] = EdgeTable(relation=relation, columns=columns, **values | {"reverse": name})
    return tables


def _relation(key: str, types: Sequence[str], name: str, where: Where) -> RelationName:
    words = key.split()
    if len(words) != 3 or " ".join(words) != key or not key.isprintable():
        example = '[edges."author writes paper"]'
        raise problem(where, name, f"{name} names no relation; give source type, name, destination, e.g. {example}")
    for word in (words[0], words[2]):
        if word not in types:
            alike = nearest(word, types)
            hint = f"did you mean {alike}?" if alike else f"add one, or name one of {', '.join(types)}"
            raise problem(where, name, f"{name}: there is no [nodes.{as_key(word)}]; {hint}")
    return (words[0], words[1], words[2])


# --- keys ----------------------------------------------------------------------------------------


def _values(owner: type[Any], path: KeyPath, given: Mapping[str, Any], where: Where) -> dict[str, Any]:
    """Every key of a section, read or by default."""
    known = keys_in(owner)
    with_columns = COLUMNS in owner.__dataclass_fields__
    _check_known(given, (*known, COLUMNS) if with_columns else tuple(known), path, where)
    return {key: _value(described, (*path, key), given, where) for key, described in known.items()}


def _check_known(given: Iterable[str], known: Sequence[str], path: KeyPath, where: Where) -> None:
    for key in given:
        if key not in known:
            hint = nearest(key, known) or f"one of {', '.join(known)}"
            message = f"unknown key {as_key(key)} in [{full_name(path)}]; did you mean {hint}?"
            raise problem(where, full_name((*path, key)), message)


def _value(described: Field[Any], path: KeyPath, given: Mapping[str, Any], where: Where) -> Any:
    name, key = full_name(path), key_of(described)
    if described.name not in given:
        default = default_of(described)
        if default is REQUIRED:
            line = f"{described.name} = {as_toml(key.example)}"
            raise problem(where, full_name(path[:-1]), f"{name} is missing; add a line such as {line}")
        return default
    value = given[described.name]
    read = key.rule.read(value)
    if read is None:
        alike = nearest(value, key.rule.words) if isinstance(value, str) else None
        hint = f"; did you mean {quoted(alike)}?" if alike else ""
        raise problem(where, name, f"{name} is {value!r:.80}; give {key.rule.expects}{hint}")
    return read


def _column_rules(path: KeyPath, given: Mapping[str, Any], where: Where) -> dict[str, ColumnRule]:
    rules = {}
    for column, entry in _table(given, (*path, COLUMNS), where).items():
        inside = (*path, COLUMNS, column)
        rules[column] = ColumnRule(**_values(ColumnRule, inside, _of_column(entry, inside, where), where))
    return rules


def _of_column(entry: Any, path: KeyPath, where: Where) -> Mapping[str, Any]:
    if isinstance(entry, dict):
        return entry
    name = full_name(path)
    example = f"{as_key(path[-1])} = {{ fill = 0 }}"
    raise ConfigError(f"{where[name]}: {name} is {entry!r:.60}; give what is done to the column, e.g. {example}")
