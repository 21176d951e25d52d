"""What runs Ibis expressions over tables: one interface, which duckdb_engine and spark_engine meet.

Whatever an engine must keep is a Parquet file in the scratch folder, so it holds no state of its own. Gives up an
engine's own tables, which would be faster by little, for one behaviour of all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ibis
import ibis.expr.types as ir
import pyarrow as pa

from hoploom.config.values import as_int
from hoploom.errors import ConfigError, DataError

ENGINES = ("duckdb", "spark")
BATCH_BYTES, MOST_ROWS = 4 << 20, 122_880  # of a batch; DuckDB slows down where more rows than these hold strings


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

    def read(self, paths: Sequence[str]) -> ir.Table:
        """The rows of some files as one table."""

    def stream(self, table: ir.Table, row_bytes: int = 16, *, as_read: bool = False) -> Iterator[pa.RecordBatch]:
        """The rows of an expression; in order where it is ordered. `as_read`: better in the order of the files."""

    def keep(self, table: ir.Table, name: str) -> ir.Table:
        """The rows of an expression, computed once."""

    def close(self) -> None: ...


def check_engine(name: str, threads: int | None) -> None:
    """Raise ConfigError for an engine that there is not, or for one without threads."""
    if name not in ENGINES:
        raise ConfigError(f"engine is {name!r}; give one of {list(ENGINES)}")
    if threads is not None:
        as_int("threads", threads, 1, "give at least 1")


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
