"""The graphs that all benchmarks share, made once and kept; the one place that reads HOPLOOM_BENCH_DIR.

Delete that folder (build/bench-stores where it is not set) to have them made again.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from report import ROOT
from torch import Tensor

import hoploom
from hoploom import keys, ops
from hoploom.batch import Sampled, Seeds
from hoploom.ingest.synthetic import generate
from hoploom.sample import Workspace, sample_hops
from hoploom.sample.hops import make_sampling
from hoploom.store import Store

FANOUTS = [15, 10, 5]
NUM_SEEDS = 1024
SHUFFLE = 7  # the key that seeds are shuffled by
PAGE = 4096


@dataclass(frozen=True)
class Shape:
    """What a graph is generated from."""

    num_nodes: int
    avg_degree: float
    num_features: int

    @property
    def name(self) -> str:
        return f"nodes{self.num_nodes}-degree{self.avg_degree:g}-features{self.num_features}.store"


MAIN = Shape(2_100_000, 59.05, 100)  # 124 M edges, 840 MB of features
SMALLER = Shape(1_000_000, 59.05, 16)
LARGER = Shape(10_000_000, 59.05, 16)  # 590 M edges
WIDE = Shape(10_000_000, 12, 128)  # 120 M edges, 5.1 GB of features


def folder() -> Path:
    """Where all of them are."""
    return Path(os.environ.get("HOPLOOM_BENCH_DIR", ROOT / "build" / "bench-stores"))


def path_of(shape: Shape, tiny: bool) -> Path:
    """Where the store of this graph is; made first if it is not there yet."""
    shape = replace(shape, num_nodes=shape.num_nodes // 100) if tiny else shape
    path = folder() / shape.name
    if not path.exists():
        print(f"making {path}; this is done once", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        generate(path, num_nodes=shape.num_nodes, avg_degree=shape.avg_degree, num_features=shape.num_features)
    return path


def open_warm(shape: Shape, tiny: bool) -> Store:
    """The store, with every page mapped: no repetition pays for a page fault."""
    folder = path_of(shape, tiny)
    forget(folder)
    store = hoploom.open(folder)
    touch(store)
    return store


def forget(folder: Path) -> None:
    """Drop the files from the page cache, so that they are read through the mapping, as after a reboot.

    What a program has just written lies in the cache in small pages; what a mapping reads lies in huge ones where the
    kernel can, and random reads of those are up to half as fast again.
    """
    for path in folder.rglob("*.npy"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch(store: Store) -> int:
    """Read a byte of every page of every file."""
    tensors = [table.rows for part in store.parts for table in part.tables.values()]
    tensors += [column for part in store.parts for lists in part.lists for column in (lists.indptr, lists.indices)]
    tensors += [ids for part in store.parts for ids in part.splits.values()]
    flat = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
    return sum(int(pages[::PAGE].sum()) for pages in flat)


def seeds_at(store: Store, begin: int, count: int) -> Tensor:
    """Some of the nodes in shuffled order; starts over after the last."""
    num_nodes = store.schema.node_types[0].num_nodes
    begin %= num_nodes - count + 1
    return ops.permute(SHUFFLE, num_nodes, begin, begin + count)


def make_sampler(store: Store) -> Callable[[int], Sampled]:
    """The library's own path from the number of a batch to its subgraph, on the calling thread."""
    workspace = Workspace(store.schema)
    sampling = make_sampling(store.schema, FANOUTS)

    def sample(step: int) -> Sampled:
        seeds = Seeds((seeds_at(store, step * NUM_SEEDS, NUM_SEEDS),), (None,))
        return sample_hops(store.graph, workspace, seeds, sampling, keys.batch_key(0, 0, step))

    return sample


def timed(sample: Callable[[int], Sampled], steps: range) -> tuple[float, int]:
    """Seconds and picks of these batches."""
    num_picks = 0
    begin = time.perf_counter()
    for step in steps:
        num_picks += sample(step).edge_index[0].shape[1]
    return time.perf_counter() - begin, num_picks
