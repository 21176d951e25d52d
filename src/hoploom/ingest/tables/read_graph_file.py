"""graph.toml becomes a GraphFile; what is wrong is named with its file and line, and with the nearest right word.

What must hold between keys is checked here; what only the tables can tell (columns, types) is checked with them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hoploom.config.document import Document, KeyPath, full_name, parse_document, read_document
from hoploom.config.rules import Only, default_of, key_of, keys_in
from hoploom.config.values import as_key, as_toml, nearest, quoted
from hoploom.errors import ConfigError
from hoploom.ingest.tables.graph_file import HEADINGS, ColumnRule, EdgeTable, GraphFile, GraphSection, NodeTable
from hoploom.schema import EDGE_ID, ORIGINAL_ID, RelationName

COLUMNS = "columns"
OF_NODES = ("x", "y", "time", ORIGINAL_ID)  # fields that other keys make
OF_EDGES = ("edge_attr", "weight", "time", EDGE_ID)
NO_NUMBERS = ("string", "bool")


def read_graph(path: str | Path) -> GraphFile:
    """The graph.toml at a path; its relative paths are relative to that file."""
    absent = f"`hoploom init --tables DIR {path}` drafts one from the tables in DIR"
    return _graph_file(read_document(path, HEADINGS, absent=absent))


def parse_graph(text: str, *, name: str = "graph.toml", folder: Path = Path()) -> GraphFile:
    """The graph.toml in a text. `name` is what messages call it, `folder` what its relative paths are relative to."""
    return _graph_file(parse_document(text, HEADINGS, name=name, folder=folder))


def _graph_file(document: Document) -> GraphFile:
    document.top()
    graph = GraphSection(**document.section(("graph",), owner=GraphSection))
    nodes = {name: _node_table(document, name) for name in _names(document, "nodes", NodeTable)}
    edges = [_edge_table(document, name, list(nodes)) for name in _names(document, "edges", EdgeTable)]
    by_relation = {table.relation: table for table in edges}
    graph_file = GraphFile(nodes, by_relation, graph.seed, document.folder, document.where)
    _check(graph_file)
    return graph_file


# --- tables --------------------------------------------------------------------------------------


def _names(document: Document, section: str, owner: type[Any]) -> Sequence[str]:
    """Of the node types or relations."""
    given = document.table((section,))
    heading = next(f"[{heading}]" for heading in HEADINGS if heading.startswith(section))
    for key, value in given.items():
        if key in keys_in(owner) and not isinstance(value, dict):
            name = full_name((section, key))
            raise document.problem(name, f"{name} stands outside of a table; write it below {heading}")
    if not given:
        what = "node type" if section == "nodes" else "relation"
        raise document.problem(section, f"there is no {what}; add a section {heading} with its files")
    return list(given)


def _node_table(document: Document, name: str) -> NodeTable:
    path = ("nodes", name)
    if not name.strip() or " " in name or not name.isprintable():
        message = f"node type {quoted(name)} is no name; give a word without spaces"
        raise document.problem(full_name(path), message)
    values = document.section(path, owner=NodeTable, tables=[COLUMNS])
    return NodeTable(name=name, columns=_column_rules(document, path), **values)


def _edge_table(document: Document, name: str, types: Sequence[str]) -> EdgeTable:
    path = ("edges", name)
    relation = _relation(name, types, document)
    values = document.section(path, owner=EdgeTable, tables=[COLUMNS])
    if isinstance(values["reverse"], bool):
        values["reverse"] = f"rev_{relation[1]}" if values["reverse"] else None
    return EdgeTable(relation=relation, columns=_column_rules(document, path), **values)


def _relation(key: str, types: Sequence[str], document: Document) -> RelationName:
    words, name = key.split(), full_name(("edges", key))
    if len(words) != 3 or " ".join(words) != key or not key.isprintable():
        example = '[edges."author writes paper"]'
        raise document.problem(name, f"{name} names no relation; give source type, name, destination, e.g. {example}")
    for word in (words[0], words[2]):
        if word not in types:
            alike = nearest(word, types)
            hint = f"did you mean {alike}?" if alike else f"add one, or name one of {', '.join(types)}"
            raise document.problem(name, f"{name}: there is no [nodes.{as_key(word)}]; {hint}")
    return (words[0], words[1], words[2])


def _column_rules(document: Document, path: KeyPath) -> dict[str, ColumnRule]:
    rules = {}
    for column, entry in document.table((*path, COLUMNS)).items():
        inside = (*path, COLUMNS, column)
        if not isinstance(entry, dict):
            name, example = full_name(inside), f"{as_key(column)} = {{ fill = 0 }}"
            message = f"{name} is {entry!r:.60}; give what is done to the column, e.g. {example}"
            raise document.problem(name, message)
        rules[column] = ColumnRule(**document.section(inside, owner=ColumnRule))
    return rules


# --- what must hold between keys -----------------------------------------------------------------


def _check(graph_file: GraphFile) -> None:
    """Raise ConfigError for the first keys that disagree."""
    for node_table in graph_file.nodes.values():
        _check_nodes(graph_file, node_table)
        _check_shared(graph_file, node_table, OF_NODES, (node_table.id,))
    for edge_table in graph_file.edges.values():
        _check_edges(graph_file, edge_table)
        _check_shared(graph_file, edge_table, OF_EDGES, (edge_table.source, edge_table.destination))
    _check_times(graph_file)


def _check_nodes(graph_file: GraphFile, table: NodeTable) -> None:
    if not table.files and table.count is None:
        message = f'{table.owner}.files is missing; add a line such as files = "{table.name}.parquet"'
        raise graph_file.problem(table.owner, f"{message}, or count = 1000 where ids are 0 to 999")
    for name, described in keys_in(NodeTable).items():
        only = key_of(described).only
        given = f"{table.owner}.{name}" in graph_file.where
        if given and only is not None and not only.allows(getattr(table, only.selector) or None):
            raise _without_say(graph_file, table, name, only)
    if table.count is not None:
        for name in ("features", "features_npy", "label", "time", "split", "fields", "columns"):
            if getattr(table, name):
                raise _without_say(graph_file, table, name, Only("files"))
    elif table.id is None:
        raise graph_file.problem(table.owner, f'{table.owner}.id is missing; add a line such as id = "{table.name}_id"')
    if table.features and table.features_npy:
        raise graph_file.problem(
            f"{table.owner}.features_npy", f"{table.owner} has features and features_npy; drop one"
        )


def _without_say(graph_file: GraphFile, table: NodeTable, name: str, only: Only) -> ConfigError:
    return graph_file.problem(f"{table.owner}.{name}", f"{table.owner}.{name} {only.refusal(None)}")


def _check_edges(graph_file: GraphFile, table: EdgeTable) -> None:
    source, _, destination = table.relation
    if source != destination:
        for name, why in ("undirected", "its edges join two types; use reverse"), ("self_loops", "it has none"):
            if getattr(table, name) != default_of(keys_in(EdgeTable)[name]):
                message = (
                    f"{table.owner}.{name} = {as_toml(getattr(table, name))} is for relations of a type with itself"
                )
                raise graph_file.problem(f"{table.owner}.{name}", f"{message}: {why}")
    if table.reverse is None:
        return
    at = f"{table.owner}.reverse"
    if table.undirected:
        raise graph_file.problem(at, f"{at} has no effect with undirected, which counts both directions; drop one")
    if " " in table.reverse:
        raise graph_file.problem(at, f"{at} is {as_toml(table.reverse)}; give the name only, without types and spaces")
    turned = (destination, table.reverse, source)
    others = [other for other in graph_file.edges.values() if other is not table]
    if turned == table.relation or turned in [other.relation for other in others]:
        raise graph_file.problem(
            at, f"{at}: there is a relation {as_toml(' '.join(turned))} already; give another name"
        )
    for other in others:
        if other.reverse and turned == (other.relation[2], other.reverse, other.relation[0]):
            raise graph_file.problem(
                at, f"{at}: {other.owner} makes {as_toml(' '.join(turned))} too; give another name"
            )


def _check_shared(
    graph_file: GraphFile, table: NodeTable | EdgeTable, made: tuple[str, ...], ids: tuple[str | None, ...]
) -> None:
    has_features = table.features or (isinstance(table, NodeTable) and table.features_npy)
    if f"{table.owner}.dtype" in graph_file.where and not has_features:
        raise graph_file.problem(
            f"{table.owner}.dtype", f"{table.owner}.dtype has no effect without features; leave it out"
        )
    for name in table.fields:
        if name in made or not name.strip() or not name.isprintable():
            at = f"{table.owner}.fields.{as_key(name)}"
            raise graph_file.problem(at, f"{at}: a field {as_toml(name)} cannot be given; choose another name")
    for column, rule in table.columns.items():
        _check_rule(graph_file, f"{table.owner}.columns.{as_key(column)}", rule, is_id=column in ids)


def _check_rule(graph_file: GraphFile, at: str, rule: ColumnRule, *, is_id: bool) -> None:
    def refuse(key: str, message: str) -> ConfigError:
        return graph_file.problem(f"{at}.{key}", f"{at}.{key} {message}")

    given: dict[str, Any] = {name: getattr(rule, name) for name in keys_in(ColumnRule)}
    if is_id:
        for name in ("fill", "categories", "standardise"):
            if given[name] is not None and given[name] is not False:  # a fill of 0 is one
                raise refuse(name, "cannot be done to ids; leave it out")
        if rule.cast not in (None, "string", "int64"):
            raise refuse("cast", f'is {as_toml(rule.cast)}, but ids are "int64" or "string"; give one of them')
    if rule.standardise and rule.categories:
        raise refuse("standardise", "is for numbers, categories for words; drop one")
    if rule.standardise and rule.cast in NO_NUMBERS:
        raise refuse("standardise", f"is for numbers, not for {rule.cast}; drop it, or cast to float32")


def _check_times(graph_file: GraphFile) -> None:
    """A store has times of nodes or of edges."""
    nodes = [table for table in graph_file.nodes.values() if table.time]
    edges = [table for table in graph_file.edges.values() if table.time]
    if nodes and edges:
        message = f"{edges[0].owner}.time and {nodes[0].owner}.time: a graph has times of nodes or of edges"
        raise graph_file.problem(f"{edges[0].owner}.time", f'{message}; keep one, the other as fields = {{ at = "…" }}')
