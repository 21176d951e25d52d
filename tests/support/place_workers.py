"""What processes of the tests of placements run: ranks that share host memory, and a killed writer."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hoploom
from hoploom import ConfigError, Store
from hoploom.gpu import host_memory as hostmemory
from hoploom.gpu.host_memory import HostMemory
from hoploom.gpu.placed_store import PlacedStore
from hoploom.ranks.context import Context
from hoploom.schema import TypeKey
from hoploom.store import Wanted
from support.graphs import num_rows
from support.sparse_stores import mapped_kilobytes
from support.stores import bits, fields_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder in shared memory, which alone can be pinned."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hoploom-test-") as folder:
        yield Path(folder)


def together(context: Context, folder: str, path: str) -> None:
    """What takes two ranks; to start them is what takes long."""
    for scene in (share_host_memory, choose_alike, share_a_device):
        context.barrier()
        scene(context, folder, path)
        context.barrier()
        assert os.listdir(folder) == [], scene


def placed_of(store: Store) -> PlacedStore:
    assert store.placed is not None
    return store.placed


def placed_rows(store: Store, owner: TypeKey, field: str, ids: Tensor) -> Tensor:
    device = placed_of(store).device
    faults = torch.zeros(1, dtype=torch.int64, device=device)
    (rows,) = placed_of(store).gather([Wanted(owner, field, ids.to(device))], faults)
    assert (rows.device, faults.item()) == (device, 0)
    return rows.cpu()


def assert_all_rows(store: Store) -> None:
    """Every row of every field is the host's, in a mixed order, with repeats."""
    for owner, field in fields_of(store.schema):
        count = num_rows(store.schema, owner)
        ids = torch.cat([torch.arange(count).flip(0), torch.randint(max(1, count), (count,))])
        (rows,) = store.features.gather([Wanted(owner, field, ids)])
        placed = placed_rows(store, owner, field, ids)
        assert (placed.dtype, placed.shape) == (rows.dtype, rows.shape)
        assert torch.equal(bits(placed), bits(rows)), (owner, field)


def share_host_memory(context: Context, folder: str, path: str) -> None:
    """Both ranks place the same store in host memory: one set of files, and no page of them is one rank's alone."""
    hostmemory.FOLDER = Path(folder)
    with hoploom.place(hoploom.open(path, context=context), "host", "host", device=DEVICE, among=context) as store:
        assert_all_rows(store)
        context.barrier()
        sizes = context.gather(torch.tensor([len(os.listdir(folder)), mapped_kilobytes(folder)["Size"]]))
        assert sizes[0].tolist() == sizes[1].tolist()
        assert sizes[0][0] == 3 + len(fields_of(store.schema))  # the relation's three columns, and every field
        assert context.max(mapped_kilobytes(folder)["Rss"]) > 0
        _read_all(store)
        context.barrier()
        assert mapped_kilobytes(folder)["Private_Clean"] + mapped_kilobytes(folder)["Private_Dirty"] <= _headers(folder)
        context.barrier()


def _read_all(store: Store) -> None:
    for lists in placed_of(store).lists:
        assert int(lists.indptr[-1]) == lists.indices.numel()
        assert int(lists.indices.min()) >= 0
        assert int(lists.indptr.min()) == 0


def _headers(folder: str) -> int:
    """Pages with marks, and those that padding alone lies in: nobody reads them."""
    return 2 * hostmemory.HEADER // 1024 * len(os.listdir(folder))


def choose_alike(context: Context, folder: str, path: str) -> None:
    """ "auto" goes by the rank with the least free memory."""
    from hoploom.gpu import place_plan

    hostmemory.FOLDER = Path(folder)
    free = (2 << 30) + (8192 if context.rank == 1 else 1 << 30)
    place_plan.free_memory = lambda device: free  # type: ignore[assignment]
    device_key = place_plan.device_key
    place_plan.device_key = lambda device: f"GPU {context.rank}"  # type: ignore[assignment]
    with hoploom.place(hoploom.open(path, context=context), features="auto", device=DEVICE, among=context) as store:
        shares = context.gather(torch.tensor([placement.share for placement in placed_of(store).report]))
        assert shares[0].tolist() == shares[1].tolist()
        assert 0 < shares[0].max() < 1
        assert "of 2 ranks" not in str(store.placed)
    place_plan.device_key = device_key


def share_a_device(context: Context, folder: str, path: str) -> None:
    """Both ranks are on one device: each takes a half of what is free there, and none takes more than that."""
    from hoploom.gpu import place_plan

    hostmemory.FOLDER = Path(folder)
    store = hoploom.open(path, context=context)
    with hoploom.place(store, features=DEVICE, among=context) as alone:
        whole = sum(placement.device_bytes for placement in placed_of(alone).report)
    for extra, share in ((whole // 2, 0.5), (whole, 1.0)):
        free = 2 * ((2 << 30) + extra)
        place_plan.free_memory = lambda device, free=free: free  # type: ignore[assignment,misc]
        with hoploom.place(store, features="auto", device=DEVICE, among=context) as placed:
            shares = [placement.share for placement in placed_of(placed).report]
            assert shares == pytest.approx([share] * len(shares), abs=0.02)
            last = str(placed.placed).splitlines()[-1]
            assert last == (
                f"auto: {placed_of(placed).device} had 2.15 GB free for each of 2 ranks, of which 2.15 GB are left to "
                "training"
            )
    place_plan.free_memory = lambda device: 2 * whole - 2  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=" free for each of 2 ranks; give features='auto'"):
        hoploom.place(store, features=DEVICE, among=context)


def die(folder: str, whole: str, half: str) -> None:
    """All bytes of a file and half of another's are written, then the process is killed."""
    hostmemory.FOLDER = Path(folder)
    memory = HostMemory(whole, 1000, lambda raw: raw.fill_(5))
    assert memory.bytes.tolist() == [5] * 1000

    def fill(raw: Tensor) -> None:
        raw[: raw.numel() // 2] = 1
        os.kill(os.getpid(), signal.SIGKILL)

    HostMemory(half, 1000, fill)


if __name__ == "__main__":
    die(*sys.argv[1:])
