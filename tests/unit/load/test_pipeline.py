"""The scheduler by itself, with made-up stages: order, bounds, groups, the first error, and nothing left behind."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from hoploom import BatchError
from hoploom.load.pipeline import Pipeline, Stages, Workers, _Run

STEPS = range(3, 15)
PATIENCE = 10.0  # seconds that a test waits for a thread
threads = pytest.mark.parametrize("num_threads", [0, 1, 4])


@dataclass
class Log:
    """What the stages were asked for, over all threads."""

    begun: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    fetched: list[list[int]] = field(default_factory=list)

    def begin(self, step: int) -> int:
        self.begun.append(step)
        return step

    def fetch(self, begun: Sequence[int]) -> list[int]:
        self.fetched.append(list(begun))
        return list(begun)

    def finish(self, step: int, begun: Any, fetched: Any) -> tuple[int, Any, Any]:
        self.finished.append(step)
        return step, begun, fetched


@threads
def test_batches_come_in_the_order_of_their_steps(num_threads: int) -> None:
    log = Log()
    stages = Stages(log.finish, window=6, num_finishing=4, begin=log.begin)
    made = Pipeline(num_threads).run(stages, STEPS)
    assert list(made) == [(step, step, None) for step in STEPS]
    assert sorted(log.begun) == sorted(log.finished) == list(STEPS)


def test_a_stage_that_is_not_there_gives_none() -> None:
    stages = Stages(Log().finish, window=1, num_finishing=1)
    assert list(Pipeline().run(stages, range(2))) == [(0, None, None), (1, None, None)]


@pytest.mark.parametrize(("window", "num_finishing", "num_begun"), [(6, 4, 6), (5, 4, 5), (9, 2, 4), (2, 2, 2)])
def test_as_many_steps_are_under_way_as_the_bounds_allow(window: int, num_finishing: int, num_begun: int) -> None:
    """That is the window, or two steps beside those whose last stage may begin; the consumer's own is not counted."""
    under_way, finishing = [0], [0]  # whenever a stage of a step began
    num_started = [0, 0]  # of each stage
    delivered: list[int] = []
    changed = threading.Condition()

    def begin(step: int) -> None:
        with changed:
            num_started[0] += 1
            under_way.append(num_started[0] - len(delivered))
            changed.notify_all()

    def finish(step: int, begun: None, fetched: None) -> int:
        with changed:
            num_started[1] += 1
            finishing.append(num_started[1] - len(delivered))
            changed.notify_all()
            assert changed.wait_for(lambda: num_started[0] >= num_begun and num_started[1] >= num_finishing, PATIENCE)
        return step

    for step in Pipeline(8).run(Stages(finish, window, num_finishing, begin), STEPS):
        delivered.append(step)
    assert delivered == list(STEPS)
    assert max(under_way) - num_begun in (0, 1)  # one is the consumer's, which has not yet said so
    assert max(finishing) - num_finishing in (0, 1)


def test_the_next_step_is_made_while_the_consumer_uses_its_own() -> None:
    made = {step: threading.Event() for step in STEPS}

    def finish(step: int, begun: Any, fetched: Any) -> int:
        made[step].set()
        return step

    for step in Pipeline(1, per_thread=1).run(Stages(finish, window=1, num_finishing=1), STEPS):
        assert step == STEPS[-1] or made[step + 1].wait(20)


def test_without_threads_a_step_is_begun_ahead_and_finished_when_it_is_needed() -> None:
    log = Log()
    made = Pipeline().run(Stages(log.finish, window=2, num_finishing=1, begin=log.begin), STEPS)
    with closing(made):
        next(made)
        assert (log.begun, log.finished) == ([3, 4], [3])
        next(made)
        assert (log.begun, log.finished) == ([3, 4, 5], [3, 4])


@threads
def test_a_group_is_fetched_once_after_the_group_before(num_threads: int) -> None:
    log = Log()
    stages = Stages(log.finish, window=10, num_finishing=4, begin=log.begin, fetch=log.fetch, group=5)
    made = list(Pipeline(num_threads).run(stages, STEPS))
    groups = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12], [13, 14]]
    assert (log.fetched, made) == (groups, [(step, step, groups[(step - 3) // 5]) for step in STEPS])


@threads
@pytest.mark.parametrize("stage", ["begin", "finish"])
def test_the_first_error_is_raised_in_its_place_and_later_steps_are_not_made(num_threads: int, stage: str) -> None:
    log = Log()

    def failing(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(step: int, *given: Any) -> Any:
            if step in (6, 7):
                raise ValueError(f"step {step}")
            return make(step, *given)

        return made

    begin, finish = (failing(log.begin), log.finish) if stage == "begin" else (log.begin, failing(log.finish))
    stages = Stages(finish, window=4, num_finishing=2, begin=begin)
    made = Pipeline(num_threads).run(stages, STEPS)
    assert [next(made)[0] for _ in range(3)] == [3, 4, 5]
    with pytest.raises(ValueError, match="step 6"):
        next(made)
    assert max(log.begun) <= 5 + 4  # within the window of the last that was delivered


def test_a_group_is_fetched_for_those_of_its_steps_that_could_be_begun() -> None:
    log = Log()

    def begin(step: int) -> int:
        if step == 4:
            raise ValueError("step 4")
        return log.begin(step)

    stages = Stages(log.finish, window=3, num_finishing=1, begin=begin, fetch=log.fetch, group=3)
    made = Pipeline().run(stages, STEPS)
    assert next(made) == (3, 3, [3])
    with pytest.raises(ValueError, match="step 4"):
        next(made)
    assert log.finished == [3]


@pytest.mark.parametrize("num_threads", [1, 4])
def test_nothing_is_running_once_the_loop_is_left(num_threads: int) -> None:
    log, before = Log(), set(threading.enumerate())
    stages = Stages(log.finish, window=8, num_finishing=4, begin=log.begin, fetch=log.fetch, group=2)
    made = Pipeline(num_threads).run(stages, STEPS)
    next(made)
    assert set(threading.enumerate()) - before
    made.close()
    assert set(threading.enumerate()) <= before
    assert len(log.finished) <= 1 + 4  # the one that was delivered, and those whose last stage had begun


@pytest.mark.parametrize("stage", ["begin", "fetch", "finish"])
def test_a_step_that_is_not_made_in_time_is_named(stage: str) -> None:
    log, go_on = Log(), threading.Event()

    def stuck(*given: Any) -> Any:
        assert go_on.wait(PATIENCE)

    calls = {"begin": log.begin, "fetch": log.fetch, "finish": log.finish, stage: stuck}
    stages = Stages(window=2, num_finishing=1, hint="wait longer", **calls)
    made = Pipeline(num_threads=2, deadline=0.05, close_deadline=0.05).run(stages, STEPS)
    try:
        with pytest.raises(BatchError, match=r"step 3 was not made within 0\.05 s; wait longer, or raise timeout"):
            next(made)
    finally:
        go_on.set()


def _run(steps: range) -> _Run[Any]:
    nothing = Workers[Any](0)
    return _Run(Pipeline(), Stages(lambda *_: None, 1, 1), steps, lambda step: nullcontext(), nothing, nothing)


def test_a_batch_that_is_done_at_the_deadline_is_delivered() -> None:
    class Late(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if timeout is not None:
                self.set_result(7)
                raise TimeoutError
            return super().result()

    assert _run(STEPS)._result(Late(), 3) == 7


@pytest.mark.parametrize("steps", [range(5), range(4, -1, -1)])
def test_a_failure_stands_in_place_of_later_steps_alone(steps: range) -> None:
    """Threads may begin an earlier step after a later one has failed."""
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        if step in (steps[1], steps[3]):
            raise ValueError(f"step {step}")
        return step

    until_one_fails = partial(_run(steps)._until_one_fails, make)
    with pytest.raises(ValueError, match=f"step {steps[3]}"):
        until_one_fails(steps[3])
    assert (until_one_fails(steps[2]), until_one_fails(steps[0])) == (steps[2], steps[0])
    for step in steps[4:]:
        with pytest.raises(ValueError, match=f"step {steps[3]}"):
            until_one_fails(step)
    with pytest.raises(ValueError, match=f"step {steps[1]}"):
        until_one_fails(steps[1])
    assert made == [steps[3], steps[2], steps[0], steps[1]]


def test_ctrl_c_is_raised_at_once_and_an_error_where_its_result_is_read() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def fail() -> None:
        raise ValueError("no")

    workers = Workers[Any](0)
    with pytest.raises(KeyboardInterrupt):
        workers.submit(interrupt)
    with pytest.raises(ValueError, match="no"):
        workers.submit(fail).result()
