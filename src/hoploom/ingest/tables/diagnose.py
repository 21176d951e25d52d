"""What is wrong with the tables, by file, row and value. Runs once a build has failed, so it may read them again."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ibis.expr.types as ir
import pyarrow as pa

from hoploom.config.values import as_key
from hoploom.errors import DataError
from hoploom.ingest.tables.engine import Engine, rows_of
from hoploom.ingest.tables.id_counts import is_utf8
from hoploom.ingest.tables.sources import TableSource
from hoploom.ingest.tables.transforms import UnfitError

SHOWN = 5
NO_TEXT = "holds text that is not UTF-8; write it in UTF-8"


def nulls(source: TableSource, column: str, count: int, way_out: str) -> DataError:
    """Some ids are null."""
    found = "a null" if count == 1 else f"{count} nulls, this is the first"
    return _at(source, column, source.locate(column, [None]).get(None), f"has {found}; {way_out}")


def zero_bytes(source: TableSource, value: str) -> DataError:
    """An id holds the letter that ends texts."""
    column = source.id_column
    return _at(source, column, source.locate(column, [value]).get(value), f"holds {value!r}; remove its zero byte")


def not_utf8(source: TableSource, column: str) -> DataError:
    """A text of the column is no UTF-8; whose, by its place."""
    for origin, before, texts in source.scan(column):
        if not is_utf8(texts):
            row = bisect_left(range(len(texts)), True, key=lambda last: not is_utf8(texts[: last + 1]))
            return _at(source, column, f"{origin}, row {before + row + 1}", NO_TEXT)
    return _at(source, column, None, NO_TEXT)


@contextmanager
def naming_texts(source: TableSource, column: str) -> Iterator[None]:
    """Values of the column are shown."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise not_utf8(source, column) from error


def duplicate_ids(engine: Engine, source: TableSource, pairs: ir.Table) -> DataError:
    """Some ids have several rows."""
    column = source.id_column
    count, listed = _listed(engine, source, column, pairs.filter(pairs["again"]).select("id"), skip=1)
    some = "an id has" if count == 1 else f"{count} ids have"
    return DataError(f"column {column!r} of {source.owner}: {some} more than one row: {listed}; keep one row each")


def dangling(engine: Engine, source: TableSource, role: str, nodes: str, ends: ir.Table) -> DataError | None:
    """Edges of unknown nodes: `ends` holds the ids at their unknown ends; None: there are none."""
    (found,) = rows_of(engine, ends.aggregate(rows=ends.count()))
    if not found["rows"]:
        return None
    column = source.table.id_columns[role]
    _, listed = _listed(engine, source, column, ends)
    verb = "end" if role == "destination" else "begin"
    edges = f"1 edge {verb}s" if found["rows"] == 1 else f"{found['rows']} edges {verb}"
    what = f"{source.owner}: {edges} at ids that {nodes} does not have"
    return DataError(f"{what}: column {column!r} holds {listed}; add them to {nodes}, or pass --drop-dangling")


def first_word(source: TableSource, column: str) -> tuple[str, Any] | None:
    """The place and the value of the first row that does not read as a number."""
    for origin, before, values in source.scan(column):
        for row, value in enumerate(values.to_pylist(), before + 1):
            if value is not None and not _reads_as_number(value):
                return f"{origin}, row {row}", value
    return None


def _reads_as_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, str)


def unfit(source: TableSource, column: str, check: Callable[[pa.Array], Any], error: Exception) -> DataError:
    """A value that `check` refuses: the first one, by its place."""
    for origin, before, values in source.scan(column):
        if _refusal(check, values) is not None:
            row = bisect_left(range(len(values)), True, key=lambda last: bool(_refusal(check, values[: last + 1])))
            reason = _refusal(check, values.slice(row, 1))
            if reason is not None:
                if column == getattr(source.table, "label", None):
                    reason += _more_labels(source, column, check, (origin, before + row))
                return _at(source, column, f"{origin}, row {before + row + 1}", reason)
    return _at(source, column, None, str(error))


def _more_labels(source: TableSource, column: str, check: Callable[[pa.Array], Any], place: tuple[str, int]) -> str:
    """Of which node the first label is that `check` refuses, and how many there are."""
    ids = (
        ids[place[1] - before].as_py()
        for origin, before, ids in source.scan(source.id_column)
        if origin == place[0] and before <= place[1] < before + len(ids)
    )
    count = 0
    for _, _, values in source.scan(column):
        try:
            check(values)
        except UnfitError as error:
            count += error.count
    return f"; it is the label of node {next(ids)!r}" + (f", the first of {count} such labels" if count > 1 else "")


def _refusal(check: Callable[[pa.Array], Any], values: pa.Array) -> str | None:
    try:
        check(values)
    except UnfitError as error:
        return str(error)
    return None


def _at(source: TableSource, column: str, place: str | None, message: str) -> DataError:
    """An error about a column, with its place where that is known."""
    place = "" if place is None else f"{place}: "
    message = message.replace("<name>", as_key(column))
    return DataError(f"{place}column {column!r} of {source.owner} {message}")


def _listed(engine: Engine, source: TableSource, column: str, ids: ir.Table, skip: int = 0) -> tuple[int, str]:
    """How many ids there are, and the first of them with their places; skip=1: the second ones."""
    distinct = ids.distinct()
    (count,) = rows_of(engine, distinct.aggregate(ids=distinct.count()))
    with naming_texts(source, column):
        first = [row["id"] for row in rows_of(engine, distinct.order_by("id").limit(SHOWN))]
    before = "again in " if skip else ""
    places = {value: f" ({before}{place})" for value, place in source.locate(column, first, skip=skip).items()}
    more = f" and {count['ids'] - SHOWN} more" if count["ids"] > SHOWN else ""
    return count["ids"], ", ".join(f"{value!r}{places.get(value, '')}" for value in first) + more
