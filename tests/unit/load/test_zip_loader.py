"""PyG's ZipLoader and NodeLoader over our loaders and sampler: each call draws anew, in worker processes too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs import library, random_graph, ring
from support.refusals import assert_refused
from torch.utils.data import DistributedSampler
from torch_geometric.loader import NodeLoader, ZipLoader
from torch_geometric.sampler import NodeSamplerInput

import hoploom
from hoploom.load.adapter import Calls

DENSE = random_graph(60, 1200, 5)


def _loaders(**share: int) -> list[hoploom.NeighborLoader]:
    return [
        hoploom.NeighborLoader(ring(50), [2], input_nodes=torch.arange(20, 40), **share),
        hoploom.NeighborLoader(DENSE, [3], input_nodes=torch.arange(5, 20), transform=lambda batch: batch, **share),
    ]


def _zipped(**options: Any) -> ZipLoader:
    return ZipLoader(_loaders(), **{"batch_size": 4, **options})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("filter_per_worker", [None, True, False])
def test_loaders_are_zipped_by_position(num_workers: int, filter_per_worker: bool | None) -> None:
    zipped = _zipped(num_workers=num_workers, filter_per_worker=filter_per_worker)
    assert zipped.dataset == range(15)
    seeds = [[batch.n_id[: batch.batch_size].tolist() for batch in pair] for pair in zipped]
    spans = [(0, 4), (4, 8), (8, 12), (12, 15)]
    assert seeds == [[list(range(20 + a, 20 + b)), list(range(5 + a, 5 + b))] for a, b in spans]
    assert [batch.batch_size for batch in zipped([0, 3])] == [2, 2]


def test_a_zip_of_loaders_that_are_dealt_over_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank would train every seed: a ZipLoader knows nothing of ranks."""
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    for name, text in torchrun.items():
        monkeypatch.setenv(name, text)
    said = ("rank 1 of 2, from torchrun's environment", "rank=0, world_size=1", "sampler=DistributedSampler(range(n))")
    assert_refused(lambda: next(iter(_zipped())), *said)
    assert _loaders()[0]([3]).n_id[0] == 23  # asking for positions oneself is no loop


def test_the_way_out_trains_every_seed_once_over_the_ranks() -> None:
    def dealt(rank: int) -> list[int]:
        sampler = DistributedSampler(range(15), num_replicas=3, rank=rank)
        zipped = ZipLoader(_loaders(rank=0, world_size=1), batch_size=4, sampler=sampler)
        return [int(position) for pair in zipped for position in pair[0].input_id]

    assert sorted(dealt(0) + dealt(1) + dealt(2)) == list(range(15))


def test_links_and_nodes_are_zipped() -> None:
    key = ("author", "writes", "paper")
    data = library()
    links = hoploom.LinkNeighborLoader(data, [2], key, neg_sampling="binary")
    nodes = hoploom.NeighborLoader(data, [2], "paper")
    one, other = next(iter(ZipLoader([links, nodes], batch_size=3)))
    assert one[key].edge_label_index.shape == (2, 6)
    assert other["paper"].batch_size == 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_of_a_zip_has_other_picks_than_the_one_before(num_workers: int) -> None:
    def epoch(zipped: ZipLoader) -> list[list[int]]:
        return [other.e_id.tolist() for _, other in zipped]

    def epochs() -> list[list[list[int]]]:
        torch.manual_seed(7)
        zipped = _zipped(num_workers=num_workers)
        return [epoch(zipped), epoch(zipped)]

    first, second = epochs()
    assert first != second
    assert first[0] != first[1]
    assert epochs() == [first, second]


def test_pygs_node_loader_in_worker_processes_has_other_picks_in_each_epoch() -> None:
    sampler = hoploom.NeighborSampler(DENSE, [3])
    loader = NodeLoader(DENSE, node_sampler=sampler, batch_size=30, num_workers=2)
    first, second = ([batch.e_id.tolist() for batch in loader] for _ in range(2))
    assert first != second


def test_workers_of_one_epoch_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    store = hoploom.from_pyg(ring(8))

    def in_worker(seed: int) -> int:
        monkeypatch.setattr("hoploom.load.adapter.get_worker_info", lambda: type("Worker", (), {"seed": seed}))
        return Calls(0, store).key()

    assert len({Calls(0, store).key(), Calls(1, store).key(), in_worker(1), in_worker(2)}) == 4


def test_a_store_that_cannot_be_forked_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hoploom.from_pyg(ring(8)).save(tmp_path / "ring.store")
    store = hoploom.open(tmp_path / "ring.store")
    object.__setattr__(store, "deployment", type(store.deployment)())  # of anything but this process
    loader, sampler = hoploom.NeighborLoader(store, [2]), hoploom.NeighborSampler(store, [2])
    assert loader.collate_fn([1]).n_id[0] == 1
    monkeypatch.setattr("hoploom.load.adapter.get_worker_info", lambda: object())
    assert_refused(lambda: loader.collate_fn([1]), "forked", "num_workers=0")
    assert_refused(lambda: sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(2))), "forked")
