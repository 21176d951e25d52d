"""Tables to a store: read, number the nodes, stream nodes and edges. What must be kept is kept on disk."""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from hoploom.config.extras import needs
from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.ingest.stream import NodeStream, Progress, StoreOptions, write_store
from hoploom.ingest.tables.duckdb_engine import DuckEngine
from hoploom.ingest.tables.engine import Engine, EngineOptions, UnreadableError, check_engine
from hoploom.ingest.tables.files import TableFile
from hoploom.ingest.tables.graph_file import GraphFile
from hoploom.ingest.tables.ids import MOST_PARTS, Numbering, number_nodes
from hoploom.ingest.tables.sources import read_sources
from hoploom.ingest.tables.table_source import ReadLimits, TableSource, check_readable, group_bytes
from hoploom.ingest.tables.table_streams import EdgeCounts, EdgeTables, NodeRows, original_ids
from hoploom.ops import give_back_freed_memory
from hoploom.store.system_memory import resident_bytes
from hoploom.store.write import StoreWriter

LEAST_SHARE = 80 << 20  # of the engine, and of what is written
THREAD_SHARE = 128 << 20  # of the engine, for each of its threads: with less it gives up
ASIDE = 144 << 20  # for what neither counts: batches on their way, plans, allocators
MB = 10**6


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How a store is built from tables. None of it but `parts` and `drop_dangling` changes what is built."""

    parts: int = 1
    memory: int = 4 << 30  # bytes of this process
    threads: int | None = None  # of the engine; None: all cores
    engine: str = "duckdb"
    master: str = "local[*]"  # Spark's
    drop_dangling: bool = False  # edges of unknown nodes are left out and counted
    largest_group: int | None = None  # bytes: Parquet in larger row groups is rewritten; None: by memory and threads


@dataclass(frozen=True)
class Report:
    """What a build did."""

    nodes: Mapping[str, int]  # by type
    edges: Mapping[str, int]  # rows read, by relation
    dropped: Mapping[str, int]  # of them with an unknown end, by relation
    seconds: Mapping[str, float]  # by stage


def build(recipe: GraphFile, out: str | Path, options: BuildOptions, *, progress: Progress | None = None) -> Report:
    """Build a store from the tables that a recipe names; it is there complete, or not at all.

    >>> build(read_graph("graph.toml"), "papers.store", BuildOptions(memory=4 << 30))
    """
    as_int("parts", options.parts, 1, f"give 1 to {MOST_PARTS}")
    if options.parts > MOST_PARTS:
        raise ConfigError(f"parts is {options.parts}; give 1 to {MOST_PARTS}")
    check_engine(options.engine, options.threads)
    share = engine_share(options)  # too little is said before tables are read
    stages, counts = BuildStages(progress or (lambda stage: None)), EdgeCounts()
    with StoreWriter(out) as writer:
        stages.begin("reading the tables")
        folder = writer.scratch / "tables"
        folder.mkdir()
        largest = options.largest_group or share // (2 * (options.threads or 1))
        sources = read_sources(recipe, folder, ReadLimits(largest_group=largest))
        give_back()
        threads = options.threads or fitting_threads(share, largest_group(sources), len(os.sched_getaffinity(0)))
        chosen = EngineOptions(name=options.engine, memory=share, threads=threads, master=options.master)
        with named_damage(sources), open_engine(chosen, writer.scratch) as engine:
            stages.begin("numbering the nodes")
            numberings = {
                name: number_nodes(engine, table, sources.get(table.owner), options.parts, folder)
                for name, table in recipe.nodes.items()
            }
            nodes = _nodes(engine, recipe, sources, numberings, folder)
            edges = []
            for (source, _, destination), table in recipe.edges.items():
                ends = numberings[source], numberings[destination]
                rows = EdgeTables(engine, recipe, table, sources[table.owner], ends)
                edges.append(rows.stream(counts, drop_dangling=options.drop_dangling))
            # The engine holds its share while rows are streamed: what is written has the rest.
            rest = store_options(recipe, options.memory - share - ASIDE)
            write_store(writer, nodes, edges, rest, progress=stages.begin)
        stages.begin("closing the store")
    seconds = stages.end()
    sizes = {name: numberings[name].num_nodes for name in recipe.nodes}
    return Report(sizes, counts.rows, counts.dropped, seconds)


def _nodes(
    engine: Engine,
    recipe: GraphFile,
    sources: Mapping[str, TableSource],
    numberings: Mapping[str, Numbering],
    scratch: Path,
) -> list[NodeStream]:
    """The node types as streams."""
    streams = []
    for name, table in recipe.nodes.items():
        if table.owner in sources:
            rows = NodeRows(engine, recipe, table, sources[table.owner], numberings[name])
            streams.append(rows.stream(scratch))
        else:
            streams.append(NodeStream(name, numberings[name].bounds, original_ids(engine, numberings[name])))
    return streams


@contextmanager
def named_damage(sources: Mapping[str, TableSource]) -> Iterator[None]:
    """Where an engine cannot read on, the file that is damaged is named, at the cost of reading all again."""
    try:
        yield
    except UnreadableError:
        for source in sources.values():
            check_readable(source)
        raise


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
    with needs("spark"):
        from hoploom.ingest.tables.spark_engine import SparkEngine
    return SparkEngine(options, folder)


def largest_group(sources: Mapping[str, TableSource]) -> int:
    """The bytes of the largest row group of all tables."""
    files = [(path, source.schema.names) for source in sources.values() for path in source.paths]
    return max((group_bytes(TableFile(path, path, "parquet"), names) for path, names in files), default=0)


def fitting_threads(share: int, largest: int, cores: int) -> int:
    """As many threads as the engine's memory carries; each reads a row group."""
    return max(1, min(cores, share // max(THREAD_SHARE, 2 * largest)))


def give_back() -> None:
    """What the process has freed goes back to the system: the engine's share is counted without it."""
    pa.default_memory_pool().release_unused()
    give_back_freed_memory()


def engine_share(options: BuildOptions) -> int:
    """Half of what the libraries leave of the memory; ConfigError if that is too little to work with."""
    give_back()
    taken = resident_bytes()
    share = (options.memory - taken - ASIDE) // 2
    if share < LEAST_SHARE:
        least = -(-(taken + ASIDE + 2 * LEAST_SHARE) // MB)
        message = f"memory is {options.memory // MB} MB, of which the libraries take {taken // MB} MB"
        raise ConfigError(f"{message}; give at least {least} MB")
    return share


def store_options(recipe: GraphFile, memory: int) -> StoreOptions:
    """What the store is prepared for."""
    timed = [table.time for table in recipe.nodes.values()] + [table.time for table in recipe.edges.values()]
    return StoreOptions(
        weight="weight" if any(table.weight for table in recipe.edges.values()) else None,
        time="time" if any(timed) else None,
        homogeneous=recipe.homogeneous and not any(table.reverse for table in recipe.edges.values()),
        memory=memory,
    )


class BuildStages:
    """How long each stage takes."""

    def __init__(self, say: Progress) -> None:
        self._say, self._seconds = say, dict[str, float]()
        self._current, self._began = "", time.monotonic()

    def begin(self, stage: str) -> None:
        """End the stage before, if there is one."""
        self.end()
        self._current = stage
        self._say(stage)

    def end(self) -> Mapping[str, float]:
        """The seconds so far, by stage."""
        now = time.monotonic()
        if self._current:
            self._seconds[self._current] = self._seconds.get(self._current, 0.0) + now - self._began
        self._current, self._began = "", now
        return self._seconds
