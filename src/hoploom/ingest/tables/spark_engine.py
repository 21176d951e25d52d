"""Build a store on Spark: the driver plans and counts; executors number nodes, join edges and write the parts.

Expressions run on Spark. Kept rows stay with the executors; only small results come to this process.

Ids are numbered after one shuffle into ranges: a task sorts a range, numbers its ids from 0, and appends a row with
counts of the ids. Spark chooses the bounds of ranges by a small sample. The driver adds up the counts, which gives the
first number of each range, so the numbers do not depend on these bounds.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from hoploom.errors import DataError, HoploomError
from hoploom.ingest.spark import SharedRows, write_shared
from hoploom.ingest.spark.frames import (
    JOIN_BYTES,
    JOINED_BYTES,
    RETURNED,
    freeze_imports,
    ranges_for,
    set_batch_rows,
    set_join_tasks,
    task_number,
)
from hoploom.ingest.spark.session import (
    active_session,
    check_java,
    check_master,
    explained,
    sendable,
    spark_page,
    spark_session,
)
from hoploom.ingest.spark.target import opened_target
from hoploom.ingest.stream import Progress
from hoploom.ingest.stream.streams import IdRows, in_turn
from hoploom.ingest.tables.engine import EngineRows, Fold, IdCounts, UnreadableError, sql_of
from hoploom.ingest.tables.graph_file import GraphFile
from hoploom.ingest.tables.graph_streams import (
    BuildOptions,
    GraphTables,
    KnownEdges,
    Report,
    UnknownEndError,
    known_edges,
)
from hoploom.ingest.tables.sources import TableSource, read_sources

UNREADABLE = "Spark cannot read the tables"
INTEGER_BYTES, TEXT_BYTES = 16, 64  # of a row with an id, about


class SparkEngine:
    """The engine that runs expressions on Spark, over tables that all executors can read."""

    def __init__(self, session: SparkSession) -> None:
        self.session, self._made, self._kept = session, 0, list[DataFrame]()
        self._connection = ibis.pyspark.connect(session)

    def read(self, paths: Sequence[str]) -> ir.Table:
        literal = [re.sub(r"([\[\]{}*?\\])", r"\\\1", path) for path in paths]  # Spark takes [a] for a pattern
        with explained(UNREADABLE, UnreadableError):
            return self.table(self.session.read.parquet(*literal))

    def count_up(self, count: int) -> ir.Table:
        return self.table(self.session.range(count))

    def table(self, frame: DataFrame) -> ir.Table:
        """Return a Spark data frame as an Ibis table."""
        self._made += 1
        name = f"hoploom_{id(self)}_{self._made}"
        frame.createOrReplaceTempView(name)
        return self._connection.table(name)

    def frame(self, table: ir.Table) -> DataFrame:
        """Return the rows of an expression as a Spark data frame."""
        with explained(UNREADABLE, UnreadableError):
            return self.session.sql(sql_of(table, "pyspark"))

    def stream(self, table: ir.Table, row_bytes: int = 16, *, as_read: bool = False) -> Iterator[pa.RecordBatch]:
        with explained(UNREADABLE, UnreadableError):
            rows = self.frame(table).toArrow()
        yield from rows.to_batches()

    def fold(self, table: ir.Table, task: Fold, row_bytes: int = 16) -> list[dict[str, Any]]:
        set_batch_rows(self.session, row_bytes)
        with explained(UNREADABLE, UnreadableError):
            made = self.frame(table).mapInArrow(partial(_folded, task), RETURNED).collect()
        return [json.loads(row[0]) for row in made]

    def number(self, ids: ir.Table, num_rows: int, name: str) -> tuple[ir.Table, IdCounts]:
        with explained(UNREADABLE, UnreadableError):
            kept = _numbered(self.frame(ids), num_rows).persist(StorageLevel.MEMORY_AND_DISK)
            self._kept.append(kept)
            stats, counts = dict[int, IdCounts](), IdCounts()
            for row in kept.filter("stats is not null").select("range", "stats").collect():
                given = json.loads(row[1])
                by_part = {int(part): rows for part, rows in given.pop("sizes").items()}
                stats[row[0]] = IdCounts(by_part, **given)
                counts.add(stats[row[0]])
            sizes = [stats[number].num_ids if number in stats else 0 for number in range(max(stats, default=0))]
            begins = ",".join(f"{begin}L" for begin in accumulate(sizes, initial=0))
            node = sql.expr(f"element_at(array({begins}), range + 1) + place").alias("node")
            return self.table(kept.filter("stats is null").select("id", node, "again")), counts

    def close(self) -> None:
        with suppress(Exception):  # Spark may be gone, which has been raised already
            for frame in self._kept:
                frame.unpersist()


def _folded(task: Fold, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        made = json.dumps(task(batches))
    except HoploomError as error:
        raise sendable(error) from error
    yield pa.RecordBatch.from_pydict({"made": [made]})


# --- numbering -----------------------------------------------------------------------------------


def _numbered(ids: DataFrame, num_rows: int) -> DataFrame:
    """Sort ids, of columns [id, part], or [id, part, bucket] for texts; return rows [id, range, place, again, stats].

    Each task sorts a range. `place` is the index of an id in its range; `again` is true if the row before has the same
    id. A range ends with a row without an id, whose `stats` are the counts of the range.
    """
    session, text = ids.sparkSession, "bucket" in ids.columns
    order = ["part", "bucket", "id"] if text else ["part", "id"]
    tasks = session.sparkContext.defaultParallelism
    ranges = ranges_for(num_rows, num_rows, JOINED_BYTES, 8 * JOIN_BYTES, tasks)
    moved = ids.repartitionByRange(ranges.count, *order[:2]).sortWithinPartitions(*order).select("id", "part")
    set_batch_rows(session, TEXT_BYTES if text else INTEGER_BYTES)
    kind = "string" if text else "long"
    columns = f"id {kind}, range int, place long, again boolean, stats string"
    return moved.mapInArrow(partial(_number_range, text), columns)


def _number_range(text: bool, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    freeze_imports()
    counts, last = IdCounts(), None
    for batch in batches:
        known = batch.filter(batch.column("id").is_valid())
        ids, again = known.column("id"), np.zeros(known.num_rows, bool)
        if len(ids):
            again[0] = ids[0] == last
            again[1:] = pc.equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
            last = ids[-1]
        places = np.arange(counts.num_ids, counts.num_ids + len(ids))
        sizes = {row["values"]: row["counts"] for row in known.column("part").value_counts().to_pylist()}
        counts.add(IdCounts(sizes, len(batch) - len(ids), int(again.sum())))
        if text:
            counts.add_texts(ids)
        yield _rows(ids, places, again, [None] * len(ids))
    nothing = pa.nulls(1, pa.string() if text else pa.int64())
    yield _rows(nothing, np.zeros(1, np.int64), np.zeros(1, bool), [json.dumps(asdict(counts))])


def _rows(ids: pa.Array, places: Any, again: Any, stats: list[str | None]) -> pa.RecordBatch:
    ranges = np.full(len(ids), task_number(), np.int32)
    columns = [ids, pa.array(ranges), pa.array(places), pa.array(again), pa.array(stats, pa.string())]
    return pa.RecordBatch.from_arrays(columns, ["id", "range", "place", "again", "stats"])


# --- the build -----------------------------------------------------------------------------------


def build_on_spark(graph: GraphFile, out: str | Path, options: BuildOptions, report: Report, begin: Progress) -> None:
    """Build a store on Spark. All executors must be able to read the tables."""
    if active_session() is None:  # before the work of this process
        check_java()
        check_master(options.master)
    with opened_target(out) as target:
        begin("reading the tables")
        folder, scratch = target.local_scratch("tables"), target.local_scratch("spark")
        sources = read_sources(graph, folder)
        begin("starting Spark")
        with (
            spark_session(scratch, options.memory, options.master, options.conf) as session,
            closing(SparkEngine(session)) as engine,
            _naming_files(sources),
        ):
            set_join_tasks(session, max((source.num_rows for source in sources.values()), default=0))
            is_remote = target.place.path is None and not str(session.sparkContext.master).startswith("local")
            for source in sources.values() if is_remote else ():
                if any(path.startswith(str(folder)) for path in source.paths):
                    way_out = "write it as Parquet under a plain name, or build into a path that all executors share"
                    why = f"{source.origins[0]} was rewritten or linked on this host, which executors do not reach"
                    raise source.problem("files", f"{why}; {way_out}")
            tables = GraphTables(graph, sources, engine)
            begin(f"numbering the nodes{spark_page(session)}")
            nodes, edges = tables.streams(options.parts, report, drop_dangling=options.drop_dangling)
            store_options = tables.store_options(options.memory)
            write_shared(session, target, nodes, edges, store_options, partial(_shared, engine), progress=begin)
        begin("closing the store")


@contextmanager
def _naming_files(sources: Mapping[str, TableSource]) -> Iterator[None]:
    """If this block raises a DataError, replace a path in the scratch folder by the path that the user gave."""
    try:
        yield
    except DataError as error:
        for source in sources.values():
            for path, name in zip(source.paths, source.origins, strict=True):
                if path in str(error):
                    raise DataError(str(error).replace(path, name)) from error
        raise


def _shared(engine: SparkEngine, rows: Any) -> SharedRows | IdRows[Any]:
    """Return the rows of a stream as SharedRows; IdRows are returned unchanged, because tasks compute them."""
    if isinstance(rows, IdRows):
        return rows
    if isinstance(rows, KnownEdges):
        inner = rows.rows
        decode = partial(in_turn, inner.decode, partial(known_edges, rows.drop_dangling))

        def why(error: HoploomError) -> HoploomError | None:
            return rows.explained() if isinstance(error, UnknownEndError) else None

        frame = engine.frame(inner.table)
        return SharedRows(frame, decode, rows.num_rows, inner.row_bytes, partial(_count, rows), why)
    assert isinstance(rows, EngineRows)
    return SharedRows(engine.frame(rows.table), rows.decode, None, rows.row_bytes)


def _count(rows: KnownEdges, came: int, left_out: int) -> None:
    if came != rows.num_rows:
        why = "a table is being written, or Spark is told to leave out files that it cannot read"
        raise DataError(f"{came:,} of the {rows.num_rows:,} rows of {rows.owner} came; {why}")
    rows.count(came, left_out)
