"""What is wrong with the tables, by file, row and value. Runs once a build has failed, so it may read them again."""

from collections.abc import Callable, Sequence
from typing import Any

import ibis.expr.types as ir
import pyarrow as pa

from hoploom.errors import DataError
from hoploom.ingest.tables.engine import Engine, rows_of
from hoploom.ingest.tables.table_source import Spot, TableSource, locate, scan

SHOWN = 5


class UnfitError(ValueError):
    """A value of a column that cannot be used: says why."""


def null_ids(source: TableSource, column: str, count: int) -> DataError:
    """Some ids are null."""
    spots = locate(source, column, [None])
    return DataError(f"{_of(spots)}{_ids(source, column)} has {_nulls(count)}; give every node an id")


def zero_bytes(source: TableSource, column: str, value: str) -> DataError:
    """An id holds the letter that ends texts."""
    return DataError(
        f"{_of(locate(source, column, [value]))}{_ids(source, column)} holds {value!r}; remove its zero byte"
    )


def duplicate_ids(engine: Engine, source: TableSource, column: str, pairs: ir.Table) -> DataError:
    """Some ids have several rows."""
    repeated = pairs.filter(pairs["again"]).select("id").distinct()
    (count,) = rows_of(engine, repeated.aggregate(ids=repeated.count()))
    first = [row["id"] for row in rows_of(engine, repeated.order_by("id").limit(SHOWN))]
    listed = _listed(first, locate(source, column, first, skip=1), "again in ")
    some = "an id has" if count["ids"] == 1 else f"{count['ids']} ids have"
    listed += _more(count["ids"])
    return DataError(f"{_ids(source, column)}: {some} more than one row: {listed}; keep one row each")


def dangling(engine: Engine, source: TableSource, ends: ir.Table, end: tuple[str, str, str]) -> DataError | None:
    """Edges of unknown nodes: `ends` holds the ids at their unknown ends; end: which, its column, its nodes."""
    side, column, nodes = end
    (count,) = rows_of(engine, ends.aggregate(rows=ends.count(), ids=ends["id"].nunique()))
    if not count["rows"]:
        return None
    first = [row["id"] for row in rows_of(engine, ends.distinct().order_by("id").limit(SHOWN))]
    listed = _listed(first, locate(source, column, first), "")
    verb = "end" if side == "destination" else "begin"
    edges = f"1 edge {verb}s" if count["rows"] == 1 else f"{count['rows']} edges {verb}"
    what = f"{source.owner}: {edges} at ids that {nodes} does not have"
    way_out = f"add them to {nodes}, or pass --drop-dangling"
    return DataError(f"{what}: column {column!r} holds {listed}{_more(count['ids'])}; {way_out}")


def null_ends(engine: Engine, source: TableSource, ends: ir.Table, column: str) -> DataError | None:
    """Edges with a null at one end."""
    (count,) = rows_of(engine, ends.aggregate(rows=ends.count()))
    if not count["rows"]:
        return None
    spots = locate(source, column, [None])
    return DataError(f"{_of(spots)}{_ids(source, column)} has {_nulls(count['rows'])}; give every edge both ends")


def unfit(source: TableSource, column: str, check: Callable[[pa.Array], Any], error: Exception) -> DataError:
    """A value that `check` refuses: the first one, by its place."""
    spot, reason = _first_unfit(source, column, check) or (None, str(error))
    return DataError(f"{_of([] if spot is None else [spot])}{_ids(source, column)} {reason}")


def _first_unfit(source: TableSource, column: str, check: Callable[[pa.Array], Any]) -> tuple[Spot, str] | None:
    """The first row that `check` refuses by itself, and why."""
    for origin, row, values in scan(source, column):
        if _refusal(check, values) is None:
            continue
        begin, end = 0, len(values)
        while end - begin > 1:  # the first half that is refused, until it is one row
            middle = (begin + end) // 2
            if _refusal(check, values.slice(begin, middle - begin)) is None:
                begin = middle
            else:
                end = middle
        reason = _refusal(check, values.slice(begin, 1))
        if reason is not None:
            return Spot(None, origin, row + begin + 1), reason
    return None


def _refusal(check: Callable[[pa.Array], Any], values: pa.Array) -> str | None:
    try:
        check(values)
    except UnfitError as error:
        return str(error)
    return None


def _of(spots: Sequence[Spot]) -> str:
    """Where a message begins."""
    return f"{spots[0]}: " if spots else ""


def _ids(source: TableSource, column: str) -> str:
    return f"column {column!r} of {source.owner}"


def _nulls(count: int) -> str:
    return "a null" if count == 1 else f"{count} nulls, this is the first"


def _more(count: int) -> str:
    return f" and {count - SHOWN} more" if count > SHOWN else ""


def _listed(values: Sequence[Any], spots: Sequence[Spot], before: str) -> str:
    places = {spot.value: f" ({before}{spot})" for spot in spots}
    return ", ".join(f"{value!r}{places.get(value, '')}" for value in values)
