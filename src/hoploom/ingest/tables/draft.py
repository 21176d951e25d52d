"""Draft a graph.toml for the tables in a folder, from the names, types and first rows of their columns.

Guesses have a comment: a person is to read the text and correct it. Also reads the ids of node tables, to find the node
types of columns by their values.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hoploom.config.values import as_key, as_share, as_toml, printable
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.tables.csv import CsvFile
from hoploom.ingest.tables.sources import column_names, plain_schema
from hoploom.ingest.tables.table_files import TableFile, arrow_batches, kind_of, parquet_batches
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName

HEADER = """\
# `hoploom build` makes a store from this file. It was drafted from the tables in {folder}
# Check the lines that say "guessed". A line that begins with `# ` has no effect.

"""
SAMPLE, WANTED = 10_000, 200  # rows that are read of a table; values of a column that are looked up among ids
ENDS = ("source", "destination")
END_WORDS = {
    "source": ("src", "source", "from", "citing"),
    "destination": ("dst", "destination", "target", "to", "cited"),
}
PEERS = ("friend", "peer", "neighbor", "neighbour", "parent", "child", "other")
ID_WORDS = ("id", "ids", "idx", "nid", "uid", "node", "nodes")
EDGE_WORDS = ("edge", "edges", "link", "links", *ID_WORDS)
LABELS, SPLITS, WEIGHTS = ("label", "labels", "y", "target", "class"), ("split", "fold"), ("weight", "w")
TIMES = ("time", "timestamp", "date", "datetime", "ts", "created_at", "published")
SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}
ROW_NUMBER = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # columns that pandas adds


@dataclass
class _Section:
    """A table and its keys in graph.toml."""

    name: str
    files: str  # the value of the key: a path or a folder
    paths: Sequence[TableFile]
    sample: pa.Table
    keys: dict[str, Any] = field(default_factory=dict)  # those of columns are dotted
    why: dict[str, str] = field(default_factory=dict)  # comments by key, if the value is guessed

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The type of each column but row numbers."""
        return {one.name: one.type for one in self.sample.schema if not ROW_NUMBER.fullmatch(one.name)}

    @property
    def node_type(self) -> str:
        """The name of the node type, if the table holds nodes."""
        return "_".join(word for word in _words(self.name) if word not in ID_WORDS) or "node"

    @property
    def id_typed(self) -> list[str]:
        """The columns that can hold ids: integers and text."""
        return [name for name, kind in self.types.items() if pa.types.is_integer(kind) or pa.types.is_string(kind)]

    def is_text(self, column: str) -> bool:
        return bool(pa.types.is_string(self.types[column]))

    def values(self, column: str) -> Iterator[pa.Array]:
        """Yield all values of a column, as text or int64."""
        kind = pa.string() if self.is_text(column) else pa.int64()
        for path in self.paths:
            yield from (batch.column(column).cast(kind, safe=False) for batch in _batches(path, [column]))


def draft(folder: Path, beside: Path) -> str:
    """Return a graph.toml for the tables in a folder, to be written into the folder `beside`.

    >>> Path("graph.toml").write_text(draft(Path("tables"), Path()))
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the folder with the tables")
    tables = list(_tables(folder, folder))
    if not tables:
        raise ConfigError(f"{folder} holds no table; give a folder with Parquet, CSV or Arrow files")
    found = _Draft({table.node_type for table in tables})
    for table in tables:
        if (column := found.own_id(table)) is not None:
            table.keys["id"] = column
            found.nodes[table.node_type] = table
    found.types = set(found.nodes)
    for table in tables:
        found.add_foreign_keys(table) if "id" in table.keys else found.add_edges(table)
        _add_columns(table, [name for name in table.types if found.refers(name)])
    return found.text(os.path.relpath(folder, beside))


def _tables(folder: Path, root: Path) -> Iterator[_Section]:
    """Yield the tables below a folder. All files of a folder are one table if they have the same columns."""
    entries = [entry for entry in sorted(folder.iterdir()) if entry.name[0] not in "._"]
    files = [entry for entry in entries if entry.is_file() and kind_of(entry.name)]
    paths = [TableFile(os.path.abspath(file), str(file), kind_of(file.name) or "") for file in files]
    columns = {tuple(sorted(column_names(path))) for path in paths}
    if folder != root and len(columns) == 1 and len(files) == len(entries):
        yield _table(folder.name, paths, folder.relative_to(root))
    else:
        for file, path in zip(files, paths, strict=True):
            yield _table(file.name.partition(".")[0], [path], file.relative_to(root))
    for child in (entry for entry in entries if entry.is_dir()):
        yield from _tables(child, root)


def _table(name: str, paths: Sequence[TableFile], shown: Path) -> _Section:
    batch = next((batch for path in paths for batch in _batches(path) if batch.num_rows), None)
    if batch is None:
        raise DataError(f"{paths[0].shown} has no rows; give a table with rows, or remove it")
    columns = {column: batch.column(batch.schema.names.index(column)) for column in batch.schema.names}
    sample = pa.table(columns).slice(0, SAMPLE)
    return _Section(name, str(shown), paths, sample.cast(plain_schema(sample.schema, sample.schema.names)))


def _batches(file: TableFile, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, of some columns or all."""
    if file.kind in ("csv", "tsv"):
        with CsvFile(file).opened(columns) as reader:
            yield from reader
    elif file.kind == "parquet":
        yield from parquet_batches(file, columns or column_names(file))
    else:
        with arrow_batches(file) as (_, batches):
            yield from batches


@dataclass
class _Draft:
    """The node types and relations found so far."""

    types: set[str]  # the names that columns may refer to
    nodes: dict[str, _Section] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # types without a table
    relations: dict[RelationName, _Section] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def refers(self, column: str) -> bool:
        """Return whether a column is called like an id, or like a node type."""
        return bool({*_words(column)} & {*ID_WORDS}) or _stem(column) in self.types

    def own_id(self, table: _Section) -> str | None:
        """Return the column that tells the rows apart: called like the table or `id`; None if there is none."""
        named = [name for name in table.id_typed if self.refers(name)]
        own = [name for name in named if _stem(name) == table.node_type] if len(named) < 3 else []
        general = [name for name in named if not _stem(name)]
        own += general if len(general) == 1 else []
        own = own or (named if len(named) == 1 else [])
        columns = {name: table.sample[name] for name in own}
        unique = (name for name, ids in columns.items() if pc.count_distinct(ids, mode="all").as_py() == len(ids))
        return None if _named_ends(table) else next(unique, None)

    def add_foreign_keys(self, table: _Section) -> None:
        """Add a relation for each column that is called like another node type, and holds its ids in every row."""
        for column in table.id_typed:
            other = _stem(column)
            if column == table.keys["id"] or other not in self.nodes or self.nodes[other] is table:
                continue
            if self.share(table, column, other) < 1 or table.sample[column].null_count:
                self.notes.append(f"{table.files}: {column} has ids of {other}, but not in every row, as edges need")
                continue
            edges = _Section("", table.files, table.paths, table.sample.select([table.keys["id"], column]))
            edges.keys = {"source": table.keys["id"], "destination": column}
            self._add_relation(edges, table.node_type, other)

    def add_edges(self, table: _Section) -> None:
        """Add the relation of a table of edges: its ends are named so, or called like ids, or the only two columns."""
        named = [name for name in table.id_typed if self.refers(name)]
        ends = _named_ends(table) or (named[:2] if len(named) > 1 else table.id_typed)
        if len(ends) != 2:
            self.notes.append(f"{table.files} is left out: no ids are seen among {', '.join(table.types)}")
            return
        table.keys |= zip(ENDS, ends, strict=True)
        types: list[str] = []
        for end, column in zip(ENDS, ends, strict=True):
            type_ = self._end_type(table, end, column, types)
            if type_ is None:
                way_out = f"add one as [nodes.{as_key(_stem(column) or 'node')}]"
                self.notes.append(f"{table.files} is left out: no table has the ids of {column}; {way_out}")
                return
            types.append(type_)
        self._add_relation(table, *types)

    def _end_type(self, table: _Section, end: str, column: str, before: Sequence[str]) -> str | None:
        """Return the node type of an end, by the column's name, else by its values, else a new one with a count."""
        by_name = next(
            (name for name, of in self.nodes.items() if column == of.keys["id"] or name in _words(column)), None
        )
        if by_name is not None:
            if (share := self.share(table, column, by_name)) < 1:
                what = f"only {as_share(share)} of the first values are ids in {self.nodes[by_name].files}"
                table.why[end] = f"guessed by the name, but {what}"
            return by_name
        shares = {name: self.share(table, column, name) for name in self.nodes}
        likely = before if _stem(column) in PEERS else ()  # the friends of users are users
        best = max(shares, key=lambda name: (name in likely and shares[name] > 0.5, shares[name]), default=None)
        is_named = self.refers(column) and _stem(column) not in ("", *PEERS)  # users may have the numbers of movies
        if best is not None and shares[best] > 0.5 and (table.is_text(column) or not is_named):
            table.why[end] = f"guessed: these are ids in {self.nodes[best].files}, by their values"
            return best
        name = _stem(column) if self.refers(column) and _stem(column) else "node"
        if table.is_text(column) or name in self.nodes:
            return None
        most = max(pc.max(values).as_py() or 0 for values in table.values(column))
        self.counts[name] = max(self.counts.get(name, 0), most + 1)
        return name

    def share(self, table: _Section, column: str, node_type: str) -> float:
        """Return the share of a column's first values that are ids of a node type."""
        nodes = self.nodes[node_type]
        if nodes.is_text(nodes.keys["id"]) != table.is_text(column):
            return 0.0
        wanted = pc.unique(next(table.values(column)).drop_null()).slice(0, WANTED)
        missing = wanted
        for ids in nodes.values(nodes.keys["id"]):
            missing = missing.filter(pc.invert(pc.is_in(missing, ids)))
        return 1 - len(missing) / max(1, len(wanted))

    def _add_relation(self, edges: _Section, source: str, destination: str) -> None:
        """Add a relation, named by the words of its table that are not those of its types."""
        taken, words = {source, destination, *EDGE_WORDS}, re.split(r"[^a-z]+", edges.name.lower())
        name = "_".join(word for word in words if word and not {word, _singular(word)} & taken) or "to"
        while (source, name, destination) in self.relations:
            name += "_2"
        self.relations[source, name, destination] = edges

    def text(self, prefix: str) -> str:
        """Return the text of graph.toml."""
        if len(self.nodes) + len(self.counts) == len(self.relations) == 1:
            self.nodes = dict(zip([HOMOGENEOUS_TYPE], self.nodes.values(), strict=False))
            self.counts = dict(zip([HOMOGENEOUS_TYPE], self.counts.values(), strict=False))
            self.relations = dict(zip([HOMOGENEOUS_RELATION], self.relations.values(), strict=True))
            self.notes.append('with the one type "node" and the one relation "node to node" the graph is homogeneous')
        has_times = any("time" in edges.keys for edges in self.relations.values())
        text = HEADER.format(folder="this folder." if prefix == "." else f"{prefix}.")
        for name, nodes in self.nodes.items():
            if has_times and (time := nodes.keys.pop("time", None)) is not None:
                self.notes.append(f"nodes.{name}.time = {time} is left out: a graph has times of nodes or of edges")
            text += _section_text(f"nodes.{as_key(name)}", nodes, prefix)
        for name, count in self.counts.items():
            text += f"[nodes.{as_key(name)}]\ncount = {count}  # guessed: one more than the largest id\n\n"
        for key, edges in self.relations.items():
            if key[0] != key[2]:
                edges.keys["reverse"], edges.why["reverse"] = True, "guessed: messages flow both ways"
            text += _section_text(f"edges.{as_key(' '.join(key))}", edges, prefix)
        if not self.relations:
            self.notes.append('no edges were found; add a section such as [edges."author writes paper"]')
        return text + "".join(f"# {printable(note)}\n" for note in self.notes)


def _named_ends(table: _Section) -> list[str]:
    """Return the columns that are called source and destination, or alike; none if there are no such columns."""
    found = [next((name for name in table.id_typed if _stem(name) in END_WORDS[end]), None) for end in ENDS]
    return [name for name in found if name is not None] if None not in found else []


def _add_columns(table: _Section, ids: Sequence[str]) -> None:
    """Add the keys of features, label, split, time and weight; `ids` are columns that are called like ids."""
    types, left = table.types, [name for name in table.types if name not in table.keys.values()]
    words = [name for name in left if table.is_text(name)]
    numbers = [name for name in left if _is_number(table, name)]
    moments = [name for name in left if pa.types.is_temporal(types[name])]

    def named(wanted: Sequence[str], able: Sequence[str]) -> str | None:
        return next((name for word in wanted for name in able if name.lower() == word), None)

    roles = {"time": named(TIMES, [*moments, *(name for name in numbers if pa.types.is_integer(types[name]))])}
    if "id" in table.keys:
        repeated = [
            name for name in words if 2 * pc.count_distinct(table.sample[name]).as_py() <= table.sample.num_rows
        ]
        able = [name for name in numbers if name != "y" or "x" not in numbers]  # x and y are a position
        roles = {"label": named(LABELS, [*able, *repeated]), "split": named(SPLITS, repeated)} | roles
    else:
        roles = {"weight": named(WEIGHTS, numbers)} | roles
    features = [name for name in numbers if name not in (*roles.values(), *ids) and not table.sample[name].null_count]
    if features:
        table.keys["features"] = _globs(features, [name for name in types if name not in features])
    table.keys |= {role: column for role, column in roles.items() if column is not None}
    if (label := roles.get("label")) is not None:
        table.why["label"] = f"guessed: the column is called {label}; is this what you predict?"
        if "split" not in table.keys:
            table.keys["split"], table.why["split"] = SHARES, "guessed: no column names the splits"
        if label in words:
            key = f"columns.{as_key(label)}.categories"
            table.keys[key], table.why[key] = "codes", "guessed: words stand for classes"


def _globs(features: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the features, by a glob where that means the same columns."""
    found = []
    for name in features:
        pattern = name.rstrip("0123456789") + "*"
        alike = [one for one in features if fnmatchcase(one, pattern)]
        is_glob = len(alike) > 2 and pattern not in ("*", f"{name}*")
        found.append(pattern if is_glob and not any(fnmatchcase(one, pattern) for one in others) else name)
    return list(dict.fromkeys(found))


def _is_number(table: _Section, name: str) -> bool:
    """Return whether a column holds numbers, or lists of numbers of one length."""
    kind = table.types[name]
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = pc.count_distinct(pc.list_value_length(table.sample[name]), mode="all").as_py()
        return bool(pa.types.is_primitive(kind.value_type)) and lengths == 1
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _words(name: str) -> list[str]:
    """Return the words of a name, in singular: writesPaper, writes_paper and writes-papers have two."""
    split = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return [_singular(word) for word in split if word]


def _singular(word: str) -> str:
    """Return author for authors, and category for categories."""
    if word.endswith("ies") and len(word) > 4 and word != "movies":
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3 else word


def _stem(name: str) -> str:
    """Return author for author_id."""
    return "_".join(word for word in _words(name) if word not in ID_WORDS)


def _section_text(owner: str, table: _Section, prefix: str) -> str:
    text = f"[{owner}]\nfiles = {as_toml(os.path.normpath(os.path.join(prefix, table.files)))}\n"
    for key, value in table.keys.items():
        why = f"  # {printable(table.why[key])}" if key in table.why else ""
        text += f"{key} = {as_toml(value)}{why}\n"
    patterns = table.keys.get("features", [])
    used = {name for name in table.types for pattern in patterns if name == pattern or fnmatchcase(name, pattern)}
    unused = [name for name in table.types if name not in used and name not in table.keys.values()]
    nulls = {name: ", some null" if table.sample[name].null_count else "" for name in unused}
    shown = ", ".join(f"{name} ({table.types[name]}{nulls[name]})" for name in unused)
    return text + (f"# not used: {printable(shown)}\n" if unused else "") + "\n"
