"""`hoploom bench`: the constants of this machine, by the functions that training and building use themselves.

Graphs are drawn at random and saved, so that what is measured reads mapped files as training does. Everything else the
machine does meanwhile makes the figures worse. The page cache is asked to drop a file before it is read; where it may
not (some container file systems), reading is as fast as memory.
"""

import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
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
from hoploom.scale.constants import OF_SPARK, SHORT_ROW, Constants, default_constants
from hoploom.store import Store, disk_figures, open_store
from hoploom.store.from_tensors import from_tensors
from hoploom.system import num_cores

Rates = dict[str, float]  # some of Constants, by name
DEGREE = 20
SCATTER = 2654435761  # a prime: popular nodes do not lie together
FANOUTS, NUM_SEEDS = (15, 10, 5), 256
ROWS = 1 << 19  # gathered at a time, of long rows fewer: what they fill is larger than a cache
LONG_ROW = 1024  # bytes
PAGE = 4096
PIECE = 1 << 20
NUM_PARTS = 8


@dataclass(frozen=True)
class Effort:
    """How large and how long."""

    edges: int = 32_000_000  # of the graph that is sampled
    file_bytes: int = 512 << 20  # written, read and gathered from
    joined_edges: int = 8_000_000
    partitioned_edges: int = 5_000_000
    budget: float = 0.6  # seconds per figure


FULL = Effort()


def measure(
    folder: Path | None = None, progress: Callable[[str], None] = lambda what: None, effort: Effort = FULL
) -> Constants:
    """Measure this machine; `folder` is on the disk that stores will lie on, and gets nothing that stays."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is no directory; give one on the disk that stores will lie on")
    found: Rates = {name: getattr(default_constants(), name) for name in OF_SPARK}
    with tempfile.TemporaryDirectory(prefix=".hoploom-bench-", dir=folder) as scratch:
        for what, measurement in MEASUREMENTS.items():
            progress(what)
            found |= measurement(Path(scratch), effort)
    return Constants(
        machine=_machine(),
        cores=num_cores(),
        hoploom=hoploom.__version__,
        date=time.strftime("%Y-%m-%d"),
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


def seconds_of(work: Callable[[], object], budget: float, least: int = 3) -> float:
    """The faster quarter's slowest of as many runs as the budget allows, after one that does not count.

    Not the median: what others do on the machine only ever adds.
    """
    work()
    spent: list[float] = []
    while len(spent) < least or sum(spent) < budget:
        begin = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begin)
    return max(sorted(spent)[len(spent) // 4], 1e-9)


# --- disk and memory -----------------------------------------------------------------------------


def _disk(here: Path, effort: Effort) -> Rates:
    path = here / "rows"
    rates = {"disk_write": _write_file(path, effort.file_bytes), "disk_read": _read_file(path)}
    found = disk_figures.measure(path)
    return rates | {"disk_requests": found.requests_per_second, "disk_sweep": found.bytes_per_second}


def _write_file(path: Path, size: int) -> float:
    """Bytes per second of writing a file that is then on the disk; random bytes, so that nothing compresses them."""
    piece = random.Random(0).randbytes(PIECE)
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // PIECE):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return size / (time.perf_counter() - begin)


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_file(path: Path) -> float:
    """Bytes per second of reading a file from the disk, in order."""
    _forget(path)
    buffer = bytearray(PIECE)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return path.stat().st_size / (time.perf_counter() - begin)


def _gathering(here: Path, effort: Effort) -> Rates:
    """Short rows, and what longer ones take beyond those."""
    bytes_ = np.memmap(here / "rows", dtype=np.uint8, mode="r+")
    int(bytes_[::PAGE].sum())  # every page is mapped
    short, long = (_gather_seconds(torch.from_numpy(bytes_).view(-1, row), effort) for row in (SHORT_ROW, LONG_ROW))
    return {"gather_rows": 1 / short, "gather_bytes": (LONG_ROW - SHORT_ROW) / max(long - short, 1e-12)}


def _gather_seconds(table: Tensor, effort: Effort) -> float:
    """Per row, by random ids, into recycled memory."""
    count = ROWS if table.shape[1] < LONG_ROW else ROWS // 4
    ids = torch.randint(table.shape[0], (count,), generator=torch.Generator().manual_seed(0))

    def gather() -> None:
        ops.gather(table, ids, ops.empty((count, table.shape[1]), torch.uint8))

    return seconds_of(gather, effort.budget) / count


# --- sampling ------------------------------------------------------------------------------------


def _sampling(here: Path, effort: Effort) -> Rates:
    """Edges sorted and picks made; how much slower picks are with hashing."""
    num_nodes = effort.edges // DEGREE
    sort = partial(ops.build_csc, draw_edges(num_nodes, effort.edges), num_nodes, num_nodes)
    sorting, lists = seconds_of(sort, 0.0, least=1), sort()
    del sort  # and the edges that it holds
    relation = {"indptr": lists.indptr, "indices": lists.indices}
    from_tensors({}, relation, num_nodes=num_nodes).save(here / "graph")
    store = _open_cold(here / "graph")
    direct, hashed = _picks(store, effort.budget, hashed=False), _picks(store, effort.budget, hashed=True)
    return {
        "sort_edges": effort.edges / sorting,
        "sample_picks": direct,
        "hashed_slowdown": max(1.0, direct / hashed),
    }


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
        _forget(path)
    store = open_store(folder)
    for lists in store.parts[0].lists:
        for column in (lists.indptr, lists.indices):
            int(column[:: PAGE // column.element_size()].sum())
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


def _joins(_: Path, effort: Effort) -> Rates:
    """Edges whose both ends DuckDB looks up, streamed out as Arrow; the built-in figure where it is not installed."""
    if find_spec("duckdb") is None:
        return {"join_edges": default_constants().join_edges}
    import duckdb

    num_edges, num_nodes = effort.joined_edges, effort.joined_edges // DEGREE
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        connection.execute(f"SET threads = {num_cores()}")
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


MEASUREMENTS = {  # in this order: gathering reads the disk's file
    "disk": _disk,
    "gathering": _gathering,
    "sorting edges, sampling": _sampling,
    "assigning nodes to parts": _assigning,
    "joins": _joins,
}
