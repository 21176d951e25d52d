"""Rewrite CSV files as scratch Parquet. Types are inferred once, from the first block of every file of a table.

A later value of another type is an error that names file and row. Ids are integers only if each is written as Python
prints it; "007" makes all ids of the column strings, which DuckDB's own CSV reader does not guarantee.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from hoploom.config.values import as_key, quoted
from hoploom.errors import DataError
from hoploom.ingest.tables.graph_file import EdgeTable, NodeTable, Table, rule_of
from hoploom.ingest.tables.table_files import TableFile, stage

INTEGER = r"^(0|-?[1-9][0-9]{0,18})$"
FRACTION = r"\.0+$"
CAST_INTEGER = r"^\s*(?:\+|(-))?([0-9]+)(?:\.0+)?\s*$"  # with a cast, 007 is 7, 1.0 is 1, and so is " +1"
NULLS = csv.ConvertOptions().null_values
CONVERSION = re.compile(
    r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\S+): invalid (value '|UTF8)(.*)", re.S
)
ENOUGH = 1000  # values that are enough to infer a type
CSV_BLOCK = 4 << 20  # bytes
UNKNOWN = NodeTable("")


@dataclass(frozen=True)
class CsvFile:
    """A CSV file, and the section of graph.toml that names it, or UNKNOWN if there is no graph.toml yet."""

    file: TableFile
    table: Table = UNKNOWN
    block: int = CSV_BLOCK  # bytes read at once

    def names(self) -> list[str]:
        """Return the column names, from the first line."""
        with self.opened() as reader:
            return list(reader.schema.names)

    def batches(self, types: Mapping[str, Any]) -> Iterator[Any]:
        """Yield batches of the columns in `types`, converted to these types."""
        with self.opened(list(types), types) as reader:
            yield from reader

    @contextmanager
    def opened(self, columns: Sequence[str] = (), types: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Open a reader of `columns` (all if empty). If a row cannot be read, raise a DataError with its number."""
        try:
            with self._reader(columns, types or {}) as reader:
                yield reader
        except (pa.ArrowException, OSError) as error:
            raise self._with_row(types or {}, error) from error

    @contextmanager
    def _reader(
        self, columns: Sequence[str], types: Mapping[str, Any], on_refusal: Any = None, *, threads: bool = True
    ) -> Iterator[Any]:
        read = csv.ReadOptions(block_size=self.block, use_threads=threads)
        between = "\t" if self.file.kind == "tsv" else ","
        parse = csv.ParseOptions(delimiter=between, newlines_in_values=True, invalid_row_handler=on_refusal)
        convert = csv.ConvertOptions(include_columns=columns or None, column_types=types)
        with self.file.open() as file, csv.open_csv(file, read, parse, convert) as reader:
            yield reader

    # --- errors ---------------------------------------------------------------------------------

    def _with_row(self, types: Mapping[str, Any], error: Exception) -> DataError:
        """Return the error with the row's number. Reads the file again in one thread, so that pyarrow counts rows."""
        refused: list[Any] = []

        def refuse(row: Any) -> str:
            refused.append(row)
            return "error"

        try:
            with self._reader(list(types), types, refuse, threads=False) as reader:
                for _ in reader:
                    pass
        except (pa.ArrowException, OSError) as again:
            error = again
        if refused:
            row = refused[0]
            found = f"{row.actual_columns} fields, the header has {row.expected_columns}: {row.text!r:.80}"
            return self.at(row.number - 1, f"it has {found}; write all, in quotes where one has commas")
        match = CONVERSION.match(str(error))
        if match is None or not self.table.files:
            reason = str(error).split("\n", 1)[0] or type(error).__name__
            if "straddl" in reason:
                reason = f"a row is longer than {self.block} bytes; is a quote left open?"
            hint = "it is damaged or cut short, so write it again"
            if not isinstance(error, OSError):
                between = quoted("\t" if self.file.kind == "tsv" else ",")
                hint = f"give a file whose first line names the columns, in UTF-8, with {between} between fields"
            return DataError(f"{self.file.shown} cannot be read as CSV: {reason}; {hint}")
        name, row_number = self.names()[int(match[1])], int(match[2]) - 1
        if match[4] == "UTF8":
            return self.at(row_number, f"{name} is no UTF-8; write the file in UTF-8")
        return self.other_type(row_number, name, match[5].rstrip().removesuffix("'"), match[3])

    def at(self, row: int, message: str) -> DataError:
        """Return an error about a row of this file."""
        return DataError(f"{self.file.shown}, row {row}: {message}")

    def other_type(self, row: int, name: str, value: str, kind: str) -> DataError:
        """Return the error about a `value` that does not fit `kind`, the type of its column."""
        rule = rule_of(self.table, name)
        why, way_out = "as its cast says", "correct it, or leave it empty"
        if rule.cast is None:
            is_text = kind != "int64" or name in self.table.id_columns.values() or rule.categories is not None
            cast = f'cast = "{"string" if is_text else "float32"}"'
            why = "as in the first rows"
            way_out = f"correct it, or give all one type: [{self.table.owner}.columns.{as_key(name)}] {cast}"
        return self.at(row, f"{name} is {value!r:.60}, not {kind} {why}; {way_out}")


def rewrite_csv(files: Sequence[CsvFile], used: Sequence[str], paths: Sequence[str], group: int) -> None:
    """Infer the types of the `used` columns of a table, and rewrite its CSV files as Parquet at `paths`."""
    types = _types(files, used)
    for file, path in zip(files, paths, strict=True):
        stage(_typed_rows(file, types), pa.schema(types.items()), Path(path), group)


def _typed_rows(file: CsvFile, types: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the rows of a file as columns of `types`. Ids are read as text first, to check how integers are written."""
    ids = set(file.table.id_columns.values())
    first, last = 1, None
    for batch in file.batches({name: pa.string() if name in ids else kind for name, kind in types.items()}):
        columns = {name: _without_empty(batch.column(name)) for name in types}
        columns |= {name: _integers(columns[name], file, name, first) for name in ids if types[name] == pa.int64()}
        yield pa.RecordBatch.from_pydict(columns)
        first, last = first + batch.num_rows, batch.slice(batch.num_rows - 1) if batch.num_rows else last
    name = file.names()[-1]
    value = last.column(name)[0].as_py() if last is not None and name in last.schema.names else None
    if isinstance(value, str) and "\n" in value:  # it may hold the rest of the file
        tail = b""
        with file.file.open() as opened:
            while piece := opened.read(file.block):
                tail = (tail + piece)[-64:]
        if tail.rstrip(b"\r\n")[-1:] != b'"':
            raise file.at(first - 1, f"a quote is left open before {value!r:.60}; close or double it")


def _without_empty(column: Any) -> Any:
    """Return a text column with nulls in place of empty strings; return other columns unchanged."""
    if not pa.types.is_string(column.type):
        return column
    return pc.if_else(pc.equal(pc.binary_length(column), 0), None, column)


def _integers(column: Any, file: CsvFile, name: str, first: int) -> Any:
    """Return text as int64; raise DataError for the first row that is no integer. Rows are counted from `first`."""
    is_cast = rule_of(file.table, name).cast is not None
    if is_cast:
        column = pc.if_else(pc.is_in(column, pa.array(NULLS)), None, column)
        column = pc.replace_substring_regex(column, CAST_INTEGER, r"\1\2")
    fits = pc.match_substring_regex(column, CAST_INTEGER if is_cast else INTEGER)
    if pc.all(fits).as_py() is not False:
        try:
            return pc.cast(column, pa.int64())
        except pa.ArrowInvalid:  # too many digits
            pass
    for row, (value, fit) in enumerate(zip(column.to_pylist(), fits.to_pylist(), strict=True), first):
        if value is not None and not (fit and -(2**63) <= int(value) < 2**63):
            raise file.other_type(row, name, value, "int64")
    raise AssertionError(f"no value of {name} explains why it is no int64")


# --- types ---------------------------------------------------------------------------------------


def _types(files: Sequence[CsvFile], used: Sequence[str]) -> dict[str, Any]:
    """Return the types of the `used` columns: from the casts in graph.toml, else from the first block of each file."""
    table = files[0].table
    ids = set(table.id_columns.values())
    casts = {name: cast for name in used if (cast := rule_of(table, name).cast)}
    decided = {name: pa.type_for_alias(cast) for name, cast in casts.items() if "int" not in cast or name in ids}
    if isinstance(table, NodeTable) and isinstance(table.split, str) and table.split not in ids:
        decided.setdefault(table.split, pa.string())
    numbers = _numbers(table, used)
    read_as = decided | dict.fromkeys(ids, pa.string())
    found, open_ids = list[dict[str, Any]](), ids - decided.keys()
    for file in files:
        with file.opened(used, read_as) as reader:
            rows = next((batch for batch in reader if batch.num_rows), None)
        if rows is not None:
            first = {name: rows[name] for name in used}
            found.append({name: _id_type(file, name, v) if name in open_ids else v.type for name, v in first.items()})
    for name in used:
        if name not in decided:
            kind = reduce(_wider, (types[name] for types in found), pa.null())
            kind = _type_further_on(files, name) if pa.types.is_null(kind) else kind
            if pa.types.is_timestamp(kind) and kind.unit == "s":  # fractions may follow
                kind = pa.timestamp("us", kind.tz)
            if pa.types.is_binary(kind):  # no UTF-8: read as text, the error names the row
                kind = pa.string()
            if name in casts and not pa.types.is_floating(kind):  # 3.0 is cast later, where nulls are known as well
                kind = pa.type_for_alias(casts[name])
            decided[name] = pa.float64() if name in numbers and pa.types.is_integer(kind) else kind
    return {name: decided[name] for name in used}


def _wider(one: Any, two: Any) -> Any:
    """Return a type that holds the values of both types."""
    types = pa.types
    if one == two or types.is_null(two):
        return one
    if types.is_null(one):
        return two
    if all(types.is_integer(kind) or types.is_floating(kind) for kind in (one, two)):
        return pa.float64()
    times = [kind for kind in (one, two) if types.is_timestamp(kind)]
    if times and all(types.is_timestamp(kind) or types.is_date(kind) for kind in (one, two)):
        finest = "ns" if any(kind.unit == "ns" for kind in times) else "us"
        return pa.timestamp(finest, times[0].tz) if len({kind.tz for kind in times}) == 1 else pa.string()
    return pa.string()


def _numbers(table: Table, used: Sequence[str]) -> set[str]:
    """Return the columns that are float64 even if their first values are integers: weights, and float features."""
    label, weight = (None, table.weight) if isinstance(table, EdgeTable) else (table.label, None)
    kept = {*table.id_columns.values(), label, table.time, *table.fields.values()}
    kept |= {name for name in used if rule_of(table, name).cast or rule_of(table, name).categories}
    return {name for name in used if name not in kept and (name == weight or "float" in table.dtype)}


def _id_type(file: CsvFile, name: str, column: Any) -> Any:
    """Return int64 if all ids of a block are written as integers, else string; raise DataError for ids such as 1.0."""
    given = pc.drop_null(_without_empty(column))
    if len(given) == 0:
        return pa.null()
    if pc.all(pc.match_substring_regex(given, "^-?[0-9]+" + FRACTION)).as_py():
        at = f"[{file.table.owner}.columns.{as_key(name)}]"
        way_out = f'{at} cast = "int64" makes them integers, "string" leaves them text'
        row = pc.index(column, given[0]).as_py() + 1
        raise file.at(row, f"the id {name} is {given[0].as_py()!r}, a fraction; {way_out}")
    if not pc.all(pc.match_substring_regex(given, INTEGER)).as_py():
        return pa.string()
    try:
        return pc.cast(given, pa.int64()).type
    except pa.ArrowInvalid:  # nineteen digits, and too many
        return pa.string()


def _type_further_on(files: Sequence[CsvFile], name: str) -> Any:
    """Return the type of a column with only nulls in the first blocks, inferred from the first values that follow."""
    is_id = name in files[0].table.id_columns.values()
    for file in files:
        for batch in file.batches({name: pa.string()}):
            given = pc.drop_null(_without_empty(batch.column(0))).slice(0, ENOUGH)
            if is_id and len(given):
                return _id_type(file, name, given)
            text = io.BytesIO()
            csv.write_csv(pa.table({"value": given}), text)
            kind = csv.read_csv(io.BytesIO(text.getvalue())).schema.field(0).type
            if not pa.types.is_null(kind):
                return kind
    return pa.string() if is_id else pa.float64()
