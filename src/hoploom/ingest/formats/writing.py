"""Where importers end: their streams, written to a store that is whole or not there."""

from collections.abc import Callable
from pathlib import Path

from hoploom.ingest.formats.pieces import Graph
from hoploom.ingest.stream import StoreOptions, write_store
from hoploom.store import Store, open_store
from hoploom.store.write import StoreWriter

Progress = Callable[[str], None]  # told what is written


def write_graph(out: str | Path, graph: Graph, memory: int, progress: Progress | None) -> Store:
    """Write a store and open it."""
    options = StoreOptions(weight=graph.weight, homogeneous=graph.homogeneous, memory=memory)
    with StoreWriter(out) as writer:
        write_store(writer, graph.nodes, graph.edges, options, progress=progress)
    return open_store(out)
