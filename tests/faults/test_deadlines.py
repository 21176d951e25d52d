"""Nothing waits for a device for ever: who waited says for what, for which step, how long, and what to do."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.device_loaders import loading, nodes, placed
from support.whole_steps import epoch_of, homogeneous_learner

import hoploom
from hoploom import BatchError, StoreError, TrainError
from hoploom.gpu import place_plan
from hoploom.gpu.batch_memory import Pool
from hoploom.gpu.cuda_graph import WorkStream
from hoploom.gpu.placed_store import Lease
from hoploom.gpu.whole_steps import WholeStep
from hoploom.ops import deadline
from hoploom.ops.deadline import HostCopy, idle, reached
from hoploom.ranks.context import Context, init
from hoploom.store import Store
from hoploom.system import StopRequests
from hoploom.train.step import Stepper, Training

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHORT = 0.02  # seconds
BUSY = r"see what else keeps it busy \(nvidia-smi\)"


class Hung:
    """An event that is never reached, and a stream that never gets there."""

    def query(self) -> bool:
        return False

    def record(self, stream: Any) -> None:
        pass

    def record_event(self) -> "Hung":
        return self

    def wait_event(self, event: Any) -> None:
        pass


class Clock:
    """Time that goes on by pauses and a microsecond by every query; an event that is reached at some moment."""

    def __init__(self, moment: float) -> None:
        self.now, self.moment, self.queries = 0.0, moment, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def query(self) -> bool:
        self.queries += 1
        self.now += 1e-6
        return self.now >= self.moment


@pytest.mark.parametrize(
    ("moment", "late", "queries"),
    [
        (0.0, 0.0, 1),
        (1.5e-5, 0.0, 15),
        (0.0035, 5e-5, 20 + 69),
        (0.1, 0.001, 20 + 98 + 302),  # pauses of a hundredth from 5 ms on: ln(20) / ln(1.01) of them
        (100.0, 0.02, 20 + 98 + 603 + 4900),  # up to 2 s, then pauses of the longest
    ],
)
def test_a_wait_is_little_longer_than_it_must_be_and_asks_seldom(
    moment: float, late: float, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(moment)
    monkeypatch.setattr(deadline, "time", clock)
    assert reached(clock, 600)
    assert clock.now <= moment + late + 2e-6
    assert clock.queries <= queries + 2


def test_a_wait_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr(deadline, "time", clock)
    assert not reached(clock, 7)
    assert clock.now == pytest.approx(7, abs=2e-6)
    assert not reached(clock, 0)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until this is set, no device ever has nothing left to do."""
    released = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: released.wait(60))
    yield released
    released.set()
    for thread in threading.enumerate():
        if thread.name == "hoploom-idle":
            thread.join(60)


def test_a_device_that_is_never_done_is_left(release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    assert idle(CPU, 0)
    assert not idle(CUDA, SHORT)
    release.set()
    assert idle(CUDA, 60)

    def fail(device: Any) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        idle(CUDA, 60)


def test_a_device_is_waited_for_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Python 3.12 once the interpreter ends."""
    waited: list[Any] = []

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert idle(CUDA, 60)
    assert waited == [CUDA]


@pytest.mark.parametrize("num_workers", [0, 1])  # steps are begun in order
def test_a_loader_names_the_step_whose_sizes_never_come(
    graph: Store, num_workers: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    loader = nodes(placed(graph, device), num_workers=num_workers, timeout=7)
    first, begun = next(iter(loader)), []
    loader.set_epoch(0)

    def late(sizes: torch.Tensor) -> HostCopy:
        begun.append(sizes)
        return HostCopy(sizes) if len(begun) == 1 else Lost(sizes)

    monkeypatch.setattr("hoploom.gpu.loading.HostCopy", late)
    made = iter(loader)
    assert torch.equal(next(made).n_id, first.n_id)
    said = rf"^step 1 of epoch 0 on rank 0 failed: TimeoutError: the device has not sampled within 7 s; {BUSY}, or "
    with pytest.raises(BatchError, match=said + "raise timeout$"):
        next(made)


def test_a_loader_waits_for_the_device_as_long_as_its_timeout_says(graph: Store, device: torch.device) -> None:
    """In a loop, and for a batch by itself."""
    assert loading(nodes(placed(graph, device), timeout=7)).pool.deadline == 7


def test_a_batch_by_itself_whose_sizes_never_come_is_named(
    graph: Store, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    loader = nodes(placed(graph, device), timeout=7)
    monkeypatch.setattr("hoploom.gpu.loading.HostCopy", Lost)
    said = rf"^a batch of 2 given positions failed: TimeoutError: the device has not sampled within 7 s; {BUSY}, or "
    with pytest.raises(BatchError, match=said + "raise timeout$"):
        loader([4, 1])


@pytest.mark.parametrize(("own", "most"), [(SHORT, 60.0), (600.0, SHORT)])
def test_a_loop_that_is_left_does_not_wait_for_ever(
    own: float, most: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hoploom.gpu.batch_memory.CLOSE_DEADLINE", most)
    pool = Pool(device, own)
    pool.close()
    pool.is_cuda, pool._stream = True, Hung()
    said = rf"^{device} has not finished within 0.02 s what a loop had begun that is left; {BUSY}$"
    with pytest.raises(BatchError, match=said):
        pool.close()


@pytest.fixture
def never_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loop has begun when it is left is never done."""
    close = Pool.close

    def hung(pool: Pool) -> None:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in (("is_cuda", True), ("_stream", Hung()), ("deadline", SHORT)):
                patched.setattr(pool, name, value, raising=False)
            close(pool)

    monkeypatch.setattr(Pool, "close", hung)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_who_leaves_a_loop_on_a_hung_device_is_told_the_first_error(
    graph: Store, num_workers: int, never_drained: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = nodes(placed(graph, device), num_workers=num_workers)
    made = iter(loader)
    next(made)
    with pytest.raises(BatchError, match="what a loop had begun"):
        made.close()  # type: ignore[attr-defined]
    monkeypatch.setattr("hoploom.gpu.loading.HostCopy", Lost)
    with pytest.raises(BatchError, match=r"^step 0 of epoch 1 on rank 0 failed: TimeoutError: the device has not"):
        next(iter(loader))


def test_who_leaves_a_loop_is_not_told_of_a_kernel_that_failed(device: torch.device) -> None:
    class Failed(Hung):
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access")

    pool = Pool(device)
    pool.is_cuda, pool._stream = True, Failed()
    pool.close()


def test_placing_ends_at_its_deadline_and_gives_everything_back(
    graph: Store, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    closed = []

    def close(held: Lease) -> None:
        closed.append(held)
        raise StoreError("the device still reads it")

    monkeypatch.setattr(place_plan, "idle", lambda device, seconds: False)
    monkeypatch.setattr(Lease, "close", close)
    with pytest.raises(StoreError, match=rf"{device}(:0)? has not taken in the store within 600 s; {BUSY}"):
        placed(graph, device)
    assert len(closed) == 1


def context_of(device: torch.device) -> Context:
    return init(device=device, timeout=SHORT)


def lose_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoploom.train.step.HostCopy", Lost)


def test_a_step_whose_loss_never_comes_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, context = homogeneous_learner(device), init(device=device, timeout=60)
    stepper = Stepper(learner, Training(1), context, None)
    said = rf"^epoch 1 step 2: the device has not computed the loss within 0.02 s; {BUSY}, or give hoploom.init a "
    with stepper.steps() as steps:
        steps.take(StopRequests())
        context.timeout = SHORT
        lose_losses(monkeypatch)
        with pytest.raises(TrainError, match=said + "timeout above 0.02 seconds; there is no checkpoint$"):
            steps.take(StopRequests())


def test_leaving_a_hung_device_does_not_hide_the_step(
    never_drained: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_losses(monkeypatch)
    learner = homogeneous_learner(device)
    with pytest.raises(TrainError, match=r"^epoch 1 step 1: the device has not computed the loss within 0.02 s"):
        hoploom.fit(learner, Training(1, progress=False), context_of(device))
    batches = iter(learner.loader)
    next(batches)
    with pytest.raises(BatchError, match="what a loop had begun"):
        batches.close()  # type: ignore[attr-defined]


def test_a_device_may_wait_for_another_rank(device: torch.device) -> None:
    context = context_of(device)
    stepper = Stepper(homogeneous_learner(device), Training(1), context, None)
    context.world_size = 2
    said = rf"loss within 0.02 s; look at what the other ranks say, it may wait for one of them; {BUSY}, or give "
    with pytest.raises(TrainError, match=said), stepper.in_time(3):
        raise TimeoutError("computed the loss")


class Lost(HostCopy):
    """A copy that never arrives."""

    def wait(self, seconds: float, message: str) -> torch.Tensor:
        self._arrived = Hung()
        return super().wait(SHORT, message)


@pytest.mark.parametrize(
    ("lost", "left", "step", "doing"),
    [
        ("gpu.whole_steps", 0, 1, "sampled"),
        ("gpu.whole_steps", 1, 2, "sampled"),
        ("train.step", 0, 1, "computed the loss"),
    ],
)
def test_a_whole_step_that_is_never_done_is_named(
    lost: str, left: int, step: int, doing: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits are for the sizes of each batch, and for the loss of the step two before."""
    waits = iter(range(left + 1))

    class LostLater(Lost):
        def wait(self, seconds: float, message: str) -> torch.Tensor:
            return super().wait(seconds, message) if next(waits) == left else self.host

    whole = WholeStep(homogeneous_learner(device), Training(1), context_of(device))
    monkeypatch.setattr(f"hoploom.{lost}.HostCopy", LostLater)
    said = rf"^epoch 1 step {step}: the device has not {doing} within 0.02 s; {BUSY}, or give hoploom.init a timeout "
    with pytest.raises(TrainError, match=said):
        list(epoch_of(whole))


def test_a_stream_closes_in_time_and_drops_its_work(release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoploom.gpu.cuda_graph.CLOSE_DEADLINE", SHORT)
    stream, dropped = WorkStream(CPU, own_stream=False), []

    class Recorded:
        def drop(self) -> None:
            dropped.append(self)

    held: Any = Recorded()
    stream.recordings.add(held)
    stream.device = CUDA
    with pytest.raises(TrainError, match=rf"cuda:0 is not done within 0.02 s with the whole steps begun; {BUSY}"):
        stream.close()
    assert dropped == [held]


@pytest.mark.parametrize("error", [None, ValueError("first")])
def test_the_first_error_of_a_run_is_the_one_that_is_told(
    error: Exception | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(whole: WholeStep) -> None:
        with whole:
            if error is not None:
                raise error

    whole = WholeStep(homogeneous_learner(device), Training(1), init(device=device))
    monkeypatch.setattr("hoploom.gpu.cuda_graph.idle", lambda device, seconds: False)
    with pytest.raises(TrainError if error is None else ValueError):
        run(whole)
