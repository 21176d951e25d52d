"""Epoch -> batches."""

from hoploom.load.adapter import NeighborSampler
from hoploom.load.neighbor import LinkNeighborLoader, NeighborLoader

__all__ = ["LinkNeighborLoader", "NeighborLoader", "NeighborSampler"]
