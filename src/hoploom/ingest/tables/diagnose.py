"""Find the file, row and value of an error in the tables, after a build has failed. Reads the tables again."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ibis.expr.types as ir
import pyarrow as pa

from hoploom.config.values import as_key
from hoploom.errors import DataError
from hoploom.ingest.tables.engine import Engine, is_utf8, result_rows
from hoploom.ingest.tables.sources import TableSource

SHOWN = 5
NO_TEXT = "holds text that is not UTF-8; write it in UTF-8"


class UnfitError(ValueError):
    """A column has a value that cannot be used."""


def nulls(source: TableSource, column: str, count: int, way_out: str) -> DataError:
    """Return the error about `count` null ids in a column, with the file and row of the first."""
    found = "a null" if count == 1 else f"{count} nulls, this is the first"
    return _at(source, column, source.locate(column, [None]).get(None), f"has {found}; {way_out}")


def zero_bytes(source: TableSource, value: str) -> DataError:
    """Return the error about the id `value`, which contains a zero byte: this byte would end the text in a store."""
    column = source.id_column
    return _at(source, column, source.locate(column, [value]).get(value), f"holds {value!r}; remove its zero byte")


def not_utf8(source: TableSource, column: str) -> DataError:
    """Return the error about text that is not UTF-8, with the file and row of the first such value."""
    for origin, before, texts in source.scan(column):
        if not is_utf8(texts):
            row = bisect_left(range(len(texts)), True, key=lambda last: not is_utf8(texts[: last + 1]))
            return _at(source, column, f"{origin}, row {before + row + 1}", NO_TEXT)
    return _at(source, column, None, NO_TEXT)


@contextmanager
def naming_texts(source: TableSource, column: str) -> Iterator[None]:
    """Raise an error with file and row in place of a UnicodeDecodeError of this block, which decodes `column`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise not_utf8(source, column) from error


def duplicate_ids(engine: Engine, source: TableSource, pairs: ir.Table) -> DataError:
    """Return the error about ids that have several rows. The table `pairs` marks repeated ids in its column `again`."""
    column = source.id_column
    count, listed = _listed(engine, source, column, pairs.filter(pairs["again"]).select("id"), skip=1)
    some = "an id has" if count == 1 else f"{count} ids have"
    return DataError(f"column {column!r} of {source.owner}: {some} more than one row: {listed}; keep one row each")


def dangling(engine: Engine, source: TableSource, role: str, nodes: str, ends: ir.Table) -> DataError | None:
    """Return the error about edges whose ends of `role` (source, destination) are the unknown ids `ends`, if any."""
    (found,) = result_rows(engine, ends.aggregate(rows=ends.count()))
    if not found["rows"]:
        return None
    column = source.table.id_columns[role]
    _, listed = _listed(engine, source, column, ends)
    verb = "end" if role == "destination" else "begin"
    edges = f"1 edge {verb}s" if found["rows"] == 1 else f"{found['rows']} edges {verb}"
    what = f"{source.owner}: {edges} at ids that {nodes} does not have"
    return DataError(f"{what}: column {column!r} holds {listed}; add them to {nodes}, or pass --drop-dangling")


def first_word(source: TableSource, column: str) -> tuple[str, Any] | None:
    """Find the first value that is not a number. Return (its file and row, the value); None if there is none."""
    for origin, before, values in source.scan(column):
        for row, value in enumerate(values.to_pylist(), before + 1):
            if value is None:
                continue
            try:
                float(value)
                is_number = isinstance(value, str)
            except (TypeError, ValueError):
                is_number = False
            if not is_number:
                return f"{origin}, row {row}", value
    return None


def unfit(source: TableSource, column: str, check: Callable[[pa.Array], Any], error: Exception) -> DataError:
    """Return the error about the first value for which `check` raises UnfitError, with its file and row."""
    for origin, before, values in source.scan(column):
        if _refusal(check, values) is not None:
            row = bisect_left(range(len(values)), True, key=lambda last: bool(_refusal(check, values[: last + 1])))
            reason = _refusal(check, values.slice(row, 1))
            if reason is not None:
                return _at(source, column, f"{origin}, row {before + row + 1}", reason)
    return _at(source, column, None, str(error))


def _refusal(check: Callable[[pa.Array], Any], values: pa.Array) -> str | None:
    try:
        check(values)
    except UnfitError as error:
        return str(error)
    return None


def _at(source: TableSource, column: str, place: str | None, message: str) -> DataError:
    """Return an error about a column, with the file and row (`place`) if they are known."""
    place = "" if place is None else f"{place}: "
    message = message.replace("<name>", as_key(column))
    return DataError(f"{place}column {column!r} of {source.owner} {message}")


def _listed(engine: Engine, source: TableSource, column: str, ids: ir.Table, skip: int = 0) -> tuple[int, str]:
    """Return the number of distinct ids, and a text of a few with file and row.

    With skip=1, the row is the second that has the id.
    """
    distinct = ids.distinct()
    (count,) = result_rows(engine, distinct.aggregate(ids=distinct.count()))
    with naming_texts(source, column):
        first = [row["id"] for row in result_rows(engine, distinct.order_by("id").limit(SHOWN))]
    before = "again in " if skip else ""
    places = {value: f" ({before}{place})" for value, place in source.locate(column, first, skip=skip).items()}
    more = f" and {count['ids'] - SHOWN} more" if count["ids"] > SHOWN else ""
    return count["ids"], ", ".join(f"{value!r}{places.get(value, '')}" for value in first) + more
