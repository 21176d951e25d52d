"""Files that get shorter while a store is open: one error that names the file, and no process ends.

Checks run in a child process: where it is no error, SIGBUS ends that.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.graphs import random_graph, save_in_parts
from support.infer_workers import model_of
from support.place_workers import own_folder
from support.servers import serving

import hoploom
from hoploom import NeighborLoader, Store, StoreError
from hoploom.gpu import host_memory
from hoploom.inference import Inference, infer
from hoploom.partition import partition
from hoploom.train.runs.link_splits import LinkShares, hold_out

pytestmark = pytest.mark.timeout(120)
SCRIPT = """
import sys, traceback
sys.path[:0] = [{tests!r}]
from pathlib import Path
from faults import test_damaged_files
for check in test_damaged_files.CHECKS:
    folder = Path({folder!r}) / check.__name__
    folder.mkdir()
    test_damaged_files.save_graph(folder / "graph.store")
    try:
        check(folder / "graph.store")
        print(check.__name__, "outlived it", flush=True)
    except Exception:
        traceback.print_exc()
"""

PART = "part-00001"
X, SPLIT = f"{PART}/nodes/node/x.npy", "part-00000/nodes/node/split.train.npy"
INDPTR, INDICES, TIME = (f"{PART}/relations/node~to~node/csc.{name}.npy" for name in ("indptr", "indices", "time"))
KEY = ("node", "to", "node")
NUM_NODES, NUM_EDGES = 20_000, 100_000  # each file is longer than a page


def save_graph(folder: Path) -> None:
    graph = random_graph(NUM_NODES, NUM_EDGES, 1)
    save_in_parts(hoploom.from_pyg(graph, time_attr="edge_time"), folder, 2)


def truncate(folder: Path, name: str) -> None:
    with (folder / name).open("r+b") as file:
        file.truncate(256)


@contextmanager
def damaged(folder: Path, name: str) -> Iterator[Store]:
    store, whole = hoploom.open(folder), (folder / name).read_bytes()
    truncate(folder, name)
    yield store
    (folder / name).write_bytes(whole)


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


def damage_under_inference(folder: Path) -> None:
    one, x = folder.parent / "one.store", X.replace(PART, "part-00000")  # of one part: rows are read where they lie
    hoploom.from_pyg(random_graph(NUM_NODES, NUM_EDGES, 1)).save(one)
    for path, name in ((folder, INDPTR), (folder, INDICES), (one, x)):
        store, whole = hoploom.open(path), (path / name).read_bytes()
        out = folder.parent / "out"
        one_error_names(
            name,
            lambda: infer(
                model_of(store),  # noqa: B023
                store,  # noqa: B023
                out,  # noqa: B023
                inference=Inference(memory=1 << 18),
                progress=lambda done, total: truncate(path, name),  # noqa: B023
            ),
        )
        assert not out.exists()
        (path / name).write_bytes(whole)


def damage_under_a_partition(folder: Path) -> None:
    for name in (X, INDICES, INDPTR):
        with damaged(folder, name) as store:
            out = folder.parent / "parts"
            one_error_names(name, lambda: partition(store, out, 2, method="hash", fanouts=None))  # noqa: B023
            assert not out.exists()


def damage_what_is_copied(folder: Path) -> None:
    """Edges held out, nodes that are their own neighbours, and rows and edges that kernels read."""
    for name in (INDICES, INDPTR, TIME):
        with damaged(folder, name) as store:
            one_error_names(name, lambda: hold_out(store, KEY, (), LinkShares(0, 0.1, 0.1)))
    for name in (INDICES, INDPTR):
        with damaged(folder, name) as store:
            one_error_names(name, lambda: store.in_degrees(KEY, torch.arange(10)))
    with own_folder() as host_memory.FOLDER:
        for name in (X, INDICES, INDPTR):
            with damaged(folder, name) as store:
                one_error_names(name, lambda: hoploom.place(store, "host", "host", device="cpu"))
                assert not list(host_memory.FOLDER.iterdir())


CHECKS = (
    damage_topology_under_a_loader,
    damage_features_under_a_loader,
    damage_seeds,
    damage_one_of_two_stores,
    damage_under_inference,
    damage_under_a_partition,
    damage_what_is_copied,
)


@pytest.fixture(scope="module")
def outlived(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[str], str]:
    """The exit status of a process that damages one store after the other, and what it says; its errors, too."""
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path_factory.mktemp("damaged")))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    return ended.returncode, ended.stdout.splitlines(), f"exit status {ended.returncode}\n{ended.stderr[-6000:]}"


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_a_file_that_gets_shorter_is_one_error(check: str, outlived: tuple[int, list[str], str]) -> None:
    _, lines, errors = outlived
    assert f"{check} outlived it" in lines, errors


def test_a_process_whose_files_got_shorter_ends_cleanly(outlived: tuple[int, list[str], str]) -> None:
    status, _, errors = outlived
    assert status == 0, errors


def test_a_server_outlives_a_file_that_gets_shorter(tmp_path: Path) -> None:
    folder = tmp_path / "graph.store"
    save_graph(folder)
    with serving(folder, [[]]) as (server,), hoploom.connect([server.address], timeout=6) as store:
        ids = torch.arange(NUM_NODES)
        (whole,) = store.features.gather([hoploom.store.Wanted("node", "x", ids)])
        truncate(folder, X)
        with pytest.raises(StoreError, match=f"{X} cannot be read any more"):  # no replica has that part
            store.features.gather([hoploom.store.Wanted("node", "x", ids)])
        good = ids[: NUM_NODES // 2]  # of the other part
        assert torch.equal(store.features.gather([hoploom.store.Wanted("node", "x", good)])[0], whole[good])
        assert server.process.poll() is None
        assert server.stop() == 0
