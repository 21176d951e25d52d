"""Write stores in bounded memory from streams: rows of nodes and edges that arrive in any order."""

from hoploom.ingest.stream.streams import (
    LEAST_MEMORY,
    EdgeRows,
    EdgeRule,
    EdgeStream,
    Finish,
    NodeFields,
    NodeStream,
    Progress,
    Rows,
    StoreOptions,
)
from hoploom.ingest.stream.to_store import write_store

__all__ = [
    "LEAST_MEMORY",
    "EdgeRows",
    "EdgeRule",
    "EdgeStream",
    "Finish",
    "NodeFields",
    "NodeStream",
    "Progress",
    "Rows",
    "StoreOptions",
    "write_store",
]
