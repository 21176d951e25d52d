"""What the ranks of the exchange tests do: spawned processes import it."""

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hoploom
from hoploom import ConfigError, PeerError, StoreError
from hoploom.load.loader import Loader
from hoploom.ranks.context import Context
from hoploom.ranks.rank_part import HeldParts, RankPart
from hoploom.store import Store
from support.batches import assert_same, assert_same_batches
from support.cluster_workers import loader
from support.until import until

OPTIONS: dict[str, Any] = {"exchange": "collective", "look_ahead": 2}


def loop_in_many_ways(context: Context, path: str, topology: str) -> None:
    """Each rank compares its batches with those of the whole graph."""
    store = hoploom.open(path, context=context, topology=topology, **OPTIONS)
    assert [len(homes) for homes in store.deployment.homes] == [2, 1, 1]
    whole = hoploom.open(path)
    assert torch.equal(store.split("train"), whole.split("train"))
    two_epochs(context, store, whole)
    leave_early(context, store, whole)
    resume_inside(context, store, whole)
    two_at_once(context, store, whole)
    unevenly(context, store, whole)
    while_torch_waits(context, store)
    assert store.traffic()["bytes_received"] > 0
    store.close()
    with pytest.raises(ConfigError, match="the store is closed, so other ranks cannot be asked"):
        store.features.gather([("node", "x", torch.arange(60))])
    leave_nothing_open(context, path)


def leave_nothing_open(context: Context, path: str) -> None:
    """Descriptors of stores that are closed. Gloo closes its own a moment later."""

    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def open_and_close(times: int) -> None:
        for _ in range(times):
            with hoploom.open(path, context=context, **OPTIONS) as store:
                store.features.gather([("node", "x", torch.arange(60))])
            store.deployment.exchange._thread.join(10)  # type: ignore[attr-defined]

    def is_settled() -> bool:
        counts.append(num_open())
        return len(counts) >= 25 and len(set(counts[-25:])) == 1

    open_and_close(2)
    counts: list[int] = []
    until(is_settled, "a count that stays the same")
    open_and_close(8)
    until(lambda: num_open() <= counts[-1], "descriptors that are closed", 10)


def _both(context: Context, store: Store, whole: Store, **options: Any) -> tuple[Loader, Loader]:
    ranks = context.rank, context.world_size
    return loader(store, *ranks, num_workers=context.rank, **options), loader(whole, *ranks, **options)


def two_epochs(context: Context, store: Store, whole: Store) -> None:
    ours, theirs = _both(context, store, whole)
    for _ in range(2):
        assert_same_batches(ours, theirs)


def leave_early(context: Context, store: Store, whole: Store) -> None:
    """One rank goes on with the next epoch while the others finish this one; then they all meet again."""
    ours, theirs = _both(context, store, whole)
    if context.rank == 1:
        assert_same(next(iter(ours)), next(iter(theirs)))
    else:
        assert_same_batches(ours, theirs)
    for one in (ours, theirs):
        one.set_epoch(5)
    assert_same_batches(ours, theirs)


def resume_inside(context: Context, store: Store, whole: Store) -> None:
    ours, theirs = _both(context, store, whole)
    expected = list(theirs)
    next(iter(ours))
    again, _ = _both(context, store, whole)
    again.load_state_dict(ours.state_dict())
    assert_same_batches(again, expected[1:])


def two_at_once(context: Context, store: Store, whole: Store) -> None:
    """Two loaders are read in turn; one rank reads the first one to its end before it goes on with the second."""
    loops = []
    for ours, theirs in (_both(context, store, whole, seed=seed) for seed in (1, 2)):
        loops.append((iter(ours), list(theirs)))
        assert_same(next(loops[-1][0]), loops[-1][1].pop(0))
    steps = [(loop, expected) for loop, left in loops for expected in left]
    if context.rank != 1:
        steps = [
            one for pair in zip(*([(loop, one) for one in left] for loop, left in loops), strict=True) for one in pair
        ]
    for loop, expected in steps:
        assert_same(next(loop), expected)


def unevenly(context: Context, store: Store, whole: Store) -> None:
    """Ranks that read far more than others, and one that reads nothing at all."""
    rank = context.rank
    if rank:
        given: dict[str, Any] = {"num_neighbors": [3, 2], "batch_size": 8, "rank": 0, "world_size": 1}
        ours, theirs = (hoploom.NeighborLoader(one, **given) for one in (store, whole))
        steps = range(0, len(ours), 3 - rank)
        assert_same_batches(ours.steps(steps, dealt=False), theirs.steps(steps, dealt=False))
    if rank == 2:
        in_many_messages(store, whole)
    context.barrier()


def in_many_messages(store: Store, whole: Store) -> None:
    """Nine rows are in each message, and those that are left in the last one of a part."""
    wanted = [("node", "x", torch.arange(60).repeat(100))]
    counts = [places.numel() for places in store.features.route("node", wanted[0][2])]  # type: ignore[attr-defined]
    num_messages = sum(-(-counts[number] // 9) for number, shard in enumerate(store.shards) if shard.is_remote)
    remote = [getattr(shard, "shard", shard) for shard in store.shards if shard.is_remote]
    asked = store.traffic()["requests"]
    with ExitStack() as patched:
        for part in remote:
            assert isinstance(part, RankPart)
            most = 9 * store.schema.node_type("node").fields["x"].row_bytes
            patched.enter_context(mock.patch.object(part, "_most", most))
        (rows,) = store.features.gather(wanted)
    assert store.traffic()["requests"] - asked == num_messages
    (expected,) = whole.features.gather(wanted)
    assert torch.equal(rows, expected)


def while_torch_waits(context: Context, store: Store) -> None:
    """Rank 0 waits where ranks met, as torch does to make a communicator, for ranks that first need its rows."""
    met, over = dist.distributed_c10d._get_default_store(), threading.Event()

    def read() -> None:
        store.features.gather([("node", "x", torch.arange(60))])

    def read_on() -> None:
        while not over.is_set():
            read()

    if context.rank == 0:
        with ThreadPoolExecutor(3) as reading:
            reads = [reading.submit(read_on) for _ in range(3)]
            try:
                met.wait(["rows have come"], timedelta(seconds=20))
            finally:
                over.set()
        assert all(one.result() is None for one in reads)
    else:
        for _ in range(30):
            read()
        met.set("rows have come", "")
    context.barrier()


# --- what cannot work, and what fails ------------------------------------------------------------


def refuse_what_differs(context: Context, path: str, other: str) -> None:
    """One call after the other; the ranks go on after each error."""
    rank = context.rank
    with pytest.raises(
        ConfigError, match=r"no rank holds part 1 of .*, they hold \[\[0\], \[0\]\]; give parts= on each"
    ):
        hoploom.open(path, context=context, exchange="collective", parts=[0])
    with pytest.raises(ConfigError, match=rf"rank {1 - rank} opened another store \(\w+\) than this rank"):
        hoploom.open((path, other)[rank], context=context, exchange="collective")
    with pytest.raises(ConfigError, match="parts is empty, so there is nothing to open; give some of the 2 parts"):
        hoploom.open(path, context=context, exchange="collective", parts=[])
    store = hoploom.open(path, context=context, exchange="collective", parts=[rank])
    damaged = Path(path, "part-00001/nodes/node/x.npy")
    if rank == 0:
        os.truncate(damaged, 0)
        with pytest.raises(StoreError, match=r"rank 1: .*x.npy"):
            store.features.gather([("node", "x", torch.arange(60))])
    context.barrier()
    assert store.features.gather([("node", "node_time", torch.arange(60))])[0].numel() == 60  # the ranks still talk


def lose_a_rank(context: Context, path: str, folder: str, how: str) -> None:
    """Rank 1 is lost when it is asked; what the others learn goes to files."""

    def lost(held: HeldParts, inquiry: Tensor) -> Any:
        Path(folder, "lost").write_text(str(os.getpid()))
        os.kill(os.getpid(), getattr(signal, f"SIG{how}"))
        raise AssertionError("it is still there")

    if context.rank == 1:
        HeldParts.answer = lost  # type: ignore[method-assign]
    store = hoploom.open(path, context=context, topology="parted", **OPTIONS)
    _told_of_the_loss(context, store, folder)


def _told_of_the_loss(context: Context, store: Store, folder: str) -> None:
    began = time.monotonic()
    try:
        for _ in range(1000):
            list(loader(store, context.rank, context.world_size, num_workers=1))
    except PeerError as error:
        Path(folder, f"{context.rank}").write_text(f"{time.monotonic() - began:.1f} {error}")
        raise


def leave_with_an_error(context: Context, path: str, folder: str) -> None:
    """Rank 1 leaves its loop with an error of its own, while the others go on."""
    with hoploom.open(path, context=context, **OPTIONS) as store:
        if context.rank == 1:
            next(iter(loader(store, context.rank, context.world_size, num_workers=1)))
            raise KeyError("rank one's own")
        _told_of_the_loss(context, store, folder)


def _read_on(store: Store) -> None:
    for _ in range(100000):
        store.features.gather([("node", "x", torch.arange(60))])


def leave_a_store_and_go_on(context: Context, path: str, folder: str) -> None:
    """Rank 1 leaves its store by an error that it catches. All go on without the store, until rank 2 is killed."""
    with suppress(KeyError), hoploom.open(path, context=context, **OPTIONS) as store:
        store.features.gather([("node", "x", torch.arange(60))])
        context.barrier()
        if context.rank == 1:
            raise KeyError("rank one's own")
        with pytest.raises(PeerError, match=r"exchanging rows with the other ranks, and rank 1 closed its store \("):
            _read_on(store)
    assert context.sum(1) == 3
    if context.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as raised:
        context.sum(1)
    Path(folder, f"{context.rank}").write_text(str(raised.value))


def linger(context: Context, path: str) -> None:
    """Rank 0 closes its stores at once; rank 1 needs its rows after that. They close their stores in another order."""
    stores = [hoploom.open(path, context=context, exchange="collective") for _ in range(2)]
    met = dist.distributed_c10d._get_default_store()
    if context.rank == 1:
        met.wait(["rank 0 has closed"], timedelta(seconds=30))
        for store in stores:
            assert_same_batches(loader(store, 0, 1), loader(hoploom.open(path), 0, 1))
    for store in stores[:: 1 - 2 * context.rank]:
        store.close()
    if context.rank == 0:
        met.set("rank 0 has closed", "")


def close_against_a_sum(context: Context, path: str, folder: str) -> None:
    """Each waits for the other. Rank 0 has left then, however its closing ended."""
    hoploom.open(path, context=context, exchange="collective")
    with pytest.raises(ConfigError) as raised:
        (context.close if context.is_main else lambda: context.sum(1))()
    if context.rank == 1:
        with pytest.raises(PeerError, match="rank 0 ended with ConfigError: rank 0 was closing its store"):
            context.sum(1)
    Path(folder, f"{context.rank}").write_text(str(raised.value))
