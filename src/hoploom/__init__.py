"""Hoploom trains graph neural networks on graphs of any size with one script."""

from hoploom.batch import Block
from hoploom.build import from_pyg, from_tensors, generate
from hoploom.errors import BatchError, ConfigError, DataError, HoploomError, PeerError, StoreError, TrainError
from hoploom.load import LinkNeighborLoader, NeighborLoader, NeighborSampler
from hoploom.sample import Edges
from hoploom.store import Store
from hoploom.store.disk import open_store as open

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "Block",
    "ConfigError",
    "DataError",
    "Edges",
    "HoploomError",
    "LinkNeighborLoader",
    "NeighborLoader",
    "NeighborSampler",
    "PeerError",
    "Store",
    "StoreError",
    "TrainError",
    "from_pyg",
    "from_tensors",
    "generate",
    "open",
]
