"""Loaders of stores that are placed."""

from typing import Any

import torch

import hoploom
from hoploom.gpu.loading import DeviceLoading
from hoploom.load.loader import Loader
from hoploom.store import Store


def placed(store: Store, device: torch.device) -> Store:
    return hoploom.place(store, topology=str(device), features=str(device))


def loading(loader: Loader) -> DeviceLoading:
    ahead = loader._producer
    assert isinstance(ahead, DeviceLoading)
    return ahead


def nodes(store: Store, **options: Any) -> Loader:
    given = {"batch_size": 7, "shuffle": True, "seed": 3, **options}
    return hoploom.NeighborLoader(store, given.pop("num_neighbors", [2, 2]), **given)
