"""DuckDB in this process. It spills into the scratch folder where its memory does not do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import ibis
import ibis.backends.duckdb  # loaded now: its memory counts as that of the libraries
import ibis.expr.types as ir
import pyarrow as pa

from hoploom.errors import ConfigError, HoploomError, StoreError
from hoploom.ingest.tables.engine import EngineOptions, UnreadableError, batch_rows, first_line, sql_of

AHEAD_BYTES = 16 << 20  # DuckDB works on while a batch is used, up to here


class DuckEngine:
    """The engine for one machine."""

    def __init__(self, options: EngineOptions, folder: Path) -> None:
        self._folder, self._views = folder, 0
        settings: dict[str, Any] = {"memory_limit": f"{options.memory // 1024}KiB", "temp_directory": str(folder)}
        settings |= {"allocator_flush_threshold": "8MB"}  # what is freed goes back to the system
        settings |= {} if options.threads is None else {"threads": options.threads}
        self._connection = ibis.duckdb.connect(**settings)

    def read(self, paths: Sequence[str]) -> ir.Table:
        self._views += 1
        name = f"files_{self._views}"
        listed = ", ".join(_quoted(path) for path in paths)
        # A view of the database, not of the connection: streams have connections of their own.
        with _explained():
            self._connection.con.execute(
                f"CREATE VIEW {name} AS SELECT * FROM read_parquet([{listed}], hive_partitioning = false)"
            )
        return self._connection.table(name)

    def stream(self, table: ir.Table, row_bytes: int = 16, *, as_read: bool = False) -> Iterator[pa.RecordBatch]:
        with _explained():
            connection = self._connection.con.cursor()
            try:
                connection.execute(f"SET preserve_insertion_order = {as_read}")
                connection.execute(f"SET streaming_buffer_size = '{AHEAD_BYTES}B'")
                yield from connection.sql(sql_of(table, "duckdb")).to_arrow_reader(batch_rows(row_bytes))
            finally:
                connection.close()

    def keep(self, table: ir.Table, name: str) -> ir.Table:
        path = self._folder / f"{name}.parquet"
        with _explained():
            self._connection.con.execute(f"COPY ({sql_of(table, 'duckdb')}) TO {_quoted(str(path))} (FORMAT parquet)")
        return self.read([str(path)])

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
    except duckdb.OutOfMemoryException as error:
        raise ConfigError(f"the memory given is too small for DuckDB; raise --memory ({first_line(error)})") from error
    except duckdb.IOException as error:
        raise StoreError(f"DuckDB cannot read or write: {first_line(error)}") from error
    except duckdb.Error as error:
        raise UnreadableError(f"DuckDB cannot read the tables: {first_line(error)}") from error
