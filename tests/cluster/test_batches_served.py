"""Server-client mode for real: trainers without a graph, servers in another process. None dies here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import assert_same
from support.graphs import random_graph, save_in_parts
from support.servers import OneProcess

import hoploom
from hoploom import ConfigError, Store

pytestmark = pytest.mark.timeout(180)


def _loader(store: Store, **options: Any) -> hoploom.NeighborLoader:
    given: dict[str, Any] = {"batch_size": 1, "shuffle": True, "seed": 5, **options}
    return hoploom.NeighborLoader(store, [3, 2], **given)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store]:
    folder = tmp_path_factory.mktemp("served")
    return folder / "store", save_in_parts(hoploom.from_pyg(random_graph(60, 500, seed=1)), folder / "store", 4)


@pytest.fixture(scope="module")
def tight(saved: tuple[Path, Store], server_process: OneProcess) -> list[str]:
    return server_process.serve(saved[0], [[]], memory=16_000)


def test_two_trainers_with_different_options_do_not_meet(saved: tuple[Path, Store], tight: list[str]) -> None:
    options: list[dict[str, Any]] = [{"disjoint": True}, {"mode": "blocks", "seed": 9}]
    with hoploom.connect(tight) as first, hoploom.connect(tight) as second:
        pairs = zip(_loader(first, **options[0]), _loader(second, **options[1]), strict=True)
        locally = zip(*(_loader(saved[1], **more) for more in options), strict=True)
        for found, expected in zip(pairs, locally, strict=True):
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)


def test_locality_is_a_note_where_servers_make_the_batches(saved: tuple[Path, Store], tight: list[str]) -> None:
    with hoploom.connect(tight) as trainer:
        with pytest.warns(UserWarning, match="locality=True changes nothing: servers make the batches") as notes:
            loaders = [_loader(trainer, locality=True, rank=rank, world_size=2, batch_size=5) for rank in (0, 1)]
        assert len(notes) == 1  # of rank 0
        for rank, loader in enumerate(loaders):
            expected = _loader(saved[1], rank=rank, world_size=2, batch_size=5)
            for one, other in zip(loader, expected, strict=True):
                assert_same(one, other)


def test_what_a_server_refuses_the_trainer_reads(tight: list[str]) -> None:
    with hoploom.connect(tight) as trainer:
        assert len(list(_loader(trainer))) == 60  # what is sent makes room again
        with pytest.raises(ConfigError, match="--memory"):
            list(hoploom.NeighborLoader(trainer, [-1, -1, -1], torch.arange(60), batch_size=60, replace=True))
