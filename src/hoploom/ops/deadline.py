"""Wait for a device with a timeout, by polling events: torch's synchronize() may never return.

After 20 microseconds, polling sleeps between queries, because each query holds the interpreter lock that threads need
to start kernels. So a wait may last 50 microseconds or one percent longer than necessary.
"""

import threading
import time
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

DEADLINE = 600.0  # seconds, if the user gives no timeout
CLOSE_DEADLINE = 60.0  # seconds, for closing: little is in flight then
BUSY = "see what else keeps it busy (nvidia-smi)"
EAGER = 20e-6  # seconds of polling without pauses
LEAST = 50e-6  # seconds: the shortest pause
SHARE = 0.01  # the next pause, as a share of the wait so far
LONGEST = 0.02  # seconds: the longest pause


class Event(Protocol):
    """An event recorded on a device's stream."""

    def query(self) -> bool:
        """Return whether the device has reached the event."""


def reached(event: Event, seconds: float) -> bool:
    """Wait until an event is reached; return False after `seconds`."""
    began = time.monotonic()
    while not event.query():
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        if waited >= EAGER:
            time.sleep(min(max(LEAST, SHARE * waited), LONGEST, seconds - waited))
    return True


class HostCopy:
    """Values that are being copied to the host on the current stream; on the CPU, the values themselves."""

    def __init__(self, values: Tensor) -> None:
        self.host, self._arrived = values, None
        if values.is_cuda:
            self.host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.current_stream(values.device).record_event()

    def wait(self, seconds: float, message: str) -> Tensor:
        """Return the values after the copy, without waiting for later work; raise TimeoutError after `seconds`."""
        if self._arrived is not None and not reached(self._arrived, seconds):
            raise TimeoutError(message)
        return self.host


def on_host(values: Tensor, doing: str, seconds: float = DEADLINE) -> Tensor:
    """Return the values in host memory, as `.cpu()` does, which has no deadline; raise TimeoutError after `seconds`."""
    return HostCopy(values).wait(seconds, f"the device has not {doing} within {seconds:g} s; {BUSY}")


def idle(device: torch.device, seconds: float) -> bool:
    """Wait until a device is idle, in a daemon thread, as no event covers all streams; return False after `seconds`."""
    if device.type != "cuda":
        return True
    done: Future[None] = Future()

    def wait() -> None:
        try:
            torch.cuda.synchronize(device)
            done.set_result(None)
        except BaseException as error:  # raised in the waiting thread
            done.set_exception(error)

    try:
        threading.Thread(target=wait, name="hoploom-idle", daemon=True).start()
    except RuntimeError:  # since Python 3.12, no thread starts at interpreter exit
        torch.cuda.synchronize(device)
        return True
    try:
        done.result(timeout=seconds)
    except TimeoutError:
        return False
    return True
