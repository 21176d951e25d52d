"""One contender of disk.py: its loader over a store that does not fit in memory, a line of JSON for every batch.

`python disk_side.py CONTENDER REQUEST` in the venv that has the library, or CONTENDER alone to hear its versions. All
read the files that Hoploom wrote. What a library lets us choose is chosen for its speed.
"""

import json
import math
import mmap
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

ASIDE = 700 << 20  # bytes of the limit that GraphBolt's cache leaves for the process, its workers and batches
UNDER_WAY = 8  # batches that GraphBolt's cache has to hold
NO_LIMIT = 4 << 30  # bytes that GraphBolt may plan with where there is no limit


@dataclass(frozen=True)
class Request:
    """What every contender is asked for."""

    store: str  # the folder
    files: dict[str, str]  # of the store: indptr, indices, x
    seeds: str  # a .npy file
    fanouts: list[int]
    batch_size: int
    num_workers: int
    limit: int | None  # bytes of memory, page cache included
    memory: int  # bytes of it that Hoploom may hold of the store; the rest is for the process and batches on their way
    scratch: str  # a folder on the same disk

    def mapped(self, name: str, advised: bool) -> torch.Tensor:
        """A file as a tensor: its pages are read when they are touched; one by one, if the kernel is advised so."""
        array = np.load(self.files[name], mmap_mode="r")
        if advised:
            array.base.madvise(mmap.MADV_RANDOM)
        return torch.from_numpy(array)

    @property
    def input_nodes(self) -> torch.Tensor:
        return torch.from_numpy(np.load(self.seeds))

    @property
    def sizes(self) -> dict[str, int]:
        return {"batch_size": self.batch_size, "num_workers": self.num_workers}


def hoploom_loader(request: Request, how: str) -> Iterable[Any]:
    """Ours, with a budget or without."""
    import hoploom

    options: dict[str, Any] = {} if how == "mapped" else {"memory": request.memory}
    if how == "packed":
        options["scratch"] = request.scratch
    store = hoploom.open(request.store, **options)
    loader = hoploom.NeighborLoader(store, request.fanouts, request.input_nodes, fields=["x"], **request.sizes)
    return loader if how != "reads alone" else replayed(store, loader)


def replayed(store: Any, loader: Iterable[Any]) -> Iterable[Any]:
    """What a loop asks of the disk, asked again by one thread that does nothing else: an item for each batch."""
    from hoploom.ops import RowRequest

    asked, read = list[list[Any]](), store.reads.rows

    def record(wanted: list[Any]) -> None:
        asked.append([(*want[:3], want.out.shape, want.out.dtype) for want in wanted])
        read(wanted)

    store.reads.rows = record
    num_rows = [rows_of(batch) for batch in loader]
    begin = time.perf_counter()
    for request in asked:
        read([RowRequest(*want, torch.empty(shape, dtype=dtype)) for *want, shape, dtype in request])
    seconds = time.perf_counter() - begin
    return [Replayed(seconds / len(num_rows), count) for count in num_rows]


class Replayed(list[None]):
    """A batch of which only the reads were made: as long as it has rows."""

    def __init__(self, seconds: float, num_rows: int) -> None:
        super().__init__([None] * num_rows)
        self.seconds = seconds


def pyg_loader(request: Request, *, advised: bool) -> Iterable[Any]:
    """PyG's NeighborLoader over mapped tensors; pyg-lib wants positions and ids of one width."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.sampler import NeighborSampler

    row = request.mapped("indices", advised)
    colptr = torch.from_numpy(np.load(request.files["indptr"])).to(row.dtype)
    no_edges = torch.empty(2, 0, dtype=torch.int64)
    sampler = NeighborSampler(Data(edge_index=no_edges, num_nodes=len(colptr) - 1), request.fanouts, is_sorted=True)
    sampler.colptr, sampler.row = colptr, row  # what it makes of an edge_index, which has no room here
    data = Data(edge_index=no_edges, x=request.mapped("x", advised))
    return NeighborLoader(
        data, request.fanouts, input_nodes=request.input_nodes, neighbor_sampler=sampler, **request.sizes
    )


def graphbolt_loader(request: Request) -> Iterable[Any]:
    """GraphBolt: the graph in memory, rows from DiskBasedFeature (io_uring, past the page cache) and its CPU cache.

    The cache waits for ever if it does not hold the batches under way. Where it cannot, there is none, and one batch at
    a time is made: with workers or overlap, the process is killed at the limit.
    """
    import dgl.graphbolt as gb

    indptr, indices = (torch.from_numpy(np.load(request.files[name])) for name in ("indptr", "indices"))
    whole = gb.fused_csc_sampling_graph(indptr, indices)
    rows = gb.DiskBasedFeature(request.files["x"])
    batch_bytes = request.batch_size * math.prod(fanout + 1 for fanout in request.fanouts) * rows.size().numel() * 4
    cache_bytes = (request.limit or NO_LIMIT) - indptr.nbytes - indices.nbytes - ASIDE
    roomy = cache_bytes >= UNDER_WAY * batch_bytes
    seeds = gb.ItemSet(request.input_nodes.to(indices.dtype), names="seeds")
    pipe = gb.ItemSampler(seeds, batch_size=request.batch_size).sample_neighbor(whole, request.fanouts[::-1])
    store = gb.BasicFeatureStore({("node", None, "x"): gb.cpu_cached_feature(rows, cache_bytes) if roomy else rows})
    pipe = pipe.fetch_feature(store, node_feature_keys=["x"], overlap_fetch=roomy)
    return gb.DataLoader(pipe, num_workers=request.num_workers if roomy else 0)


LOADERS: dict[str, Callable[[Request], Iterable[Any]]] = {
    **{how: partial(hoploom_loader, how=how) for how in ("packed", "window", "mapped", "reads alone")},
    "PyG": lambda request: pyg_loader(request, advised=False),
    "PyG, advised": lambda request: pyg_loader(request, advised=True),
    "GraphBolt": graphbolt_loader,
}


def versions(contender: str) -> str:
    """Import what it needs; ImportError where that is not here."""
    if contender.startswith("PyG"):
        import torch_geometric

        if not torch_geometric.typing.WITH_PYG_LIB:
            raise ImportError("PyG finds no pyg-lib")
        import pyg_lib

        return f"PyG {torch_geometric.__version__} with pyg-lib {pyg_lib.__version__}, torch {torch.__version__}"
    if contender == "GraphBolt":
        import dgl
        from dgl.graphbolt import DiskBasedFeature, cpu_cached_feature  # noqa: F401

        how = "io_uring" if torch.ops.graphbolt.detect_io_uring() else "mapped, for want of io_uring"
        return f"GraphBolt {dgl.__version__}, rows by {how}, torch {torch.__version__}"
    import hoploom

    return f"Hoploom {hoploom.__version__}, torch {torch.__version__}"


def rows_of(batch: Any) -> int:
    """How many feature rows a batch has."""
    if isinstance(batch, Replayed):
        return len(batch)
    return len(batch.node_features["x"]) if hasattr(batch, "node_features") else len(batch.x)


def held_and_read() -> dict[str, int]:
    """The most memory of this process so far, and what it and its workers have read from the disk."""
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    workers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    read = 0
    for process in ("self", *workers):
        counts = Path(f"/proc/{process}/io").read_text().splitlines()
        read += next(int(line.split()[1]) for line in counts if line.startswith("read_bytes"))
    return {"peak": int(peak.split()[1]) << 10, "read": read}


def say(**found: Any) -> None:
    """One line, now: we may be stopped at any moment."""
    print(json.dumps(found), flush=True)


def main(contender: str, request: str | None = None) -> None:
    """Batches until the seeds end."""
    torch.set_num_threads(2)
    try:
        found = versions(contender)
    except ImportError as error:
        raise SystemExit(f"{contender}: {error}") from error
    if request is None:
        say(versions=found)
        return
    begin = time.perf_counter()
    loader = LOADERS[contender](Request(**json.loads(request)))
    say(opened=time.perf_counter() - begin, **held_and_read())
    begin, replayed_seconds = time.perf_counter(), 0.0
    for batch in loader:
        replayed_seconds += getattr(batch, "seconds", 0.0)
        seconds = replayed_seconds or time.perf_counter() - begin
        say(seconds=seconds, rows=rows_of(batch), **held_and_read())


if __name__ == "__main__":
    main(*sys.argv[1:])
