"""Build a store on Spark: the driver plans and counts; executors number nodes, join edges and write the parts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from hoploom.errors import DataError, HoploomError
from hoploom.ingest.spark import SharedRows, write_shared
from hoploom.ingest.spark.frames import one_row_each, run_tasks, set_join_tasks
from hoploom.ingest.spark.session import DamagedFileError, spark_session, watching
from hoploom.ingest.spark.target import StoreTarget, opened_target
from hoploom.ingest.stream.streams import IdRows, in_turn
from hoploom.ingest.tables.build_options import BuildOptions, Report, StageTimes
from hoploom.ingest.tables.engine import EngineRows
from hoploom.ingest.tables.graph_file import GraphFile
from hoploom.ingest.tables.graph_streams import GraphTables, KnownEdges, UnknownEndError, known_edges
from hoploom.ingest.tables.sources import TableSource, read_sources
from hoploom.ingest.tables.spark_engine import SparkEngine
from hoploom.ingest.tables.table_files import Rewrite, one_by_one


def build_on_spark(
    graph: GraphFile, out: str | Path, options: BuildOptions, report: Report, stages: StageTimes
) -> None:
    """Build a store from tables that all executors reach."""
    begin = stages.begin
    with opened_target(out) as target, ExitStack() as closing:

        @cache
        def started() -> SparkSession:  # after the keys of graph.toml have been checked
            begin("starting Spark")
            folder = target.local_scratch("spark")
            return closing.enter_context(spark_session(folder, options.memory, options.master, options.conf))

        def rewrite(rewrites: Sequence[Rewrite]) -> None:
            if not rewrites:
                return
            session = started()
            begin("rewriting tables as Parquet")
            if not _share_folders(target, session):
                return one_by_one(rewrites)
            with watching(session, stages.detail):
                count, task = len(rewrites), partial(_rewrite, rewrites)
                run_tasks(one_row_each(session, count), count, task, target.staging)

        begin("reading the tables")
        folder = target.local_scratch("tables")
        sources = read_sources(graph, folder, run_all=rewrite)
        session = started()
        with SparkEngine(session) as engine, _naming_files(sources):
            set_join_tasks(session, max((source.num_rows for source in sources.values()), default=0))
            if not _share_folders(target, session):
                _check_reach(folder, sources)
            tables = GraphTables(graph, sources, engine)
            begin("numbering the nodes")
            with watching(session, stages.detail):
                nodes, edges = tables.streams(options.parts, report, drop_dangling=options.drop_dangling)
            store_options = tables.store_options(options.memory)
            write_shared(session, target, nodes, edges, store_options, partial(_shared, engine), progress=stages)
        begin("closing the store")


def _rewrite(rewrites: Sequence[Rewrite], number: int, _: Iterator[Any]) -> None:
    rewrites[number]()


def _share_folders(target: StoreTarget, session: SparkSession) -> bool:
    """Return whether executors reach the folders of this process."""
    return target.place.path is not None or str(session.sparkContext.master).startswith("local")


def _check_reach(folder: Path, sources: Mapping[str, TableSource]) -> None:
    """Raise ConfigError if executors on other hosts cannot read a table that was rewritten on this one."""
    for source in sources.values():
        if any(path.startswith(str(folder)) for path in source.paths):
            way_out = "write it as Parquet under a plain name, or build into a path that all executors share"
            why = f"{source.origins[0]} was rewritten or linked on this host, which executors do not reach"
            raise source.problem("files", f"{why}; {way_out}")


@contextmanager
def _naming_files(sources: Mapping[str, TableSource]) -> Iterator[None]:
    """Name a damaged file by the user's path, if Spark was given a link."""
    try:
        yield
    except DamagedFileError as error:
        own = {
            path: name for source in sources.values() for path, name in zip(source.paths, source.origins, strict=True)
        }
        raise DamagedFileError(own.get(error.path, error.path)) from error


def _shared(engine: SparkEngine, rows: Any) -> SharedRows | IdRows[Any]:
    """Return the rows of a stream as a frame."""
    if isinstance(rows, IdRows):
        return rows
    if isinstance(rows, KnownEdges):
        inner = rows.rows
        decode = partial(in_turn, inner.decode, partial(known_edges, rows.drop_dangling))
        frame, explained = engine.frame(inner.table), partial(_explained, rows)
        return SharedRows(frame, decode, rows.num_rows, inner.row_bytes, partial(_count, rows), explained)
    assert isinstance(rows, EngineRows)
    return SharedRows(engine.frame(rows.table), rows.decode, None, rows.row_bytes)


def _count(rows: KnownEdges, came: int, left_out: int) -> None:
    if came != rows.num_rows:
        why = "a table is being written, or Spark is told to leave out files that it cannot read"
        raise DataError(f"{came:,} of the {rows.num_rows:,} rows of {rows.owner} came; {why}")
    rows.count(came, left_out)


def _explained(rows: KnownEdges, error: HoploomError) -> HoploomError | None:
    return rows.explained() if isinstance(error, UnknownEndError) else None
