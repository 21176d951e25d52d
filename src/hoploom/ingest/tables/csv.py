"""CSV into scratch Parquet. Types are inferred once, from the first block of every file, whatever their order.

Gives up guessing again later: a value of another type further down is an error with its file and row. Ids are integers
only if each is written as Python would write it; "007" makes them strings, which DuckDB's own reader does not promise.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from hoploom.config.toml import as_key, quoted
from hoploom.errors import DataError
from hoploom.ingest.tables.columns import Table, id_columns, rule_of
from hoploom.ingest.tables.files import TableFile
from hoploom.ingest.tables.graph_file import NodeTable
from hoploom.ingest.tables.table_source import ReadLimits, stage

WHOLE = r"^(0|-?[1-9][0-9]{0,18})$"
WHOLE_FRACTION = r"^-?[0-9]+\.0+$"
CONVERSION = re.compile(
    r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\S+): invalid (value '|UTF8)(.*)", re.S
)
ENOUGH = 1000  # values that tell a type


@dataclass(frozen=True)
class CsvFile:
    """A CSV file, and the table that it belongs to (None: not known yet)."""

    file: TableFile
    table: Table | None = None
    block: int = ReadLimits.csv_block  # bytes read at once

    def names(self) -> list[str]:
        """The names in the first line."""
        with self.opened() as reader:
            return list(reader.schema.names)

    def first_rows(self, columns: Sequence[str], types: Mapping[str, Any]) -> Any:
        """The first block with rows, or None."""
        with self.opened(columns, types) as reader:
            return next((batch for batch in reader if batch.num_rows), None)

    def batches(self, types: Mapping[str, Any]) -> Iterator[Any]:
        """Some columns, as these types."""
        with self.opened(list(types), types) as reader:
            yield from reader

    @contextmanager
    def opened(self, columns: Sequence[str] = (), types: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """A reader, of all columns where none are named; DataError names the row that cannot be read."""
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
        parse = csv.ParseOptions(delimiter=self.separator, newlines_in_values=True, invalid_row_handler=on_refusal)
        convert = csv.ConvertOptions(include_columns=columns or None, column_types=types)
        with self.file.open() as file, csv.open_csv(file, read, parse, convert) as reader:
            yield reader

    @property
    def separator(self) -> str:
        return "\t" if self.file.kind == "tsv" else ","

    # --- what goes wrong ------------------------------------------------------------------------

    def _with_row(self, types: Mapping[str, Any], error: Exception) -> DataError:
        """What pyarrow says of the file, with its row. Reads once more, in one thread: only then are rows counted."""
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
        told = CONVERSION.match(str(error))
        if told is None or self.table is None:
            return self._unreadable(error)
        name, row_number = self.names()[int(told[1])], int(told[2]) - 1
        if told[4] == "UTF8":
            return self.at(row_number, f"{name} is no UTF-8; write the file in UTF-8")
        return self.other_type(row_number, name, told[5].rstrip().removesuffix("'"), told[3])

    def at(self, row: int, message: str) -> DataError:
        """An error about a row."""
        return DataError(f"{self.file.shown}, row {row}: {message}")

    def other_type(self, row: int, name: str, value: str, kind: str) -> DataError:
        """A value has another type than its column."""
        assert self.table is not None
        rule, is_id = rule_of(self.table, name), name in id_columns(self.table).values()
        if rule.cast is not None:
            way_out = "correct it, or leave it empty"
        else:
            better = "float32" if kind == "int64" and not is_id and rule.categories is None else "string"
            way_out = f'correct it, or give all one type: [{self.table.owner}.columns.{as_key(name)}] cast = "{better}"'
        why = "as asked for" if rule.cast is not None else "as in the first rows"
        return self.at(row, f"{name} is {value!r:.60}, not {kind} {why}; {way_out}")

    def _unreadable(self, error: Exception) -> DataError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "straddl" in reason:
            reason = f"a row is longer than {self.block} bytes; is a quote left open?"
        hint = f"give a file whose first line names the columns, in UTF-8, with {quoted(self.separator)} between fields"
        if isinstance(error, OSError):
            hint = "it is damaged or cut short, so write it again"
        return DataError(f"{self.file.shown} cannot be read as CSV: {reason}; {hint}")


def stage_csv(
    table: Table, files: Sequence[TableFile], used: Sequence[str], paths: Sequence[Path], limits: ReadLimits
) -> None:
    """Rewrite CSV files, one by one."""
    found = [CsvFile(file, table, limits.csv_block) for file in files]
    types = csv_types(table, found, used)
    ids = id_columns(table).values()
    stored = {name: pa.int64() if name in ids and pa.types.is_floating(types[name]) else types[name] for name in types}
    for one, path in zip(found, paths, strict=True):
        stage(_typed_rows(table, one, types), pa.schema(stored.items()), path, limits.row_group)


def _typed_rows(table: Table, file: CsvFile, types: Mapping[str, Any]) -> Iterator[Any]:
    """The rows of a file, as these types."""
    ids = id_columns(table).values()
    checked = {name for name in ids if types[name] == pa.int64() and not rule_of(table, name).cast}  # cast, 007 is 7
    first, last = 1, None
    for batch in file.batches({name: pa.string() if name in checked else kind for name, kind in types.items()}):
        columns = []
        for name in types:
            column = _without_empty(batch.column(name))
            if name in checked:
                column = _whole(column, file, name, first)
            elif name in ids and pa.types.is_floating(column.type):
                column = _whole_floats(column, file, name, first)
            columns.append(column)
        yield pa.RecordBatch.from_arrays(columns, list(types))
        first, last = first + batch.num_rows, batch.slice(batch.num_rows - 1) if batch.num_rows else last
    if last is not None:
        _check_closed(file, first - 1, last)


def _check_closed(file: CsvFile, row: int, last: Any) -> None:
    """Raise where the rest of a file went into its last value, because of a quote that nothing closes."""
    name = file.names()[-1]
    value = last.column(name)[0].as_py() if name in last.schema.names else None
    if not isinstance(value, str) or "\n" not in value:
        return
    tail = b""
    with file.file.open() as opened:
        while piece := opened.read(file.block):
            tail = (tail + piece)[-64:]
    if tail.rstrip(b"\r\n")[-1:] != b'"':
        raise file.at(row, f"a quote is left open before {value!r:.60}; close or double it")


def _without_empty(column: Any) -> Any:
    """Text of no length is null."""
    if not pa.types.is_string(column.type):
        return column
    empty = pc.equal(pc.binary_length(column), 0)
    return pc.if_else(empty, None, column) if pc.any(empty).as_py() else column


def _whole(column: Any, file: CsvFile, name: str, first: int) -> Any:
    """Text as int64, or an error that names the first row that is none."""
    odd = pc.match_substring_regex(column, r"(?s)^(-0|0.)")
    if not pc.any(odd).as_py():
        try:
            return pc.cast(column, pa.int64())
        except pa.ArrowInvalid:
            pass
    for row, value in enumerate(column.to_pylist(), first):
        if value is not None and (not re.fullmatch(WHOLE, value) or not -(2**63) <= int(value) < 2**63):
            raise file.other_type(row, name, value, "int64")
    raise AssertionError(f"no value of {name} explains why it is no int64")


def _whole_floats(column: Any, file: CsvFile, name: str, first: int) -> Any:
    """Ids such as 1.0 as the int64 that was asked for, or an error that names the first row that is none."""
    known = pc.if_else(pc.is_nan(column), None, column)
    odd = pc.or_(pc.not_equal(pc.floor(known), known), pc.greater(pc.abs(known), 2.0**53))
    at = pc.index(odd, True).as_py()
    if at >= 0:
        raise file.other_type(first + at, name, str(column[at].as_py()), "int64")
    return pc.cast(known, pa.int64())


# --- types ---------------------------------------------------------------------------------------


def csv_types(table: Table, files: Sequence[CsvFile], used: Sequence[str]) -> dict[str, Any]:
    """The type of every column that is used."""
    fixed = _fixed_types(table, used)
    ids = {name for name in id_columns(table).values() if not rule_of(table, name).cast}
    found: dict[str, Any] = dict.fromkeys(used, pa.null())
    for file in files:
        batch = file.first_rows(used, fixed | dict.fromkeys(ids, pa.string()))
        for name in used if batch is not None else ():
            if name in ids:
                _check_fractions(file, name, batch[name])
            found[name] = _wider(found[name], _id_type(batch[name]) if name in ids else batch[name].type)
    numbers = _numbers(table, used)
    for name, kind in found.items():
        if pa.types.is_null(kind):
            kind = fixed.get(name) or _type_further_on(table, files, name)
        if pa.types.is_timestamp(kind) and kind.unit == "s":  # fractions may follow
            kind = pa.timestamp("us", kind.tz)
        if pa.types.is_binary(kind):  # no UTF-8, and read as text the row is told
            kind = pa.string()
        cast = rule_of(table, name).cast or ""
        if "int" in cast and not pa.types.is_floating(kind):  # 3.0 is cast later, where nulls are known as well
            kind = pa.type_for_alias(cast)
        found[name] = pa.float64() if name in numbers and pa.types.is_integer(kind) else kind
    return found


def _wider(one: Any, two: Any) -> Any:
    """The type that holds the values of both."""
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


def _check_fractions(file: CsvFile, name: str, column: Any) -> None:
    """Raise where all ids are written as 1.0: as text they are no id that is written 1."""
    assert file.table is not None
    given = pc.drop_null(_without_empty(column))
    if len(given) and pc.all(pc.match_substring_regex(given, WHOLE_FRACTION)).as_py():
        at = f"[{file.table.owner}.columns.{as_key(name)}]"
        way_out = f'{at} cast = "int64" makes them integers, "string" leaves them text'
        row = pc.index(column, given[0]).as_py() + 1
        raise file.at(row, f"the id {name} is {given[0].as_py()!r}, a fraction; {way_out}")


def _fixed_types(table: Table, used: Sequence[str]) -> dict[str, Any]:
    """Types that the recipe decides."""
    fixed = {}
    for name in used:
        cast = rule_of(table, name).cast
        if cast is not None and "int" not in cast:
            fixed[name] = pa.type_for_alias(cast)
        elif isinstance(table, NodeTable) and name == table.split:
            fixed[name] = pa.string()
    return fixed


def _numbers(table: Table, used: Sequence[str]) -> set[str]:
    """Columns whose integers may go on as fractions: the features, where those are no integers, and the weight."""
    kept = {*id_columns(table).values(), getattr(table, "label", None), table.time, *table.fields.values()}
    kept |= {name for name in used if rule_of(table, name).cast or rule_of(table, name).categories}
    weight = getattr(table, "weight", None)
    return {name for name in used if name not in kept and (name == weight or "float" in table.dtype)}


def _id_type(column: Any) -> Any:
    """int64 if every id of a first block reads as one."""
    given = pc.drop_null(_without_empty(column))
    if len(given) == 0:
        return pa.null()
    if not pc.all(pc.match_substring_regex(given, WHOLE)).as_py():
        return pa.string()
    try:
        pc.cast(given, pa.int64())
    except pa.ArrowInvalid:  # nineteen digits, and too many
        return pa.string()
    return pa.int64()


def _type_further_on(table: Table, files: Sequence[CsvFile], name: str) -> Any:
    """The type of a column that begins with nulls: that of its first values."""
    is_id = name in id_columns(table).values()
    for file in files:
        for batch in file.batches({name: pa.string()}):
            given = pc.drop_null(_without_empty(batch.column(0))).slice(0, ENOUGH)
            if is_id and len(given):
                return _id_type(given)
            text = io.BytesIO()
            csv.write_csv(pa.table({"value": given}), text)
            kind = csv.read_csv(io.BytesIO(text.getvalue())).schema.field(0).type
            if not pa.types.is_null(kind):
                return kind
    return pa.string() if is_id else pa.float64()
