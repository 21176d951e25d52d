"""Hoploom trains graph neural networks on graphs of any size with one script."""

from hoploom.batch import Block
from hoploom.build import from_pyg, from_tensors, generate
from hoploom.errors import BatchError, ConfigError, DataError, HoploomError, PeerError, StoreError, TrainError
from hoploom.load import LinkNeighborLoader, NeighborLoader, NeighborSampler
from hoploom.sample import Edges
from hoploom.store import Store
from hoploom.store.disk import open_store as open
from hoploom.train import Checkpoint, evaluate, fit, infer, init, spawn

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "Block",
    "Checkpoint",
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
    "evaluate",
    "fit",
    "from_pyg",
    "from_tensors",
    "generate",
    "infer",
    "init",
    "open",
    "spawn",
]
