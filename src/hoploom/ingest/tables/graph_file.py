"""Read graph.toml into frozen dataclasses: the tables of nodes and edges, and the roles of their columns.

Each key is declared once, with its rule and with the help text that the table in docs/tables.md shows. Columns and
types are checked when the tables are read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoploom.config import rules
from hoploom.config.rules import (
    REQUIRED,
    Document,
    Headings,
    KeyCondition,
    KeyPath,
    KeyRule,
    default_of,
    full_name,
    key,
    key_of,
    keys_in,
    parse_document,
    problem,
    read_document,
)
from hoploom.config.values import as_key, as_toml, nearest, quoted
from hoploom.errors import ConfigError
from hoploom.schema import DTYPES, EDGE_ID, HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, ORIGINAL_ID, RelationName

CASTS = ("string", "bool", "int8", "int16", "int32", "int64", "uint8", "float32", "float64")
WITH_FILES = KeyCondition("files")


def _read_split(value: Any) -> str | dict[str, float] | None:
    if not isinstance(value, dict):
        return rules.TEXT.read(value)  # type: ignore[no-any-return]
    shares = {name: rules.number(0, 1).read(share) for name, share in value.items()}
    return shares if shares and all(shares.values()) and math.fsum(shares.values()) <= 1 + 1e-9 else None


def _read_fill(value: Any) -> float | int | str | None:
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, int | float | str) else None


FILES = rules.texts("a path in quotes, or a list", single=True)
COLUMNS = rules.texts("a column, or a list", single=True)
NAMED_COLUMNS = rules.table_of(rules.TEXT, 'a table of columns by field, e.g. { rank = "pagerank" }')
SHARES = "{ train = 0.8, val = 0.1, test = 0.1 }"
SPLIT = KeyRule(f"a column in quotes, or shares above 0 that add up to at most 1, e.g. {SHARES}", _read_split)
REVERSE = KeyRule(
    'true, false or the name of the reverse relation, e.g. "written_by"',
    lambda value: value if isinstance(value, bool) else rules.TEXT.read(value),
)
FILL = KeyRule("a number or text", _read_fill)


@dataclass(frozen=True)
class ColumnRule:
    """Changes to a column, in this order: fill, cast, then categories or standardise."""

    fill: float | int | str | None = key(None, "the value that replaces nulls", FILL, example=0)
    cast: str | None = key(None, "convert to this type", rules.choice(*CASTS), example="float32")
    categories: str | None = key(
        None,
        "turn words into numbers: a column per word (one-hot), or one number (codes)",
        rules.choice("one-hot", "codes"),
        example="one-hot",
    )
    standardise: bool = key(False, "subtract the mean and divide by the standard deviation", rules.FLAG)


@dataclass(frozen=True)
class NodeTable:
    """The section of a node type, whose table has a row per node. Without `files`, ids are 0, 1, … `count` - 1."""

    name: str
    files: tuple[str, ...] = key((), "paths, globs, folders or URLs of .parquet, .csv, .tsv or .arrow files", FILES)
    count: int | None = key(
        None,
        "number of nodes, if there is no table",
        rules.whole(1, 2**62),
        example=1000,
        only=KeyCondition("files", absent=True),
    )
    id: str | None = key(None, "the column with the node ids", rules.TEXT, example="paper_id", only=WITH_FILES)
    features: tuple[str, ...] = key(
        (), "columns that become field x, side by side; f_* means all that begin with f_", COLUMNS, only=WITH_FILES
    )
    dtype: str = key("float32", "the type of field x", rules.choice(*DTYPES))
    label: str | None = key(None, "the column that becomes field y", rules.TEXT, example="venue", only=WITH_FILES)
    num_classes: int | None = key(
        None, "number of classes; every label must be smaller", rules.whole(1), example=40, only=KeyCondition("label")
    )
    time: str | None = key(None, "the column that becomes field time", rules.TEXT, example="published", only=WITH_FILES)
    split: str | Mapping[str, float] | None = key(
        None,
        "a column with the name of each node's split, or shares of splits that are drawn by id "
        "(nodes without a label are in none)",
        SPLIT,
        only=WITH_FILES,
    )
    fields: Mapping[str, str] = key({}, "more fields, with their columns", NAMED_COLUMNS, only=WITH_FILES)
    columns: Mapping[str, ColumnRule] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The name of the section, such as nodes.paper."""
        return f"nodes.{as_key(self.name)}"

    @property
    def id_columns(self) -> dict[str, str]:
        """The name of the id column, as {"id": name}; empty if the section has no files."""
        return {} if self.id is None else {"id": self.id}


@dataclass(frozen=True)
class EdgeTable:
    """The section of a relation, whose table has a row per edge."""

    relation: RelationName
    files: tuple[str, ...] = key(
        REQUIRED,
        "paths, globs, folders or URLs of .parquet, .csv, .tsv or .arrow files",
        FILES,
        example="edges.parquet",
    )
    source: str = key(REQUIRED, "the column with the ids of the sources", rules.TEXT, example="source")
    destination: str = key(REQUIRED, "the column with the ids of the destinations", rules.TEXT, example="destination")
    features: tuple[str, ...] = key((), "columns that become field edge_attr, side by side", COLUMNS)
    dtype: str = key("float32", "the type of field edge_attr", rules.choice(*DTYPES))
    weight: str | None = key(None, "the column that becomes field weight", rules.TEXT, example="w")
    time: str | None = key(None, "the column that becomes field time", rules.TEXT, example="at")
    fields: Mapping[str, str] = key({}, "more fields, with their columns", NAMED_COLUMNS)
    reverse: str | None = key(
        None, "also add the reverse relation under this name; true: rev_ and the relation's name", REVERSE
    )
    undirected: bool = key(False, "every edge counts in both directions", rules.FLAG)
    deduplicate: bool = key(False, "of edges with the same source and destination, keep one", rules.FLAG)
    self_loops: str = key("keep", "edges from a node to itself", rules.choice("keep", "drop"))
    columns: Mapping[str, ColumnRule] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The name of the section, such as edges."author writes paper"."""
        return f"edges.{as_key(' '.join(self.relation))}"

    @property
    def id_columns(self) -> dict[str, str]:
        """The names of the id columns, as {"source": name, "destination": name}."""
        return {"source": self.source, "destination": self.destination}


Table = NodeTable | EdgeTable


def rule_of(table: Table, column: str) -> ColumnRule:
    """Return the rule that graph.toml gives for a column, or a rule that changes nothing."""
    return table.columns.get(column, ColumnRule())


@dataclass(frozen=True)
class GraphFile:
    """The content of a graph.toml."""

    nodes: Mapping[str, NodeTable]  # by name, in the order of the file
    edges: Mapping[RelationName, EdgeTable]
    seed: int = key(0, "the number that random splits derive from", rules.whole(0, rules.MOST_SEED))
    folder: Path = Path()  # relative paths are relative to this folder
    where: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)  # nodes.paper.id -> graph.toml:3

    @property
    def tables(self) -> list[Table]:
        return [*self.nodes.values(), *self.edges.values()]

    @property
    def homogeneous(self) -> bool:
        """True if the only type is `node` and the only relation `node to node`."""
        return list(self.nodes) == [HOMOGENEOUS_TYPE] and list(self.edges) == [HOMOGENEOUS_RELATION]

    def problem(self, name: str, message: str) -> ConfigError:
        """Return an error about a key (nodes.paper.label) or a section (nodes.paper), with its line in the file."""
        return problem(self.where, name, f"{name}: {message}")


HEADINGS: Headings = {
    "graph": GraphFile,
    "nodes.<type>": NodeTable,
    'edges."<source> <name> <destination>"': EdgeTable,
    "….columns.<column>": ColumnRule,
}


def read_graph(path: str | Path) -> GraphFile:
    """Read the graph.toml at a path. Relative paths in the file are relative to the file's folder."""
    absent = f"`hoploom init --tables DIR {path}` drafts one from the tables in DIR"
    return _graph_file(read_document(path, HEADINGS, absent=absent))


def parse_graph(text: str, *, name: str = "graph.toml", folder: Path = Path()) -> GraphFile:
    """Read a graph.toml from its text. Messages call the file `name`; relative paths are relative to `folder`."""
    return _graph_file(parse_document(text, HEADINGS, name=name, folder=folder))


def _graph_file(document: Document) -> GraphFile:
    document.top()
    seed = document.section(("graph",), owner=GraphFile)["seed"]
    nodes, edges = dict[str, NodeTable](), dict[RelationName, EdgeTable]()
    for name in _names(document, "nodes", NodeTable):
        path = ("nodes", name)
        if not name.strip() or " " in name or not name.isprintable():
            raise document.problem(full_name(path), f"node type {quoted(name)} is no name; give a word without spaces")
        nodes[name] = NodeTable(name=name, **_values(document, path, NodeTable))
    for name in _names(document, "edges", EdgeTable):
        relation, values = _relation(name, list(nodes), document), _values(document, ("edges", name), EdgeTable)
        if isinstance(values["reverse"], bool):
            values["reverse"] = f"rev_{relation[1]}" if values["reverse"] else None
        edges[relation] = EdgeTable(relation=relation, **values)
    graph = GraphFile(nodes, edges, seed, document.folder, document.where)
    for table in graph.tables:
        _check_nodes(graph, table) if isinstance(table, NodeTable) else _check_edges(graph, table)
        _check_fields(graph, table)
    timed = [next((table for table in some.values() if table.time), None) for some in (nodes, edges)]
    if timed[0] and timed[1]:
        way_out = 'keep one, the other as fields = { at = "…" }'
        message = f"there is {timed[0].owner}.time, too, and a graph has times of nodes or of edges; {way_out}"
        raise graph.problem(f"{timed[1].owner}.time", message)
    return graph


def _names(document: Document, section: str, owner: type[Any]) -> Sequence[str]:
    """Return the names of the node types or relations; raise ConfigError if there are none."""
    given = document.table((section,))
    heading = next(f"[{heading}]" for heading in HEADINGS if heading.startswith(section))
    for name, value in given.items():
        if name in keys_in(owner) and not isinstance(value, dict):
            at = full_name((section, name))
            raise document.problem(at, f"{at} stands outside of a table; write it below {heading}")
    if not given:
        what = "node type" if section == "nodes" else "relation"
        raise document.problem(section, f"there is no {what}; add a section {heading} with its files")
    return list(given)


def _values(document: Document, path: KeyPath, owner: type[Table]) -> dict[str, Any]:
    values, inside = document.section(path, owner=owner, tables=["columns"]), (*path, "columns")
    columns = {
        column: ColumnRule(**document.section((*inside, column), owner=ColumnRule)) for column in document.table(inside)
    }
    return {**values, "columns": columns}


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


# --- checks between keys -------------------------------------------------------------------------


def _check_nodes(graph: GraphFile, table: NodeTable) -> None:
    if not table.files and table.count is None:
        message = f'add a line such as files = "{table.name}.parquet", or count = 1000 where ids are 0 to 999'
        raise graph.problem(table.owner, f"files is missing; {message}")
    for name, described in keys_in(NodeTable).items():
        only, at = key_of(described).only, f"{table.owner}.{name}"
        is_said = at in graph.where and getattr(table, name) != {}  # an empty table says nothing
        if is_said and only is not None and not only.allows(getattr(table, only.selector) or None):
            raise graph.problem(at, f"it {only.refusal(None)}")
    if table.count is None and table.id is None:
        raise graph.problem(table.owner, f'id is missing; add a line such as id = "{table.name}_id"')
    if table.count is not None and table.columns:
        raise graph.problem(f"{table.owner}.columns", f"it {WITH_FILES.refusal(None)}")


def _check_edges(graph: GraphFile, table: EdgeTable) -> None:
    source, _, destination = table.relation
    for name in ("undirected", "self_loops") if source != destination else ():
        if getattr(table, name) != default_of(keys_in(EdgeTable)[name]):
            message = f"{as_toml(getattr(table, name))} is for relations of a type with itself; leave it out"
            raise graph.problem(f"{table.owner}.{name}", message)
    if table.reverse is None:
        return
    at, turned = f"{table.owner}.reverse", (destination, table.reverse, source)
    if table.undirected:
        raise graph.problem(at, "it has no effect with undirected, which counts both directions; drop one")
    if " " in table.reverse:
        raise graph.problem(at, f"{as_toml(table.reverse)} is more than a name; leave out types and spaces")
    others = [other for other in graph.edges.values() if other is not table]
    reversed_ones = [(other.relation[2], other.reverse, other.relation[0]) for other in others]
    if turned in [*graph.edges, *reversed_ones]:
        raise graph.problem(at, f"there is a relation {as_toml(' '.join(turned))} already; give another name")


def _check_fields(graph: GraphFile, table: Table) -> None:
    is_nodes = isinstance(table, NodeTable)
    made = ("x", "y", "time", ORIGINAL_ID) if is_nodes else ("edge_attr", "weight", "time", EDGE_ID)  # by other keys
    at = f"{table.owner}.dtype"
    if at in graph.where and not table.features:
        raise graph.problem(at, "it has no effect without features; leave it out")
    if isinstance(table, NodeTable) and table.label in table.features:
        message = f"{quoted(table.label)} is the label, too, so the model would be given the answer; drop it here"
        raise graph.problem(f"{table.owner}.features", message)
    for name in table.fields:
        if name in made or not name.strip() or not name.isprintable():
            at = f"{table.owner}.fields.{as_key(name)}"
            raise graph.problem(at, f"a field {as_toml(name)} cannot be given; choose another name")
    for column, rule in table.columns.items():
        at = f"{table.owner}.columns.{as_key(column)}"
        if column in table.id_columns.values():
            for name in ("fill", "categories", "standardise"):
                if getattr(rule, name) is not None and getattr(rule, name) is not False:  # a fill of 0 is one
                    raise graph.problem(f"{at}.{name}", "it cannot be done to ids; leave it out")
            if rule.cast not in (None, "string", "int64"):
                raise graph.problem(f"{at}.cast", f'{as_toml(rule.cast)} is given, but ids are "int64" or "string"')
        if rule.standardise and (rule.categories or rule.cast in ("string", "bool")):
            other = "categories" if rule.categories else f'cast = "{rule.cast}"'
            raise graph.problem(f"{at}.standardise", f"it is for numbers, {other} is not; drop one")
