"""Check the tables that graph.toml names, turn them into Parquet that every engine reads alike, and locate values.

Only the footers of Parquet files are read; other formats, and too large row groups, are rewritten batch by batch.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hoploom.config.values import as_key, nearest, quoted
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.tables.csv import CSV_BLOCK, INTEGER, CsvFile, rewrite_csv
from hoploom.ingest.tables.graph_file import GraphFile, NodeTable, Table, rule_of
from hoploom.ingest.tables.table_files import (
    BATCH,
    GROUP,
    MAGIC,
    TableFile,
    arrow_batches,
    arrow_schema,
    find_files,
    group_bytes,
    is_url,
    largest_value,
    parquet_batches,
    parquet_footer,
    readable,
    stage,
)

PLAIN_PATH = re.compile(r"[\w./ +@,~-]+")  # paths that no engine mistakes for a pattern or a partition
SHOWN = 12  # names in a message


@dataclass(frozen=True)
class ReadLimits:
    """Limits of how much is read or written at once. They do not change the rows."""

    csv_block: int = CSV_BLOCK  # bytes of text
    row_group: int = GROUP  # bytes
    largest_group: int | None = None  # Parquet in larger row groups is rewritten; None: no limit


@dataclass(frozen=True)
class TableSource:
    """A table of graph.toml as engines read it: its Parquet files, schema and number of rows."""

    graph: GraphFile
    table: Table  # its section in graph.toml
    paths: tuple[str, ...]  # Parquet files in the order of `files`; files of a glob or folder by name
    origins: tuple[str, ...]  # the user's own file of each, as messages call it
    schema: pa.Schema  # of the columns that are used
    num_rows: int
    features: tuple[str, ...] = ()  # the columns of x or edge_attr, in order: globs are resolved

    @property
    def owner(self) -> str:
        """The name of the table's section, e.g. nodes.paper."""
        return self.table.owner

    @property
    def id_column(self) -> str:
        """The id column of a table of nodes."""
        (column,) = self.table.id_columns.values()
        return column

    def has_text(self, column: str) -> bool:
        """Return whether a column's ids are text, in the file or after the cast. If not, they are integers."""
        return bool(pa.types.is_string(self.schema.field(column).type)) or rule_of(self.table, column).cast == "string"

    def problem(self, key: str, message: str) -> ConfigError:
        """Return an error about a key of this table's section in graph.toml."""
        return self.graph.problem(f"{self.owner}.{key}", message)

    def scan(self, column: str, most_rows: int = BATCH) -> Iterator[tuple[str, int, pa.Array]]:
        """Yield a column in batches, file by file: (the user's file, number of rows before the batch in it, values)."""
        for path, origin in zip(self.paths, self.origins, strict=True):
            row = 0
            for batch in parquet_batches(TableFile(path, origin, "parquet"), [column], most_rows):
                yield origin, row, batch.column(0)
                row += batch.num_rows

    def locate(self, column: str, values: Sequence[Any], *, skip: int = 0, most_rows: int = BATCH) -> dict[Any, str]:
        """Return, by value, the file and row where each of `values` first occurs; with skip=1, the second time.

        Rows count from 1. The value None finds nulls; the text "7" also finds the integer 7. Values that are not found
        are left out. Reads the table from its start, so use it only for error messages.
        """
        left, found = dict.fromkeys(values, skip), dict[Any, str]()
        kind = pa.string() if any(isinstance(value, str) for value in left) else self.schema.field(column).type
        among = pa.array(left, kind)
        for file, before, given in self.scan(column, most_rows):
            rows = pc.cast(given, kind)
            for index in pc.indices_nonzero(pc.is_in(rows, among)).to_pylist():
                value = rows[index].as_py()
                if left[value] == 0:
                    found[value] = f"{file}, row {before + index + 1}"
                left[value] -= 1
            if len(found) == len(left):
                break
        return found


# --- reading -------------------------------------------------------------------------------------


def read_sources(graph: GraphFile, scratch: Path, limits: ReadLimits | None = None) -> Mapping[str, TableSource]:
    """Return a dict from section to the source of its table. Other formats become Parquet in the folder `scratch`."""
    sources = {}
    for index, table in enumerate(graph.tables):
        if table.files:
            folder = scratch / f"{index:03d}"
            folder.mkdir()
            sources[table.owner] = _source(graph, table, folder, limits or ReadLimits())
    _check_ids(graph, sources)
    return sources


def _source(graph: GraphFile, table: Table, folder: Path, limits: ReadLimits) -> TableSource:
    found = find_files(graph, f"{table.owner}.files", table.files)
    for one, other in pairwise(found):
        if one.kind != other.kind:
            message = f"{one.shown} is {one.kind}, {other.shown} is {other.kind}; give a table in one format"
            raise graph.problem(f"{table.owner}.files", message)
    names = [column_names(file, limits.csv_block) for file in found]
    features = _features(graph, table, names[0], found[0].shown)
    for file, there in zip(found, names, strict=True):
        for role, column in [*_single_columns(table).items(), *(("features", column) for column in features)]:
            at, alike = f"{table.owner}.{role}", [name for name in there if name.lower() == column.lower()]
            if column not in there:
                raise graph.problem(at, f"{file.shown} has no column {quoted(column)}; {_hint(column, there)}")
            if len(alike) > 1:
                message = f"{file.shown} has columns {_listed(alike)}, which engines take for one; rename one"
                raise graph.problem(at, message)
    used = tuple(dict.fromkeys([*_single_columns(table).values(), *features]))
    for column in table.columns:
        if column not in used:
            at = f"{table.owner}.columns.{as_key(column)}"
            raise graph.problem(at, f"no key uses a column {quoted(column)}; {_hint(column, used)}")
    paths = [_linked(file, folder / f"{index:05d}.parquet") for index, file in enumerate(found)]
    if found[0].kind in ("csv", "tsv"):
        rewrite_csv([CsvFile(file, table, limits.csv_block) for file in found], used, paths, limits.row_group)
    elif found[0].kind == "arrow":
        plain = [plain_schema(arrow_schema(file), used) for file in found]
        _check_alike(found, plain)  # before float16 becomes float32
        for file, path, schema in zip(found, paths, plain, strict=True):
            stage(_arrow_rows(file, schema.names), schema, Path(path), limits.row_group)
    footers = [parquet_footer(TableFile(path, file.shown, "parquet")) for file, path in zip(found, paths, strict=True)]
    schemas, num_rows = [plain_schema(schema, used) for schema, _ in footers], sum(rows for _, rows in footers)
    _check_alike(found, schemas)
    if num_rows == 0:
        some = found[0].shown + (f" and {len(found) - 1} more" if len(found) > 1 else "")
        raise DataError(f"{table.owner}: there are no rows in {some}; give files with rows")
    largest = limits.largest_group
    if found[0].kind == "parquet" and largest is not None and max(group_bytes(file, used) for file in found) > largest:
        paths = [str(folder / f"{index:05d}.cut.parquet") for index in range(len(found))]
        for file, path, schema in zip(found, paths, schemas, strict=True):
            stage(parquet_batches(file, used), schema, Path(path))
    origins = tuple(file.shown for file in found)
    return TableSource(graph, table, tuple(paths), origins, schemas[0], num_rows, features)


def column_names(file: TableFile, csv_block: int = CSV_BLOCK) -> list[str]:
    """Return the names of a file's columns."""
    if file.kind in ("csv", "tsv"):
        return CsvFile(file, block=csv_block).names()
    return list((parquet_footer(file)[0] if file.kind == "parquet" else arrow_schema(file)).names)


def _linked(file: TableFile, scratch: Path) -> str:
    """Return the path by which engines read a file: its own or, if it is no Parquet or is badly named, `scratch`."""
    if file.kind == "parquet":
        is_plain = PLAIN_PATH.fullmatch(file.path) and Path(file.path).name[0] not in "_."  # Spark skips these
        if is_url(file.path) or is_plain:
            return file.path
        os.symlink(file.path, scratch)
    return str(scratch)


def _arrow_rows(file: TableFile, names: Sequence[str]) -> Iterator[Any]:
    """Yield batches of some columns of an Arrow file. Errors while reading name the file."""
    with readable(f"{file.shown} is no Arrow file, or cut short"), arrow_batches(file) as (_, batches):
        for batch in batches:
            yield batch.select(names)


def _check_alike(found: Sequence[TableFile], schemas: Sequence[pa.Schema]) -> None:
    """Raise DataError unless each column has the same type in all files of the table."""
    for file, schema in zip(found, schemas, strict=True):
        for one, two in zip(schemas[0], schema, strict=True):
            if one.type != two.type:
                message = f"{file.shown}: {one.name} is {two.type}, but {one.type} in {found[0].shown}"
                raise DataError(f"{message}; write all files of a table with the same types")


# --- columns -------------------------------------------------------------------------------------


def _single_columns(table: Table) -> dict[str, str]:
    """Return a dict from key to column for the keys that name one column: ids, label, weight, time, split, fields."""
    given = {role: getattr(table, role, None) for role in ("label", "weight", "time", "split")}
    found = table.id_columns | {role: column for role, column in given.items() if isinstance(column, str)}
    return found | {f"fields.{as_key(field)}": column for field, column in table.fields.items()}


def _features(graph: GraphFile, table: Table, names: Sequence[str], shown: str) -> tuple[str, ...]:
    """Return the feature columns in order. A glob does not match columns that another key names."""
    at = f"{table.owner}.features"
    others = set(_single_columns(table).values())
    found: list[str] = []
    for pattern in table.features:
        if pattern in names or not any(sign in pattern for sign in MAGIC):
            if pattern in found:
                raise graph.problem(at, f"{quoted(pattern)} is named twice; drop one")
            found.append(pattern)
            continue
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise graph.problem(at, f"no column of {shown} matches {quoted(pattern)}; its columns are {_listed(names)}")
        found += [name for name in matching if name not in found and name not in others]
    return tuple(found)


def _hint(name: str, known: Sequence[str]) -> str:
    if len(known) == 1 and any(sign in known[0] for sign in ";|\t"):
        return f"its only column is {quoted(known[0])}; write commas between columns"
    alike = nearest(name, known)
    return f"did you mean {quoted(alike)}?" if alike else f"its columns are {_listed(known)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(map(quoted, names[:SHOWN]))}{more}"


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the plain type of values of type `kind`: no dictionary encoding, no views, no 64-bit offsets."""
    types = pa.types
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind


def plain_schema(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Return a schema of the columns `names`, in this order, with their plain types."""
    return pa.schema([(name, plain_type(schema.field(name).type)) for name in names])


# --- ids -----------------------------------------------------------------------------------------


def _check_ids(graph: GraphFile, sources: Mapping[str, TableSource]) -> None:
    """Raise ConfigError or DataError unless ids are integers or text, alike in node and edge tables."""
    for source in sources.values():
        for role, column in source.table.id_columns.items():
            kind, what = source.schema.field(column).type, _described(source, column)
            if not pa.types.is_string(kind) and not pa.types.is_integer(kind):
                raise source.problem(role, f"{what}; ids are integers or text, so write it as one of them")
            if pa.types.is_string(kind) and rule_of(source.table, column).cast == "int64":
                message = f'{what}; only CSV is read as "int64", so write integers or leave the cast out'
                raise source.problem(f"columns.{as_key(column)}.cast", message)
            if kind == pa.uint64() and any(largest_value(path, column) >= 2**63 for path in source.paths):
                for file, before, ids in source.scan(column):
                    at_row = pc.index(pc.greater(ids, pa.scalar(2**63 - 1, kind)), True).as_py()
                    if at_row >= 0:
                        found = f"{file}, row {before + at_row + 1}: {column} is {ids[at_row]}"
                        raise DataError(f"{found}; integer ids are below 2**63, so write them as text")
    for edges in graph.edges.values():
        source = sources[edges.owner]
        for (role, column), name in zip(edges.id_columns.items(), edges.relation[::2], strict=True):
            _check_ends(source, role, column, graph.nodes[name], sources)


def _described(source: TableSource, column: str) -> str:
    return f"column {column} of {source.origins[0]} is {source.schema.field(column).type}"


def _check_ends(
    source: TableSource, role: str, column: str, nodes: NodeTable, sources: Mapping[str, TableSource]
) -> None:
    is_text, what = source.has_text(column), _described(source, column)
    if nodes.id is None:
        if is_text:
            message = f"{what}, but {nodes.owner} has a count, so its ids are integers; give it files"
            raise source.problem(role, message)
        return
    theirs = sources[nodes.owner]
    if is_text != theirs.has_text(nodes.id):
        owner, cast = (nodes.owner, nodes.id) if is_text else (source.owner, column)
        way_out = f'cast one: [{owner}.columns.{as_key(cast)}] cast = "string"'
        why = _first_text(source, column) if is_text else _first_text(theirs, nodes.id)
        raise source.problem(role, f"{what}, but for {nodes.owner} {_described(theirs, nodes.id)}{why}; {way_out}")


def _first_text(source: TableSource, column: str) -> str:
    """Return a note on the first id that is not written as an integer, with its file and row; "" if there is none."""
    for file, before, ids in source.scan(column) if pa.types.is_string(source.schema.field(column).type) else ():
        row = pc.index(pc.match_substring_regex(ids, INTEGER), False).as_py()
        if row >= 0:
            return f" ({file}, row {before + row + 1} holds {ids[row].as_py()!r:.60})"
    return ""
