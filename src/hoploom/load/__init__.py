"""Epoch -> batches."""

from hoploom.load.neighbor import LinkNeighborLoader, NeighborLoader

__all__ = ["LinkNeighborLoader", "NeighborLoader"]
