"""The placements of the same-batch table: where a case's graph is, and where its batches are made.

A placement turns a case into a store and into options of its loader, and says who must make the batches then. A new one
is one line.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import hoploom
from hoploom import ops
from hoploom.cli.serving import placed_for_clients
from hoploom.deploy.device_server import PlacedShard
from hoploom.gpu.loading import DeviceSampling
from hoploom.load.loader import Loader
from hoploom.load.look_ahead import LookAhead
from hoploom.serve.graph_server import BatchOptions
from hoploom.serve.requests import most_picks
from hoploom.store import Store
from hoploom.store.row_cache import cached
from support import made_by
from support.batch_servers import listening, makers_of, without_graph
from support.batches import with_reference
from support.cases import CASES, HOOKS, NOT_SENT, Case
from support.device_loaders import loading
from support.graphs import in_parts, save_in_parts
from support.made_by import MadeBy
from support.servers import OneProcess
from support.shards import spread

FLEET = [[0, 1], [2, 3], [1, 2], [0, 1, 2, 3]]  # the parts of each server: some are replicas, one holds all


@dataclass
class Site:
    """What placements share: stores on disk, servers in one other process, and the device."""

    folder: Path
    device: torch.device
    process: Callable[[], OneProcess]  # for the servers
    closing: ExitStack = field(default_factory=ExitStack)  # until one test is done
    _served: dict[tuple[str, bool], list[str]] = field(default_factory=dict)

    def saved(self, case: Case, num_parts: int) -> Path:
        path = self.folder / f"{case.graph}-{num_parts}"
        if not path.exists():
            save_in_parts(case.store, path, num_parts)
        return path

    def servers(self, case: Case, *, budget: bool = False) -> list[str]:
        """With a budget, all that they can have on disk is there."""
        key = case.graph, budget
        if key not in self._served:
            path = self.saved(case, 4)
            memory = within(path, 0) if budget else None
            self._served[key] = self.process().serve(path, FLEET, together=True, store_memory=memory)
        return self._served[key]

    def connected(self, case: Case, *, budget: bool = False, **options: Any) -> Store:
        return self.closing.enter_context(hoploom.connect(self.servers(case, budget=budget), **options))

    def beside(self, case: Case, **options: Any) -> Store:
        return self.connected(case, path=self.saved(case, 4), parts=[0], **options)

    def beside_on_disk(self, case: Case, **options: Any) -> Store:
        """The same; of it and of what the servers have, all that can be is on disk."""
        return self.beside(case, budget=True, memory=within(self.saved(case, 4), 0), **options)

    def placed(self, store: Store, *, topology: bool = True) -> Store:
        device = str(self.device)
        return self.closing.enter_context(hoploom.place(store, topology=device if topology else None, features=device))


Placed = tuple[Store, dict[str, Any]]  # and what the loader is told
Make = Callable[[], Loader]


@dataclass(frozen=True)
class Placement:
    place: Callable[[Case, Site], Placed]
    made_by: MadeBy  # what its loaders must be made of
    batches: Callable[[Make], Iterable[Any]] = lambda make: make()
    only: Iterable[str] = tuple(CASES)  # the cases that it takes part in
    quick: Iterable[str] = tuple(CASES)  # of these, those that are not slow
    missing: dict[str, str] = field(default_factory=dict)  # cases that cannot be: what the error says


def restored(make: Make) -> Iterator[Any]:
    """Every batch by a loader that was restored from the one before it."""
    loader = make()
    for _ in range(len(loader)):
        yield next(iter(loader))
        state, loader = loader.state_dict(), make()
        loader.load_state_dict(state)


def ends(make: Make) -> Iterable[Any]:
    """The first batch and the last: kernels are slow in the interpreter."""
    loader = make()
    return loader.steps(range(0, len(loader), max(1, len(loader) - 1)))


def ends_again(make: Make) -> Iterable[Any]:
    """The same where the device has too little room at first."""

    def small() -> Loader:
        loader = make()
        sampling = loading(loader)._sampling
        assert isinstance(sampling, DeviceSampling)
        sampling.large = 3
        return loader

    return ends(small)


ENDS = (ends, ends_again)


def _hashed(case: Case, site: Site) -> Placed:
    site.closing.enter_context(patch.object(ops.NodeMap.__init__, "__defaults__", (0,)))
    return case.store, {}


def _cached(case: Case) -> Store:
    counts = {t.name: torch.arange(t.num_nodes) % 5 for t in case.store.schema.node_types}
    return cached(spread(case.store, 4, here=[1]), 0.3, counts)


def _placed_beside(case: Case, site: Site, *, cache: bool = False, **options: Any) -> Store:
    """Own parts and edges as the device takes them; all other rows come from real servers."""
    store = site.beside(case, **options)
    if cache:
        store = cached(store, 0.3, {t.name: torch.arange(t.num_nodes) % 5 for t in store.schema.node_types})
    return site.closing.enter_context(hoploom.place(store, "auto", "50%", device=site.device))


def _served(case: Case, site: Site) -> Placed:
    kinds = [case.store, spread(case.store, 3, {0}), spread(case.store, 3, {2}, whole_topology=True)]
    kinds = kinds[:1] if case.name == "degrees" else kinds  # the others cannot
    return without_graph(case.store, *map(makers_of, kinds))[0], {}


def _in_pieces(case: Case, site: Site) -> Placed:
    """Servers that may be short of memory count in-edges before they pick."""
    count = lambda graph, frontiers, draw, _: most_picks(graph, frontiers, draw, -1)  # noqa: E731
    site.closing.enter_context(patch("hoploom.serve.batch_service.most_picks", count))
    return without_graph(case.store)[0], {}


def _over_tcp(case: Case, site: Site, **options: Any) -> Store:
    site.closing.enter_context(patch("hoploom.serve.client.connect_unix", lambda *_: None))
    return site.connected(case, **options)


def _in_shared_memory(case: Case, site: Site) -> Store:
    """A server here; tensors of any size are shared, as many as one connection may."""
    for module in ("shared_memory", "wire"):
        site.closing.enter_context(patch(f"hoploom.serve.{module}.SHARED_FROM", 1))
    server = site.closing.enter_context(listening(site.saved(case, 3)))
    return site.closing.enter_context(hoploom.connect(server.address))


def _by_a_device(case: Case, site: Site, *parts: Sequence[int], **options: Any) -> Store:
    """A server here that has placed all parts on the device, or a server for each of the `parts`."""
    for name in ("_begin_hop", "begin_gather"):
        site.closing.enter_context(patch.object(PlacedShard, name, autospec=True, side_effect=vars(PlacedShard)[name]))
    own = BatchOptions(place=partial(placed_for_clients, str(site.device)), threads=2)
    servers = [listening(site.saved(case, 3), own, parts=some) for some in parts or (None,)]
    addresses = [site.closing.enter_context(server).address for server in servers]
    return site.closing.enter_context(hoploom.connect(addresses, **options))


def _remote(case: Case, *, rows_alone: bool = False) -> Store:
    return spread(case.store, 4, here=[1], whole_topology=rows_alone)


def within(path: Path, share: float) -> int:
    """A budget of a share of what a store takes beyond the positions of its lists."""
    parts = hoploom.open(path).parts
    begins = sum(lists.indptr.nbytes for part in parts for lists in part.lists)
    columns = [column.nbytes for part in parts for lists in part.lists for column in lists.columns]
    rows = [table.rows.nbytes for part in parts for table in part.tables.values()]
    return begins + 2 + int(share * (sum(columns) + sum(rows) - begins))


def _within(case: Case, site: Site, num_parts: int, share: float) -> Store:
    path = site.saved(case, num_parts)
    return hoploom.open(path, memory=within(path, share))


def _by_threads(case: Case, site: Site) -> Placed:
    """As where io_uring is forbidden."""
    store = _within(case, site, 2, 0.15)
    assert store.reads is not None
    store.reads.by_threads = True
    return store, THREADS


def _buffered(case: Case, site: Site) -> Placed:
    mounted = site.folder / "ramfs"
    mounted.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "ramfs", "ramfs", mounted], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a ramfs is not permitted here: {done.stderr.strip()}")
    site.closing.callback(subprocess.run, ["umount", "--lazy", mounted], check=True)
    path = Path(shutil.copytree(site.saved(case, 1), mounted / case.graph))
    assert not any(ops.DiskFile(str(file)).is_direct for file in path.rglob("*.npy"))
    return hoploom.open(path, memory=within(path, 0.15)), {"look_ahead": 2}


def _packed(case: Case, site: Site) -> Placed:
    """Two steps at a time: in a graph as small as this, the window would hold no more ids."""
    site.closing.enter_context(patch.object(LookAhead, "_steps_that_fit", lambda *_: 2))
    path = site.saved(case, 2)
    return hoploom.open(path, memory=within(path, 0.03), scratch=site.folder), THREADS


NO_DEGREES = {"degrees": "in-degrees of 'node' are not in reach"}
THREADS = {"num_workers": 2}
THREE = ("uniform", "blocks", "links, binary")
A_FEW = ("uniform", "node times", "blocks", "links, binary", "heterogeneous uniform")
ON_DEVICE = (*A_FEW, "edge times", "disjoint", "degrees", "induced", "blocks, edge fields", "heterogeneous HGT")
ONE_OF_EACH = (  # kind of sampling
    *("uniform", "all", "replace", "node times", "edge times", "disjoint", "induced", "blocks", "blocks, disjoint"),
    *("repeated seeds", "links, binary", "aggregated", "degrees", *HOOKS, "heterogeneous uniform"),
    *("heterogeneous blocks", "heterogeneous blocks, edge fields", "heterogeneous HGT"),
)

# In the quick suite every case meets threads, a restored loader, parts on disks, a budget, remote shards, a cache,
# look-ahead and servers once; what combines two of them, or is part of another row, meets one case of each kind.
PLACEMENTS: dict[str, Placement] = {
    "four threads": Placement(lambda case, site: (case.store, {"num_workers": 4}), made_by.this_process),
    "restored": Placement(lambda case, site: (case.store, {}), made_by.this_process, restored),
    "reference": Placement(
        lambda case, site: (with_reference(case.store), {}), made_by.this_process, quick=ONE_OF_EACH
    ),
    "hashed node map": Placement(_hashed, made_by.this_process, quick=ONE_OF_EACH),
    "parts on disk": Placement(lambda case, site: (hoploom.open(site.saved(case, 3)), THREADS), made_by.this_process),
    "budget, nothing fits": Placement(
        lambda case, site: (_within(case, site, 1, 0), {}), made_by.the_disk, quick=ONE_OF_EACH
    ),
    "budget, some edges fit": Placement(
        lambda case, site: (_within(case, site, 3, 0.15), {"look_ahead": 3, **THREADS}),
        made_by.the_disk,
        quick=ONE_OF_EACH,
    ),
    "budget, edges and some rows fit": Placement(
        lambda case, site: (_within(case, site, 2, 0.6), {"look_ahead": 2}), made_by.the_disk, restored
    ),
    "budget, threads read": Placement(_by_threads, made_by.the_disk, only=A_FEW),
    "budget, buffered": Placement(_buffered, made_by.the_disk, only=A_FEW),
    "budget, packed in scratch space": Placement(
        _packed, made_by.scratch_space, restored, quick=("uniform", "links, binary", "heterogeneous uniform")
    ),
    "remote parts": Placement(
        lambda case, site: (_remote(case), THREADS), made_by.remote_shards, quick=ONE_OF_EACH, missing=NO_DEGREES
    ),
    "remote rows": Placement(
        lambda case, site: (_remote(case, rows_alone=True), THREADS), made_by.remote_shards, quick=ONE_OF_EACH
    ),
    "cache": Placement(lambda case, site: (_cached(case), THREADS), made_by.a_cache, missing=NO_DEGREES),
    "look-ahead": Placement(
        lambda case, site: (_remote(case, rows_alone=True), {"look_ahead": 3, **THREADS}), made_by.look_ahead, restored
    ),
    "look-ahead over a cache": Placement(
        lambda case, site: (_cached(case), {"look_ahead": 2}),
        made_by.look_ahead_over_a_cache,
        quick=ONE_OF_EACH,
        missing=NO_DEGREES,
    ),
    "served batches": Placement(_served, made_by.servers, missing=NOT_SENT),
    "served batches, picked in pieces": Placement(_in_pieces, made_by.servers, quick=ONE_OF_EACH, missing=NOT_SENT),
    "servers": Placement(
        lambda case, site: (site.connected(case, made="here"), THREADS), made_by.look_ahead, missing=NO_DEGREES
    ),
    "servers, own part": Placement(
        lambda case, site: (site.beside(case, topology="parted", look_ahead=1), THREADS),
        made_by.this_process,
        quick=ONE_OF_EACH,
        missing=NO_DEGREES,
    ),
    "servers, own topology": Placement(
        lambda case, site: (site.beside(case, topology="local", look_ahead=3), THREADS),
        made_by.look_ahead,
        quick=ONE_OF_EACH,
    ),
    "servers and replicas make batches": Placement(
        lambda case, site: (site.connected(case), {}), made_by.servers, quick=ONE_OF_EACH, missing=NOT_SENT
    ),
    "servers, over TCP": Placement(
        lambda case, site: (_over_tcp(case, site, made="here"), THREADS),
        made_by.look_ahead,
        quick=A_FEW,
        missing=NO_DEGREES,
    ),
    "servers make batches in shared memory": Placement(
        lambda case, site: (_in_shared_memory(case, site), THREADS),
        made_by.servers,
        quick=ONE_OF_EACH,
        missing=NOT_SENT,
    ),
    "servers with a budget": Placement(
        lambda case, site: (site.connected(case, budget=True, made="here"), THREADS),
        made_by.look_ahead,
        quick=ONE_OF_EACH,
        missing=NO_DEGREES,
    ),
    "servers with a budget make batches": Placement(
        lambda case, site: (site.connected(case, budget=True), {}),
        made_by.servers,
        only=[name for name in CASES if name != "degrees"],  # lists of other parts that do not fit are not here
        quick=A_FEW,
        missing=NOT_SENT,
    ),
    "look-ahead over servers and a budget here": Placement(
        lambda case, site: (site.beside_on_disk(case, topology="local", look_ahead=3), THREADS),
        made_by.look_ahead_over_a_disk,
        restored,
        quick=ONE_OF_EACH,
    ),
    "a server's device makes batches": Placement(
        lambda case, site: (_by_a_device(case, site), {}),
        made_by.the_device_of_a_server,
        ends,
        only=[name for name in {**dict.fromkeys(ON_DEVICE), **dict.fromkeys(ONE_OF_EACH)} if name not in NOT_SENT],
        quick=ON_DEVICE,
    ),
    "a server's device, hops and rows": Placement(
        lambda case, site: (_by_a_device(case, site, made="here"), {}),
        made_by.hops_and_rows_of_a_device,
        ends,
        only=("uniform", "disjoint", "links, binary", "heterogeneous uniform"),
        quick=("links, binary", "heterogeneous uniform"),
    ),
    "devices of servers that have some parts each, hops and rows": Placement(
        lambda case, site: (_by_a_device(case, site, [0], [1, 2], made="here"), {}),
        made_by.hops_and_rows_of_a_device,
        ends,
        only=ONE_OF_EACH,
        quick=A_FEW,
        missing=NO_DEGREES,
    ),
    "device": Placement(lambda case, site: (site.placed(case.store), {}), made_by.the_device, ends, quick=ON_DEVICE),
    "device, sampled on the host": Placement(
        lambda case, site: (site.placed(case.store, topology=False), {}),
        made_by.the_device_from_host_samples,
        ends,
        quick=A_FEW,
    ),
    "device, threads": Placement(
        lambda case, site: (site.placed(case.store), {"num_workers": 3}),
        made_by.the_device,
        only=THREE,
        quick=["uniform"],
    ),
    "device, parts": Placement(
        lambda case, site: (site.placed(in_parts(case.store, 3)), {}), made_by.the_device, ends, only=THREE
    ),
    "device, restored": Placement(
        lambda case, site: (site.placed(case.store), THREADS), made_by.the_device, restored, only=THREE, quick=()
    ),
    "device, rows on servers": Placement(
        lambda case, site: (_placed_beside(case, site, topology="local", look_ahead=1), {}),
        made_by.the_device_and_servers,
        ends,
        quick=ON_DEVICE,
    ),
    "device, rows on servers, look-ahead": Placement(
        lambda case, site: (_placed_beside(case, site, topology="local", look_ahead=4), THREADS),
        made_by.the_device_and_servers,
        only=THREE,
        quick=["uniform"],
    ),
    "device, rows on servers and in a cache": Placement(
        lambda case, site: (_placed_beside(case, site, cache=True, topology="local"), THREADS),
        made_by.the_device_over_a_cache,
        ends,
        only=A_FEW,
        quick=THREE,
    ),
    "device, edges and rows on servers": Placement(
        lambda case, site: (_placed_beside(case, site, topology="parted", look_ahead=4), THREADS),
        made_by.the_device_with_rows_of_servers,
        ends,
        quick=A_FEW,
        missing=NO_DEGREES,
    ),
    "device, edges and rows on servers, restored": Placement(
        lambda case, site: (_placed_beside(case, site, cache=True, topology="parted", look_ahead=1), THREADS),
        made_by.the_device_with_rows_of_servers,
        restored,
        only=THREE,
        quick=(),
    ),
    "device, made again": Placement(
        lambda case, site: (site.placed(case.store), {}),
        made_by.the_device_again,
        ends_again,
        only=THREE,
        quick=["uniform"],
    ),
}
