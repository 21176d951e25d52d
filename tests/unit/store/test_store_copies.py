"""A store never changes, so a copy of one is the same one; another process opens it from its files. A loader goes on
from where it is, so whoever wants two of them makes two.
"""

import copy
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from support.graphs import ring

import hoploom
from hoploom import ConfigError, Store


@pytest.fixture(params=["in memory", "on disk", "placed"])
def store(request: pytest.FixtureRequest, device: torch.device, sound_stores: object) -> Store:
    if request.param == "on disk":
        return hoploom.open(f"{sound_stores}/ring")
    made = hoploom.from_pyg(ring(12))
    return hoploom.place(made, str(device), str(device)) if request.param == "placed" else made


def test_a_copy_of_a_store_is_the_same_store(store: Store) -> None:
    for shown in (store, store["node"], store.x):
        assert copy.copy(shown) is copy.deepcopy(shown) is shown
    holder = {"graph": store, "weights": torch.ones(2)}
    copied = copy.deepcopy(holder)
    assert copied["graph"] is store
    assert copied["weights"] is not holder["weights"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_store_is_not_pickled_and_says_what_to_do_instead(store: Store, protocol: int) -> None:
    said = r"^a store is never pickled; .*its path and hoploom\.open it there.*; save one that is in memory first$"
    for shown in (store, store["node"], store.x):
        with pytest.raises(ConfigError, match=said):
            pickle.dumps({"graph": shown}, protocol)
        with pytest.raises(ConfigError, match=said):  # as an argument of a spawned process
            ForkingPickler.dumps(shown, protocol)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, ForkingPickler.dumps])
def test_a_loader_is_not_copied_and_says_what_to_do_instead(copied: Callable[[object], object], store: Store) -> None:
    loader = hoploom.NeighborLoader(store, [2], torch.arange(4), batch_size=2)
    with pytest.raises(ConfigError, match=r"^a loader is never copied or pickled; make another, and give it"):
        copied(loader)
