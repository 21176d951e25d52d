"""Server-client mode for real: trainers without a graph, servers in another process. None dies here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import assert_same, assert_same_batches
from support.cases import CASES
from support.graphs import library, random_graph, save_in_parts
from support.servers import OneProcess

import hoploom
from hoploom import ConfigError, Store

pytestmark = pytest.mark.timeout(180)
HOMOGENEOUS = {"weight_attr": "weight", "time_attr": "node_time"}
HETEROGENEOUS = {"weight_attr": "weight", "time_attr": "year"}
FLEETS: dict[int, list[list[int]]] = {1: [[]], 2: [[0, 1], [2, 3]], 4: [[0], [1], [2], [3]]}
SIZES = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]


def _saved(folder: Path, heterogeneous: bool) -> Store:
    attrs = HETEROGENEOUS if heterogeneous else HOMOGENEOUS
    data = library() if heterogeneous else random_graph(60, 500, seed=1)
    return save_in_parts(hoploom.from_pyg(data, **attrs), folder / "store", 4)


@pytest.mark.parametrize("num_servers", SIZES)
def test_any_number_of_servers_makes_the_batches_of_the_local_loader(
    num_servers: int, tmp_path: Path, server_process: OneProcess
) -> None:
    for heterogeneous in (False, True):
        folder = tmp_path / f"{heterogeneous}"
        store = _saved(folder, heterogeneous)
        addresses = server_process.serve(folder / "store", FLEETS[num_servers], together=True)
        with hoploom.connect(addresses) as trainer:
            for case in CASES:
                if case.values[0] != heterogeneous or case.id == "edge times":  # those are of another store
                    continue
                print(heterogeneous, case.id)  # shown where it fails
                make: Any = case.values[1]
                assert_same_batches(make(store), make(trainer))


def _loader(store: Store, **options: Any) -> hoploom.NeighborLoader:
    given: dict[str, Any] = {"batch_size": 1, "shuffle": True, "seed": 5, **options}
    return hoploom.NeighborLoader(store, [3, 2], **given)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store]:
    folder = tmp_path_factory.mktemp("served")
    return folder / "store", _saved(folder, False)


@pytest.fixture(scope="module")
def tight(saved: tuple[Path, Store], server_process: OneProcess) -> list[str]:
    """A server with memory for a few small batches."""
    return server_process.serve(saved[0], [[]], memory=16_000)


def test_two_trainers_with_different_options_do_not_meet(saved: tuple[Path, Store], tight: list[str]) -> None:
    options: list[dict[str, Any]] = [{"disjoint": True}, {"mode": "blocks", "seed": 9}]
    with hoploom.connect(tight) as first, hoploom.connect(tight) as second:
        pairs = zip(_loader(first, **options[0]), _loader(second, **options[1]), strict=True)
        locally = zip(*(_loader(saved[1], **more) for more in options), strict=True)
        for found, expected in zip(pairs, locally, strict=True):
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)


def test_what_a_server_refuses_the_trainer_reads(tight: list[str]) -> None:
    with hoploom.connect(tight) as trainer:
        assert len(list(_loader(trainer))) == 60  # what is sent makes room again
        with pytest.raises(ConfigError, match="--memory"):
            list(hoploom.NeighborLoader(trainer, [-1, -1, -1], torch.arange(60), batch_size=60, replace=True))
