"""Waiting for a device, but not for ever: its events are asked again and again, where synchronize() would not return.

After a moment there are pauses, as asking takes the interpreter from threads that start kernels: a wait is longer by
the least pause, or by a hundredth.
"""

import threading
import time
from concurrent.futures import Future
from typing import Protocol

import torch

DEADLINE = 600.0  # seconds, where the user gives no timeout
CLOSE_DEADLINE = 60.0  # seconds, for what is closed: hardly anything is under way then
BUSY = "see what else keeps it busy (nvidia-smi)"
EAGER = 20e-6  # seconds of asking without a pause
LEAST = 50e-6  # seconds, the next pause at least;
SHARE = 0.01  # of what was waited so far,
LONGEST = 0.02  # seconds, at most


class Event(Protocol):
    """A point in what a device has to do."""

    def query(self) -> bool:
        """Whether it is reached."""


def reached(event: Event, seconds: float) -> bool:
    """Hold this thread until an event is reached; False if it is not in so many seconds."""
    began = time.monotonic()
    while not event.query():
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        if waited >= EAGER:
            time.sleep(min(max(LEAST, SHARE * waited), LONGEST, seconds - waited))
    return True


def idle(device: torch.device, seconds: float) -> bool:
    """Hold this thread until a device has nothing left to do, on any stream; False if it has after so many seconds.

    No event stands for all streams: a thread waits, and is left behind if that takes too long.
    """
    if device.type != "cuda":
        return True
    done: Future[None] = Future()

    def wait() -> None:
        try:
            torch.cuda.synchronize(device)
            done.set_result(None)
        except BaseException as error:  # it belongs to who waits
            done.set_exception(error)

    try:
        threading.Thread(target=wait, name="hoploom-idle", daemon=True).start()
    except RuntimeError:  # from Python 3.12 on none starts while the interpreter ends
        torch.cuda.synchronize(device)
        return True
    try:
        done.result(timeout=seconds)
    except TimeoutError:
        return False
    return True
