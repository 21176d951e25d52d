"""Which order of nodes makes the better cache: by the visits that are expected, or by visits that were sampled?

`hoploom partition` puts the most used nodes first in their part. One process samples batches to find them. On Spark,
the visits to expect are computed, a pass over the edges for each hop. The third order is by what tasks of Spark could
sample: each from its own seeds, with the in-edges of its own nodes. A cache holds the first tenth of all nodes, and
batches of another seed ask for rows. The graph has 200,000 nodes and 2.4 M edges; few nodes are the source of many.
"""

import tempfile
from pathlib import Path

import numpy as np
import report
import torch
from measure import Spread
from report import Report, Row, Target

import hoploom
from hoploom.load.presample import Presampling, count_visits
from hoploom.partition.partition import MOST_BATCHES
from hoploom.partition.spark.exchange import InProcess
from hoploom.partition.spark.hotness import ExpectedVisits, expect_visits
from hoploom.partition.spark.level import log_class
from hoploom.partition.spark.numbers import PER_DOUBLING
from hoploom.partition.spark.read import Buckets, StoreOnPlace
from hoploom.partition.spark.state import State
from hoploom.partition.spark.stream import SeedSplit
from hoploom.sample.hops import resolve_fanouts
from hoploom.store import open_store
from hoploom.store.format import read_manifest
from hoploom.store.storage_path import StoragePath

FANOUTS = [15, 10, 5]
SKEWS = (0.6, 0.9)  # the n-th most popular node is the source of edges in proportion to n to the power of -this
DEGREE, SEEDS, CACHED = 12, 0.1, 0.1  # in-edges of a node; shares of the nodes
TASKS = 16
AS_GOOD = Target("ratio", ">=", 0.99)
Array = np.ndarray


def measure(tiny: bool) -> Report:
    """Rows found, in percent of those that are asked for."""
    rows, num_nodes = [], 8_000 if tiny else 200_000
    for skew in SKEWS:
        with tempfile.TemporaryDirectory() as name:
            edges, seeds = _graph(num_nodes, skew)
            folder = _saved(Path(name) / "graph", edges, seeds, num_nodes)
            asked = _visits(folder, Presampling(seed=9, batches=range(MOST_BATCHES)))
            expected = _found(asked, _expected(folder, Path(name)))
            orders = {
                "sampled by one process": _visits(folder, Presampling(batches=range(MOST_BATCHES))),
                "sampled by 16 tasks, each in its own edges": _by_tasks(Path(name), edges, seeds, num_nodes),
                "the most that any order finds": asked,
            }
            question = f"rows in a cache of {CACHED:.0%} of the nodes, skew {skew}"
            for order, visits in orders.items():
                other = _found(asked, visits)
                target = AS_GOOD if order == "sampled by one process" else None
                rows.append(Row(question, "%", _once(expected), order, _once(other), expected / other, target))
    return Report(rows, ["rows in a cache are the same every time"])


def _graph(num_nodes: int, skew: float) -> tuple[Array, Array]:
    """Edges [2, n], and seeds in ascending order."""
    rng = np.random.default_rng(1)
    popular = rng.permutation(np.arange(1, num_nodes + 1) ** -skew)
    shares = [popular**power / (popular**power).sum() for power in (1, 0.5)]  # of sources, of destinations
    edges = np.stack([rng.choice(num_nodes, num_nodes * DEGREE, p=share) for share in shares])
    return edges, np.sort(rng.choice(num_nodes, int(num_nodes * SEEDS), replace=False))


def _saved(folder: Path, edges: Array, seeds: Array, num_nodes: int) -> Path:
    splits = {"train": torch.from_numpy(seeds)}
    hoploom.from_tensors({}, torch.from_numpy(edges), num_nodes=num_nodes, splits=splits).save(folder)
    return folder


def _visits(folder: Path, plan: Presampling) -> Array:
    found: Array = count_visits(open_store(folder), FANOUTS, "train", plan)["node"].numpy()
    return found


def _expected(folder: Path, work: Path) -> Array:
    work.mkdir(exist_ok=True)
    manifest = read_manifest(folder)
    store = StoreOnPlace(StoragePath(str(folder)), manifest.schema, manifest.parts)
    buckets, state = Buckets(store.bounds[-1], -(-store.bounds[-1] // TASKS)), State(StoragePath(str(work)), "visits")
    visits = ExpectedVisits(store, buckets, state, SeedSplit(0, "train"), resolve_fanouts(store.schema, FANOUTS))
    expect_visits(InProcess(), visits)
    return log_class(np.concatenate([visits.visits(bucket) for bucket in range(buckets.count)]), PER_DOUBLING)


def _by_tasks(work: Path, edges: Array, seeds: Array, num_nodes: int) -> Array:
    """Visits in batches of the seeds of a sixteenth of the nodes, where the other nodes have no in-edges."""
    size, visits = -(-num_nodes // TASKS), np.zeros(num_nodes, np.int64)
    for task in range(TASKS):
        own = np.ascontiguousarray(edges[:, edges[1] // size == task])
        folder = _saved(work / f"task-{task}", own, seeds[seeds // size == task], num_nodes)
        visits += _visits(folder, Presampling(batches=range(2 * MOST_BATCHES // TASKS)))
    return visits


def _found(asked: Array, visits: Array) -> float:
    """Of what is asked for, in percent, what a cache of the first nodes has."""
    order = np.argsort(-visits, kind="stable")
    return float(100 * asked[order[: int(asked.size * CACHED)]].sum() / asked.sum())


def _once(share: float) -> Spread:
    return Spread(share, share, share, 1)


if __name__ == "__main__":
    report.main(measure)
