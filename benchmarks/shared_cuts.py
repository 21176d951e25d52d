"""How many edges does `hoploom partition --engine spark` cut, next to today's `stream` in one process?

Planted communities, 200,000 nodes and 4 M edges, 16 communities: a share of the edges (homophily) stays inside. Nodes,
in-edges and seeds are within the same 5 % of the mean for both, or the benchmark fails. The stages run in this process,
one task after the other: on Spark they are the same functions and make the same parts, whatever the executors.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import report
import torch
from measure import Spread
from report import Report, Row, Target

import hoploom
from hoploom.ops import PartitionRule
from hoploom.partition import assign, edge_cut
from hoploom.partition.assign import KEY
from hoploom.partition.spark.exchange import InProcess
from hoploom.partition.spark.partition import IMBALANCE
from hoploom.partition.spark.read import Buckets, StoreOnPlace
from hoploom.partition.spark.refine import PASSES
from hoploom.partition.spark.state import State
from hoploom.partition.spark.stream import SeedSplit, assign_stream
from hoploom.store import Store
from hoploom.store.format import read_manifest
from hoploom.store.storage_path import StoragePath

HOMOPHILY, PARTS = (0.8, 0.5), (4, 16)
MOST = 1.3  # times what one process cuts


def measure(tiny: bool) -> Report:
    """Cuts of four settings."""
    rows, notes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for homophily in HOMOPHILY:
            path = Path(folder) / f"planted-{homophily}"
            store = hoploom.generate(path, num_nodes=4_000 if tiny else 200_000, num_features=1, homophily=homophily)
            for num_parts in PARTS:
                begin = time.perf_counter()
                ours = _cut_in_buckets(path, store, num_parts, Path(folder) / f"work-{homophily}-{num_parts}")
                seconds = time.perf_counter() - begin
                other = _share(store, assign(store, num_parts, "stream", seeds="train")["node"])
                question = f"edges cut, homophily {homophily}, {num_parts} parts"
                target = Target("ratio", "<", MOST)
                rows.append(Row(question, "%", _once(ours), "stream", _once(other), ours / other, target))
                notes.append(f"{question}: {seconds:.0f} s in one process")
    return Report(rows, [*notes, "cuts are the same every time"])


def _cut_in_buckets(path: Path, store: Store, num_parts: int, work: Path) -> float:
    work.mkdir()
    manifest = read_manifest(path)
    shared = StoreOnPlace(StoragePath(str(path)), manifest.schema, manifest.parts)
    buckets, state = Buckets(shared.bounds[-1], 1 << 16), State(StoragePath(str(work)), "cut")
    rule = PartitionRule(num_parts, PASSES, IMBALANCE, 1, KEY)
    held = assign_stream(InProcess(), shared, buckets, state, SeedSplit(0, "train"), rule)
    assert (held <= np.ceil(held.sum(0) / num_parts) + held.sum(0) / num_parts * IMBALANCE + 1).all(), held
    parts = [state.load("parts", bucket, "part")["part"] for bucket in range(buckets.count)]
    return _share(store, torch.from_numpy(np.concatenate(parts)))


def _share(store: Store, parts: torch.Tensor) -> float:
    """In percent."""
    return 100 * sum(edge_cut(store, {"node": parts}).values()) / store.schema.relations[0].num_edges


def _once(share: float) -> Spread:
    return Spread(share, share, share, 1)


if __name__ == "__main__":
    report.main(measure)
