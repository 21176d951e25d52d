"""Ctrl-C and SIGTERM as a question that training answers between two steps.

Signals reach the main thread only: elsewhere nothing is caught, and nothing is changed.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequests:
    """While entered, SIGINT and SIGTERM set `asked`; a second SIGINT raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: it was not Python's, and cannot be put back
                signal.signal(number, handler)
        self._before.clear()
