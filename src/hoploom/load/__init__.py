"""Loaders: they divide an epoch into steps and make the batch of each step."""

from hoploom.load.adapter import NeighborSampler
from hoploom.load.neighbor import LinkNeighborLoader, NeighborLoader

__all__ = ["LinkNeighborLoader", "NeighborLoader", "NeighborSampler"]
