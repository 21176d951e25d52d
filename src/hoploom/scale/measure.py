"""`hoploom bench`: measure the rates of this machine with the functions that training and building use.

Graphs are random and saved first, so that mapped files are read as in training. Other load on the machine lowers the
rates. The reading rate is too high if the kernel keeps a file in its page cache although it is asked to drop the file.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import hoploom
from hoploom import keys, ops
from hoploom.batch import Seeds
from hoploom.errors import ConfigError
from hoploom.ingest.synthetic import generate
from hoploom.ops import NodeMap
from hoploom.partition import assign
from hoploom.sample import Workspace, sample_hops
from hoploom.sample.hops import make_sampling
from hoploom.scale.inputs import SHORT_ROW, Constants, default_constants
from hoploom.store import Store, open_store
from hoploom.store.from_tensors import from_tensors
from hoploom.system import cpu_model, num_cores

Rates = dict[str, float]  # fields of Constants, by name
DEGREE = 20
SCATTER = 2654435761  # a prime: spreads popular nodes over the ids
FANOUTS, NUM_SEEDS = (15, 10, 5), 256
ROWS = 1 << 19  # gathered at a time (a quarter for long rows): more than a CPU cache
LONG_ROW = 1024  # bytes
PAGE = 4096
PIECE = 1 << 20


@dataclass(frozen=True)
class Effort:
    """Sizes of the test data, and the seconds to spend on each figure."""

    edges: int = 32_000_000  # of the sampled graph
    file_bytes: int = 512 << 20  # of the file that is written, read and gathered from
    partitioned_edges: int = 5_000_000
    budget: float = 0.6  # seconds per figure


FULL = Effort()


def measure(
    folder: Path | None = None, progress: Callable[[str], None] = lambda what: None, effort: Effort = FULL
) -> Constants:
    """Measure the rates of this machine. Temporary files go to `folder`, which should be on the disk of your stores."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is no directory; give one on the disk that will hold the stores")
    built_in = default_constants()
    found = {"join_edges": built_in.join_edges / built_in.cores * num_cores()}  # not measured: DuckDB may be missing
    with tempfile.TemporaryDirectory(prefix=".hoploom-bench-", dir=folder) as scratch:
        for what, measurement in MEASUREMENTS.items():
            progress(what)
            found |= measurement(Path(scratch), effort)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    machine = f"{cpu_model()}, {memory:.0f} GiB"
    date = time.strftime("%Y-%m-%d")
    return Constants(machine=machine, cores=num_cores(), hoploom=hoploom.__version__, date=date, **found)


def seconds_of(work: Callable[[], object], budget: float, least: int = 3) -> float:
    """Return the seconds of one call of `work`: the 25th percentile, because other load only makes calls slower."""
    work()
    spent: list[float] = []
    while len(spent) < least or sum(spent) < budget:
        begin = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begin)
    return max(sorted(spent)[len(spent) // 4], 1e-9)


def _disk(here: Path, effort: Effort) -> Rates:
    """Measure the disk: write and flush a file of random bytes, which cannot be compressed, and read the file."""
    path, piece = here / "rows", bytearray(random.Random(0).randbytes(PIECE))
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(effort.file_bytes // PIECE):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # drop the file from the page cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dropped = time.perf_counter()
        while file.readinto(piece):
            pass
    return {
        "disk_write": effort.file_bytes / (written - begin),
        "disk_read": effort.file_bytes / (time.perf_counter() - dropped),
    }


def _gathering(here: Path, effort: Effort) -> Rates:
    """Measure gathering by random ids: short rows per second, and bytes per second for the rest of longer rows."""
    bytes_ = np.memmap(here / "rows", dtype=np.uint8, mode="r+")
    int(bytes_[::PAGE].sum())  # every page is mapped
    seconds = {}
    for width, count in ((SHORT_ROW, ROWS), (LONG_ROW, ROWS // 4)):
        table = torch.from_numpy(bytes_).view(-1, width)
        ids = torch.randint(table.shape[0], (count,), generator=torch.Generator().manual_seed(0))
        work = partial(ops.gather, table, ids, torch.empty(count, width, dtype=torch.uint8))
        seconds[width] = seconds_of(work, effort.budget) / count
    further = max(seconds[LONG_ROW] - seconds[SHORT_ROW], 1e-12)
    return {"gather_rows": 1 / seconds[SHORT_ROW], "gather_bytes": (LONG_ROW - SHORT_ROW) / further}


def _sampling(here: Path, effort: Effort) -> Rates:
    """Measure sorting edges into adjacency lists, sampling, and how much a hash table of node ids slows sampling."""
    num_nodes = effort.edges // DEGREE
    edges = draw_edges(num_nodes, effort.edges)
    sorting = seconds_of(partial(ops.build_csc, edges, num_nodes, num_nodes), 0.0, least=1)
    from_tensors({}, edges, num_nodes=num_nodes).save(here / "graph")
    del edges
    store = open_store(here / "graph")
    for column in (store.parts[0].lists[0].indptr, store.parts[0].lists[0].indices):
        int(column[:: PAGE // column.element_size()].sum())  # every page is mapped
    direct, hashed = _picks(store, effort.budget, hashed=False), _picks(store, effort.budget, hashed=True)
    return {
        "sort_edges": effort.edges / sorting,
        "sample_picks": direct,
        "hashed_slowdown": max(1.0, direct / hashed),
    }


def draw_edges(num_nodes: int, num_edges: int) -> Tensor:
    """Return random edges, [2, num_edges]. A few sources are popular; all destinations are equally likely."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(num_edges, generator=generator, dtype=torch.float64)
    ranks = draws.square_().mul_(num_nodes).long()
    sources = ranks.mul_(SCATTER).remainder_(num_nodes)
    return torch.stack([sources, torch.randint(num_nodes, (num_edges,), generator=generator)])


def _picks(store: Store, budget: float, *, hashed: bool) -> float:
    """Return the picks that one thread samples and relabels per second; if `hashed`, with a hash table of ids."""
    workspace, steps = Workspace(store.schema), iter(range(1 << 30))
    num_nodes = store.schema.node_types[0].num_nodes
    if hashed:
        workspace.maps = [NodeMap(num_nodes, budget=0)]
    sampling = make_sampling(store.schema, FANOUTS)
    num_picks: list[int] = []

    def sample() -> None:
        step = next(steps)
        begin = step * NUM_SEEDS % (num_nodes - NUM_SEEDS)
        seeds = Seeds((ops.permute(0, num_nodes, begin, begin + NUM_SEEDS),), (None,))
        sampled = sample_hops(store.graph, workspace, seeds, sampling, keys.batch_key(0, 0, step))
        num_picks.append(sampled.edge_index[0].shape[1])

    seconds = seconds_of(sample, budget)
    return sum(num_picks) / len(num_picks) / seconds


def _assigning(here: Path, effort: Effort) -> Rates:
    """Measure one thread of the stream partitioner on a graph with communities."""
    num_nodes = effort.partitioned_edges // DEGREE
    store = generate(here / "communities", num_nodes=num_nodes, avg_degree=DEGREE, num_features=1)
    work = partial(assign, store, 8, "stream", seeds="train", threads=1)
    return {"partition_edges": store.schema.relations[0].num_edges / seconds_of(work, 0.0, least=1)}


MEASUREMENTS = {  # in order: gathering reads the file of "disk"
    "disk": _disk,
    "gathering": _gathering,
    "sorting edges, sampling": _sampling,
    "assigning nodes to parts": _assigning,
}
