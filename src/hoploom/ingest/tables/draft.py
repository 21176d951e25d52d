"""Draft a graph.toml for the tables in a folder, from the names, types and first values of their columns.

Guesses have a comment: a person is to read the text and correct it. Reads the first rows of each table, and the ids of
node tables.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
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
FEW, MOST_SPLITS, HALF = 8, 10, 0.5
ENDS = ("source", "destination")
SOURCES = ("src", "source", "from", "head", "start", "u", "citing", "follower", "sender")
DESTINATIONS = ("dst", "dest", "destination", "target", "to", "tail", "end", "v", "cited", "followee", "receiver")
PEERS = ("friend", "peer", "neighbor", "neighbour", "parent", "child", "other", "partner", "ref", "reference")
ID_WORDS = ("id", "ids", "idx", "nid", "uid", "key", "index")
NODE_WORDS, EDGE_WORDS = ("node", "nodes", "vertex", "vertices"), ("edge", "edges", "link", "links", "rel", "relation")
LABELS, SPLITS, WEIGHTS = ("label", "labels", "y", "target", "class"), ("split", "fold", "subset"), ("weight", "w")
TIMES = ("time", "timestamp", "date", "datetime", "ts", "at", "created", "created_at", "published")
SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}
ID_NAME = re.compile(r"((.*[_ -])?(id|ids|idx|nid|uid|key|index)|node|vertex)$|.*[a-z]I[dD]$", re.IGNORECASE)
ROW_NUMBER = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # columns that pandas adds
SHARD = re.compile(r"(?<![a-zA-Z])\d+|\d+$")  # the number in part-00001, edges_3 and edges7


@dataclass
class _Section:
    """A table and its keys in graph.toml."""

    name: str
    files: str  # the value of the key: a path, a glob or a folder
    paths: Sequence[TableFile]
    sample: pa.Table
    keys: dict[str, Any] = field(default_factory=dict)  # those of columns are dotted
    why: dict[str, str] = field(default_factory=dict)  # comments by key, where the value is guessed

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The type of each column but row numbers."""
        return {one.name: one.type for one in self.sample.schema if not ROW_NUMBER.fullmatch(one.name)}

    @property
    def node_type(self) -> str:
        """The name of the node type, if the table holds nodes."""
        return "_".join(_singular(word) for word in _words(self.name) if word not in NODE_WORDS) or "node"

    @property
    def id_typed(self) -> list[str]:
        """The columns that can hold ids: integers and text."""
        return [name for name, kind in self.types.items() if pa.types.is_integer(kind) or pa.types.is_string(kind)]

    def is_text(self, column: str) -> bool:
        return bool(pa.types.is_string(self.types[column]))

    def first_values(self, column: str) -> pa.Array:
        """Return the first distinct values of a column, as text or int64."""
        values = pc.unique(self.sample[column].combine_chunks().drop_null()).slice(0, WANTED)
        return values.cast(pa.string() if self.is_text(column) else pa.int64(), safe=False)

    def all_values(self, column: str) -> Iterator[pa.Array]:
        """Yield all values of a column, batch by batch."""
        kind = self.types[column]
        for path in self.paths:
            yield from (batch.column(column).cast(kind) for batch in _batches(path, {column: kind}))


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
            found.nodes[_free(table.node_type, found.nodes)] = table
    found.types = set(found.nodes)
    for table in tables:
        if "id" in table.keys:
            found.add_foreign_keys(table)
        else:
            found.add_edges(table)
        _add_columns(table, found)
    return found.text(os.path.relpath(folder, beside))


# --- tables in a folder --------------------------------------------------------------------------


def _tables(folder: Path, root: Path) -> Iterator[_Section]:
    """Yield the tables: files whose names differ by a number are one, and so are all files of a folder, if alike."""
    entries = [entry for entry in sorted(folder.iterdir()) if entry.name[0] not in "._"]
    shards: dict[str, list[TableFile]] = {}
    for entry in entries:
        if entry.is_file() and (kind := kind_of(entry.name)) is not None:
            stem = entry.name.partition(".")[0]
            pattern = SHARD.sub("*", stem) + entry.name.removeprefix(stem)
            shards.setdefault(pattern, []).append(TableFile(os.path.abspath(entry), str(entry), kind))
    files = [file for some in shards.values() for file in some]
    if folder != root and len(files) == len(entries) and _are_alike(files):
        shards = {"": files}
    for pattern, files in shards.items():
        if _are_alike(files) and (len(files) > 1 or not pattern):
            name = re.sub(r"[^A-Za-z0-9]*part$", "", SHARD.sub("", pattern.partition(".")[0].replace("*", "")))
            yield _table(name.strip("-_. ") or folder.name, files, folder.relative_to(root) / pattern)
        else:
            for path, file in ((Path(file.path), file) for file in files):
                yield _table(path.name.partition(".")[0], [file], path.relative_to(os.path.abspath(root)))
    for child in (entry for entry in entries if entry.is_dir()):
        yield from _tables(child, root)


def _are_alike(files: Sequence[TableFile]) -> bool:
    return len({tuple(sorted(column_names(file))) for file in files}) == 1


def _table(name: str, paths: Sequence[TableFile], pattern: Path) -> _Section:
    batch = next((batch for path in paths for batch in _batches(path) if batch.num_rows), None)
    if batch is None:
        raise DataError(f"{paths[0].shown} has no rows; give a table with rows, or remove it")
    columns = {column: batch.column(batch.schema.names.index(column)) for column in batch.schema.names}
    sample = pa.table(columns).slice(0, SAMPLE)
    return _Section(name, str(pattern), paths, sample.cast(plain_schema(sample.schema, sample.schema.names)))


def _batches(file: TableFile, types: dict[str, pa.DataType] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file: all columns, or those in `types`."""
    columns = list(types or ())
    if file.kind in ("csv", "tsv"):
        with CsvFile(file).opened(columns, types) as reader:
            yield from reader
    elif file.kind == "parquet":
        yield from parquet_batches(file, columns or column_names(file))
    else:
        with arrow_batches(file) as (_, batches):
            yield from batches


# --- node types and relations --------------------------------------------------------------------


@dataclass
class _Draft:
    """The node types and relations found so far."""

    types: Collection[str]  # the names that columns may refer to
    nodes: dict[str, _Section] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # types without a table
    relations: dict[RelationName, _Section] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def refers(self, column: str) -> bool:
        """Return whether a column is called like an id, or like a node type."""
        return bool(ID_NAME.match(column)) or _stem(column) in self.types

    def own_id(self, table: _Section) -> str | None:
        """Return the column that tells the rows apart: called like the table or `id`; None if there is none."""
        if _named_ends(table):
            return None
        named = [name for name in table.id_typed if self.refers(name)]
        own = [name for name in named if _stem(name) == table.node_type and _stem(name) not in PEERS]
        if len(named) > len(own) + 1 and not any(ID_NAME.match(name) for name in own):
            own = []  # the rating of an item by a user
        own = own or [name for name in named if _stem(name) in ("", *NODE_WORDS)] or (named if len(named) == 1 else [])
        columns = {name: table.sample[name] for name in own if not table.sample[name].null_count}
        return next((name for name, ids in columns.items() if pc.count_distinct(ids).as_py() == len(ids)), None)

    def add_foreign_keys(self, table: _Section) -> None:
        """Add a relation for each column that holds ids of another node type in every row."""
        own = next(name for name, nodes in self.nodes.items() if nodes is table)
        for column in (column for column in table.id_typed if column != table.keys["id"]):
            shares = {of: self.share(table, column, of) for of in self.nodes if of != own}
            able = [of for of in shares if shares[of] > HALF and (table.is_text(column) or _stem(column) == of)]
            other = max(able, key=lambda of: (_stem(column) == of, shares[of]), default=None)
            if other is None:
                continue
            if shares[other] < 1 or table.sample[column].null_count:
                self.notes.append(f"{table.files}: {column} has ids of {other}, but not in every row, as edges need")
                continue
            edges = _Section(column, table.files, table.paths, table.sample.select([table.keys["id"], column]))
            edges.keys = {"source": table.keys["id"], "destination": column}
            edges.why["destination"] = "guessed: these are ids of {}, by their values"
            self._add_relation(edges, own, other)

    def add_edges(self, table: _Section) -> None:
        """Add the relation of a table of edges, whose ends are found by name, else by value."""
        named = [name for name in table.id_typed if _stem(name) and self.refers(name)]
        valued = [name for name in table.id_typed if name in named or self._are_ids(table, name)]
        ends = _named_ends(table) or next((names[:2] for names in (named, valued) if len(names) > 1), [])
        if not ends and len(table.types) == 2 == len(table.id_typed) and len({*table.types.values()}) == 1:
            ends = list(table.types)
        if not ends:
            self.notes.append(f"{table.files} is left out: no ids are seen among {', '.join([*table.types][:FEW])}")
            return
        table.keys |= zip(ENDS, ends, strict=True)
        types: list[str] = []
        for end, column, word in zip(ENDS, ends, (0, -1), strict=True):
            type_ = self._end_type(table, end, column, word, types[0] if types else None)
            if type_ is None:
                reason = f"no table has the ids of {column}; add one as [nodes.{as_key(_subject(column) or 'node')}]"
                self.notes.append(f"{table.files} is left out: {reason}")
                return
            types.append(type_)
        self._add_relation(table, *types)

    def _end_type(self, table: _Section, end: str, column: str, word: int, other: str | None) -> str | None:
        """Return the node type of an end: by the column's name, the file's, or the values; else one with a count."""
        nodes = {name: of for name, of in self.nodes.items() if of.is_text(of.keys["id"]) == table.is_text(column)}
        subject, of_file = _subject(column), _words(table.name)
        named = [name for name, of in nodes.items() if _stem(column) == name or of.keys["id"] == column]
        named += [name for name in nodes if name == subject]
        if not subject and len(of_file) > 1 and (name := _singular(of_file[word])) in nodes:
            named.append(name)
        if named:
            if (share := self.share(table, column, named[0])) < 1:
                what = f"only {as_share(share)} of the first values are ids of {{}}"
                table.why[end] = f"guessed by the name, but {what}"
            return named[0]
        if table.is_text(column) or not (subject and self.refers(column)):  # two types may number their nodes alike
            shares = {name: self.share(table, column, name) for name in nodes}
            best = max(
                shares,
                key=lambda name: (not subject and name == other and shares[name] > HALF, shares[name]),
                default=None,
            )
            if best is not None and (shares[best] > HALF or len(self.nodes) == 1):
                table.why[end] = "guessed: these are ids of {}, by their values"
                return best
        if table.is_text(column) or (subject or "node") in self.nodes:
            return None
        most = max(pc.max(values).as_py() or 0 for values in table.all_values(column))
        self.counts[subject or "node"] = max(self.counts.get(subject or "node", 0), most + 1)
        return subject or "node"

    def share(self, table: _Section, column: str, node_type: str) -> float:
        """Return the share of a column's first values that are ids of a node type."""
        nodes, wanted = self.nodes[node_type], table.first_values(column)
        if len(wanted) == 0 or nodes.is_text(nodes.keys["id"]) != table.is_text(column):
            return 0.0
        missing = wanted
        for ids in nodes.all_values(nodes.keys["id"]):
            missing = missing.filter(pc.invert(pc.is_in(missing, ids.cast(missing.type, safe=False))))
            if len(missing) == 0:
                break
        return 1 - len(missing) / len(wanted)

    def _are_ids(self, table: _Section, column: str) -> bool:
        """Return whether a column's values are ids. Numbers must be many: 1 to 5 are stars, not ids."""
        if table.is_text(column):
            return any(self.share(table, column, name) > HALF for name in self.nodes)
        found, num_values = self.nodes.items(), len(table.first_values(column))
        most = {name: min(WANTED, nodes.sample.num_rows) for name, nodes in found}
        return any(num_values > HALF * most[name] and self.share(table, column, name) == 1 for name, _ in found)

    def _add_relation(self, edges: _Section, source: str, destination: str) -> None:
        """Add a relation, named by the words of its table or column that are not those of its types."""
        said = {*_words(source), *_words(destination), *EDGE_WORDS, *ID_WORDS}
        kept = [word for word in _words(edges.name) if not {word, _singular(word)} & said and not word.isdigit()]
        taken = [key[1] for key in self.relations if (key[0], key[2]) == (source, destination)]
        self.relations[source, _free("_".join(kept) or "to", taken), destination] = edges

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
            edges.why |= {
                end: edges.why[end].format(of) for end, of in zip(ENDS, key[::2], strict=True) if end in edges.why
            }
            if key[0] != key[2]:
                edges.keys["reverse"], edges.why["reverse"] = True, "guessed: messages flow both ways"
            text += _section_text(f"edges.{as_key(' '.join(key))}", edges, prefix)
        if not self.relations:
            self.notes.append('no edges were found; add a section such as [edges."author writes paper"]')
        return text + "".join(f"# {printable(note)}\n" for note in self.notes)


def _named_ends(table: _Section) -> list[str]:
    """Return the columns that are called source and destination, or alike; none if there are no such columns."""
    sources = [name for name in table.id_typed if _stem(name) in SOURCES][:1]
    destinations = [name for name in table.id_typed if _stem(name) in DESTINATIONS and name not in sources][:1]
    return [*sources, *destinations] if sources and destinations else []


# --- the other columns ---------------------------------------------------------------------------


def _add_columns(table: _Section, found: _Draft) -> None:
    """Add the keys of features, label, split, time and weight."""
    is_nodes, types = "id" in table.keys, table.types
    left = [name for name in types if name not in table.keys.values()]

    def named(words: Sequence[str], able: Collection[str]) -> str | None:
        return next((name for word in words for name in left if name.lower() == word and name in able), None)

    numbers = [name for name in left if _is_number(table, name)]
    words = [name for name in left if table.is_text(name)]
    distinct = {name: pc.count_distinct(table.sample[name]).as_py() for name in words}
    moments = [name for name in left if pa.types.is_temporal(types[name])]
    able = [*numbers, *(name for name in words if 2 * distinct[name] <= table.sample.num_rows)]
    if "x" in numbers and "y" in numbers:
        able.remove("y")  # x and y are a position
    roles = {"time": named(TIMES, [*moments, *(one for one in numbers if pa.types.is_integer(types[one]))])}
    roles["time"] = roles["time"] or next(iter(moments), None)
    if is_nodes:
        label = named(LABELS, able)
        split = named(SPLITS, [name for name in words if distinct[name] <= MOST_SPLITS])
        roles = {"label": label, "split": split} | roles
        if label is not None:
            table.why["label"] = f"guessed: the column is called {label}; is this what you predict?"
    else:
        roles = {"weight": named(WEIGHTS, numbers)} | roles
    features = [
        name for name in numbers if not (name in roles.values() or found.refers(name) or table.sample[name].null_count)
    ]
    if features:
        table.keys["features"] = _globs(features, [name for name in types if name not in features])
    for role, column in roles.items():
        if column is not None:
            table.keys[role] = column
        elif role == "split" and roles["label"] is not None:
            table.keys[role], table.why[role] = SHARES, "guessed: no column names the splits"
    if (label := roles.get("label")) in words:
        key = f"columns.{as_key(str(label))}.categories"
        table.keys[key], table.why[key] = "codes", "guessed: words stand for classes"


def _globs(features: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the features, by a glob where that means the same columns."""
    found = []
    for name in features:
        pattern = name.rstrip("0123456789") + "*"
        alike = [one for one in features if fnmatchcase(one, pattern)]
        is_numbered = pattern not in ("*", f"{name}*") and len(alike) > 2
        found.append(pattern if is_numbered and not any(fnmatchcase(one, pattern) for one in others) else name)
    return list(dict.fromkeys(found))


def _is_number(table: _Section, name: str) -> bool:
    """Return whether a column holds numbers, or lists of numbers of one length."""
    kind = table.types[name]
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = pc.count_distinct(pc.list_value_length(table.sample[name]), mode="all").as_py()
        return bool(pa.types.is_primitive(kind.value_type)) and lengths == 1
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


# --- words and text ------------------------------------------------------------------------------


def _words(name: str) -> list[str]:
    """Return the words of a name: writesPaper, writes_paper and writes-paper have two."""
    return [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) if word]


def _singular(word: str) -> str:
    """Return author for authors, and movie for movies."""
    if word.endswith("ies") and len(word) > 4 and word != "movies":
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3 else word


def _stem(name: str) -> str:
    """Return author for author_id."""
    return _singular("_".join(word for word in _words(name) if word not in ID_WORDS))


def _subject(name: str) -> str:
    """Return paper for cited_paper_id and paper2, and nothing for src and friend_id."""
    general = (*ID_WORDS, *NODE_WORDS, *SOURCES, *DESTINATIONS, *PEERS)
    kept = [_singular(word.rstrip("0123456789")) for word in _words(name)]
    return "_".join(word for word in kept if len(word) > 1 and word not in general)


def _free(name: str, taken: Collection[str]) -> str:
    """Return the name, with a number if it is taken."""
    return next(
        free for number in range(1, len(taken) + 2) if (free := name + f"_{number}" * (number > 1)) not in taken
    )


def _section_text(owner: str, table: _Section, prefix: str) -> str:
    text = f"[{owner}]\nfiles = {as_toml(os.path.normpath(os.path.join(prefix, table.files)))}\n"
    for key, value in table.keys.items():
        why = f"  # {printable(table.why[key])}" if key in table.why else ""
        text += f"{key} = {as_toml(value)}{why}\n"
    patterns = table.keys.get("features", [])
    used = {name for name in table.types for pattern in patterns if name == pattern or fnmatchcase(name, pattern)}
    unused = [name for name in table.types if name not in used and name not in table.keys.values()]
    if unused:
        nulls = {name: ", some null" if table.sample[name].null_count else "" for name in unused}
        shown = ", ".join(f"{name} ({table.types[name]}{nulls[name]})" for name in unused[:FEW])
        more = f" and {len(unused) - FEW} more" if len(unused) > FEW else ""
        text += f"# not used: {printable(shown)}{more}\n"
    return text + "\n"
