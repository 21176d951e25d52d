"""A build on Spark: the driver plans and counts; executors number nodes, join edges and write the parts."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hoploom.errors import DataError, HoploomError
from hoploom.ingest.spark import SharedRows, write_shared
from hoploom.ingest.spark.frames import set_join_tasks
from hoploom.ingest.spark.session import spark_session
from hoploom.ingest.spark.target import StoreTarget, opened_target
from hoploom.ingest.spark.watch_jobs import watching
from hoploom.ingest.stream.streams import IdRows, in_turn
from hoploom.ingest.tables.array_frame import array_rows_on
from hoploom.ingest.tables.array_rows import ArrayRows
from hoploom.ingest.tables.build_options import BuildOptions
from hoploom.ingest.tables.build_report import Report, StageTimes
from hoploom.ingest.tables.edge_tables import KnownEdges, UnknownEndError, known_edges
from hoploom.ingest.tables.engine_rows import EngineRows
from hoploom.ingest.tables.graph_file import GraphFile
from hoploom.ingest.tables.graph_streams import GraphTables, store_options
from hoploom.ingest.tables.sources import TableSource, read_sources
from hoploom.ingest.tables.spark_engine import SparkEngine


def build_on_spark(
    graph: GraphFile, out: str | Path, options: BuildOptions, report: Report, stages: StageTimes
) -> None:
    """Build a store from tables that all executors reach."""
    begin = stages.begin
    with opened_target(out) as target:
        begin("reading the tables")
        folder = target.local_scratch("tables")
        sources = read_sources(graph, folder)
        begin("starting Spark")
        local = target.local_scratch("spark")
        with (
            spark_session(local, options.memory, options.master, options.conf) as session,
            SparkEngine(session) as engine,
        ):
            set_join_tasks(session, max((source.num_rows for source in sources.values()), default=0))
            _check_reach(target, folder, sources, str(session.sparkContext.master))
            tables = GraphTables(graph, sources, engine, folder)
            begin("numbering the nodes")
            with watching(session, stages.detail):
                nodes, edges = tables.streams(options.parts, report, drop_dangling=options.drop_dangling)
            told = store_options(graph, options.memory)
            write_shared(session, target, nodes, edges, told, partial(_shared, engine), progress=stages)
        begin("closing the store")


def _check_reach(target: StoreTarget, folder: Path, sources: Mapping[str, TableSource], master: str) -> None:
    """ConfigError where executors on other hosts could not read a table that was rewritten here."""
    if target.place.path is not None or master.startswith("local"):
        return
    for source in sources.values():
        if any(path.startswith(str(folder)) for path in source.paths):
            way_out = "write it as Parquet under a plain name, or build into a path that all executors share"
            why = f"{source.origins[0]} was rewritten or linked on this host, which executors do not reach"
            raise source.problem("files", f"{why}; {way_out}")


def _shared(engine: SparkEngine, rows: Any) -> SharedRows | IdRows[Any]:
    """The rows of a stream, where Spark has them."""
    if isinstance(rows, IdRows):
        return rows
    if isinstance(rows, ArrayRows):
        return array_rows_on(engine, rows)
    if isinstance(rows, KnownEdges):
        inner = rows.rows
        decode = partial(in_turn, inner.decode, partial(known_edges, rows.drop_dangling))
        explained = partial(_explained, rows)
        return SharedRows(
            engine.frame(inner.table), decode, rows.num_rows, inner.row_bytes, partial(_count, rows), explained
        )
    assert isinstance(rows, EngineRows)
    return SharedRows(engine.frame(rows.table), rows.decode, None, rows.row_bytes)


def _count(rows: KnownEdges, came: int, left_out: int) -> None:
    if came != rows.num_rows:
        why = "a table is being written, or Spark is told to leave out files that it cannot read"
        raise DataError(f"{came:,} of the {rows.num_rows:,} rows of {rows.owner} came; {why}")
    rows.count(came, left_out)


def _explained(rows: KnownEdges, error: HoploomError) -> HoploomError | None:
    return rows.explained() if isinstance(error, UnknownEndError) else None
