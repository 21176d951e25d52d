"""The scheduler of all loops: threads run the stages begin, fetch and finish of several steps; batches come in order.

Makers of batches define the stages; threads, order, deadlines and errors are handled here for all of them. No thread
outlives the loop that reads the batches. A ThreadPoolExecutor would not do: at interpreter exit, it waits for a stuck
thread for ever.
"""

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from hoploom.errors import BatchError

Made = TypeVar("Made")
Naming = Callable[[int], AbstractContextManager[None]]  # a block whose errors name the step

DEADLINE = 600.0  # seconds that a batch may take if the user gives no timeout
CLOSE_DEADLINE = 10.0  # seconds that a thread may take to finish its batch after the loop has ended
LEAD = 2  # groups of steps that are begun before the first one is finished, so that threads have work during a fetch


@dataclass(frozen=True)
class Stages(Generic[Made]):
    """The stages in which a loop's batches are made. If `begin` or `fetch` is None, `finish` gets None in its place."""

    finish: Callable[[int, Any, Any], Made]  # (step, result of `begin`, result of `fetch` for its group)
    window: int  # the most steps in flight
    num_finishing: int  # the most of these in the last stage or ready
    begin: Callable[[int], Any] | None = None
    fetch: Callable[[Sequence[Any]], Any] | None = None  # (results of `begin` of a group); one group at a time
    group: int = 1  # number of steps per `fetch`
    leave: Callable[[], None] = lambda: None  # called at the end of the loop, before its threads are joined
    hint: str = "make the transform faster"  # in the error of a step that takes too long


@dataclass(frozen=True)
class Pipeline:
    """The number of threads that make batches, how many batches they may be ahead, and deadlines."""

    num_threads: int = 0
    per_thread: int = 2  # batches that are ready or being made, for each thread
    deadline: float = DEADLINE
    close_deadline: float = CLOSE_DEADLINE

    @property
    def num_ahead(self) -> int:
        return max(1, self.num_threads * self.per_thread)

    def run(
        self, stages: Stages[Made], steps: range, naming: Naming = lambda step: nullcontext()
    ) -> Generator[Made, None, None]:
        """Yield the batches of these steps in order. Without threads, stages run in the calling thread when needed."""
        if not self.num_threads and stages.begin is None and stages.fetch is None:  # nothing to schedule
            for step in steps:
                with naming(step):
                    made = stages.finish(step, None, None)
                yield made
            return
        with ExitStack() as running:  # a separate thread fetches, so that the others need not wait for a peer
            fetching = running.enter_context(Workers[Any](min(1, self.num_threads), self.close_deadline))
            workers = running.enter_context(Workers[Any](self.num_threads, self.close_deadline))  # closed first
            running.callback(stages.leave)
            yield from _Run(self, stages, steps, naming, workers, fetching).delivered()


class _Run(Generic[Made]):
    """The steps of one loop that are in progress, and their results in order."""

    def __init__(
        self,
        pipeline: Pipeline,
        stages: Stages[Made],
        steps: range,
        naming: Naming,
        workers: "Workers[Any]",
        fetching: "Workers[Any]",
    ) -> None:
        self._pipeline, self._stages, self._steps, self._naming = pipeline, stages, steps, naming
        self._workers, self._fetching = workers, fetching
        self._groups = iter([steps[at : at + stages.group] for at in range(0, len(steps), stages.group)])
        self._begun: deque[tuple[int, Future[Any] | None, Future[Any] | None]] = deque()
        self._finishing: deque[Future[Made]] = deque()
        self._failed: tuple[int, BaseException] | None = None  # the index of a step, and its error

    def delivered(self) -> Generator[Made, None, None]:
        for step in self._steps:
            self._fill()
            made = self._result(self._finishing.popleft(), step)
            if self._pipeline.num_threads:
                self._fill()  # the consumer's batch is not in flight any more: others are made while it is used
            yield made

    def _fill(self) -> None:
        """Submit steps until the limits are reached: whole groups to `begin` and `fetch`, single steps to `finish`."""
        group = self._stages.group
        while True:
            num_begun = len(self._begun)
            fits = num_begun + len(self._finishing) + group <= self._stages.window and num_begun + group <= LEAD * group
            if fits and (steps := next(self._groups, None)) is not None:
                begun = list[Future[Any]]()
                if self._stages.begin is not None:
                    begun = [self._workers.submit(partial(self._until_one_fails, self._begin, step)) for step in steps]
                fetched = None
                if self._stages.fetch is not None:
                    fetched = self._fetching.submit(partial(self._fetch, begun))
                self._begun.extend((step, one, fetched) for step, one in zip_longest(steps, begun))
            elif num_begun and len(self._finishing) < self._stages.num_finishing:
                self._finishing.append(self._workers.submit(partial(self._finish, *self._begun.popleft())))
            else:
                return

    def _begin(self, step: int) -> Any:
        assert self._stages.begin is not None
        with self._naming(step):
            return self._stages.begin(step)

    def _fetch(self, begun: Sequence["Future[Any]"]) -> Any:
        """Call `fetch` for the steps whose `begin` succeeded. Other steps' errors are raised when these are due."""
        assert self._stages.fetch is not None
        return self._stages.fetch([one.result() for one in begun if one.exception(self._pipeline.deadline) is None])

    def _finish(self, step: int, begun: "Future[Any] | None", fetched: "Future[Any] | None") -> Made:
        def finish(step: int) -> Made:
            with self._naming(step):
                own = None if begun is None else self._result(begun, step)
                rows = None if fetched is None else self._result(fetched, step)
                return self._stages.finish(step, own, rows)

        return finish(step) if self._stages.begin is not None else self._until_one_fails(finish, step)

    def _until_one_fails(self, make: Callable[[int], Any], step: int) -> Any:
        """Return make(step). If an earlier step has failed, raise its error, because this step is never delivered."""
        index, failed = self._steps.index(step), self._failed
        if failed is not None and index > failed[0]:  # a step before the failed one, begun later, is still delivered
            raise failed[1]
        try:
            return make(step)
        except BaseException as error:  # only remembered
            self._failed = index, error
            raise

    def _result(self, future: "Future[Any]", step: int) -> Any:
        """Return the result of `future`, a stage of `step`, or raise its error; raise BatchError after the deadline."""
        deadline = self._pipeline.deadline
        try:
            return future.result(timeout=deadline)
        except FutureTimeoutError as error:
            if future.done():  # just in time, or a TimeoutError of the maker itself
                return future.result()
            hint = f"{self._stages.hint}, or raise timeout"
            raise BatchError(f"step {step} was not made within {deadline:g} s; {hint}") from error


class Workers(Generic[Made]):
    """Daemon threads, which cannot hold up the exit, that run calls in order; without threads, `submit` runs them."""

    def __init__(self, num_threads: int, close_deadline: float = CLOSE_DEADLINE) -> None:
        self._close_deadline = close_deadline
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
        future: Future[Made] = Future()
        if self._threads:
            self._jobs.put((future, call))
            return future
        try:
            future.set_result(call())
        except Exception as error:  # raised when the result is read; Ctrl-C at once
            future.set_exception(error)
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # raised on the consumer's thread, whatever it is
                future.set_exception(error)
            del future, call, job

    def close(self) -> None:
        """Cancel the calls that have not begun, and wait at most `close_deadline` for each thread."""
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
                thread.join(self._close_deadline)

    def __exit__(self, *error: object) -> None:
        self.close()
