"""Record work once as a CUDA graph, then replay it. On the CPU, the work is simply run again.

A replay starts all kernels with one call, and uses the memory addresses of the recording: the caller must keep inputs
and outputs in the same tensors. The first calls run without recording, so that objects made at first use (an
optimizer's state, compiled kernels) exist before it. Python numbers keep the values that they had when recorded.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from hoploom.errors import ConfigError, HoploomError, TrainError
from hoploom.ops.deadline import BUSY, CLOSE_DEADLINE, idle
from hoploom.train.step import check_closure

WARM_UP = 2  # calls before the recording


class WorkStream:
    """A CUDA stream for recordings, new or the current one. They share a memory pool, as they never run at once."""

    def __init__(self, device: torch.device, *, own_stream: bool) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._owns_stream = own_stream
        self.stream: Any = None  # runs the first calls, and records
        self.pool: Any = None
        self.recordings: WeakSet[Recording] = WeakSet()  # which `close` drops
        if self.is_cuda:
            with torch.cuda.device(device):
                self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self.pool = torch.cuda.graph_pool_handle()

    def current(self) -> Any:
        """Return a context manager that makes this stream the current one."""
        return torch.cuda.stream(self.stream) if self._owns_stream and self.is_cuda else nullcontext()

    def close(self) -> None:
        """Wait for the device, then drop all recordings and their memory; raise TrainError after a timeout."""
        try:
            if not idle(self.device, CLOSE_DEADLINE):  # dropped memory may be used again at once
                raise TrainError(
                    f"{self.device} is not done within {CLOSE_DEADLINE:g} s with the whole steps begun; {BUSY}, and "
                    "start again from the last checkpoint"
                )
        finally:
            for recording in self.recordings:
                recording.drop()

    def event(self) -> Any:
        """Return a new CUDA event; None on the CPU, where all work is done at once."""
        return torch.cuda.Event() if self.is_cuda else None  # type: ignore[no-untyped-call]

    def record(self, event: Any) -> None:
        """Record an event after the work started so far."""
        if event is not None:
            event.record(self._queue)

    def wait_for(self, event: Any) -> None:
        """Make work started from now on wait for an event; this thread does not wait."""
        if event is not None:
            self._queue.wait_event(event)

    @property
    def _queue(self) -> Any:
        return self.stream if self._owns_stream else torch.cuda.current_stream(self.device)


class Recording:
    """A function without arguments that is recorded as a CUDA graph after its first calls, then replayed."""

    def __init__(self, work: Callable[[], None], stream: WorkStream) -> None:
        self._work: Callable[[], None] | None = work
        self._stream = stream
        self._calls = 0
        self._graph: Any = None
        stream.recordings.add(self)

    @property
    def is_warm(self) -> bool:
        """Whether the first calls are done, so that the next call is a replay (on a GPU)."""
        return self._calls >= WARM_UP

    def __call__(self) -> None:
        is_warm, self._calls = self.is_warm, self._calls + 1
        assert self._work is not None
        if not self._stream.is_cuda:
            self._work()
            return
        if not is_warm:
            self._run(self._work)
            return
        if self._graph is None:
            self._graph = self._capture(self._work)
        with self._stream.current():
            self._graph.replay()

    def drop(self) -> None:
        """Drop the recording with its memory, and the function, which may refer back to this object."""
        self._work = self._graph = None

    def _run(self, work: Callable[[], None]) -> None:
        """Run the work on the stream that records, ordered as if it ran on the stream that replays."""
        stream, queue = self._stream.stream, self._stream._queue
        stream.wait_stream(queue)
        with torch.cuda.stream(stream):
            work()
        queue.wait_stream(stream)

    def _capture(self, work: Callable[[], None]) -> Any:
        """Return the work, captured as a CUDA graph. Calls of other threads, e.g. allocations, do not break it."""
        own, graph = self._stream, torch.cuda.CUDAGraph()
        with torch.cuda.device(own.device), without_gc():
            before = torch.cuda.current_stream(own.device)
            try:
                with torch.cuda.graph(graph, pool=own.pool, stream=own.stream, capture_error_mode="thread_local"):
                    work()
            except HoploomError:
                raise
            except RuntimeError as error:
                raise _capture_error(error) from error
            finally:
                torch.cuda.set_stream(before)  # a capture that cannot be ended leaves its own stream current
        return graph


def _capture_error(error: RuntimeError) -> ConfigError:
    first: BaseException = error
    while isinstance(first.__context__, RuntimeError):  # CUDA raises once more when the capture ends
        first = first.__context__
    message = (str(first) or type(first).__name__).splitlines()[0]
    return ConfigError(
        f"this step cannot be recorded as a CUDA graph: {message:.300}; what waits for the device cannot (.item(), a "
        "boolean mask, a copy from plain memory); leave whole steps off, in a new process: this one's memory and "
        "random numbers stay as if still recorded"
    )


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection in this block: freeing an earlier graph's memory would break the capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- optimizers: learning rates are read from the device, so that changes by a schedule take effect ----


def check_optimizer(optimizer: Optimizer, device: torch.device, *, scheduled: bool) -> None:
    """Raise ConfigError if the optimizer needs a closure, or if its steps cannot be recorded on the device."""
    check_closure(optimizer)
    name = type(optimizer).__name__
    if device.type != "cuda":
        return
    for group in optimizer.param_groups:
        if "capturable" in group and not group["capturable"]:
            raise not_recordable(f"do not go with {name} that counts its steps on the host; give it capturable=True")
        if "capturable" not in group and not isinstance(optimizer, SGD):
            raise not_recordable(f"do not go with {name}; take Adam or AdamW with capturable=True, SGD")
        if scheduled and not _takes_tensor(group):
            raise not_recordable(
                f"do not go with {name} that keeps the learning rate it began with; give it fused=True"
            )


def _takes_tensor(group: dict[str, Any]) -> bool:
    """Return whether a parameter group's learning rate may be a tensor, which the optimizer reads on the device."""
    return bool(group.get("capturable") or group.get("fused"))


def not_recordable(why: str) -> ConfigError:
    """Return the error for a step that cannot be recorded; its text is "whole steps " and `why`."""
    return ConfigError(f"whole steps {why}, or leave whole steps off")


def prepare_optimizer(optimizer: Optimizer, *, recorded: bool) -> None:
    """Set the optimizer's options for steps with or without recordings; a checkpoint may have changed them."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, SGD):
            group["fused"] = True if recorded else None
        if "capturable" not in group or group["capturable"] == recorded:
            continue
        group["capturable"] = recorded
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device if recorded else "cpu", torch.float32)


class LearningRates:
    """The learning rates of parameter groups as tensors that recorded steps read; between steps they are numbers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors = [  # None if the group's optimizer needs a number
            torch.full((), float(group["lr"]), dtype=torch.float32, device=group["params"][0].device)
            if _takes_tensor(group)
            else None
            for group in optimizer.param_groups
        ]
        self._recorded: list[dict[str, Any]] = []

    @property
    def _groups(self) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
        return zip(self._optimizer.param_groups, self._tensors, strict=True)

    def send(self) -> None:
        """Write the learning rates to the device, without waiting for it."""
        for group, tensor in self._groups:
            if tensor is not None:
                tensor.fill_(float(group["lr"]))

    @contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Set the groups' learning rates to the device tensors in this `with` block."""
        numbers = [group["lr"] for group, _ in self._groups]
        for group, tensor in self._groups:
            group["lr"] = group["lr"] if tensor is None else tensor
        try:
            yield
        finally:
            for (group, _), number in zip(self._groups, numbers, strict=True):
                group["lr"] = number

    def check(self) -> None:
        """Raise ConfigError if an optimizer option has changed since the first call: recordings keep the old value."""
        now = []
        for group, tensor in self._groups:
            unseen = {"params", "initial_lr", "lr"} if tensor is not None else {"params", "initial_lr"}
            now.append({name: value for name, value in group.items() if name not in unseen})
        self._recorded = self._recorded or now
        for before, group in zip(self._recorded, now, strict=True):
            for name, value in group.items():
                if value != before[name]:
                    raise not_recordable(
                        f"do not see that {name} of {type(self._optimizer).__name__} went from {before[name]} to "
                        f"{value}; keep it, for lr give the optimizer fused=True"
                    )
