"""Learned rows of graphs that real servers hold: to the last bit those of a graph in this process."""

from pathlib import Path

import pytest
import torch
from support.graphs import save_in_parts
from support.learned_workers import SEEDS, shop
from support.servers import Server, serving, serving_together
from torch import Tensor

import hoploom
from hoploom.nn.embedding import Embedding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # servers import torch


def learned(store: hoploom.Store, kill: Server | None = None) -> Tensor:
    """Return the rows after two epochs; a server is killed in the second."""
    rows = Embedding(store, "user", dim=8, lr=0.5)
    given = {"batch_size": SEEDS, "shuffle": True, "num_workers": 2, "prefetch_factor": 2}
    loader = hoploom.NeighborLoader(rows.store, [4, 3], input_nodes="item", **given)
    for epoch in range(2):
        for step, batch in enumerate(loader):
            if kill is not None and (epoch, step) == (1, 1):
                kill.kill()
            assert torch.equal(batch["user"].x, rows.rows[batch["user"].n_id])
            batch["user"].x.sin().sum().backward()
            rows.step()
    return rows.rows


def test_a_client_without_a_graph_learns_the_same_rows_and_so_it_does_if_a_server_dies(tmp_path: Path) -> None:
    save_in_parts(shop(), tmp_path / "shop.store", 2)
    with (
        serving(tmp_path / "shop.store", [[], []]) as servers,
        hoploom.connect([server.address for server in servers]) as store,
    ):
        assert torch.equal(learned(store, servers[0]), learned(shop()))


def test_a_client_and_a_worker_of_servers_with_a_part_each_learn_the_same_rows(tmp_path: Path) -> None:
    save_in_parts(shop(), tmp_path / "shop.store", 2)
    with serving_together(tmp_path / "shop.store", [[0], [1]]) as servers:
        addresses = [server.address for server in servers]
        for given in ({}, {"path": tmp_path / "shop.store", "parts": [0]}):
            with hoploom.connect(addresses, **given) as store:  # type: ignore[arg-type]
                assert torch.equal(learned(store), learned(shop()))
