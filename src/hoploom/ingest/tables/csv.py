"""CSV into scratch Parquet. Types are inferred once, from the first block of every file, whatever their order.

Gives up guessing again later: a value of another type further down is an error with its file and row. Ids are integers
only if each is written as Python would write it; "007" makes them strings.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoploom.config.toml import as_key, quoted
from hoploom.errors import DataError
from hoploom.ingest.tables.columns import Table, id_columns
from hoploom.ingest.tables.graph_file import ColumnRule, NodeTable
from hoploom.ingest.tables.places import Place
from hoploom.ingest.tables.staging import stage

BLOCK = 4 << 20  # bytes read at once
WHOLE = r"^(0|-?[1-9][0-9]{0,18})$"
WHOLE_FRACTION = r"^-?[0-9]+\.0+$"
CONVERSION = re.compile(
    r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\S+): invalid (value '|UTF8)(.*)", re.S
)
ENOUGH = 1000  # values that tell a type


@dataclass
class _Refusal:
    """The row that the parser stopped at."""

    rows: list[Any] = field(default_factory=list)

    def __call__(self, row: Any) -> str:
        self.rows.append(row)
        return "error"


def csv_names(place: Place) -> list[str]:
    """The names in the first line."""
    with _explained(place), _open(place, None, {}) as reader:
        return list(reader.schema.names)


def csv_sample(place: Place) -> Any:
    """The first block of rows, as pyarrow takes them."""
    with _explained(place), _open(place, None, {}) as reader:
        return next((batch for batch in reader if batch.num_rows), None) or reader.schema.empty_table()


def csv_column(place: Place, name: str, kind: Any) -> Iterator[Any]:
    """All values of a column, as a type."""
    with _explained(place), _open(place, [name], {name: kind}) as reader:
        for batch in reader:
            yield batch.column(0)


def stage_csv(table: Table, places: Sequence[Place], used: Sequence[str], paths: Sequence[Path]) -> list[int]:
    """Rewrite CSV files, one by one; the number of rows of each."""
    import pyarrow as pa

    types = csv_types(table, places, used)
    ids = id_columns(table).values()
    stored = {name: pa.int64() if name in ids and pa.types.is_floating(types[name]) else types[name] for name in types}
    counts = []
    for place, path in zip(places, paths, strict=True):
        counts.append(stage(_batches(table, place, types), pa.schema(stored.items()), path))
    return counts


def _batches(table: Table, place: Place, types: Mapping[str, Any]) -> Iterator[Any]:
    """The rows of a file, as these types."""
    import pyarrow as pa

    checked, ids = _checked_ids(table, types), id_columns(table).values()
    read_as = {name: pa.string() if name in checked else kind for name, kind in types.items()}
    first, last = 1, None
    with _explained(place, table, read_as), _open(place, list(types), read_as) as reader:
        for batch in reader:
            columns = []
            for name in types:
                column = _without_empty(batch.column(name))
                if name in checked:
                    column = _whole(column, table, place, name, first)
                elif name in ids and pa.types.is_floating(column.type):
                    column = _whole_floats(column, table, place, name, first)
                columns.append(column)
            yield pa.RecordBatch.from_arrays(columns, list(types))
            first, last = first + batch.num_rows, batch.slice(batch.num_rows - 1) if batch.num_rows else last
    if last is not None:
        _check_closed(place, first - 1, last)


def _check_closed(place: Place, row: int, last: Any) -> None:
    """Raise where the rest of a file went into its last value, because of a quote that nothing closes."""
    name = csv_names(place)[-1]
    value = last.column(name)[0].as_py() if name in last.schema.names else None
    if not isinstance(value, str) or "\n" not in value:
        return
    tail = b""
    with place.open() as file:
        while piece := file.read(BLOCK):
            tail = (tail + piece)[-64:]
    if tail.rstrip(b"\r\n")[-1:] != b'"':
        raise DataError(f"{place.shown}, row {row}: a quote is left open before {value!r:.60}; close or double it")


def _checked_ids(table: Table, types: Mapping[str, Any]) -> set[str]:
    """Integer ids by our own finding; asked for by `cast`, 007 is 7."""
    import pyarrow as pa

    return {name for name in id_columns(table).values() if types[name] == pa.int64() and not _cast(table, name)}


def _cast(table: Table, name: str) -> str | None:
    return table.columns.get(name, ColumnRule()).cast


def _without_empty(column: Any) -> Any:
    """Text of no length is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_string(column.type):
        return column
    empty = pc.equal(pc.binary_length(column), 0)
    return pc.if_else(empty, None, column) if pc.any(empty).as_py() else column


def _whole(column: Any, table: Table, place: Place, name: str, first: int) -> Any:
    """Text as int64, or an error that names the first row that is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    odd = pc.or_(
        pc.starts_with(column, "-0"), pc.and_(pc.starts_with(column, "0"), pc.greater(pc.binary_length(column), 1))
    )
    if not pc.any(odd).as_py():
        try:
            return pc.cast(column, pa.int64())
        except pa.ArrowInvalid:
            pass
    for row, value in enumerate(column.to_pylist(), first):
        if value is not None and (not re.fullmatch(WHOLE, value) or not -(2**63) <= int(value) < 2**63):
            raise _other_type(table, place, row, name, value, "int64")
    raise AssertionError(f"no value of {name} explains why it is no int64")


def _whole_floats(column: Any, table: Table, place: Place, name: str, first: int) -> Any:
    """Ids such as 1.0 as the int64 that was asked for, or an error that names the first row that is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    known = pc.if_else(pc.is_nan(column), None, column)
    odd = pc.or_(pc.not_equal(pc.floor(known), known), pc.greater(pc.abs(known), 2.0**53))
    at = pc.index(odd, True).as_py()
    if at >= 0:
        raise _other_type(table, place, first + at, name, str(column[at].as_py()), "int64")
    return pc.cast(known, pa.int64())


# --- types ---------------------------------------------------------------------------------------


def csv_types(table: Table, places: Sequence[Place], used: Sequence[str]) -> dict[str, Any]:
    """The type of every column that is used."""
    import pyarrow as pa

    fixed = _fixed_types(table, used)
    ids = {name for name in id_columns(table).values() if not _cast(table, name)}
    found: dict[str, Any] = dict.fromkeys(used, pa.null())
    for place in places:
        batch = _first_rows(table, place, used, fixed | dict.fromkeys(ids, pa.string()))
        for name in used if batch is not None else ():
            if name in ids:
                _check_fractions(table, place, name, batch[name])
            found[name] = _wider(found[name], _id_type(batch[name]) if name in ids else batch[name].type)
    numbers = _numbers(table, used)
    for name, kind in found.items():
        if pa.types.is_null(kind):
            kind = fixed.get(name) or _type_further_on(table, places, name)
        if pa.types.is_timestamp(kind) and kind.unit == "s":  # fractions may follow
            kind = pa.timestamp("us", kind.tz)
        if pa.types.is_binary(kind):  # no UTF-8, and read as text the row is told
            kind = pa.string()
        cast = _integer_cast(table, name)
        if cast is not None and not pa.types.is_floating(kind):  # 3.0 is cast later, where nulls are known as well
            kind = cast
        found[name] = pa.float64() if name in numbers and pa.types.is_integer(kind) else kind
    return found


def _first_rows(table: Table, place: Place, used: Sequence[str], types: Mapping[str, Any]) -> Any:
    """The first block with rows, or None."""
    with _explained(place, table, types), _open(place, list(used), types) as reader:
        return next((batch for batch in reader if batch.num_rows), None)


def _wider(one: Any, two: Any) -> Any:
    """The type that holds the values of both."""
    import pyarrow as pa

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


def _check_fractions(table: Table, place: Place, name: str, column: Any) -> None:
    """Raise where all ids are written as 1.0: as text they are no id that is written 1."""
    import pyarrow.compute as pc

    given = pc.drop_null(_without_empty(column))
    if len(given) and pc.all(pc.match_substring_regex(given, WHOLE_FRACTION)).as_py():
        row = pc.index(column, given[0]).as_py() + 1
        way_out = (
            f'[{table.owner}.columns.{as_key(name)}] cast = "int64" makes them integers, "string" leaves them text'
        )
        raise DataError(f"{place.shown}, row {row}: the id {name} is {given[0].as_py()!r}, a fraction; {way_out}")


def _fixed_types(table: Table, used: Sequence[str]) -> dict[str, Any]:
    """Types that the recipe decides."""
    import pyarrow as pa

    names = {"string": "string", "bool": "bool_"}
    fixed = {}
    for name in used:
        cast = _cast(table, name)
        if cast is not None and _integer_cast(table, name) is None:
            fixed[name] = getattr(pa, names.get(cast, cast))()
        elif isinstance(table, NodeTable) and name == table.split:
            fixed[name] = pa.string()
    return fixed


def _integer_cast(table: Table, name: str) -> Any:
    """The integer type that a column is cast to, or None."""
    import pyarrow as pa

    cast = _cast(table, name) or ""
    return getattr(pa, cast)() if "int" in cast else None


def _numbers(table: Table, used: Sequence[str]) -> set[str]:
    """Columns whose integers may go on as fractions: the features, where those are no integers, and the weight."""
    kept = {*id_columns(table).values(), getattr(table, "label", None), table.time, *table.fields.values()}
    kept |= {name for name in used if _cast(table, name) or table.columns.get(name, ColumnRule()).categories}
    weight = getattr(table, "weight", None)
    return {name for name in used if name not in kept and (name == weight or "float" in table.dtype)}


def _id_type(column: Any) -> Any:
    """int64 if every id of a first block reads as one."""
    import pyarrow as pa
    import pyarrow.compute as pc

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


def _type_further_on(table: Table, places: Sequence[Place], name: str) -> Any:
    """The type of a column that begins with nulls: that of its first values."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    for place in places:
        with _explained(place, table, {}), _open(place, [name], {name: pa.string()}) as reader:
            for batch in reader:
                given = pc.drop_null(_without_empty(batch.column(0))).slice(0, ENOUGH)
                if name in id_columns(table).values() and len(given):
                    return _id_type(given)
                text = io.BytesIO()
                csv.write_csv(pa.table({"value": given}), text)
                kind = csv.read_csv(io.BytesIO(text.getvalue())).schema.field(0).type
                if not pa.types.is_null(kind):
                    return kind
    return pa.string() if name in id_columns(table).values() else pa.float64()


# --- reading, and what goes wrong ----------------------------------------------------------------


@contextmanager
def _open(
    place: Place, columns: Sequence[str] | None, types: Mapping[str, Any], refusal: Any = None, *, threads: bool = True
) -> Iterator[Any]:
    from pyarrow import csv

    read = csv.ReadOptions(block_size=BLOCK, use_threads=threads)
    separator = "\t" if place.kind == "tsv" else ","
    parse = csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=refusal)
    convert = csv.ConvertOptions(include_columns=columns, column_types=types)
    with place.open() as file, csv.open_csv(file, read, parse, convert) as reader:
        yield reader


@contextmanager
def _explained(place: Place, table: Table | None = None, types: Mapping[str, Any] | None = None) -> Iterator[None]:
    """What pyarrow says of a file, with its row."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise _with_row(place, table, types or {}, error) from error


def _with_row(place: Place, table: Table | None, types: Mapping[str, Any], error: Exception) -> Exception:
    """Reads once more, in one thread: only then are rows counted."""
    import pyarrow as pa

    refusal = _Refusal()
    try:
        with _open(place, list(types) or None, types, refusal, threads=False) as reader:
            for _ in reader:
                pass
    except (pa.ArrowException, OSError) as again:
        error = again
    if refusal.rows:
        row = refusal.rows[0]
        found = f"{row.actual_columns} fields, the header has {row.expected_columns}: {row.text!r:.80}"
        return DataError(
            f"{place.shown}, row {row.number - 1}: it has {found}; write all, in quotes where one has commas"
        )
    told = CONVERSION.match(str(error))
    if told is None or table is None:
        return _unreadable(place, error)
    name = csv_names(place)[int(told[1])]
    if told[4] == "UTF8":
        return DataError(f"{place.shown}, row {int(told[2]) - 1}: {name} is no UTF-8; write the file in UTF-8")
    return _other_type(table, place, int(told[2]) - 1, name, told[5].rstrip().removesuffix("'"), told[3])


def _other_type(table: Table, place: Place, row: int, name: str, value: str, kind: str) -> DataError:
    cast = _cast(table, name)
    if cast is not None:
        way_out = "correct it, or leave it empty"
    else:
        is_text = name in id_columns(table).values() or table.columns.get(name, ColumnRule()).categories is not None
        better = "float32" if kind == "int64" and not is_text else "string"
        way_out = f'correct it, or give all one type: [{table.owner}.columns.{as_key(name)}] cast = "{better}"'
    why = "as asked for" if cast is not None else "as in the first rows"
    return DataError(f"{place.shown}, row {row}: {name} is {value!r:.60}, not {kind} {why}; {way_out}")


def _unreadable(place: Place, error: Exception) -> DataError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "straddl" in reason:
        reason = f"a row is longer than {BLOCK} bytes; is a quote left open?"
    hint = f"give a file whose first line names the columns, in UTF-8, with {quoted(_separator(place))} between fields"
    if isinstance(error, OSError):
        hint = "it is damaged or cut short, so write it again"
    return DataError(f"{place.shown} cannot be read as CSV: {reason}; {hint}")


def _separator(place: Place) -> str:
    return "\t" if place.kind == "tsv" else ","
