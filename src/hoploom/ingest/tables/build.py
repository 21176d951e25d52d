"""Tables to a store: read, number the nodes, stream nodes and edges. What must be kept is kept on disk."""

import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from hoploom.config.extras import needs
from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.ingest.stream import EdgeStream, NodeStream, Progress, StoreOptions, write_store
from hoploom.ingest.tables.engine import DuckEngine, Engine, UnreadableError
from hoploom.ingest.tables.graph_file import GraphFile
from hoploom.ingest.tables.ids import MOST_PARTS, Numbering, number_nodes
from hoploom.ingest.tables.sources import ReadLimits, TableSource, read_sources
from hoploom.ingest.tables.table_files import TableFile, group_bytes
from hoploom.ingest.tables.table_streams import EdgeTables, NodeRows, Report, original_ids
from hoploom.ops import give_back_freed_memory
from hoploom.store.system_memory import resident_bytes
from hoploom.store.write import StoreWriter
from hoploom.system import num_cores

ENGINES = ("duckdb", "spark")
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

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine is {self.engine!r}; give one of {', '.join(ENGINES)}")
        if self.threads is not None:
            as_int("threads", self.threads, 1, "give at least 1")
        if as_int("parts", self.parts, 1, f"give 1 to {MOST_PARTS}") > MOST_PARTS:
            raise ConfigError(f"parts is {self.parts}; give 1 to {MOST_PARTS}")


def build(graph: GraphFile, out: str | Path, options: BuildOptions, *, progress: Progress | None = None) -> Report:
    """Build a store from the tables that a graph file names; it is there complete, or not at all.

    >>> build(read_graph("graph.toml"), "papers.store", BuildOptions(memory=4 << 30))
    """
    share = engine_share(options.memory)  # too little is an error before tables are read
    report, begun = Report(), list[tuple[str, float]]()

    def begin(stage: str) -> None:
        begun.append((stage, time.monotonic()))
        if progress is not None:
            progress(stage)

    with StoreWriter(out) as writer:
        begin("reading the tables")
        folder = writer.scratch / "tables"
        folder.mkdir()
        largest = options.largest_group or share // (2 * (options.threads or 1))
        sources = read_sources(graph, folder, ReadLimits(largest_group=largest))
        give_back()
        threads = options.threads or fitting_threads(share, largest_group(sources), num_cores())
        engine = open_engine(writer.scratch, share, threads, name=options.engine, master=options.master)
        with _named_damage(sources), engine as opened:
            begin("numbering the nodes")
            nodes, edges = _streams(graph, sources, opened, options, folder, report)
            # The engine holds its share while rows are streamed: what is written has the rest.
            rest = _store_options(graph, options.memory - share - ASIDE)
            write_store(writer, nodes, edges, rest, progress=begin)
        begin("closing the store")
    for (stage, start), (_, end) in pairwise([*begun, ("", time.monotonic())]):
        report.seconds[stage] = report.seconds.get(stage, 0.0) + end - start
    return report


def _streams(
    graph: GraphFile,
    sources: Mapping[str, TableSource],
    engine: Engine,
    options: BuildOptions,
    scratch: Path,
    report: Report,
) -> tuple[list[NodeStream], list[EdgeStream]]:
    """The node types and the relations, once all nodes are numbered."""
    numberings, nodes, edges = dict[str, Numbering](), list[NodeStream](), list[EdgeStream]()
    for name, node_table in graph.nodes.items():
        source = sources.get(node_table.owner)
        numberings[name] = number_nodes(engine, node_table, source, options.parts, scratch)
        report.nodes[name] = numberings[name].num_nodes
    for name, node_table in graph.nodes.items():
        numbering = numberings[name]
        if node_table.files:
            nodes.append(NodeRows(engine, sources[node_table.owner], numbering).stream(scratch, report))
        else:
            nodes.append(NodeStream(name, numbering.bounds, original_ids(engine, numbering)))
    for (begin, _, end), table in graph.edges.items():
        rows = EdgeTables(engine, sources[table.owner], (numberings[begin], numberings[end]))
        edges.append(rows.stream(report, drop_dangling=options.drop_dangling))
    return nodes, edges


@contextmanager
def _named_damage(sources: Mapping[str, TableSource]) -> Iterator[None]:
    """Where an engine cannot read on, the file that is damaged is named, at the cost of reading all again."""
    try:
        yield
    except UnreadableError:
        for source in sources.values():
            for column in source.schema.names:
                deque(source.scan(column), maxlen=0)
        raise


@contextmanager
def open_engine(
    scratch: Path, memory: int, threads: int | None = None, *, name: str = "duckdb", master: str = ""
) -> Iterator[Engine]:
    """The engine by its name; its files go into the scratch folder."""
    folder = scratch / "engine"
    folder.mkdir(parents=True)
    if name == "spark":
        with needs("spark"):
            from hoploom.ingest.tables.spark_engine import SparkEngine
        engine: Engine = SparkEngine(folder, memory, master)
    else:
        engine = DuckEngine(folder, memory, threads)
    try:
        yield engine
    finally:
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)


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


def engine_share(memory: int) -> int:
    """Half of what the libraries leave of the memory; ConfigError if that is too little to work with."""
    give_back()
    taken = resident_bytes()
    share = (memory - taken - ASIDE) // 2
    if share < LEAST_SHARE:
        least = -(-(taken + ASIDE + 2 * LEAST_SHARE) // MB)
        message = f"memory is {memory // MB} MB, of which the libraries take {taken // MB} MB"
        raise ConfigError(f"{message}; give at least {least} MB")
    return share


def _store_options(graph: GraphFile, memory: int) -> StoreOptions:
    """What the store is prepared for."""
    return StoreOptions(
        weight="weight" if any(table.weight for table in graph.edges.values()) else None,
        time="time" if any(table.time for table in graph.tables) else None,
        homogeneous=graph.homogeneous and not any(table.reverse for table in graph.edges.values()),
        memory=memory,
    )
