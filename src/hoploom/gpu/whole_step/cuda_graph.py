"""Work that is recorded once as a CUDA graph and then replayed; on the CPU it is simply done again.

A replay starts all its kernels with one call and reads and writes the very memory of the recording: whoever records
keeps what goes in and out in tensors that stay. The first calls are real ones, so that what is made at first use (an
optimizer's state, compiled kernels) is there before the recording.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch

from hoploom.errors import ConfigError, HoploomError, TrainError
from hoploom.ops.deadline import BUSY, CLOSE_DEADLINE, idle, reached

WARM_UP = 2  # calls before the recording


class Mark:
    """A point that a lane has reached, or will. Nothing to wait for on the CPU, where all is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def reached(self, seconds: float) -> bool:
        """Hold this thread until it is reached; False if it is not in so many seconds."""
        return self._event is None or reached(self._event, seconds)


class Lane:
    """A queue of work on the device: its own stream, or the current one. Recordings of a lane share their memory.

    They may, as one lane's work never overlaps. Two lanes' work does.
    """

    def __init__(self, device: torch.device, *, beside: bool) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._beside = beside
        self.stream: Any = None  # where the lane's first calls and recordings run
        self.pool: Any = None
        self._recordings: WeakSet[Recording] = WeakSet()
        if self.is_cuda:
            with torch.cuda.device(device):
                self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self.pool = torch.cuda.graph_pool_handle()

    def on(self) -> Any:
        """Within: what is started is this lane's."""
        return torch.cuda.stream(self.stream) if self._beside and self.is_cuda else nullcontext()

    def add(self, recording: "Recording") -> None:
        """It runs on this lane."""
        self._recordings.add(recording)

    def close(self) -> None:
        """Wait for the device, and drop what was recorded and what it was made of. The lane takes no more work."""
        try:
            if not idle(self.device, CLOSE_DEADLINE):  # what is dropped may be used again at once
                raise TrainError(
                    f"{self.device} is not done within {CLOSE_DEADLINE:g} s with the whole steps begun; {BUSY}, and "
                    "start again from the last checkpoint"
                )
        finally:
            for recording in self._recordings:
                recording.drop()

    def set(self, mark: Mark) -> None:
        """Put the mark behind what was started so far."""
        if mark._event is not None:
            mark._event.record(self._queue)

    def wait(self, mark: Mark) -> None:
        """What is started from now on waits for the mark; this thread does not."""
        if mark._event is not None:
            self._queue.wait_event(mark._event)

    @property
    def _queue(self) -> Any:
        return self.stream if self._beside else torch.cuda.current_stream(self.device)


class Recording:
    """One function of no arguments, and its recording once there is one.

    >>> step = Recording(train_on_the_static_batch, Lane(device, beside=False))
    >>> step()
    """

    def __init__(self, work: Callable[[], None], lane: Lane) -> None:
        self._work: Callable[[], None] | None = work
        self._lane = lane
        self._calls = 0
        self._graph: Any = None
        lane.add(self)

    @property
    def is_warm(self) -> bool:
        """Whether the next call is a replay; on the CPU, whether it would be one."""
        return self._calls >= WARM_UP

    def __call__(self) -> None:
        is_warm, self._calls = self.is_warm, self._calls + 1
        assert self._work is not None
        if not self._lane.is_cuda:
            self._work()
            return
        if not is_warm:
            self._do(self._work)
            return
        if self._graph is None:
            self._graph = self._recorded(self._work)
        with self._lane.on():
            self._graph.replay()

    def drop(self) -> None:
        """Forget the work, which may lead back to this, and the recording with its memory."""
        self._work = self._graph = None

    def _do(self, work: Callable[[], None]) -> None:
        """On the stream of the recording, between what the lane did before and what it does next."""
        lane = self._lane
        queue = lane._queue
        lane.stream.wait_stream(queue)
        with torch.cuda.stream(lane.stream):
            work()
        queue.wait_stream(lane.stream)

    def _recorded(self, work: Callable[[], None]) -> Any:
        """Waits for the device. Other threads may go on: only what this one calls must be fit for a recording."""
        lane, graph = self._lane, torch.cuda.CUDAGraph()
        with torch.cuda.device(lane.device), uncollected():
            before = torch.cuda.current_stream(lane.device)
            try:
                with torch.cuda.graph(graph, pool=lane.pool, stream=lane.stream, capture_error_mode="thread_local"):
                    work()
            except HoploomError:
                raise
            except RuntimeError as error:
                raise _refused(error) from error
            finally:
                torch.cuda.set_stream(before)  # a capture that cannot be ended leaves its own
        return graph


def _refused(error: RuntimeError) -> ConfigError:
    first: BaseException = error
    while isinstance(first.__context__, RuntimeError):  # CUDA says once more, at the end, that something went wrong
        first = first.__context__
    said = (str(first) or type(first).__name__).splitlines()[0]
    return ConfigError(
        f"this step cannot be recorded as a CUDA graph: {said:.300}; what waits for the device cannot (.item(), a "
        "boolean mask, a copy from plain memory); leave whole steps off, in a new process: this one's memory and "
        "random numbers stay as if still recorded"
    )


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected within: memory of an earlier recording that is given back there would break this one."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
