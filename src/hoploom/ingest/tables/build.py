"""Tables to a store: read, number the nodes, stream nodes and edges. What must be kept is kept on disk."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.ingest.stream import EdgeStream, NodeStream, StoreOptions, write_store
from hoploom.ingest.tables.edges import EdgeTables, Tally
from hoploom.ingest.tables.engine import Engine, EngineOptions, UnreadableError, check_engine, open_engine
from hoploom.ingest.tables.files import read_sources
from hoploom.ingest.tables.graph_file import GraphFile
from hoploom.ingest.tables.ids import MOST_PARTS, Numbering, number_nodes
from hoploom.ingest.tables.nodes import NodeRows, original_ids
from hoploom.ingest.tables.places import Place
from hoploom.ingest.tables.scan import check_readable, group_bytes
from hoploom.ingest.tables.sources import Source
from hoploom.ops import give_back_freed_memory
from hoploom.store.system_memory import resident_bytes
from hoploom.store.write import StoreWriter

LEAST_SHARE = 80 << 20  # of the engine, and of what is written
THREAD_SHARE = 128 << 20  # of the engine, for each of its threads: with less it gives up
ASIDE = 144 << 20  # for what neither counts: batches on their way, plans, allocators
MB = 10**6
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How a store is built from tables. None of it but `parts` and `drop_dangling` changes what is built."""

    parts: int = 1
    memory: int = 4 << 30  # bytes of this process
    threads: int | None = None  # of the engine; None: all cores
    engine: str = "duckdb"
    master: str = "local[*]"  # Spark's
    drop_dangling: bool = False  # edges of unknown nodes are left out and counted


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
    stages, tally = Stages(progress or (lambda stage: None)), Tally()
    with StoreWriter(out) as writer:
        stages.begin("reading the tables")
        folder = writer.scratch / "tables"
        folder.mkdir()
        sources = read_sources(recipe, folder, share // (2 * (options.threads or 1)))
        give_back()
        threads = options.threads or fitting_threads(share, sources)
        chosen = EngineOptions(name=options.engine, memory=share, threads=threads, master=options.master)
        with named_damage(sources), open_engine(chosen, writer.scratch) as engine:
            graph = Tables(engine, recipe, sources, folder)
            stages.begin("numbering the nodes")
            numberings = graph.numberings(options.parts)
            nodes = graph.nodes(numberings)
            edges = graph.edges(numberings, tally, drop_dangling=options.drop_dangling)
            # The engine holds its share while rows are streamed: it is no room for what is written.
            room = store_options(recipe, options.memory - share - ASIDE)
            write_store(writer, nodes, edges, room, progress=stages.begin)
        stages.begin("closing the store")
    seconds = stages.end()
    sizes = {name: numberings[name].num_nodes for name in recipe.nodes}
    return Report(sizes, tally.rows, tally.dropped, seconds)


@contextmanager
def named_damage(sources: Mapping[str, Source]) -> Iterator[None]:
    """Where an engine cannot read on, the file that is damaged is named, at the cost of reading all again."""
    try:
        yield
    except UnreadableError:
        for source in sources.values():
            check_readable(source)
        raise


def fitting_threads(share: int, sources: Mapping[str, Source]) -> int:
    """As many threads as the engine's memory carries; each reads a row group."""
    files = [(path, source.schema.names) for source in sources.values() for path in source.paths]
    largest = max((group_bytes(Place(path, path, "parquet"), names) for path, names in files), default=0)
    return max(1, min(len(os.sched_getaffinity(0)), share // max(THREAD_SHARE, 2 * largest)))


def give_back() -> None:
    """What the process has freed goes back to the system: the engine's share is counted without it."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    give_back_freed_memory()


def engine_share(options: BuildOptions) -> int:
    """Half of what the libraries leave of the memory; ConfigError if that is too little to work with."""
    import pyarrow.csv
    import pyarrow.fs
    import pyarrow.parquet  # noqa: F401  (all are counted with the libraries)

    if options.engine == "duckdb":
        import ibis.backends.duckdb  # noqa: F401
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


@dataclass(frozen=True)
class Tables:
    """The tables of a recipe, on an engine."""

    engine: Engine
    recipe: GraphFile
    sources: Mapping[str, Source]  # by owner
    scratch: Path

    def numberings(self, parts: int) -> dict[str, Numbering]:
        """How the nodes of each type are numbered."""
        return {
            name: number_nodes(self.engine, table, self.sources.get(table.owner), parts, self.scratch)
            for name, table in self.recipe.nodes.items()
        }

    def nodes(self, numberings: Mapping[str, Numbering]) -> list[NodeStream]:
        """The node types as streams."""
        streams = []
        for name, table in self.recipe.nodes.items():
            numbering = numberings[name]
            if table.owner in self.sources:
                rows = NodeRows(self.engine, self.recipe, table, self.sources[table.owner], numbering)
                streams.append(rows.stream(self.scratch))
            else:
                streams.append(NodeStream(name, numbering.bounds, original_ids(self.engine, numbering)))
        return streams

    def edges(self, numberings: Mapping[str, Numbering], tally: Tally, *, drop_dangling: bool) -> list[EdgeStream]:
        """The relations as streams."""
        streams = []
        for (source, _, destination), table in self.recipe.edges.items():
            ends = numberings[source], numberings[destination]
            edges = EdgeTables(self.engine, self.recipe, table, self.sources[table.owner], ends)
            streams.append(edges.stream(tally, drop_dangling=drop_dangling))
        return streams


class Stages:
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
