"""Stores from streams: rows of nodes and edges in any order, written in bounded memory."""

from hoploom.ingest.stream.streams import Block, EdgeRows, EdgeRule, EdgeStream, Finish, NodeStream, Rows, StoreOptions
from hoploom.ingest.stream.write import write_store

__all__ = ["Block", "EdgeRows", "EdgeRule", "EdgeStream", "Finish", "NodeStream", "Rows", "StoreOptions", "write_store"]
