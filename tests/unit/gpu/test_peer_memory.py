"""Rows spread over the ranks of a host: each holds its share and reads the others' in place."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import place_workers
from support.graphs import random_graph, save_in_parts

import hoploom
from hoploom.gpu.place import host_memory as hostmemory
from hoploom.gpu.place import peer_memory as peermemory
from hoploom.gpu.place.peer_memory import PeerMemory
from hoploom.ranks.context import gather_json, init

pytestmark = pytest.mark.usefixtures("no_sync")
TIMEOUT = 60  # seconds, of what ranks wait for each other


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in three parts, its edges in the user's own order."""
    path = tmp_path_factory.mktemp("spread") / "store"
    save_in_parts(hoploom.from_pyg(random_graph(90, 400, 1), weight_attr="weight"), path, 3)
    return path


def _spawn(fn: object, tmp_path: Path, path: Path) -> None:
    device = "cuda:0" if place_workers.DEVICE == "cuda" else "cpu"  # one GPU for both
    hoploom.spawn(fn, 2, [str(tmp_path), str(path)], device=device, backend="gloo", timeout=TIMEOUT)  # type: ignore[arg-type]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where files of host memory lie."""
    with place_workers.own_folder() as own:
        yield own


def test_two_ranks_share_host_memory_and_read_each_others_rows(folder: Path, path: Path) -> None:
    """At last rank 1 fails, and rank 0 does not wait for it."""
    with pytest.raises(RuntimeError, match="rank 1 had enough"):
        _spawn(place_workers.together, folder, path)
    assert time.time() - (path.parent / "left").stat().st_mtime < 0.75 * TIMEOUT


def test_one_rank_alone_holds_all(monkeypatch: pytest.MonkeyPatch, folder: Path, path: Path) -> None:
    monkeypatch.setattr(hostmemory, "FOLDER", folder)
    with init(device=place_workers.DEVICE) as context:
        assert gather_json(context, {"a": [1, None]}) == [{"a": [1, None]}]
        assert peermemory.ranks_of_host(context) == (0,)
        with hoploom.place(
            hoploom.open(path, context=context), features="spread", device=place_workers.DEVICE, among=context
        ) as store:
            assert store.placed is not None
            place_workers.assert_all_rows(store)
            assert store.placed.fields["node", "x"].bounds.tolist() == [0]
    assert os.listdir(folder) == []


def test_shares_that_are_still_read_stay(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def sevens(raw: torch.Tensor) -> None:
        raw.fill_(7)

    monkeypatch.setattr(hostmemory, "FOLDER", folder)
    monkeypatch.setattr(hostmemory, "STILL_READ", [])
    with init(device="cpu") as context:
        memory = PeerMemory(context, [0], [3], sevens, torch.device("cpu"))
        monkeypatch.setattr(context, "barrier", lambda: pytest.fail("it waited for the others"))
        memory.close(is_idle=False)
        memory.close()
        assert memory.bytes[0].tolist() == [7] * 3
        assert memory in hostmemory.STILL_READ
        assert len(os.listdir(folder)) == 1


def test_ranks_of_another_host_are_no_neighbours() -> None:
    class Three:
        rank, world_size = 1, 3

        def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
            """Rank 0 is elsewhere: its first word differs."""
            other = tensor.clone()
            if other.numel() > 1:
                other[3] = 120  # of its boot id
            return [other, tensor, tensor]

        def barrier(self) -> None: ...

    assert peermemory.ranks_of_host(Three()) == (1, 2)
