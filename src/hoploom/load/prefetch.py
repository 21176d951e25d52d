"""Batches made ahead by threads, delivered in order; nothing outlives the loop that reads them.

Not a ThreadPoolExecutor: that one joins a stuck thread for ever when the interpreter ends.
"""

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from hoploom.errors import BatchError

Made = TypeVar("Made")
CLOSE_DEADLINE = 10.0  # seconds that a thread may take to finish the batch it is at


def in_order(
    make: Callable[[int], Made], steps: range, num_threads: int, num_ahead: int, deadline: float
) -> Generator[Made, None, None]:
    """make(step) for every step. With threads, up to `num_ahead` steps are under way at a time."""
    if num_threads == 0:
        yield from map(make, steps)
        return
    under_way: deque[Future[Made]] = deque()
    waiting = iter(steps)
    until_one_fails = UntilOneFails(make, steps)
    with Workers[Made](num_threads) as workers:
        for step in steps:
            while len(under_way) < num_ahead and (next_step := next(waiting, None)) is not None:
                under_way.append(workers.submit(partial(until_one_fails, next_step)))
            yield result_of(under_way.popleft(), step, deadline)


class UntilOneFails(Generic[Made]):
    """Makes steps until one fails: those after it are never delivered, and waiting for them may take long."""

    def __init__(self, make: Callable[[int], Made], steps: range) -> None:
        self._make, self._steps = make, steps
        self._failure: tuple[int, BaseException] | None = None  # of some step: which one, by its place

    def __call__(self, step: int) -> Made:
        place, failure = self._steps.index(step), self._failure
        if failure is not None and place > failure[0]:  # one before it, begun later by its thread, is delivered
            raise failure[1]
        try:
            return self._make(step)
        except BaseException as error:  # only remembered
            self._failure = place, error
            raise


def result_of(future: "Future[Made]", step: int, deadline: float, way_out: str = "make the transform faster") -> Made:
    """What was made for a step, or its error; BatchError if it is not there in time."""
    try:
        return future.result(timeout=deadline)
    except FutureTimeoutError as error:
        if future.done():  # just in time, or the maker's own TimeoutError
            return future.result()
        message = f"step {step} was not made within {deadline:g} s; {way_out}, or raise timeout"
        raise BatchError(message) from error


def at_once(call: Callable[[], Made]) -> "Future[Made]":
    """The call is made now; an error is raised where its result is read, Ctrl-C at once."""
    future: Future[Made] = Future()
    try:
        future.set_result(call())
    except BaseException as error:
        if not isinstance(error, Exception):
            raise
        future.set_exception(error)
    return future


class Workers(Generic[Made]):
    """Threads that make calls in turn. Daemons, so that a transform that never returns cannot hold up the exit."""

    def __init__(self, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Made], Callable[[], Made]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"hoploom-{i}", daemon=True) for i in range(num_threads)
        ]

    def __enter__(self) -> "Workers[Made]":
        atexit.register(self.close)  # a thread inside the core must be done before the interpreter is
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.close()
            raise BatchError(f"cannot start {len(self._threads)} threads; lower num_workers") from error
        return self

    def submit(self, call: Callable[[], Made]) -> "Future[Made]":
        """Queue one call."""
        future: Future[Made] = Future()
        self._jobs.put((future, call))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # it belongs to the consumer, whatever it is
                future.set_exception(error)
            del future, call, job

    def close(self) -> None:
        """Drop what has not begun, wait for what has, a bounded time."""
        atexit.unregister(self.close)
        try:
            while (job := self._jobs.get_nowait()) is not None:
                job[0].cancel()
        except queue.Empty:
            pass
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(CLOSE_DEADLINE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
