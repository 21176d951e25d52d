"""Graphs in memory, on disk and on other hosts, behind two interfaces: GraphStore and FeatureStore."""

from hoploom.store.base import Draw, GraphStore, Part, Table, Wanted
from hoploom.store.sharded import Sharded
from hoploom.store.store import Store, assemble, open_store

__all__ = [
    "Draw",
    "GraphStore",
    "Part",
    "Sharded",
    "Store",
    "Table",
    "Wanted",
    "assemble",
    "open_store",
]
__dir__ = __all__.copy
