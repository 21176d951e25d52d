"""Servers on a device, in processes of their own: the same batches whichever answers, and host memory that is freed."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support import place_workers
from support.batches import assert_same_batches
from support.graphs import random_graph, save_in_parts
from support.servers import addresses_of, command_of, serving, serving_by, serving_together

import hoploom
from hoploom.gpu.placement import NO_GPU

pytestmark = pytest.mark.timeout(180)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What a server runs that finds its device full, so that all of the store goes to host memory, in a folder of the test.
FULL = """
import sys
from pathlib import Path
from hoploom.cli import main
from hoploom.gpu import host_memory, place_plan
host_memory.FOLDER = Path(sys.argv.pop(1))
place_plan.free_memory = lambda device: 0
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device") / "store"
    save_in_parts(hoploom.from_pyg(random_graph(60, 500, seed=1)), path, 2)
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    with place_workers.own_folder() as own:
        yield own


def full(path: Path, folder: Path, *more: str) -> Sequence[str]:
    python, _, _, *words = command_of(path, (), "127.0.0.1:0", ["--device", DEVICE, *more])
    return [python, "-c", FULL, str(folder), *words]


def batches_of(store: hoploom.Store) -> list[object]:
    return list(hoploom.NeighborLoader(store, [3, 2], batch_size=20, shuffle=True, seed=3, timeout=120))


def test_a_replica_on_the_host_goes_on_with_the_batches_of_one_on_a_device(path: Path) -> None:
    expected = batches_of(hoploom.open(path))
    with (
        serving(path, [[]], "--device", DEVICE) as (placed,),
        serving(path, [[]]) as (other,),
        hoploom.connect([placed.address, other.address]) as store,
    ):
        made = iter(hoploom.NeighborLoader(store, [3, 2], batch_size=20, shuffle=True, seed=3, timeout=120))
        first = next(made)
        placed.kill()
        assert_same_batches(expected, [first, *made])


@pytest.mark.parametrize("together", [True, False])
def test_servers_of_some_parts_answer_from_their_devices(path: Path, together: bool) -> None:
    """Together, they have the edges of all parts, and make whole batches."""
    expected = batches_of(hoploom.open(path))
    start = serving_together if together else serving
    with start(path, [[0], [1]], "--device", DEVICE) as servers:
        for made in ("servers", "here")[not together :]:
            with hoploom.connect(addresses_of(servers), made=made) as store:  # type: ignore[arg-type]
                assert_same_batches(expected, batches_of(store))


def test_servers_of_one_host_share_what_the_device_has_no_memory_for(path: Path, folder: Path) -> None:
    """SIGTERM frees it; what SIGKILL leaves behind is the next server's."""
    expected = batches_of(hoploom.open(path))
    with serving_by([full(path, folder), full(path, folder)]) as (one, other):
        files = sorted(os.listdir(folder))
        assert len(files) > 3  # indptr and indices, and a field each
        one.kill()
        with hoploom.connect(other.address) as store:
            assert_same_batches(expected, batches_of(store))
        other.kill()
        assert sorted(os.listdir(folder)) == files
    with serving_by([full(path, folder)]) as (again,):
        assert sorted(os.listdir(folder)) == files
        assert again.stop() == 0
        assert os.listdir(folder) == []


def refused(command: Sequence[str]) -> str:
    with pytest.raises(AssertionError, match="the server did not start") as error, serving_by([command]):
        pass
    return str(error.value)


def test_host_memory_counts_in_the_budget_of_the_store(path: Path, folder: Path) -> None:
    said = refused(full(path, folder, "--store-memory", "9KB"))
    assert "of host memory, and the store may have 9.00 kB; raise that limit, or place more on the device" in said
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda", NO_GPU if not torch.cuda.is_available() else ""),
        ("cuda:77", NO_GPU if not torch.cuda.is_available() else "there is no cuda:77"),
        ("gpu", "device is 'gpu'; give 'cuda' or 'cuda:1', or leave it out"),
    ],
)
def test_a_wrong_device_is_one_error_before_the_server_listens(
    path: Path, device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not said:
        pytest.skip("there is a GPU here")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shown = refused(command_of(path, (), "127.0.0.1:0", ["--device", device]))
    assert said in shown
    assert "ready" not in shown
    assert shown.count("hoploom:") == 1
