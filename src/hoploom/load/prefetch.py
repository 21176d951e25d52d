"""Batches made ahead by threads, delivered in order; nothing outlives the loop that reads them."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from hoploom.errors import BatchError

Made = TypeVar("Made")


def in_order(
    make: Callable[[int], Made], steps: range, num_threads: int, num_ahead: int, deadline: float
) -> Iterator[Made]:
    """make(step) for every step. With threads, up to `num_ahead` steps are under way at a time."""
    if num_threads == 0:
        yield from map(make, steps)
        return
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix="hoploom")
    under_way: deque[Future[Made]] = deque()
    waiting = iter(steps)
    try:
        for step in steps:
            while len(under_way) < num_ahead and (next_step := next(waiting, None)) is not None:
                under_way.append(executor.submit(make, next_step))
            yield _result(under_way.popleft(), step, deadline)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _result(future: "Future[Made]", step: int, deadline: float) -> Made:
    try:
        return future.result(timeout=deadline)
    except FutureTimeoutError as error:
        if future.done():
            raise
        message = f"step {step} was not made within {deadline:g} s; make the transform faster, or raise timeout"
        raise BatchError(message) from error
