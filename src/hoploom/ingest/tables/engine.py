"""Run Ibis expressions over tables: the interface of engines, and the engine that runs DuckDB in this process.

Results that DuckDB must keep are Parquet files in its folder, to which it also spills. DuckDB's own tables would be
slightly faster; files behave alike on every engine.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import duckdb
import ibis
import ibis.backends.duckdb  # loaded now: its memory counts as that of the libraries
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.compute as pc

from hoploom.errors import ConfigError, DataError, HoploomError, StoreError
from hoploom.ingest.stream.streams import in_turn

BATCH_BYTES, MOST_ROWS = 4 << 20, 122_880  # of a batch; DuckDB is slow with more rows of strings
AHEAD_BYTES = 16 << 20  # most bytes that DuckDB reads ahead while a batch is used
BUCKETS = 256  # of integer ids; texts have 16 ** 3
Fold = Callable[[Iterator[pa.RecordBatch]], dict[str, Any]]
T = TypeVar("T")


class UnreadableError(DataError):
    """An engine failed to read a table. Its message does not always name the file."""


def is_utf8(texts: pa.Array) -> bool:
    """Return whether all texts are valid UTF-8."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


@dataclass
class IdCounts:
    """Counts of ids of one node type; they show whether the ids can be used."""

    sizes: dict[int, int] = field(default_factory=dict)  # ids by part
    nulls: int = 0
    repeated: int = 0  # rows whose id an earlier row has
    width: int = 1  # bytes of the longest text
    is_utf8: bool = True  # of all texts: DuckDB refuses others, Spark reads them
    zero: str | None = None  # the least of the texts seen with a zero byte

    @property
    def num_ids(self) -> int:
        return sum(self.sizes.values())

    def add(self, other: "IdCounts") -> None:
        for part, rows in other.sizes.items():
            self.sizes[part] = self.sizes.get(part, 0) + rows
        self.nulls += other.nulls
        self.repeated += other.repeated
        self.width = max(self.width, other.width)
        self.is_utf8 &= other.is_utf8
        self.zero = min((zero for zero in (self.zero, other.zero) if zero is not None), default=None)

    def add_texts(self, ids: pa.Array) -> None:
        """Add text ids to the counts: their greatest width, whether all are UTF-8, and one with a zero byte, if any."""
        if not is_utf8(ids):
            self.is_utf8 = False
            return
        width, zeros = pc.max(pc.binary_length(ids)).as_py() or 0, pc.match_substring(ids, "\0")
        zero = ids.filter(zeros)[0].as_py() if pc.any(zeros).as_py() else None
        self.add(IdCounts(width=width, zero=zero))


class Engine(Protocol):
    """Runs expressions over tables in Parquet files."""

    def read(self, paths: Sequence[str]) -> ir.Table:
        """Return the rows of some files as one table."""

    def count_up(self, count: int) -> ir.Table:
        """Return a table of the numbers 0 to count - 1, as `id`."""

    def stream(self, table: ir.Table, row_bytes: int = 16, *, as_read: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield the rows of an expression in batches. If `as_read`, rows keep the order of the files where possible."""

    def fold(self, table: ir.Table, task: Fold, row_bytes: int = 16) -> list[dict[str, Any]]:
        """Run `task` on all rows, or on each partition; return a list of its results, dicts of numbers and texts."""

    def number(self, ids: ir.Table, num_rows: int, name: str) -> tuple[ir.Table, IdCounts]:
        """Assign store ids to the ids in a table [id, part]; return a table [id, node, again], and counts of the ids.

        `node` is the store id, ascending by (part, id). A table of text ids also has a column `bucket`, and the order
        is (part, bucket, id). `again` is true if the id has occurred before. Null ids are only counted.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineRows(Generic[T]):
    """A stream of the rows of a query: the engine, the query, and the function that decodes a batch of rows."""

    engine: Engine
    table: ir.Table
    decode: Callable[[pa.RecordBatch], T]
    row_bytes: int = 16
    as_read: bool = False  # prefer the order of the files

    def __call__(self) -> Iterator[T]:
        return map(self.decode, self.engine.stream(self.table, self.row_bytes, as_read=self.as_read))

    def then(self, further: Callable[[T], Any]) -> "EngineRows[Any]":
        """Return rows that apply `further` to each decoded batch."""
        return replace(self, decode=partial(in_turn, self.decode, further))


def result_rows(engine: Engine, table: ir.Table) -> list[dict[str, Any]]:
    """Return the rows of an expression as dicts; for small results only."""
    return [row for batch in engine.stream(table) for row in batch.to_pylist()]


def sql_of(table: ir.Table, dialect: str) -> str:
    """Return the SQL statement of an expression."""
    return str(ibis.to_sql(table, dialect=dialect))


# --- DuckDB --------------------------------------------------------------------------------------


class DuckEngine:
    """The engine that runs DuckDB in this process; threads=None uses all cores."""

    def __init__(self, folder: Path, memory: int, threads: int | None = None) -> None:
        self._folder, self._views = folder, 0
        settings: dict[str, Any] = {"memory_limit": f"{memory // 1024}KiB", "temp_directory": str(folder)}
        settings |= {"allocator_flush_threshold": "8MB"}  # freed memory goes back to the system
        settings |= {} if threads is None else {"threads": threads}
        self._connection = ibis.duckdb.connect(**settings)

    def read(self, paths: Sequence[str]) -> ir.Table:
        return self._view(f"SELECT * FROM read_parquet([{', '.join(map(_quoted, paths))}], hive_partitioning = false)")

    def count_up(self, count: int) -> ir.Table:
        return self._view(f"SELECT range AS id FROM range({count})")

    def _view(self, statement: str) -> ir.Table:
        """Create a view that all connections to the database see, because each stream opens a connection."""
        self._views += 1
        with _explained():
            self._connection.con.execute(f"CREATE VIEW rows_{self._views} AS {statement}")
        return self._connection.table(f"rows_{self._views}")

    def stream(self, table: ir.Table, row_bytes: int = 16, *, as_read: bool = False) -> Iterator[pa.RecordBatch]:
        with _explained(), self._connection.con.cursor() as connection:
            connection.execute(f"SET preserve_insertion_order = {as_read}")
            connection.execute(f"SET streaming_buffer_size = '{AHEAD_BYTES}B'")
            batch_rows = max(256, min(MOST_ROWS, BATCH_BYTES // max(1, row_bytes)))
            yield from connection.sql(sql_of(table, "duckdb")).to_arrow_reader(batch_rows)

    def fold(self, table: ir.Table, task: Fold, row_bytes: int = 16) -> list[dict[str, Any]]:
        return [task(self.stream(table, row_bytes))]

    def number(self, ids: ir.Table, num_rows: int, name: str) -> tuple[ir.Table, IdCounts]:
        """Assign store ids bucket by bucket, so that the ids are never all sorted at once."""
        if "bucket" not in ids.columns:  # ranges of integers; rounding is harmless, as they still ascend with the ids
            (found,) = result_rows(self, ids.aggregate(low=ids["id"].min(), high=ids["id"].max()))
            low, high = found["low"] or 0, found["high"] or 0  # None if all are null
            width = ibis.literal((high - low) // BUCKETS + 1, "float64")
            span = (ids["id"].cast("float64") - ibis.literal(float(low), "float64")) / width
            ids = ids.mutate(bucket=span.floor().cast("int64"))
        sizes = self._keep(ids.group_by("part", "bucket").aggregate(rows=ids.count()), f"{name}.buckets")
        nulls, counts = sizes["rows"].sum(where=sizes["bucket"].isnull()).fill_null(0), IdCounts()
        for row in result_rows(self, sizes.group_by("part").aggregate(rows=sizes["rows"].sum(), nulls=nulls)):
            counts.add(IdCounts({row["part"]: int(row["rows"])}, int(row["nulls"])))
        pairs = self._keep(_numbered_in_buckets(ids, sizes), f"{name}.ids")
        (repeated,) = result_rows(self, pairs.aggregate(rows=pairs["again"].cast("int64").sum()))
        counts.repeated = repeated["rows"] or 0
        if pairs["id"].type().is_string():
            for batch in self.stream(pairs.select("id"), 64):
                counts.add_texts(batch.column(0))
        return pairs, counts

    def _keep(self, table: ir.Table, name: str) -> ir.Table:
        """Write the rows of an expression to a file, and return the file's rows as a table."""
        path = str(self._folder / f"{name}.parquet")
        with _explained():
            self._connection.con.execute(f"COPY ({sql_of(table, 'duckdb')}) TO {_quoted(path)} (FORMAT parquet)")
        return self.read([path])

    def close(self) -> None:
        self._connection.disconnect()


def _numbered_in_buckets(ids: ir.Table, sizes: ir.Table) -> ir.Table:
    """Return [id, node, again] as `Engine.number` does, for ids [id, part, bucket]. `sizes` has the ids per bucket."""
    before = ibis.window(order_by=[sizes["part"], sizes["bucket"]], preceding=(None, 1))
    begins = sizes.select(
        in_part=sizes["part"],
        in_bucket=sizes["bucket"],
        begin=sizes["rows"].sum().over(before).fill_null(0).cast("int64"),
    )
    placed = ids.inner_join(begins, [ids["part"] == begins["in_part"], ids["bucket"] == begins["in_bucket"]])
    placed = placed.select("id", "part", "bucket", "begin")
    window = ibis.window(group_by=[placed["part"], placed["bucket"]], order_by=placed["id"])
    return placed.select(
        id=placed["id"],
        node=ibis.row_number().over(window) + placed["begin"],
        again=(placed["id"].lag().over(window) == placed["id"]).fill_null(False),
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@contextmanager
def _explained() -> Iterator[None]:
    """Raise DuckDB's errors in this block as Hoploom's."""
    try:
        yield
    except HoploomError:
        raise
    except (duckdb.Error, OSError) as error:  # pyarrow raises OSError for DuckDB's errors while rows are streamed
        message = str(error).strip().split("\n", 1)[0]  # without the statement that follows
        if "Out of Memory Error" in message:
            hint = "the memory given is too small for DuckDB; raise --memory by 200 MB, of which it gets half"
            raise ConfigError(f"{hint} ({message})") from error
        if isinstance(error, duckdb.IOException) or message.startswith("IO Error"):
            raise StoreError(f"DuckDB cannot read or write: {message}") from error
        raise UnreadableError(f"DuckDB cannot read the tables: {message}") from error
