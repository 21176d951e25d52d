"""Opening a store maps its files, which processes share, and whatever walks it lives in a quarter of its size."""

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TESTS
from support.graphs import save_in_parts
from support.memory_group import forget_pages, memory_group
from support.sparse_stores import mapped_kilobytes, save_sparse, touch_every_page
from support.stores import assert_same

import hoploom
from hoploom import NeighborLoader, Store
from hoploom.store.check import problems

pytestmark = pytest.mark.usefixtures("no_sync")


def test_opening_maps_the_files_and_reads_only_their_ends(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "store", 100_000, 500)  # 200 MB
    store = hoploom.open(folder)
    assert mapped_kilobytes(folder)["Rss"] < 1024
    assert touch_every_page(store) == 0.0
    in_memory = mapped_kilobytes(folder)
    assert in_memory["Rss"] > 190 * 1024
    assert in_memory["Private_Dirty"] < 1024  # the file's own header may not have reached the disk yet


def test_opening_a_terabyte_takes_as_long_as_opening_a_kilobyte(tmp_path: Path) -> None:
    small = save_sparse(tmp_path / "small", 1, 256)
    large = save_sparse(tmp_path / "large", 1_000_000_000, 256)
    hoploom.open(small)
    begin = time.process_time()
    hoploom.open(small)
    between = time.process_time()
    store = hoploom.open(large)
    end = time.process_time()
    assert (end - between) - (between - begin) < 0.3
    (batch,) = NeighborLoader(store, [2], input_nodes=torch.tensor([999_999_999]))
    assert batch.x.tolist() == [[0.0] * 256]


def test_writing_to_an_opened_tensor_does_not_change_the_file(ring_store: Store, tmp_path: Path) -> None:
    opened = ring_store.save(tmp_path / "store")
    opened.parts[0].tables["node", "x"].rows.fill_(-1.0)
    assert list(problems(tmp_path / "store")) == []
    assert_same(ring_store, hoploom.open(tmp_path / "store"))


SECOND_PROCESS = """
import json, sys
from pathlib import Path
import hoploom
sys.path.insert(0, sys.argv[2])
from support.sparse_stores import mapped_kilobytes, touch_every_page

def held():
    lines = map(str.split, Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {word[:-1]: int(size) for word, size, *_ in lines}

before = held()
store = hoploom.open(sys.argv[1])
touch_every_page(store)
after = held()
grown = {kind: after[kind] - before[kind] for kind in ("Private_Dirty", "Rss")}
print(json.dumps({"grown": grown, "mapped": mapped_kilobytes(sys.argv[1])}))
"""


@pytest.mark.slow  # starts a process that imports torch
def test_a_second_process_shares_every_page_and_adds_none(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "store", 100_000, 500)  # 200 MB
    store = hoploom.open(folder)
    touch_every_page(store)
    measured = json.loads(run(SECOND_PROCESS, folder, TESTS))
    assert measured["grown"]["Rss"] > 190 * 1024
    assert measured["grown"]["Private_Dirty"] < 8 * 1024
    assert measured["mapped"]["Private_Dirty"] < 1024
    assert measured["mapped"]["Private_Clean"] < 8 * 1024
    assert measured["mapped"]["Shared_Clean"] > 190 * 1024


def run(code: str, *arguments: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_an_open_store_holds_no_descriptor(ring_store: Store, tmp_path: Path) -> None:
    gc.collect()  # what other tests left is not closed while this one counts
    before = len(list(Path("/proc/self/fd").iterdir()))
    store = save_in_parts(ring_store, tmp_path / "ring", 20)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(store.parts) == 20


MB = 1 << 20
FEW = 25_000  # of 160,000 pages: those of positions, labels and rows between layers come one by one

BEGINNING = """
import resource, sys
from pathlib import Path
import torch
import hoploom
from hoploom import ConfigError, LinkNeighborLoader, NeighborLoader, infer
from hoploom.inference import Inference
from hoploom.load.presample import Presampling, count_visits
from hoploom.nn import GNN, Shape
from hoploom.store.check import problems
from hoploom.store.base import scan_rows
from hoploom.train.runs.link_splits import LinkShares, hold_out

path, memory, out = sys.argv[1:]
KEY = ("node", "to", "node")
small = hoploom.generate(Path(out) / "small.store", num_nodes=300, avg_degree=3, num_features=4, num_classes=4)
for _ in NeighborLoader(small, [2, 2], "train", num_workers=1):  # imports what is imported late
    pass
infer(GNN("sage", small.schema, Shape(hidden=8, num_layers=2, out=4)), small, Path(out) / "small")

def rows(store):
    return sum(float(some.sum()) for some in scan_rows(store.features, "node", "x", store.num_nodes))

def took_of(loader, steps):
    return sum(batch.n_id.numel() for _, batch in zip(range(steps), loader))

enter()
store = hoploom.open(path, memory=memory)
assert not store.budget.holds_all, store
before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
"""
ENDING = """
print(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before)
"""
TRAINS = "assert took_of(NeighborLoader(store, [5, 3], 'train', batch_size=64, num_workers=2), 20) > 20 * 64"
EVALUATES = "assert took_of(NeighborLoader(store, [-1, -1], 'val', batch_size=64, num_workers=2), 10) > 10 * 64"
WALKS = {
    "all rows": "rows(store)",
    "all rows, mapped": "rows(hoploom.open(path))",
    "labels": "assert store.num_classes == 4",
    "in-degrees": "store.in_degrees(KEY, torch.arange(100))",
    "counting visits": "count_visits(store, [5, 3], torch.arange(0, store.num_nodes, 50), Presampling(batch_size=256))",
    "links": "assert took_of(LinkNeighborLoader(store, [3], batch_size=64, num_workers=2), 10) > 10 * 64",
    "held-out links": """
held = hold_out(store, KEY, (), LinkShares(0, 0.05, 0.1))
assert took_of(LinkNeighborLoader(held.store, [3], held.links["train"], batch_size=64, num_workers=2), 10) > 10 * 64
assert held.store.reads.requests
""",
    "aggregated": """
loader = NeighborLoader(store, [5, 3], "train", batch_size=64, num_workers=2, mode="blocks", aggregate="mean")
assert took_of(loader, 20) > 20 * 64
""",
    "inference, rows between layers of twice the group": """
model = GNN("sage", store.schema, Shape(hidden=64, num_layers=2, out=4))
infer(model, store, Path(out) / "nodes", inference=Inference(memory=48 << 20))
""",
    "saving": "store.save(Path(out) / 'saved.store')",
    "checking": "assert not list(problems(path))",
}
REFUSED = {  # what does not fit says so before it is taken
    "whole graph": ("store.to_pyg()", "to read the graph takes"),
    "all links": (
        "LinkNeighborLoader(store, [3])",
        r"edges of .* as seeds take .* .*edge_label_index=",
    ),
    "held-out links": ("hold_out(store, KEY, (), LinkShares(0, 0.1, 0.1))", r"graph without .*: task.links"),
}


def _run(store: Path, walk: str, memory: str, limit: int, folder: Path) -> int:
    """Page faults that had to wait for the disk."""
    forget_pages(store)
    with memory_group(limit) as group:
        done = group.run(BEGINNING + walk + ENDING, [str(store), memory, str(folder)])
        assert group.num_killed == 0
        assert group.peak <= limit
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def _generate(folder: Path, num_megabytes: int) -> Path:
    path = folder / "graph.store"
    hoploom.generate(path, num_nodes=num_megabytes * 1950, avg_degree=2, num_features=128, num_classes=4)
    size = sum(file.stat().st_size for file in path.rglob("*.npy"))
    assert size > num_megabytes * MB
    return path


def test_training_and_evaluation_live_in_a_quarter_of_their_store(tmp_path: Path) -> None:
    path = _generate(tmp_path, 256)
    _run(path, f"{TRAINS}\n{EVALUATES}", "12MB", 64 * MB, tmp_path)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _generate(tmp_path_factory.mktemp("large"), 640)


@pytest.mark.slow
@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_whatever_walks_a_store_lives_in_a_quarter_of_it(large: Path, walk: str, tmp_path: Path) -> None:
    memory = "48MB" if "hold_out" in walk else "64MB"  # beside the edges that are left
    faults = _run(large, walk, memory, 160 * MB, tmp_path)
    assert faults < FEW, "pages were read one at a time"


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    dense = tmp_path / "dense.store"
    hoploom.generate(dense, num_nodes=500_000, avg_degree=20, num_features=1, num_classes=4)
    tries = "".join(
        f"""
try:
    {call}
except ConfigError as error:
    assert re.search({message!r}, str(error)), error
else:
    raise AssertionError({message!r})
"""
        for call, message in REFUSED.values()
    )
    _run(dense, "import re" + tries, "32MB", 80 * MB, tmp_path)
