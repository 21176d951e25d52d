"""A placed store's loader makes the host's batches, on the device, with one word to the host for each.

Their memory is taken at once, bounded by what is alive, and then flat.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.batches import assert_same, assert_same_batches, contents, on_host, same_value
from support.device_loaders import loading, nodes, placed
from support.graphs import library, random_graph, ring
from support.placements import within
from support.shards import spread
from support.waiting import NoWaiting
from torch import Tensor
from torch_geometric.data import Data

import hoploom
from hoploom import BatchError, ConfigError
from hoploom.gpu import loading as stages
from hoploom.gpu.batch_memory import BatchMemory, Pool, map_tensors
from hoploom.gpu.loading import DeviceLoading, DeviceSampling
from hoploom.load.assemble import is_there
from hoploom.load.loader import Loader
from hoploom.load.order import StepShare
from hoploom.load.pipeline import Workers
from hoploom.ops.deadline import HostCopy
from hoploom.store import Store


def ends(loader: Loader) -> Iterator[Any]:
    """The first batch and the last."""
    return loader.steps(range(0, len(loader), max(1, len(loader) - 1)))


def test_all_of_a_batch_is_on_the_device_and_its_room_was_enough(graph: Store, device: torch.device) -> None:
    there = nodes(placed(graph, device), mode="blocks")
    assert all(tensor.device.type == device.type for batch in ends(there) for tensor in _tensors(batch))
    assert loading(there)._sampling.num_redone == 0  # type: ignore[union-attr]


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(contents(batch), lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def test_epochs_and_single_batches_are_the_hosts(graph: Store, device: torch.device) -> None:
    host, there = nodes(graph), nodes(placed(graph, device))
    for loader in (host, there):
        loader.set_epoch(3)
    assert_same(host([4, 1, 1]), on_host(there([4, 1, 1])))
    assert_same(next(iter(host)), on_host(next(iter(there))))


def test_batches_made_on_the_device_have_the_learned_rows_as_they_are_now(device: torch.device) -> None:
    """The same as those of the host, step after step, alone and added to features that are placed."""
    sides = []
    for store in (hoploom.from_pyg(library()), placed(hoploom.from_pyg(library()), device)):
        venues = hoploom.Embedding(store, "venue", dim=5, lr=0.5)
        papers = hoploom.Embedding(venues.store, "paper", dim=4, lr=0.5, join="add")
        sides.append((venues, papers, nodes(papers.store, input_nodes="paper", batch_size=3)))
    first = sides[0][0].rows.clone()
    (venues, papers, host), (*others, there) = sides
    for batch, other in zip(host, there, strict=True):
        assert_same(batch, on_host(other))
        assert torch.equal(batch["venue"].x, venues.rows[batch["venue"].n_id])
        for made, learned in ((batch, (venues, papers)), (other, others)):
            (made["venue"].x.square().sum() + made["paper"].x.sin().sum()).backward()
            for each in learned:
                each.step()
    assert all(torch.equal(each.rows, other.rows.cpu()) for each, other in zip((venues, papers), others, strict=True))
    assert not torch.equal(venues.rows, first)


def test_rows_of_other_processes_come_without_look_ahead(device: torch.device) -> None:
    whole = hoploom.from_pyg(ring(40))
    store = hoploom.place(spread(whole, 4, here=[0], whole_topology=True), topology=str(device))
    assert_same_batches(ends(nodes(whole)), map(on_host, ends(nodes(store))))
    with pytest.raises(ConfigError, match="look_ahead is set, but features are not placed; give place features="):
        nodes(store, look_ahead=3)


def test_a_store_with_a_memory_budget_that_is_placed_has_no_rows_to_look_ahead_for(
    device: torch.device, tmp_path: Path
) -> None:
    hoploom.from_pyg(ring(40)).save(tmp_path / "store")
    with placed(hoploom.open(tmp_path / "store", memory=within(tmp_path / "store", 0.15)), device) as store:
        assert_same_batches(ends(nodes(hoploom.from_pyg(ring(40)))), map(on_host, ends(nodes(store, look_ahead=2))))


def test_a_batch_made_at_once_waits_for_buffers_until_its_deadline(graph: Store, device: torch.device) -> None:
    there = loading(nodes(placed(graph, device), timeout=1))
    while there._idle.acquire(blocking=False):
        pass
    there.pool.deadline = 0.01
    with pytest.raises(TimeoutError, match=r"no buffers to sample in were free within 0\.01 s"):
        there.make(nodes(graph).rehearsal().step(0))


def test_batches_go_to_the_host_where_that_is_asked_for() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda:1")
    assert is_there(None, cuda)
    assert is_there(cuda, cuda)
    assert is_there(cpu, cpu)
    assert not is_there(cpu, cuda)
    assert not is_there(torch.device("cuda:0"), cuda)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_too_little_room_is_learned_and_changes_nothing(graph: Store, num_workers: int, device: torch.device) -> None:
    there = nodes(placed(graph, device), num_workers=num_workers)
    sampling = loading(there)._sampling
    assert isinstance(sampling, DeviceSampling)
    sampling.large = 3
    assert_same_batches(ends(nodes(graph)), map(on_host, ends(there)))
    redone = sampling.num_redone
    assert redone > 0
    assert len(list(ends(there))) == 2
    assert sampling.num_redone == redone  # what was learned is kept


def test_a_batch_is_read_about_once(graph: Store, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its sizes are read nothing waits for the device, and they are read in one go."""
    reads: list[int] = []
    wait = HostCopy.wait

    def counted(reading: HostCopy, *given: Any) -> Tensor:
        reads.append(reading.host.numel())
        return wait(reading, *given)

    there, begun = loading(nodes(placed(graph, device))), []
    monkeypatch.setattr(HostCopy, "wait", counted)
    for step in range(3):
        share = StepShare(torch.arange(7 * step, 7 * step + 7), 0, step)
        with NoWaiting():  # type: ignore[no-untyped-call]
            begun.append(there._sampling.begin(share))
    assert reads == []
    for one in begun:
        there._sampling.finish(one, BatchMemory(there.pool))
    assert len(reads) == 3


def pool_of(device: torch.device) -> Pool:
    """As a placed store has it: its device has a number."""
    return Pool(torch.empty(0, device=device).device)


def test_staged_values_come_out_as_they_went_in(device: torch.device) -> None:
    pool = pool_of(device)
    value = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "columns": [torch.arange(6).view(2, 3).t(), 7, None, torch.tensor(9)],
    }
    staged = pool.stage(value)
    there = staged.over(BatchMemory(pool).copy(staged.block))
    assert same_value(map_tensors(there, Tensor.cpu), value)


def test_memory_that_others_have_cached_is_given_back_before_it_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a private pool torch does not do so."""
    pool, left, within, said = Pool(torch.device("cpu")), [1], [False], list[str]()
    empty = torch.empty

    @contextmanager
    def use_mem_pool(*given: Any) -> Iterator[None]:
        within[0] = True
        try:
            yield
        finally:
            within[0] = False

    def short(*given: Any, **options: Any) -> Tensor:
        assert within[0]
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*given, **options)

    monkeypatch.setattr(torch, "empty", short)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append(f"within: {within[0]}"))
    pool.is_cuda, pool._stream, pool._blocks = True, Mock(), Mock()
    assert ([block.numel() for block in pool.blocks([3, 5], Mock())], said) == ([3, 5], ["within: False"])
    left[0] = 2
    with pytest.raises(torch.OutOfMemoryError):
        pool.blocks([3, 5], Mock())
    assert len(said) == 2


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_transform_runs_on_the_device_and_its_errors_name_the_step(
    graph: Store, num_workers: int, device: torch.device
) -> None:
    seen = []

    def transform(batch: Data) -> Any:
        if 14 in batch.input_id.tolist():
            raise ValueError("fourteen")
        seen.append(batch.x.device.type)
        return {"sum": batch.x.sum(), "ids": batch.n_id}

    loader = nodes(placed(graph, device), transform=transform, shuffle=False, num_workers=num_workers)
    made = iter(loader)
    first = next(made)
    assert set(first["ids"].tolist()) >= set(range(7))
    next(made)
    with pytest.raises(BatchError, match=r"step 2 of epoch 0 on rank 0 failed: ValueError: fourteen"):
        next(made)
    assert set(seen) == {device.type}
    assert not _threads()


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hoploom")]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_is_left_waits_for_what_the_device_still_writes(
    graph: Store, num_workers: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Memory that is given back may be unmapped; no thread may add to it after that."""
    drained: list[list[str]] = []
    close = Pool.close

    def seen(self: Pool) -> None:
        drained.append(_threads())
        close(self)

    monkeypatch.setattr(Pool, "close", seen)
    made = iter(nodes(placed(graph, device), num_workers=num_workers))
    next(made)
    assert drained == []
    del made
    assert drained == [[]]


def test_a_step_that_a_busy_device_holds_up_may_be_the_devices_fault(
    graph: Store, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    assembled, go_on = DeviceLoading.assembled, threading.Event()

    def late(there: DeviceLoading, *given: Any) -> Any:
        assert go_on.wait(60)
        return assembled(there, *given)

    monkeypatch.setattr(DeviceLoading, "assembled", late)
    made, close = iter(nodes(placed(graph, device), num_workers=1, timeout=0.02)), Workers.close

    def let_go(workers: Workers[Any]) -> None:
        go_on.set()
        close(workers)

    monkeypatch.setattr(Workers, "close", let_go)
    said = "step 0 was not made within 0.02 s; make the transform faster, see what else keeps the device busy "
    with pytest.raises(BatchError, match=said + r"\(nvidia-smi\), or raise timeout"):
        next(made)


def test_a_damaged_list_names_the_step(device: torch.device) -> None:
    store = placed(hoploom.from_pyg(ring(12)), device)
    assert store.placed is not None
    assert store.placed.lists is not None
    store.placed.lists[0].indptr[6] = 2**40
    with pytest.raises(BatchError, match=r"step 0 .* indptr is damaged; run hoploom check"):
        list(nodes(store, shuffle=False))


@pytest.mark.gpu
def test_the_consumer_never_reads_a_batch_before_or_after_its_time(device: torch.device) -> None:
    """Nodes and rows say the same, however late the consumer's stream is."""
    store = placed(hoploom.from_pyg(ring(50_000)), device)
    loader = nodes(store, num_neighbors=[2, 2, 2], batch_size=2048, num_workers=2)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(20):
        for batch in loader:
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            wrong += (batch.x[:, 0].long() != batch.n_id).sum()
            wrong += (batch.y != batch.n_id).sum()
    assert int(wrong) == 0


def test_memory_has_the_size_of_the_largest_so_far(device: torch.device) -> None:
    pool, bytes_held = pool_of(device), []
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
    pool = pool_of(device)
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


def test_a_batch_that_waits_for_rows_has_no_blocks_for_them(taken: list[list[int]], device: torch.device) -> None:
    pool = pool_of(device)
    for _ in range(2):
        memory = BatchMemory(pool)
        kept = memory.empty((16,), torch.uint8)
        memory.drop_unused()
        rows = [memory.empty((size,), torch.uint8) for size in (160, 320)]
    assert taken[-2:] == [[17, 170, 340], [170, 340]]
    assert {block.untyped_storage().data_ptr() for block in (kept, *rows)} == memory.own


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
    make_buffers, wait = stages.make_buffers, HostCopy.wait

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

    def held(reading: HostCopy, *given: Any) -> Tensor:
        assert num_workers < 2 or third_is_up.wait(60)  # one thread makes them in turn
        return wait(reading, *given)

    store = placed(graph, device)
    monkeypatch.setattr(stages, "make_buffers", counted)
    monkeypatch.setattr(threading, "BoundedSemaphore", Noted)
    monkeypatch.setattr(HostCopy, "wait", held)
    there = nodes(store, num_workers=num_workers, batch_size=2, input_nodes=torch.arange(16))
    assert (len(list(there)), len(made)) == (8, 2)


def test_one_thread_at_a_time_enqueues_what_is_sampled(device: torch.device) -> None:
    """Who is inside stays until all others are there too, or at the door."""
    pool, inside, most = pool_of(device), [0], [0]
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


def test_no_kernel_reads_a_closed_store(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(stages, "sample_on_device", lambda *arguments: started.append(arguments))
    store = hoploom.place(hoploom.from_pyg(random_graph(40, 160, 3)), device, device)
    loader = hoploom.NeighborLoader(store, [3, 2], torch.arange(8), batch_size=4)
    store.close()
    with pytest.raises(hoploom.ConfigError, match="closed"):
        next(iter(loader))
    assert not started
