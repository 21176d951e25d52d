"""The same expressions on Spark: what an expression gives is written as Parquet into the scratch folder, then read.

The scratch folder must be one that Spark's workers reach under the same path; with `local` masters it is.
"""

import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from hoploom.errors import ConfigError, HoploomError
from hoploom.ingest.tables.engine import UnreadableError, batch_rows, first_line, sql_of

STATIC = {  # of a process
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",  # no Hive: nothing is written outside the scratch folder
}
SETTINGS = {  # of a session
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.legacy.parquet.nanosAsLong": "true",  # else such columns are refused
}


class SparkEngine:
    """A Spark session, in the Spark that this process has already, or else in one of our own."""

    def __init__(self, folder: Path, memory: int, master: str) -> None:
        self._folder, self._made = folder, 0
        with _explained(f"Spark at {master!r} does not start", ConfigError), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of pandas, which nothing here uses
            active = SparkSession.getActiveSession()
            self._mine = active is None
            self._session = (_started(folder, memory, master) if active is None else active).newSession()
            for name, value in SETTINGS.items():
                self._session.conf.set(name, value)
            self._connection = ibis.pyspark.connect(self._session)

    def read(self, paths: Sequence[str]) -> ir.Table:
        with _explained("Spark cannot read the tables"):
            frame = self._session.read.parquet(*map(_literal, paths))
            name = f"hoploom_{id(self)}_{self._next()}"
            frame.createOrReplaceTempView(name)
            return self._connection.table(name)

    def stream(self, table: ir.Table, row_bytes: int = 16, *, as_read: bool = False) -> Iterator[pa.RecordBatch]:
        folder = self._write(table, f"stream-{self._next()}")
        try:
            for file in sorted(folder.glob("part-*.parquet")):  # in the order of the rows, where they have one
                with pq.ParquetFile(file) as rows:
                    yield from rows.iter_batches(batch_size=batch_rows(row_bytes))
                file.unlink()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, table: ir.Table, name: str) -> ir.Table:
        return self.read([str(self._write(table, name))])

    def close(self) -> None:
        if self._mine:
            self._session.stop()

    def _write(self, table: ir.Table, name: str) -> Path:
        folder = self._folder / name
        with _explained("Spark cannot read the tables"):
            self._session.sql(sql_of(table, "pyspark")).write.parquet(f"file://{folder}")  # Spark decodes no %20
        return folder

    def _next(self) -> int:
        self._made += 1
        return self._made


def _literal(path: str) -> str:
    """A path that Spark reads as it is; without this, it looks for what a pattern such as [a] stands for."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def _started(folder: Path, memory: int, master: str) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("hoploom build")
    for name, value in STATIC.items():
        builder = builder.config(name, value)
    if master.startswith("local"):  # all in one process: no name service, no folders but this one
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
        builder = builder.config("spark.local.dir", str(folder)).config("spark.sql.shuffle.partitions", "8")
        builder = builder.config("spark.driver.memory", f"{max(512, memory >> 20)}m")
    builder = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


@contextmanager
def _explained(what: str, kind: type[HoploomError] = UnreadableError) -> Iterator[None]:
    """Spark's errors as ours."""
    try:
        yield
    except HoploomError:
        raise
    except Exception as error:  # Py4J's, Spark's and Java's have no common base
        hint = "; Spark needs Java 17 or later, as `java` or under JAVA_HOME" if "JAVA" in str(error).upper() else ""
        raise kind(f"{what}: {first_line(error)}{hint}") from error
