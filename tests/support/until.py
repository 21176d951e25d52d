"""Waiting for what nobody announces."""

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], what: str = "what was waited for", seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} has not come about after {seconds} seconds"
        time.sleep(0.02)
