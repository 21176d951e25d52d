"""The one scheduler of batches: begin -> fetch -> finish over a window of steps, delivered in order.

Who makes batches says what the stages do; threads, order, deadlines and errors are the same for all of them. Nothing
outlives the loop that reads the batches. Not a ThreadPoolExecutor: that one joins a stuck thread for ever when the
interpreter ends.
"""

import atexit
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Generic, TypeAlias, TypeVar

from torch import Tensor

from hoploom import keys
from hoploom.closing import Closing
from hoploom.errors import BatchError, HoploomError, StoreError
from hoploom.load.assemble import Sent, num_bytes
from hoploom.load.order import Order

Made = TypeVar("Made")
Submit: TypeAlias = Callable[[Callable[[], Any]], "Future[Any]"]

DEADLINE = 600.0  # seconds that a batch may take where the user gives no timeout
CLOSE_DEADLINE = 10.0  # seconds that a thread may take to finish the batch it is at
LEAD = 2  # groups of steps that are begun before the first of them is finished: nobody waits for a fetch without work


@dataclass
class ByteLimit:
    """The bytes that batches under way may take: one counts as the largest so far until it is made, and one may always
    be made."""

    most: int
    largest: int = 0  # of all loops

    def fits(self, made: Sequence[int], num_under_way: int, num_more: int) -> bool:
        """Whether more steps may begin beside those under way, of which some are `made`: their bytes."""
        num_counted = num_under_way - len(made) + num_more
        return not num_under_way or (self.largest > 0 and sum(made) + num_counted * self.largest <= self.most)


@dataclass(frozen=True)
class Delivery:
    """How batches reach the consumer."""

    num_threads: int = 0
    per_thread: int = 2  # batches that are ready or being made, for each thread
    deadline: float = DEADLINE
    close_deadline: float = CLOSE_DEADLINE
    byte_limit: ByteLimit | None = None  # None: however many bytes it takes

    @property
    def num_ahead(self) -> int:
        return max(1, self.num_threads * self.per_thread)


@dataclass(frozen=True)
class Stages(Generic[Made]):
    """How the steps of a loop are made. Where there is no `begin` or no `fetch`, `finish` is given None for it."""

    finish: Callable[[int, Any, Any], Made]  # (step, what was begun, what was fetched for its group)
    window: int  # steps that are under way at most
    num_finishing: int  # of these, those whose last stage may begin
    begin: Callable[[int], Any] | None = None
    fetch: Callable[[Sequence[Any], Any], Any] | None = None  # (all begun of a group, what the group before fetched)
    group: int = 1  # steps that are fetched for together
    naming: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext()  # names a step in its errors
    leave: Callable[[], None] = lambda: None  # called when the loop is left, before its threads are waited for
    way_out: str = "make the transform faster"  # where a step takes too long


@dataclass(frozen=True)
class Work:
    """The steps of one loop: where each stands, what names it in an error, and how its batch is sent."""

    order: Order
    epoch: int
    send: Callable[[Sent], Sent]

    def place(self, step: int) -> tuple[Tensor, int, int]:
        """A step's seeds by position, where the first of them stands in it, and the key of all its draws."""
        return *self.order.seeds_of(self.epoch, step), keys.batch_key(self.order.seed, self.epoch, step)

    @contextmanager
    def naming(self, step: int) -> Iterator[None]:
        """Errors of the store, and those that are not Hoploom's own, say which step they are of."""
        of_step = f"step {step} of epoch {self.epoch} on rank {self.order.rank}"
        try:
            yield
        except StoreError as error:
            if type(error) is not StoreError or str(error).startswith(of_step):  # named where the step began
                raise
            raise StoreError(f"{of_step}: {error}") from error
        except HoploomError:
            raise
        except Exception as error:
            raise BatchError(f"{of_step} failed: {type(error).__name__}: {error}") from error


class Producer(ABC):
    """Who makes a loader's batches: each by one call, unless it says how a loop makes them."""

    @property
    def least_threads(self) -> int:
        """Threads that there must be, however few the user asks for."""
        return 0

    @abstractmethod
    def make(self, indices: Tensor, first: int, key: int) -> Sent:
        """The batch of these seeds, at once; `first` is the place of the first one in its step."""

    def stages(self, work: Work, delivery: Delivery) -> AbstractContextManager[Stages[Sent]]:
        """How the steps of a loop are made; left when its threads are gone."""

        def finish(step: int, begun: None, fetched: None) -> Sent:
            return work.send(self.make(*work.place(step)))

        return nullcontext(Stages(finish, delivery.num_ahead, delivery.num_ahead, naming=work.naming))


def in_order(stages: Stages[Made], steps: range, delivery: Delivery) -> Generator[Made, None, None]:
    """The batches of these steps. Without threads every stage runs on the consumer's, when it is needed."""
    if not delivery.num_threads and stages.begin is None and stages.fetch is None:  # nothing to schedule
        for step in steps:
            with stages.naming(step):
                made = stages.finish(step, None, None)
            yield made
        return
    with ExitStack() as running:
        submit: Submit = at_once
        fetch: Submit = at_once
        if delivery.num_threads:
            if stages.fetch is not None:  # by a thread of its own: the others wait for no peer while they can work
                fetch = running.enter_context(Workers[Any](1, delivery.close_deadline)).submit
            workers = Workers[Any](delivery.num_threads, delivery.close_deadline)  # closed first
            submit = running.enter_context(workers).submit
        running.callback(stages.leave)
        yield from _Run(stages, steps, delivery, submit, fetch).delivered()


class _Run(Generic[Made]):
    """The steps under way in one loop."""

    def __init__(self, stages: Stages[Made], steps: range, delivery: Delivery, submit: Submit, fetch: Submit) -> None:
        self._stages, self._steps = stages, steps
        self._deadline, self._byte_limit = delivery.deadline, delivery.byte_limit
        self._has_threads = delivery.num_threads > 0
        self._sizes: dict[int, int] = {}  # with a byte limit: bytes of what is made and not delivered, by step
        self._submit, self._submit_fetch = submit, fetch
        self._groups = iter([steps[at : at + stages.group] for at in range(0, len(steps), stages.group)])
        self._num_waiting = len(steps)  # steps that are not begun
        self._begun: deque[tuple[int, Future[Any] | None, Future[Any] | None]] = deque()
        self._finishing: deque[Future[Made]] = deque()
        self._fetched: Future[Any] | None = None  # for the newest group
        self._until_one_fails = UntilOneFails(steps)

    def delivered(self) -> Generator[Made, None, None]:
        for step in self._steps:
            self._fill()
            made = self._result(self._finishing.popleft(), step)
            self._sizes.pop(step, None)
            if self._has_threads:
                self._fill()  # the consumer's own is not under way any more, so that others are made while it is used
            yield made

    def _fill(self) -> None:
        """Begin and finish as many steps as may be under way; those begun are a group or two ahead."""
        group = self._stages.group
        while True:
            num_begun = len(self._begun)
            fits = num_begun + len(self._finishing) + group <= self._stages.window and num_begun + group <= LEAD * group
            if self._num_waiting and fits and self._is_within_limit(group):
                self._begin_group(next(self._groups))
            elif num_begun and len(self._finishing) < self._stages.num_finishing:
                step, begun, fetched = self._begun.popleft()
                finish: Callable[[int], Made] = partial(self._finish, begun=begun, fetched=fetched)
                if self._stages.begin is None:
                    finish = partial(self._until_one_fails, finish)
                self._finishing.append(self._submit(partial(finish, step)))
            else:
                return

    def _is_within_limit(self, num_more: int) -> bool:
        if self._byte_limit is None:
            return True
        return self._byte_limit.fits(tuple(self._sizes.values()), len(self._begun) + len(self._finishing), num_more)

    def _begin_group(self, steps: range) -> None:
        self._num_waiting -= len(steps)
        begun: list[Future[Any]] = []
        if self._stages.begin is not None:
            begun = [self._submit(partial(self._until_one_fails, self._begin, step)) for step in steps]
        if self._stages.fetch is not None:
            self._fetched = self._submit_fetch(partial(self._fetch, begun, self._fetched))
        self._begun.extend((step, one, self._fetched) for step, one in zip_longest(steps, begun))

    def _begin(self, step: int) -> Any:
        assert self._stages.begin is not None
        with self._stages.naming(step):
            return self._stages.begin(step)

    def _fetch(self, begun: Sequence["Future[Any]"], before: "Future[Any] | None") -> Any:
        """What could not be begun is left out: its error is raised where its step is due."""
        assert self._stages.fetch is not None
        sound = [one.result() for one in begun if one.exception(self._deadline) is None]
        is_sound = before is not None and before.exception(self._deadline) is None
        return self._stages.fetch(sound, before.result() if is_sound and before is not None else None)

    def _finish(self, step: int, begun: "Future[Any] | None", fetched: "Future[Any] | None") -> Made:
        with self._stages.naming(step):
            own = None if begun is None else self._result(begun, step)
            rows = None if fetched is None else self._result(fetched, step)
            made = self._stages.finish(step, own, rows)
        if self._byte_limit is not None:
            self._sizes[step] = num_bytes(made)
            self._byte_limit.largest = max(self._byte_limit.largest, self._sizes[step], 1)
        return made

    def _result(self, future: "Future[Any]", step: int) -> Any:
        return result_of(future, step, self._deadline, self._stages.way_out)


class UntilOneFails:
    """Makes steps until one fails: those after it are never delivered, and waiting for them may take long."""

    def __init__(self, steps: range) -> None:
        self._steps = steps
        self._failure: tuple[int, BaseException] | None = None  # of some step: which one, by its place

    def __call__(self, make: Callable[[int], Made], step: int) -> Made:
        place, failure = self._steps.index(step), self._failure
        if failure is not None and place > failure[0]:  # one before it, begun later by its thread, is delivered
            raise failure[1]
        try:
            return make(step)
        except BaseException as error:  # only remembered
            self._failure = place, error
            raise


def result_of(future: "Future[Made]", step: int, deadline: float, way_out: str) -> Made:
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


class Workers(Closing, Generic[Made]):
    """Threads that make calls in turn. Daemons, so that a transform that never returns cannot hold up the exit."""

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
                thread.join(self._close_deadline)
