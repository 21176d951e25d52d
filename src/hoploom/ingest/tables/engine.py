"""Where Ibis expressions run: DuckDB in this process, or Spark. Nothing else knows which.

Whatever an engine must keep is a Parquet file in the scratch folder, so it holds no state of its own. Gives up an
engine's own tables, which would be faster by little, for one behaviour of all.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hoploom.config.values import as_int
from hoploom.errors import ConfigError, DataError, HoploomError, StoreError

if TYPE_CHECKING:
    import ibis.expr.types as ir
    import pyarrow as pa

ENGINES = ("duckdb", "spark")
BATCH_BYTES, MOST_ROWS = 4 << 20, 122_880  # of a batch; DuckDB slows down where more rows than these hold strings
AHEAD_BYTES = 16 << 20  # DuckDB works on while a batch is used, up to here


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engine, and what it may take."""

    name: str = "duckdb"
    memory: int  # bytes
    threads: int | None = None  # None: all cores
    master: str = "local[*]"  # Spark's


class UnreadableError(DataError):
    """The engine stopped at a table; which, it may not have said."""


class Engine(Protocol):
    """Runs expressions over tables in Parquet files."""

    def read(self, paths: Sequence[str]) -> "ir.Table":
        """The rows of some files as one table."""

    def stream(self, table: "ir.Table", row_bytes: int = 16, *, as_read: bool = False) -> "Iterator[pa.RecordBatch]":
        """The rows of an expression; in order where it is ordered. `as_read`: better in the order of the files."""

    def keep(self, table: "ir.Table", name: str) -> "ir.Table":
        """The rows of an expression, computed once."""

    def close(self) -> None: ...


def rows_of(engine: Engine, table: "ir.Table") -> list[dict[str, Any]]:
    """The rows of a small result."""
    return [row for batch in engine.stream(table) for row in batch.to_pylist()]


def check_engine(name: str, threads: int | None) -> None:
    """Raise ConfigError for an engine that there is not, or for one without threads."""
    if name not in ENGINES:
        raise ConfigError(f"engine is {name!r}; give one of {list(ENGINES)}")
    if threads is not None:
        as_int("threads", threads, 1, "give at least 1")


@contextmanager
def open_engine(options: EngineOptions, scratch: Path) -> Iterator[Engine]:
    """The engine by its name; its files go into the scratch folder."""
    check_engine(options.name, options.threads)
    folder = scratch / "engine"
    folder.mkdir(parents=True)
    engine: Engine = DuckEngine(options, folder) if options.name == "duckdb" else _spark(options, folder)
    try:
        yield engine
    finally:
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)


def _spark(options: EngineOptions, folder: Path) -> Engine:
    from hoploom.ingest.tables.spark import SparkEngine

    return SparkEngine(options, folder)


def batch_rows(row_bytes: int) -> int:
    """How many rows a batch holds."""
    return max(256, min(MOST_ROWS, BATCH_BYTES // max(1, row_bytes)))


class DuckEngine:
    """DuckDB in this process. It spills into the scratch folder where its memory does not do."""

    def __init__(self, options: EngineOptions, folder: Path) -> None:
        try:
            import ibis
        except ImportError as error:
            raise ConfigError(f"DuckDB cannot be used, {error.name} is missing; install hoploom again") from error
        self._folder, self._views = folder, 0
        settings: dict[str, Any] = {"memory_limit": f"{options.memory // 1024}KiB", "temp_directory": str(folder)}
        settings |= {"allocator_flush_threshold": "8MB"}  # what is freed goes back to the system
        settings |= {} if options.threads is None else {"threads": options.threads}
        self._connection = ibis.duckdb.connect(**settings)

    def read(self, paths: Sequence[str]) -> "ir.Table":
        self._views += 1
        name = f"files_{self._views}"
        listed = ", ".join(_quoted(path) for path in paths)
        # A view of the database, not of the connection: streams have connections of their own.
        with _explained():
            self._connection.con.execute(
                f"CREATE VIEW {name} AS SELECT * FROM read_parquet([{listed}], hive_partitioning = false)"
            )
        return self._connection.table(name)

    def stream(self, table: "ir.Table", row_bytes: int = 16, *, as_read: bool = False) -> "Iterator[pa.RecordBatch]":
        with _explained():
            connection = self._connection.con.cursor()
            try:
                connection.execute(f"SET preserve_insertion_order = {as_read}")
                connection.execute(f"SET streaming_buffer_size = '{AHEAD_BYTES}B'")
                yield from connection.sql(sql_of(table, "duckdb")).to_arrow_reader(batch_rows(row_bytes))
            finally:
                connection.close()

    def keep(self, table: "ir.Table", name: str) -> "ir.Table":
        path = self._folder / f"{name}.parquet"
        with _explained():
            self._connection.con.execute(f"COPY ({sql_of(table, 'duckdb')}) TO {_quoted(str(path))} (FORMAT parquet)")
        return self.read([str(path)])

    def close(self) -> None:
        self._connection.disconnect()


def sql_of(table: "ir.Table", dialect: str) -> str:
    """The statement of an expression."""
    import ibis

    return str(ibis.to_sql(table, dialect=dialect))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@contextmanager
def _explained() -> Iterator[None]:
    """DuckDB's errors as ours."""
    import duckdb

    try:
        yield
    except HoploomError:
        raise
    except duckdb.OutOfMemoryException as error:
        raise ConfigError(f"the memory given is too small for DuckDB; raise --memory ({first_line(error)})") from error
    except duckdb.IOException as error:
        raise StoreError(f"DuckDB cannot read or write: {first_line(error)}") from error
    except duckdb.Error as error:
        raise UnreadableError(f"DuckDB cannot read the tables: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """An engine's message without the statement that it repeats."""
    return str(error).strip().split("\n", 1)[0]
