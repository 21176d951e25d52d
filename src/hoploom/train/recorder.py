"""Work that is recorded once as a CUDA graph and then replayed; on the CPU it is simply done again.

A replay starts all its kernels with one call and reads and writes the very memory of the recording: whoever records
keeps what goes in and out in tensors that stay. The first calls are real ones, so that what is made at first use (an
optimizer's state, compiled kernels) is there before the recording.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from hoploom.errors import ConfigError, HoploomError

WARM_UP = 2  # calls before the recording


class Mark:
    """A point that a lane has reached, or will. Nothing to wait for on the CPU, where all is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Hold this thread until it is reached."""
        if self._event is not None:
            self._event.synchronize()


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
        if self.is_cuda:
            with torch.cuda.device(device):
                self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self.pool = torch.cuda.graph_pool_handle()

    def on(self) -> Any:
        """Within: what is started is this lane's."""
        return torch.cuda.stream(self.stream) if self._beside and self.is_cuda else nullcontext()

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
        self._work, self._lane = work, lane
        self._calls = 0
        self._graph: Any = None

    @property
    def is_warm(self) -> bool:
        """Whether the next call is a replay; on the CPU, whether it would be one."""
        return self._calls >= WARM_UP

    def __call__(self) -> None:
        is_warm, self._calls = self.is_warm, self._calls + 1
        if not self._lane.is_cuda:
            self._work()
            return
        if not is_warm:
            self._do()
            return
        if self._graph is None:
            self._graph = self._recorded()
        with self._lane.on():
            self._graph.replay()

    def _do(self) -> None:
        """On the stream of the recording, between what the lane did before and what it does next."""
        lane = self._lane
        queue = lane._queue
        lane.stream.wait_stream(queue)
        with torch.cuda.stream(lane.stream):
            self._work()
        queue.wait_stream(lane.stream)

    def _recorded(self) -> Any:
        """Waits for the device. Other threads may go on: only what this one calls must be fit for a recording."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._lane.device):
            try:
                with torch.cuda.graph(
                    graph, pool=self._lane.pool, stream=self._lane.stream, capture_error_mode="thread_local"
                ):
                    self._work()
            except HoploomError:
                raise
            except RuntimeError as error:
                raise ConfigError(
                    f"this step cannot be recorded as a CUDA graph: {str(error).splitlines()[0]:.300}; what waits for "
                    "the device cannot (.item(), a boolean mask, a copy from plain memory); leave whole steps off"
                ) from error
        return graph
