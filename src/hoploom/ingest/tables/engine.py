"""What runs Ibis expressions over tables: one interface, and DuckDB in this process, which meets it.

Whatever an engine must keep is a Parquet file in its folder. Gives up an engine's own tables, which would be faster by
little, for one behaviour of all. DuckDB spills into that folder, too, where its memory does not do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import duckdb
import ibis
import ibis.backends.duckdb  # loaded now: its memory counts as that of the libraries
import ibis.expr.types as ir
import pyarrow as pa

from hoploom.errors import ConfigError, DataError, HoploomError, StoreError
from hoploom.ingest.tables.id_counts import IdCounts

BATCH_BYTES, MOST_ROWS = 4 << 20, 122_880  # of a batch; DuckDB slows down where more rows than these hold strings
AHEAD_BYTES = 16 << 20  # DuckDB works on while a batch is used, up to here
Fold = Callable[[Iterator[pa.RecordBatch]], dict[str, Any]]


class UnreadableError(DataError):
    """The engine stopped at a table; which, it may not have said."""


class Engine(Protocol):
    """Runs expressions over tables in Parquet files."""

    def read(self, paths: Sequence[str]) -> ir.Table:
        """The rows of some files as one table."""

    def count_up(self, count: int) -> ir.Table:
        """The numbers 0 to count - 1, as `id`."""

    def stream(self, table: ir.Table, row_bytes: int = 16, *, as_read: bool = False) -> Iterator[pa.RecordBatch]:
        """The rows of an expression; in order where it is ordered. `as_read`: better in the order of the files."""

    def fold(self, table: ir.Table, task: Fold, row_bytes: int = 16) -> list[dict[str, Any]]:
        """What `task` makes of the rows, or of each of the pieces that they come in: numbers and texts."""

    def keep(self, table: ir.Table, name: str) -> ir.Table:
        """The rows of an expression, computed once."""

    def number(self, ids: ir.Table, num_rows: int, name: str) -> tuple[ir.Table, IdCounts] | None:
        """Where the engine has a way of its own to do what `id_buckets.by_buckets` does: the same. Else None."""

    def close(self) -> None: ...


def rows_of(engine: Engine, table: ir.Table) -> list[dict[str, Any]]:
    """The rows of a small result."""
    return [row for batch in engine.stream(table) for row in batch.to_pylist()]


def batch_rows(row_bytes: int) -> int:
    """How many rows a batch holds."""
    return max(256, min(MOST_ROWS, BATCH_BYTES // max(1, row_bytes)))


def sql_of(table: ir.Table, dialect: str) -> str:
    """The statement of an expression."""
    return str(ibis.to_sql(table, dialect=dialect))


def first_line(error: Exception) -> str:
    """An engine's message without the statement that it repeats."""
    return str(error).strip().split("\n", 1)[0]


# --- DuckDB --------------------------------------------------------------------------------------


class DuckEngine:
    """The engine for one machine; threads=None takes all cores."""

    def __init__(self, folder: Path, memory: int, threads: int | None = None) -> None:
        self._folder, self._views = folder, 0
        settings: dict[str, Any] = {"memory_limit": f"{memory // 1024}KiB", "temp_directory": str(folder)}
        settings |= {"allocator_flush_threshold": "8MB"}  # what is freed goes back to the system
        settings |= {} if threads is None else {"threads": threads}
        self._connection = ibis.duckdb.connect(**settings)

    def read(self, paths: Sequence[str]) -> ir.Table:
        return self._view(f"SELECT * FROM read_parquet([{', '.join(map(_quoted, paths))}], hive_partitioning = false)")

    def count_up(self, count: int) -> ir.Table:
        return self._view(f"SELECT range AS id FROM range({count})")

    def _view(self, statement: str) -> ir.Table:
        """A view of the database, not of the connection: streams have connections of their own."""
        self._views += 1
        with _explained():
            self._connection.con.execute(f"CREATE VIEW rows_{self._views} AS {statement}")
        return self._connection.table(f"rows_{self._views}")

    def stream(self, table: ir.Table, row_bytes: int = 16, *, as_read: bool = False) -> Iterator[pa.RecordBatch]:
        with _explained(), self._connection.con.cursor() as connection:
            connection.execute(f"SET preserve_insertion_order = {as_read}")
            connection.execute(f"SET streaming_buffer_size = '{AHEAD_BYTES}B'")
            yield from connection.sql(sql_of(table, "duckdb")).to_arrow_reader(batch_rows(row_bytes))

    def fold(self, table: ir.Table, task: Fold, row_bytes: int = 16) -> list[dict[str, Any]]:
        return [task(self.stream(table, row_bytes))]

    def keep(self, table: ir.Table, name: str) -> ir.Table:
        path = str(self._folder / f"{name}.parquet")
        with _explained():
            self._connection.con.execute(f"COPY ({sql_of(table, 'duckdb')}) TO {_quoted(path)} (FORMAT parquet)")
        return self.read([path])

    def number(self, ids: ir.Table, num_rows: int, name: str) -> None:
        return None

    def close(self) -> None:
        self._connection.disconnect()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@contextmanager
def _explained() -> Iterator[None]:
    """DuckDB's errors as ours."""
    try:
        yield
    except HoploomError:
        raise
    except (duckdb.Error, OSError) as error:  # pyarrow raises OSError for what DuckDB says while rows are streamed
        said = first_line(error)
        if "Out of Memory Error" in said:
            message = "the memory given is too small for DuckDB; raise --memory by 200 MB, of which it gets half"
            raise ConfigError(f"{message} ({said})") from error
        if isinstance(error, duckdb.IOException) or said.startswith("IO Error"):
            raise StoreError(f"DuckDB cannot read or write: {said}") from error
        raise UnreadableError(f"DuckDB cannot read the tables: {said}") from error
