"""Draft a graph.toml for the tables in a folder, from the names and types of their columns and the first rows.

Guessed values have a comment, so that the user can check and correct them.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hoploom.config.values import as_key, as_toml, printable
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.tables.csv import CsvFile
from hoploom.ingest.tables.sources import column_names, plain_schema
from hoploom.ingest.tables.table_files import TableFile, arrow_batches, kind_of, parquet_batches
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName

HEADER = """\
# `hoploom build` makes a store from this file. It was drafted from the tables in {folder}
# Check the lines that say "guessed". A line that begins with `# ` has no effect.

"""
SAMPLE = 10_000  # rows that are read of a table
END_WORDS = {
    "source": ("src", "source", "from", "citing"),
    "destination": ("dst", "destination", "target", "to", "cited"),
}
ID_WORDS = ("id", "ids", "idx", "nid", "uid", "node", "nodes")
OTHER_WORDS = ("friend", "neighbor", "neighbour", "parent", "child", *END_WORDS["source"], *END_WORDS["destination"])
LABELS, SPLITS = ("label", "labels", "y", "target", "class"), ("split", "fold")
NO_FEATURES = ("time", "timestamp", "date", "datetime", "ts", "created_at", "published", "weight", "w")
SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}
ROW_NUMBER = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # columns that pandas adds


@dataclass
class _Section:
    """A table, and the keys that its section of the drafted graph.toml gets."""

    name: str
    files: str  # the value of the key: a path or a folder
    paths: Sequence[TableFile]
    sample: pa.Table
    keys: dict[str, Any] = field(default_factory=dict)  # keys about a column are dotted: columns.NAME.categories
    why: dict[str, str] = field(default_factory=dict)  # by key, the comment on a guessed value

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The type of each column, without the columns of row numbers that pandas adds."""
        return {one.name: one.type for one in self.sample.schema if not ROW_NUMBER.fullmatch(one.name)}

    @property
    def node_type(self) -> str:
        """The node type that the table's name suggests, used if the table holds nodes."""
        return _stem(self.name) or "node"

    @property
    def id_typed(self) -> list[str]:
        """The columns that can hold ids: integers and text."""
        return [name for name, kind in self.types.items() if pa.types.is_integer(kind) or pa.types.is_string(kind)]

    def is_text(self, column: str) -> bool:
        return bool(pa.types.is_string(self.types[column]))

    def is_number(self, column: str) -> bool:
        """Return whether a column holds numbers, or lists of numbers of one length."""
        kind = self.types[column]
        if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            lengths = pc.count_distinct(pc.list_value_length(self.sample[column]), mode="all").as_py()
            return bool(pa.types.is_primitive(kind.value_type)) and lengths == 1
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def draft(folder: Path, beside: Path) -> str:
    """Return the text of a graph.toml for the tables in `folder`. Paths in it are relative to the folder `beside`."""
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
        if "id" not in table.keys:
            found.add_edges(table)
        _add_columns(table, [name for name in table.types if found.refers(name)])
    return found.text(os.path.relpath(folder, beside))


def _tables(folder: Path, root: Path) -> Iterator[_Section]:
    """Yield the tables below a folder. All files of a folder are one table if they have the same columns."""
    entries = [entry for entry in sorted(folder.iterdir()) if entry.name[0] not in "._"]
    files = [entry for entry in entries if entry.is_file() and kind_of(entry.name)]
    paths = [TableFile(os.path.abspath(file), str(file), kind_of(file.name) or "") for file in files]
    columns = {tuple(sorted(column_names(path))) for path in paths}
    if folder != root and len(columns) == 1 and len(files) == len(entries):
        yield _section(folder.name, paths, folder.relative_to(root))
    else:
        for file, path in zip(files, paths, strict=True):
            yield _section(file.name.partition(".")[0], [path], file.relative_to(root))
    for child in (entry for entry in entries if entry.is_dir()):
        yield from _tables(child, root)


def _section(name: str, paths: Sequence[TableFile], shown: Path) -> _Section:
    batch = next((batch for path in paths for batch in _batches(path) if batch.num_rows), None)
    if batch is None:
        raise DataError(f"{paths[0].shown} has no rows; give a table with rows, or remove it")
    sample = pa.Table.from_batches([batch]).slice(0, SAMPLE)
    return _Section(name, str(shown), paths, sample.cast(plain_schema(sample.schema, sample.schema.names)))


def _batches(file: TableFile, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    """Yield batches of a file's rows, with the given columns, or with all columns if `columns` is empty."""
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
        """Return whether a column's name suggests ids: it has a word such as "id", or is the name of a node type."""
        return bool({*_words(column)} & {*ID_WORDS}) or _stem(column) in self.types

    def own_id(self, table: _Section) -> str | None:
        """Return a node table's id column, or None. It is named `id` or like the table, and its values are unique."""
        named = [name for name in table.id_typed if self.refers(name)]
        own = [name for name in named if _stem(name) == table.node_type] if len(named) < 3 else []
        general = [name for name in named if not _stem(name)]
        own += general if len(general) == 1 else []
        for name in () if _named_ends(table) else own or named[: len(named) == 1]:
            if pc.count_distinct(table.sample[name], mode="all").as_py() == table.sample.num_rows:
                return name
        return None

    def add_edges(self, table: _Section) -> None:
        """Add the relation of an edge table, or a note if it is left out.

        Its id columns have names in END_WORDS, else are the first two named like ids, else the only two that can hold
        ids.
        """
        named = [name for name in table.id_typed if self.refers(name)]
        ends = _named_ends(table) or (named[:2] if len(named) > 1 else table.id_typed)
        if len(ends) != 2:
            self.notes.append(f"{table.files} is left out: no ids are seen among {', '.join(table.types)}")
            return
        table.keys |= zip(END_WORDS, ends, strict=True)
        types = [self._named_type(table, column) for column in ends]
        if None in types:
            known = [name for name in _words(table.name) if name in self.nodes]
            only = [*self.nodes, "node"] if len(self.nodes) < 2 else []
            both = [*(name for name in types if name), *known, *only]
            for number, end in enumerate(END_WORDS):
                if types[number] is None and both:
                    types[number] = known[-number] if known else both[0]
                    table.why[end] = f"guessed: these are ids of {types[number]}"
        for name, column in zip(types, ends, strict=True):
            nodes = self.nodes.get(name or "")
            has_text = False if nodes is None else nodes.is_text(nodes.keys["id"])
            if name is None or table.is_text(column) != has_text:
                way_out = f"add one as [nodes.{as_key(_stem(column) or 'node')}]"
                self.notes.append(f"{table.files} is left out: no table has the ids of {column}; {way_out}")
                return
            if nodes is None:
                batches = (batch for path in table.paths for batch in _batches(path, [column]))
                most = max(pc.max(batch.column(column)).as_py() or 0 for batch in batches)
                self.counts[name] = max(self.counts.get(name, 0), most + 1)
        source, destination = types
        taken = {source, destination, "edge", "link", *ID_WORDS}
        words = re.findall(r"[a-z]+", table.name.lower())
        name = "_".join(word for word in words if not {word, *_words(word)} & taken) or "to"
        while (str(source), name, str(destination)) in self.relations:
            name += "_2"
        self.relations[str(source), name, str(destination)] = table

    def _named_type(self, table: _Section, column: str) -> str | None:
        """Return the node type that the name of a column contains; None if there is none."""
        for name, nodes in self.nodes.items():
            if column == nodes.keys["id"] or name in _words(column):
                return name
        stem = "_".join(word for word in _words(column) if word not in (*ID_WORDS, *OTHER_WORDS))
        return stem if stem and self.refers(column) and not table.is_text(column) else None

    def text(self, prefix: str) -> str:
        """Return the text of graph.toml; paths in it begin with `prefix`."""
        if len(self.nodes) + len(self.counts) == len(self.relations) == 1:
            self.nodes = dict(zip([HOMOGENEOUS_TYPE], self.nodes.values(), strict=False))
            self.counts = dict(zip([HOMOGENEOUS_TYPE], self.counts.values(), strict=False))
            self.relations = dict(zip([HOMOGENEOUS_RELATION], self.relations.values(), strict=True))
        text = HEADER.format(folder="this folder." if prefix == "." else f"{prefix}.")
        for name, nodes in self.nodes.items():
            text += _section_text(f"nodes.{as_key(name)}", nodes, prefix)
        for name, count in self.counts.items():
            text += f"[nodes.{as_key(name)}]\ncount = {count}  # guessed: one more than the largest id\n\n"
        for key, edges in self.relations.items():
            if key[0] != key[2]:
                edges.keys["reverse"], edges.why["reverse"] = True, "guessed: messages flow both ways"
            text += _section_text(f"edges.{as_key(' '.join(key))}", edges, prefix)
        text += "" if self.relations else '# no edges were found; add a section such as [edges."author writes paper"]\n'
        return text + "".join(f"# {printable(note)}\n" for note in self.notes)


def _named_ends(table: _Section) -> list[str]:
    """Return [source column, destination column], found by names in END_WORDS; [] unless there is one of each."""
    found = [name for words in END_WORDS.values() for name in table.id_typed if _stem(name) in words]
    return found if len(found) == 2 else []


def _add_columns(table: _Section, ids: Sequence[str]) -> None:
    """Guess the keys `features` and, for node tables, `label` and `split`. Columns in `ids` are not used for these."""
    left = [name for name in table.types if name not in (*table.keys.values(), *ids)]
    numbers = [name for name in left if table.is_number(name) and name.lower() not in NO_FEATURES]
    repeated = [  # words that stand for classes or splits
        name
        for name in left
        if table.is_text(name) and 2 * pc.count_distinct(table.sample[name]).as_py() <= table.sample.num_rows
    ]
    able = [name for name in numbers if name != "y" or "x" not in numbers]  # x and y are a position
    labels = [name for word in LABELS for name in [*able, *repeated] if name.lower() == word and "id" in table.keys]
    features = [name for name in numbers if name not in labels[:1] and not table.sample[name].null_count]
    if features:
        table.keys["features"] = features
    if not labels:
        return
    table.keys["label"] = labels[0]
    table.why["label"] = f"guessed: the column is called {labels[0]}; is this what you predict?"
    splits = [name for name in repeated if name.lower() in SPLITS]
    table.keys["split"] = splits[0] if splits else SHARES
    if not splits:
        table.why["split"] = "guessed: no column names the splits"
    if labels[0] in repeated:
        key = f"columns.{as_key(labels[0])}.categories"
        table.keys[key], table.why[key] = "codes", "guessed: words stand for classes"


def _words(name: str) -> list[str]:
    """Return a name's words in singular: "write" and "paper" for writesPaper, writes_paper and writes-papers."""
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    words = [re.sub(r"(?<=..)(?<!mov)ies$", "y", word) for word in words if word]
    return [re.sub(r"(?<=...)(?<!s|u|i)s$", "", word) for word in words]


def _stem(name: str) -> str:
    """Return a name without its words for ids, e.g. author for author_id."""
    return "_".join(word for word in _words(name) if word not in ID_WORDS)


def _section_text(owner: str, table: _Section, prefix: str) -> str:
    text = f"[{owner}]\nfiles = {as_toml(os.path.normpath(os.path.join(prefix, table.files)))}\n"
    for key, value in table.keys.items():
        why = f"  # {printable(table.why[key])}" if key in table.why else ""
        text += f"{key} = {as_toml(value)}{why}\n"
    used = [*table.keys.get("features", []), *table.keys.values()]
    unused = [name for name in table.types if name not in used]
    nulls = {name: ", some null" if table.sample[name].null_count else "" for name in unused}
    shown = ", ".join(f"{name} ({table.types[name]}{nulls[name]})" for name in unused)
    return text + (f"# not used: {printable(shown)}\n" if unused else "") + "\n"
