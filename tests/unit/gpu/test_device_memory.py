"""The memory of batches that are made on the device: taken at once, bounded by what is alive, and then flat."""

import threading
from collections import deque
from typing import Any

import pytest
import torch
from support.device_loaders import loading, nodes, placed
from support.graphs import random_graph
from torch import Tensor

import hoploom
from hoploom.gpu import loading as stages
from hoploom.gpu.batch_memory import BatchMemory, PendingRead, Pool
from hoploom.store import Store


@pytest.fixture(scope="module")
def graph() -> Store:
    return hoploom.from_pyg(random_graph(30, 120, seed=1))


def test_memory_has_the_size_of_the_largest_so_far(device: torch.device) -> None:
    pool = Pool(device)
    bytes_held = []
    for rows in (100, 90, 110, 500, 480):
        memory = BatchMemory(pool)
        first, second = memory.empty((rows, 4), torch.float32), memory.empty((3,), torch.int64)
        assert first.shape == (rows, 4)
        assert first.is_contiguous()
        assert second.untyped_storage().nbytes() == 24 + 24 // 16
        bytes_held.append(first.untyped_storage().nbytes())
    assert bytes_held == [1700, 1700, 1870, 8500, 8500]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The bytes of the blocks that are taken, each time."""
    calls: list[list[int]] = []
    blocks = Pool.blocks

    def counted(self: Pool, sizes: Any, consumer: Any) -> deque[Tensor]:
        calls.append(list(sizes))
        return blocks(self, sizes, consumer)

    monkeypatch.setattr(Pool, "blocks", counted)
    return calls


def test_a_batch_takes_its_blocks_all_at_once(taken: list[list[int]], device: torch.device) -> None:
    pool = Pool(device)
    first = BatchMemory(pool)
    for size in (160, 0, 320):
        first.empty((size,), torch.uint8)
    assert taken == [[], [170], [340]]
    taken.clear()
    second = BatchMemory(pool)
    blocks = [second.empty((size,), torch.uint8).untyped_storage() for size in (170, 0, 400, 32)]
    assert taken == [[170, 0, 340], [425], [34]]  # what is larger than before, or new, by itself
    assert len({block.data_ptr() for block in blocks if block.nbytes()}) == 3  # each goes when its tensor goes
    assert {block.data_ptr() for block in blocks if block.nbytes()} == second.own


@pytest.mark.parametrize("num_workers", [0, 3])
def test_memory_for_all_batches_that_are_alive_at_once_is_there_after_the_first(
    graph: Store, num_workers: int, taken: list[list[int]], device: torch.device
) -> None:
    there = nodes(placed(graph, device), num_workers=num_workers, batch_size=2, input_nodes=torch.arange(12))
    assert len(list(there)) == 6
    pool, alive = loading(there).pool, there._pipeline.num_ahead + 2
    whole = [len(sizes) for sizes in taken if len(sizes) > 1]
    num_tensors = len(pool._sizes)
    assert num_tensors > 5
    (settled,) = [length for length in whole if length > num_tensors]
    if num_workers < 2:  # else some have begun with their own before the first is made
        assert settled == (alive - 1) * num_tensors


@pytest.mark.parametrize("num_workers", [0, 4])
def test_two_batches_are_sampled_at_once_however_many_threads_there_are(
    graph: Store, num_workers: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """No buffers come free until a thread is at the third batch: waiting for them, or making some."""
    made, third_is_up = [], threading.Event()
    make_buffers, wait = stages.make_buffers, PendingRead.wait

    def counted(*given: Any) -> Any:
        made.append(given)
        if len(made) == 3:
            third_is_up.set()
        return make_buffers(*given)

    class Noted(threading.BoundedSemaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            if super().acquire(blocking=False):
                return True
            third_is_up.set()
            return super().acquire(blocking, timeout)

    def held(reading: PendingRead) -> list[Any]:
        assert num_workers < 2 or third_is_up.wait(60)  # one thread makes them in turn
        return wait(reading)

    monkeypatch.setattr(stages, "make_buffers", counted)
    monkeypatch.setattr(threading, "BoundedSemaphore", Noted)
    monkeypatch.setattr(PendingRead, "wait", held)
    there = nodes(placed(graph, device), num_workers=num_workers, batch_size=2, input_nodes=torch.arange(16))
    assert len(list(there)) == 8
    assert len(made) == 2


def test_one_thread_at_a_time_enqueues_what_is_sampled(device: torch.device) -> None:
    """Who is inside stays until all others are there too, or at the door."""
    pool, inside, most = Pool(device), [0], [0]
    turn, door, come = pool._turn, threading.Condition(), set()

    def arrive() -> None:
        with door:
            come.add(threading.get_ident())
            door.notify_all()

    class Watched:
        def __enter__(self) -> None:
            arrive()
            turn.acquire()

        def __exit__(self, *error: object) -> None:
            turn.release()

    pool._turn = Watched()  # type: ignore[assignment]

    def work() -> None:
        with pool.side_stream():
            arrive()
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            with pool.side_stream(alone=False), door:
                assert door.wait_for(lambda: len(come) == 3, 60)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


SEGMENT = 2 << 20  # what torch asks the driver for, for small tensors


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_is_flat_over_10000_steps(num_workers: int, device: torch.device) -> None:
    """With threads, in which order blocks are cut out of a segment is chance, and may cost one more of them."""
    store = placed(hoploom.from_pyg(random_graph(20_000, 200_000, seed=1)), device)
    loader = nodes(store, num_neighbors=[5, 5], batch_size=256, num_workers=num_workers)
    weight = torch.randn(5, 64, device=device)
    reserved = 0
    step = 0
    while step < 10_000:
        for batch in loader:
            (batch.x @ weight).relu().sum()
            step += 1
            if step == 100:
                reserved = torch.cuda.memory_reserved(device)
    assert torch.cuda.memory_reserved(device) <= reserved + (SEGMENT if num_workers > 1 else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_pool_has_memory_for_all_batches_after_the_first(num_workers: int, device: torch.device) -> None:
    store = placed(hoploom.from_pyg(random_graph(20_000, 200_000, seed=1)), device)
    loader = nodes(store, num_neighbors=[5, 5], batch_size=256, num_workers=num_workers)
    made = iter(loader)
    held = [next(made)]
    torch.cuda.synchronize()
    pool = loading(loader).pool
    rooms, alive = sum(pool._sizes), loader._pipeline.num_ahead + 2
    assert sum(segment["total_size"] for segment in pool._blocks.snapshot()) >= alive * rooms
    held.append(next(made))
    made.close()  # type: ignore[attr-defined]
    assert pool._stream.query()
    del held


def test_no_kernel_reads_a_closed_store(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(stages, "sample_on_device", lambda *arguments: started.append(arguments))
    store = hoploom.place(hoploom.from_pyg(random_graph(40, 160, 3)), device, device)
    loader = hoploom.NeighborLoader(store, [3, 2], torch.arange(8), batch_size=4)
    store.close()
    with pytest.raises(hoploom.ConfigError, match="closed"):
        next(iter(loader))
    assert not started
