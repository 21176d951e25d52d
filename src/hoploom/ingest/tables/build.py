"""Build a store from tables in bounded memory: read them, number the nodes, stream nodes and edges."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from hoploom.errors import ConfigError
from hoploom.ingest.stream import Progress, write_store
from hoploom.ingest.tables.engine import DuckEngine
from hoploom.ingest.tables.graph_file import GraphFile
from hoploom.ingest.tables.graph_streams import BuildOptions, GraphTables, Report
from hoploom.ingest.tables.sources import ReadLimits, read_sources
from hoploom.ingest.tables.table_files import TableFile, group_bytes
from hoploom.ops import give_back_freed_memory
from hoploom.store.write import StoreWriter
from hoploom.system import needs, num_cores, resident_bytes

__all__ = ["BuildOptions", "build"]
LEAST_SHARE = 80 << 20  # least memory of the engine, and of the writer of the store
THREAD_SHARE = 128 << 20  # least memory of the engine for each of its threads: DuckDB fails with less
JOIN_BYTES = 40 << 20  # of a thread's share, for a join that spills; the rest is for two row groups
ASIDE = 144 << 20  # batches in flight, plans and allocators, which neither share counts
MB = 10**6


def build(graph: GraphFile, out: str | Path, options: BuildOptions, *, progress: Progress | None = None) -> Report:
    """Build a store from the tables that `graph` names, and report counts and times. A failed build leaves no store."""
    report, begun = Report(), list[tuple[str, float]]()

    def begin(stage: str) -> None:
        begun.append((stage, time.monotonic()))
        if progress is not None:
            progress(stage)

    if options.engine == "spark":
        with needs("spark"):
            from hoploom.ingest.tables.spark_engine import build_on_spark
        build_on_spark(graph, out, options, report, begin)
    else:
        _build_here(graph, Path(out), options, report, begin)
    for (stage, start), (_, end) in pairwise([*begun, ("", time.monotonic())]):
        name = stage.partition(";")[0]  # without the address of Spark's page
        report.seconds[name] = report.seconds.get(name, 0.0) + end - start
    return report


def _build_here(graph: GraphFile, out: Path, options: BuildOptions, report: Report, begin: Progress) -> None:
    share = engine_share(options.memory)  # too little is an error before tables are read
    with StoreWriter(out) as writer:
        begin("reading the tables")
        folder = writer.scratch / "tables"
        folder.mkdir()
        own = share // (options.threads or 1)
        sources = read_sources(graph, folder, ReadLimits(largest_group=max(own // 4, own - JOIN_BYTES) // 2))
        _give_back()
        files = [(path, source.schema.names) for source in sources.values() for path in source.paths]
        largest = max((group_bytes(TableFile(path, path, "parquet"), names) for path, names in files), default=0)
        threads = options.threads or fitting_threads(share, largest, num_cores())
        with open_engine(writer.scratch, share, threads) as engine:
            tables = GraphTables(graph, sources, engine)
            with tables.naming_damage():
                begin("numbering the nodes")
                nodes, edges = tables.streams(options.parts, report, drop_dangling=options.drop_dangling)
                # The engine holds its share while rows are streamed: the writer has the rest.
                write_store(writer, nodes, edges, tables.store_options(options.memory - share - ASIDE), progress=begin)
        begin("closing the store")


@contextmanager
def open_engine(scratch: Path, memory: int, threads: int | None = None) -> Iterator[DuckEngine]:
    """Start DuckDB for this block. Its files are in a new folder in `scratch`, which is removed when the block ends."""
    folder = scratch / "engine"
    folder.mkdir(parents=True)
    engine = DuckEngine(folder, memory, threads)
    try:
        yield engine
    finally:
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)


def fitting_threads(share: int, largest: int, cores: int) -> int:
    """Return how many threads fit in `share` bytes, if each thread joins two row groups of `largest` bytes."""
    return max(1, min(cores, share // max(THREAD_SHARE, 2 * largest + JOIN_BYTES)))


def engine_share(memory: int) -> int:
    """Return the engine's bytes, half of `memory` less this process and a reserve; raise ConfigError for too few."""
    _give_back()
    taken = resident_bytes()
    share = (memory - taken - ASIDE) // 2
    if share < LEAST_SHARE:
        least = -(-(taken + ASIDE + 2 * LEAST_SHARE) // MB)
        message = f"memory is {memory // MB} MB, of which the libraries take {taken // MB} MB"
        raise ConfigError(f"{message}; give at least {least} MB")
    return share


def _give_back() -> None:
    """Give freed memory back to the system, so that it no longer counts as memory of this process."""
    pa.default_memory_pool().release_unused()
    give_back_freed_memory()
