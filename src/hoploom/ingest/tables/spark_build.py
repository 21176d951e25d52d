"""A build on Spark: the driver plans and counts; executors number nodes, join edges and write the parts."""

from functools import partial
from pathlib import Path
from typing import Any

from hoploom.errors import HoploomError
from hoploom.ingest.spark import SharedRows, write_shared
from hoploom.ingest.spark.session import spark_session
from hoploom.ingest.spark.target import opened_target
from hoploom.ingest.stream import Progress
from hoploom.ingest.stream.streams import IdRows, in_turn
from hoploom.ingest.tables.array_frame import array_rows_on
from hoploom.ingest.tables.array_rows import ArrayRows
from hoploom.ingest.tables.build_options import BuildOptions
from hoploom.ingest.tables.build_report import Report
from hoploom.ingest.tables.edge_tables import KnownEdges, UnknownEndError, known_edges
from hoploom.ingest.tables.engine_rows import EngineRows
from hoploom.ingest.tables.graph_file import GraphFile
from hoploom.ingest.tables.graph_streams import GraphTables, store_options
from hoploom.ingest.tables.sources import read_sources
from hoploom.ingest.tables.spark_engine import SparkEngine


def build_on_spark(graph: GraphFile, out: str | Path, options: BuildOptions, report: Report, begin: Progress) -> None:
    """Build a store from tables that all executors reach."""
    with opened_target(str(out)) as target:
        begin("reading the tables")
        folder = target.local_scratch("tables")
        sources = read_sources(graph, folder)
        begin("starting Spark")
        local = target.local_scratch("spark")
        with (
            spark_session(local, options.memory, options.master, options.conf) as session,
            SparkEngine(session) as engine,
        ):
            tables = GraphTables(graph, sources, engine, folder)
            with tables.naming_damage():
                begin("numbering the nodes")
                nodes, edges = tables.streams(options.parts, report, drop_dangling=options.drop_dangling)
                told = store_options(graph, options.memory)
                write_shared(session, target, nodes, edges, told, partial(_shared, engine), progress=begin)
        begin("closing the store")


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
        return SharedRows(engine.frame(inner.table), decode, rows.num_rows, inner.row_bytes, rows.count, explained)
    assert isinstance(rows, EngineRows)
    return SharedRows(engine.frame(rows.table), rows.decode, 0, rows.row_bytes)


def _explained(rows: KnownEdges, error: HoploomError) -> HoploomError:
    return rows.explained() if isinstance(error, UnknownEndError) else error
