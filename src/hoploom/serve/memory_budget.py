"""Limits the memory of requests before they are read, and of responses (batches, picks, rows) until they are sent.

A request waits a bounded time for memory, then its client asks again. A request that could never fit is refused.
"""

import threading
import time
from typing import Self

from hoploom import ops
from hoploom.errors import ConfigError, PeerError
from hoploom.ops import Empty

WAIT = 5.0  # seconds that a request waits for memory


class BusyError(PeerError):
    """The server cannot answer now. It may later, and another one may now."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; ask again, or another server")


class CancelledError(PeerError):
    """The client left while its response was made."""


class RequestContext:
    """A request in flight: the memory for its response, and whether its client still waits."""

    def __init__(self, empty: Empty = ops.empty, *, is_shared: bool = False, num_bytes: int = 0) -> None:
        self.empty, self.is_shared = empty, is_shared
        self.num_bytes = num_bytes  # of the budget for requests and picks, taken by the request itself
        self.is_cancelled = False

    def check(self) -> None:
        """Raise CancelledError if the client has left."""
        if self.is_cancelled:
            raise CancelledError("the client has left")


NO_CLIENT = RequestContext()  # never cancelled


class MemoryBudget:
    """A number of bytes for all responses of one kind; `kind` names them in errors."""

    def __init__(self, size: int, wait: float, kind: str = "batches") -> None:
        self.size, self.wait, self.kind = size, wait, kind
        self.taken = 0
        self._changed = threading.Condition()

    def take(self, amount: int) -> None:
        """Wait for memory; raise BusyError if none becomes free in time."""
        deadline = time.monotonic() + self.wait
        with self._changed:
            while self.taken + amount > self.size:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise BusyError(f"{amount} bytes of {self.kind} do not fit: {self.taken} of {self.size} are taken")
            self.taken += amount

    def take_some(self, amount: int) -> int:
        """Take `amount` bytes or what is free of them, without waiting; return how many."""
        with self._changed:
            taken = max(0, min(amount, self.size - self.taken))
            self.taken += taken
        return taken

    def give(self, amount: int) -> None:
        with self._changed:
            self.taken -= amount
            self._changed.notify_all()


class Reservation:
    """The memory of one response. In a `with` block, an error gives it back; otherwise `close` does."""

    def __init__(
        self, budget: MemoryBudget, request: RequestContext = NO_CLIENT, *, of: str = "a batch", beside: int = 0
    ) -> None:
        """`of` names it in errors; `beside` are bytes of the budget that the same request has taken already."""
        self._budget, self.taken, self.request, self._of, self._beside = budget, 0, request, of, beside

    @property
    def left(self) -> int:
        """Bytes that could still be taken if there were no other responses."""
        return self._budget.size - self.taken - self._beside

    def check(self, amount: int) -> None:
        """Raise ConfigError if `amount` bytes can never be free."""
        if amount > self.left:
            size = self._budget.size
            raise ConfigError(
                f"{self._of} would take {size - self.left + amount} bytes or more, the server has {size} for all "
                f"{self._budget.kind}; lower the fanouts or batch_size, or give hoploom serve more --memory"
            )

    def take(self, amount: int) -> None:
        """Wait for `amount` more bytes; raise an error if the client has left."""
        self.request.check()
        self.check(amount)
        self._budget.take(amount)
        self.taken += amount

    def take_some(self, amount: int) -> int:
        """Take `amount` bytes or what is free of them; return how many."""
        taken = self._budget.take_some(amount)
        self.taken += taken
        return taken

    def resize(self, amount: int) -> None:
        """Set the bytes taken to the size that the response has now."""
        if amount > self.taken:
            self.take(amount - self.taken)
        self._budget.give(self.taken - amount)
        self.taken = amount

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        taken, self.taken = self.taken, 0
        self._budget.give(taken)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()
