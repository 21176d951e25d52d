"""`hoploom bench`: the constants of this machine, by the functions that training and building use themselves.

Graphs are drawn at random and saved, so that what is measured reads mapped files as training does. Everything else the
machine does meanwhile makes the figures worse.
"""

import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoploom import keys, ops
from hoploom.batch import Seeds
from hoploom.errors import ConfigError
from hoploom.ingest.synthetic import generate
from hoploom.load import NeighborLoader
from hoploom.ops import InEdges, NodeMap
from hoploom.partition import assign
from hoploom.sample import Workspace, sample_hops
from hoploom.sample.options import make_sampling
from hoploom.scale import machine
from hoploom.scale.constants import SHORT_ROW, Constants
from hoploom.scale.machine import seconds_of
from hoploom.store import Store, open_store
from hoploom.store.from_tensors import from_tensors

Progress = Callable[[str], None]
Rates = dict[str, Any]  # some of Constants, by name
MB = 1 << 20
DEGREE = 20
SCATTER = 2654435761  # a prime: popular nodes do not lie together
FANOUTS, NUM_SEEDS = (15, 10, 5), 256
ROWS = 1 << 19  # gathered at a time, of long rows fewer: what they fill is larger than a cache
LONG_ROW = 1024  # bytes
WIDTH = 256
NUM_PARTS = 8


@dataclass(frozen=True)
class Effort:
    """How large and how long."""

    edges: tuple[int, ...]  # of the graphs that are sampled, ascending
    file_bytes: int
    tables: tuple[int, ...]  # bytes of the tables that are gathered from
    joined_edges: int
    partitioned_edges: int
    budget: float  # seconds per figure


QUICK = Effort((500_000, 3_000_000), 48 * MB, (2 * MB, 48 * MB), 500_000, 1_000_000, 0.1)
FULL = Effort((1_000_000, 8_000_000, 32_000_000), 512 * MB, (4 * MB, 64 * MB, 512 * MB), 8_000_000, 5_000_000, 0.6)


def measure(quick: bool = False, folder: Path | None = None, progress: Progress | None = None) -> Constants:
    """Measure this machine; `folder` is on the disk that stores will lie on, and gets nothing that stays.

    >>> constants = measure(quick=True)
    """
    effort, say = QUICK if quick else FULL, progress or (lambda _: None)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is no directory; give one on the disk that stores will lie on")
    found: Rates = {}
    with tempfile.TemporaryDirectory(prefix=".hoploom-bench-", dir=folder) as scratch:
        for what, measurements in MEASUREMENTS.items():
            say(what)
            for measurement in measurements:
                found |= measurement(Path(scratch), effort)
    return Constants(
        machine=_machine(),
        cores=len(os.sched_getaffinity(0)),
        hoploom=metadata.version("hoploom"),
        date=time.strftime("%Y-%m-%d"),
        quick=quick,
        **found,
    )


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{named[0] if named else platform.machine()}, {memory:.0f} GiB"


# --- disk, memory and network --------------------------------------------------------------------


def _disk(here: Path, effort: Effort) -> Rates:
    path = here / "rows"
    return {
        "disk_write": machine.write_file(path, effort.file_bytes),
        "disk_read": machine.read_file(path),
        "disk_reads": machine.read_pages(path, effort.budget),
        "copy_bytes": machine.copy_bytes(32 * MB, effort.budget),
    }


def _network(_: Path, effort: Effort) -> Rates:
    rate, trip = machine.loopback(effort.budget)
    return {"loopback_bytes": rate, "round_trip_seconds": trip}


def _gathering(here: Path, effort: Effort) -> Rates:
    """Short rows by the size of the table, and what longer ones take beyond those."""
    machine.forget(here / "rows")
    bytes_ = np.memmap(here / "rows", dtype=np.uint8, mode="r+")
    int(bytes_[:: machine.PAGE].sum())  # every page is mapped
    flat = torch.from_numpy(bytes_)
    short = [_gather_seconds(flat[:size].view(-1, SHORT_ROW), effort.budget) for size in effort.tables]
    long = _gather_seconds(flat.view(-1, LONG_ROW), effort.budget)
    return {
        "gather_rows": tuple((float(size), 1 / seconds) for size, seconds in zip(effort.tables, short, strict=True)),
        "gather_bytes": 1 / max((long - short[-1]) / (LONG_ROW - SHORT_ROW), 1e-12),
        "random_reads": 1 / _gather_seconds(flat.view(-1, 4), effort.budget),
    }


def _gather_seconds(table: Tensor, budget: float) -> float:
    """Per row, by random ids, into recycled memory."""
    count = ROWS if table.shape[1] < LONG_ROW else ROWS // 4
    ids = torch.randint(table.shape[0], (count,), generator=torch.Generator().manual_seed(0))

    def gather() -> None:
        ops.gather(table, ids, ops.empty((count, table.shape[1]), torch.uint8))

    return seconds_of(gather, budget) / count


# --- sampling ------------------------------------------------------------------------------------


def _sampling(here: Path, effort: Effort) -> Rates:
    """Edges sorted and picks made, by the size of the lists; how much slower picks are with hashing."""
    sorting, picks, slowdown = [], [], 1.0
    for number, num_edges in enumerate(effort.edges):
        num_nodes = num_edges // DEGREE
        sort = partial(ops.build_csc, draw_edges(num_nodes, num_edges), num_nodes, num_nodes)
        size = float(num_nodes * 8 + num_edges * 4)  # of indptr and indices
        sorting.append((size, num_edges / seconds_of(sort, 0.0, least=1)))
        lists = sort()
        del sort  # and the edges that it holds
        relation = {"indptr": lists.indptr, "indices": lists.indices}
        from_tensors({}, relation, num_nodes=num_nodes).save(here / f"graph-{number}")
        store = _open_cold(here / f"graph-{number}")
        direct = _picks(store, effort.budget, hashed=False)
        slowdown = max(1.0, direct / _picks(store, effort.budget, hashed=True))
        picks.append((size, direct))
    return {"csc_edges": tuple(sorting), "sample_picks": tuple(picks), "hashed_slowdown": slowdown}


def draw_edges(num_nodes: int, num_edges: int) -> Tensor:
    """[2, num_edges]: sources of which few are popular, as the squares of even draws are; any destination."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(num_edges, generator=generator, dtype=torch.float64)
    ranks = draws.square_().mul_(num_nodes).long()
    sources = ranks.mul_(SCATTER).remainder_(num_nodes)
    return torch.stack([sources, torch.randint(num_nodes, (num_edges,), generator=generator)])


def _open_cold(folder: Path) -> Store:
    """Opened, with every page mapped, the files having been read through the mapping."""
    for path in folder.rglob("*.npy"):
        machine.forget(path)
    store = open_store(folder)
    for part in store.parts:
        for lists in part.lists:
            for column in (lists.indptr, lists.indices):
                int(column[:: machine.PAGE // column.element_size()].sum())
    return store


def _picks(store: Store, budget: float, *, hashed: bool) -> float:
    """Picks per second of one thread, the batch's own numbering of nodes included."""
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


# --- the rest ------------------------------------------------------------------------------------


def _batches(here: Path, effort: Effort) -> Rates:
    """Batches so small that only what every batch costs counts."""
    store = generate(here / "small", num_nodes=5_000, avg_degree=8, num_features=8)
    loader = NeighborLoader(store, [2, 2], input_nodes=torch.arange(320), batch_size=16)
    return {"batch_seconds": seconds_of(lambda: sum(1 for _ in loader), effort.budget) / len(loader)}


def _opening(here: Path, effort: Effort) -> Rates:
    """A store of one part, and what each further file adds."""
    found = []
    for num_parts in (1, 16):
        folder = here / f"parts-{num_parts}"
        generate(folder, num_nodes=1_000, avg_degree=4, num_features=4, num_parts=num_parts)
        num_files = sum(1 for _ in folder.rglob("*.npy"))
        found.append((num_files, seconds_of(partial(open_store, folder), effort.budget)))
    (few, short), (many, long) = found
    return {"open_seconds": short, "open_file_seconds": max((long - short) / (many - few), 1e-7)}


def _joins(_: Path, effort: Effort) -> Rates:
    """Edges whose both ends DuckDB looks up, streamed out as Arrow."""
    if find_spec("duckdb") is None:
        return {"join_edges": None}
    import duckdb

    num_edges, num_nodes = effort.joined_edges, effort.joined_edges // DEGREE
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        connection.execute(f"SET threads = {len(os.sched_getaffinity(0))}")
        scattered = f"(i * {SCATTER}) % {1 << 40}"  # distinct, for the factor is odd
        connection.execute(f"CREATE TABLE nodes AS SELECT {scattered} AS id, i AS place FROM range({num_nodes}) t(i)")
        ends = [f"((hash(i * 2 + {end}) % {num_nodes})::BIGINT * {SCATTER}) % {1 << 40}" for end in (0, 1)]
        connection.execute(f"CREATE TABLE edges AS SELECT {ends[0]} AS a, {ends[1]} AS b FROM range({num_edges}) t(i)")
        begin = time.perf_counter()
        found = connection.sql(
            "SELECT s.place, d.place FROM edges LEFT JOIN nodes s ON a = s.id LEFT JOIN nodes d ON b = d.id"
        )
        count = sum(batch.num_rows for batch in found.to_arrow_reader(1 << 17))
        seconds = time.perf_counter() - begin
    assert count == num_edges, "an id was found twice"
    return {"join_edges": num_edges / seconds}


def _assigning(here: Path, effort: Effort) -> Rates:
    """Nodes of a graph of communities, by one thread of the stream partitioner."""
    num_nodes = effort.partitioned_edges // DEGREE
    store = generate(here / "communities", num_nodes=num_nodes, avg_degree=DEGREE, num_features=1)
    work = partial(assign, store, NUM_PARTS, "stream", seeds="train", threads=1)
    return {"partition_edges": store.schema.relations[0].num_edges / seconds_of(work, 0.0, least=1)}


def _layers(_: Path, effort: Effort) -> Rates:
    """A mean over neighbours and a linear layer, each forward and backward."""
    num_destinations, num_sources, picks = 8_000, 60_000, 10
    sources = torch.randint(num_sources, (num_destinations * picks,), generator=torch.Generator().manual_seed(0))
    destinations = torch.arange(num_destinations).repeat_interleave(picks)
    edges = InEdges.of(torch.stack([sources, destinations]), num_sources, num_destinations)
    layer, rows = nn.Linear(WIDTH, WIDTH), 16_384

    def seconds(work: Callable[[Tensor], Tensor], num_in: int, num_out: int, *weights: Tensor) -> float:
        x, grad = torch.randn(num_in, WIDTH, requires_grad=True), torch.ones(num_out, WIDTH)
        return seconds_of(lambda: torch.autograd.grad(work(x), (x, *weights), grad), effort.budget)

    mean = seconds(lambda x: ops.aggregate(x, edges, "mean"), num_sources, num_destinations)
    linear = seconds(layer, rows, rows, *layer.parameters())
    return {
        "aggregate_values": sources.numel() * WIDTH / mean,
        "linear_flops": 3 * 2 * rows * WIDTH * WIDTH / linear,
    }


MEASUREMENTS = {  # what is said, and what then runs; a file that one leaves in the folder, a later one may read
    "disk and memory": (_disk,),
    "gathering": (_gathering,),
    "sorting edges, sampling": (_sampling,),
    "assigning nodes to parts": (_assigning,),
    "loading, network, joins, layers": (_batches, _opening, _network, _joins, _layers),
}
