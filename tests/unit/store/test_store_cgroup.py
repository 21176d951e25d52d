"""A store four times as large as the memory that its process may have: nothing is killed, and nothing crawls.

The limit is a control group's, and counts what a process takes after its imports, pages of files too. What is read a
page at a time shows as page faults: a walk in order has few.
"""

from pathlib import Path

import pytest
from support.memory_group import forget_pages, memory_group

import hoploom

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
