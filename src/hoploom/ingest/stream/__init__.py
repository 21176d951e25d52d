"""Stores from streams: rows of nodes and edges in any order, written in bounded memory."""

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
