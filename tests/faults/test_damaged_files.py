"""Files that get shorter while a store is open: one error that names the file, and no process ends."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.graphs import random_graph, save_in_parts
from support.servers import serving

import hoploom
from hoploom import NeighborLoader, PeerError, Store, StoreError

PART = "part-00001"
X, SPLIT = f"{PART}/nodes/node/x.npy", "part-00000/nodes/node/split.train.npy"
INDPTR, INDICES = (f"{PART}/relations/node~to~node/csc.{name}.npy" for name in ("indptr", "indices"))
NUM_NODES, NUM_EDGES = 20_000, 100_000  # each file is longer than a page
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    graph = random_graph(NUM_NODES, NUM_EDGES, 1)
    save_in_parts(hoploom.from_pyg(graph, time_attr="edge_time"), tmp_path / "graph.store", 2)
    return tmp_path / "graph.store"


def truncate(folder: Path, name: str) -> None:
    with (folder / name).open("r+b") as file:
        file.truncate(256)


def loader(store: Store, **options: object) -> NeighborLoader:
    given: dict[str, object] = {"input_nodes": "train", "batch_size": 512, "num_workers": 2}
    return NeighborLoader(store, [5, 5], **(given | options))  # type: ignore[arg-type]


def one_error_names(name: str, make: Callable[[], object]) -> None:
    with pytest.raises(StoreError, match=rf"{name} cannot be read any more: it was truncated .* `hoploom check`"):
        make()


def damage_topology_under_a_loader(folder: Path) -> None:
    for name in (INDICES, INDPTR):
        store = hoploom.open(folder)
        batches = iter(loader(store))
        next(batches)
        whole = (folder / name).read_bytes()
        truncate(folder, name)
        one_error_names(name, lambda: [None for _ in batches])  # noqa: B023
        one_error_names(name, lambda: next(iter(loader(store))))  # noqa: B023
        (folder / name).write_bytes(whole)
        assert len(list(loader(hoploom.open(folder)))) == len(loader(store))  # another map reads the file again


def damage_features_under_a_loader(folder: Path) -> None:
    store = hoploom.open(folder)
    batches = iter(loader(store))
    next(batches)
    truncate(folder, X)
    one_error_names(X, lambda: [None for _ in batches])
    one_error_names(X, lambda: store.save(folder.parent / "copy.store"))


def damage_seeds(folder: Path) -> None:
    one = folder.parent / "one.store"  # of one part: its split is a map, not a copy
    batches = iter(loader(hoploom.from_pyg(random_graph(NUM_NODES, NUM_EDGES, 1)).save(one), num_workers=0))
    next(batches)
    truncate(one, SPLIT)
    one_error_names(SPLIT, lambda: [None for _ in batches])


def damage_one_of_two_stores(folder: Path) -> None:
    own, other = hoploom.open(folder), hoploom.from_pyg(random_graph(100, 300, 2))
    truncate(folder, X)
    one_error_names(X, lambda: list(loader(own)))
    assert len(list(loader(other, batch_size=10)))


CHECKS = (damage_topology_under_a_loader, damage_features_under_a_loader, damage_seeds, damage_one_of_two_stores)
SCRIPT = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from test_damaged_files import CHECKS
for check, folder in zip(CHECKS, sys.argv[1:], strict=True):
    check(Path(folder))
print("outlived it")
"""


def test_a_file_that_gets_shorter_is_one_error(folder: Path, tmp_path: Path) -> None:
    """In a process of its own: where it is no error, SIGBUS ends the process."""
    folders = [folder, *(shutil.copytree(folder, tmp_path / f"{i}" / "graph.store") for i in range(1, len(CHECKS)))]
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    ended = subprocess.run([sys.executable, "-c", script, *folders], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "outlived it\n"), ended.stderr[-2000:]


def test_a_server_outlives_a_file_that_gets_shorter(folder: Path) -> None:
    with serving(folder, [[]]) as (server,), hoploom.connect([server.address], timeout=6) as store:
        ids = torch.arange(NUM_NODES)
        (whole,) = store.features.gather([hoploom.store.Wanted("node", "x", ids)])
        truncate(folder, X)
        with pytest.raises(PeerError, match=f"{X} cannot be read any more"):  # no replica has that part
            store.features.gather([hoploom.store.Wanted("node", "x", ids)])
        good = ids[: NUM_NODES // 2]  # of the other part
        assert torch.equal(store.features.gather([hoploom.store.Wanted("node", "x", good)])[0], whole[good])
        assert server.process.poll() is None
        assert server.stop() == 0
