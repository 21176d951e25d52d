"""Ranks of one host: they share host memory, choose alike, and share what is free on a device."""

from pathlib import Path

import pytest
from support import place_workers
from support.graphs import random_graph, save_in_parts

import hoploom


@pytest.mark.slow
def test_two_ranks_share_host_memory_and_what_is_free(tmp_path: Path) -> None:
    save_in_parts(hoploom.from_pyg(random_graph(90, 400, 1), weight_attr="weight"), tmp_path / "store", 3)
    device = "cuda:0" if place_workers.DEVICE == "cuda" else "cpu"  # one GPU for both, over Gloo: NCCL takes one each
    with place_workers.own_folder() as folder:
        paths = [str(folder), str(tmp_path / "store")]
        hoploom.spawn(place_workers.together, 2, paths, device=device, backend="gloo", timeout=60)
