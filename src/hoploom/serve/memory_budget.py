"""Limits on a server's memory. Requests reserve memory before they are read; responses hold theirs until they are sent.

A request waits a limited time for memory, then fails; its client may repeat it. One that can never fit is refused.
"""

import threading
import time
from typing import Self

from hoploom import ops
from hoploom.errors import ConfigError, PeerError
from hoploom.ops import Empty

WAIT = 5.0  # seconds that a request waits for memory


class BusyError(PeerError):
    """The server has no memory or thread for a request now. Repeat the request later, or send it to another server."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; ask again, or another server")


class CancelledError(PeerError):
    """The client closed its connection while its response was being made."""


class RequestContext:
    """A request in flight. `empty` allocates tensors for its response; `is_cancelled` is true once the client left."""

    def __init__(self, empty: Empty = ops.empty, *, is_shared: bool = False, num_bytes: int = 0) -> None:
        self.empty, self.is_shared = empty, is_shared
        self.num_bytes = num_bytes  # that the request itself has taken from the budget for requests and picks
        self.is_cancelled = False

    def check(self) -> None:
        """Raise CancelledError if the client has left."""
        if self.is_cancelled:
            raise CancelledError("the client has left")


NO_CLIENT = RequestContext()  # never cancelled


class MemoryBudget:
    """A limit of `size` bytes for all requests or responses of one kind. `kind` is their name in error messages."""

    def __init__(self, size: int, wait: float, kind: str = "batches") -> None:
        self.size, self.wait, self.kind = size, wait, kind
        self.taken = 0
        self._changed = threading.Condition()

    def take(self, amount: int) -> None:
        """Wait until `amount` bytes are free, and take them; raise BusyError after `wait` seconds."""
        deadline = time.monotonic() + self.wait
        with self._changed:
            while self.taken + amount > self.size:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise BusyError(f"{amount} bytes of {self.kind} do not fit: {self.taken} of {self.size} are taken")
            self.taken += amount

    def take_some(self, amount: int) -> int:
        """Take up to `amount` bytes, as many as are free, without waiting; return the number taken."""
        with self._changed:
            taken = max(0, min(amount, self.size - self.taken))
            self.taken += taken
        return taken

    def give(self, amount: int) -> None:
        with self._changed:
            self.taken -= amount
            self._changed.notify_all()


class Reservation:
    """The bytes of a budget that one request or response holds. `close`, or an error in a `with` block, frees them."""

    def __init__(
        self, budget: MemoryBudget, request: RequestContext = NO_CLIENT, *, of: str = "a batch", beside: int = 0
    ) -> None:
        """`of` says in error messages what needs the memory. `request` already holds `beside` bytes elsewhere."""
        self._budget, self.taken, self.request, self._of, self._beside = budget, 0, request, of, beside

    @property
    def left(self) -> int:
        """Bytes that this reservation could still take if no other request held any."""
        return self._budget.size - self.taken - self._beside

    def check(self, amount: int) -> None:
        """Raise ConfigError if `amount` more bytes can never be free, as they exceed the whole budget."""
        if amount > self.left:
            size = self._budget.size
            raise ConfigError(
                f"{self._of} would take {size - self.left + amount} bytes or more, the server has {size} for all "
                f"{self._budget.kind}; lower the fanouts or batch_size, or give hoploom serve more --memory"
            )

    def take(self, amount: int) -> None:
        """Wait for `amount` more bytes and take them; raise CancelledError if the client has left."""
        self.request.check()
        self.check(amount)
        self._budget.take(amount)
        self.taken += amount

    def take_some(self, amount: int) -> int:
        """Take up to `amount` more bytes, as many as are free; return the number taken."""
        taken = self._budget.take_some(amount)
        self.taken += taken
        return taken

    def resize(self, amount: int) -> None:
        """Take or give back bytes, so that the reservation holds `amount` bytes in total."""
        if amount > self.taken:
            self.take(amount - self.taken)
        self._budget.give(self.taken - amount)
        self.taken = amount

    def close(self) -> None:
        """Give all bytes back to the budget. A second call does nothing."""
        taken, self.taken = self.taken, 0
        self._budget.give(taken)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()
