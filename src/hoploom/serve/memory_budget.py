"""Limits the memory of requests before they are read, and of answers (batches, picks, rows) until they are sent.

Each waits a bounded time for memory, and then its client asks again. One that could never fit is refused.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import torch

from hoploom import ops
from hoploom.errors import ConfigError, PeerError
from hoploom.ops import Empty, Frontier, Picks
from hoploom.schema import Field, Owner, Schema
from hoploom.store import Draw, Store
from hoploom.store.base import Triple

PICK_BYTES = 40  # of a pick: source, edge, local source, both ends in edge_index
WAIT = 5.0  # seconds that a request waits for memory
PIECE = 256  # nodes whose picks are made together where their number is not known before


class BusyError(PeerError):
    """The server cannot answer now: it may later, and another one may now."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; ask again, or another server")


class Call:
    """A request that is being answered: the memory for its answer, and whether its client still waits."""

    def __init__(self, *, is_shared: bool = False, requested: int = 0) -> None:
        self.is_shared, self.is_cancelled = is_shared, False
        self.requested = requested  # bytes of the budget of picks that the request itself takes

    def check(self) -> None:
        """Raise CancelledError if the client has left, so that the work ends."""
        if self.is_cancelled:
            raise CancelledError("the client has left")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor of the answer."""
        return ops.empty(shape, dtype)


ALONE = Call()  # is never cancelled


class CancelledError(PeerError):
    """The client has left while its answer was made."""


class MemoryBudget:
    """A number of bytes for all answers of one kind together; `of` names the kind in errors."""

    def __init__(self, size: int, wait: float, of: str = "batches") -> None:
        self.size, self.wait, self.of = size, wait, of
        self.taken = 0
        self._changed = threading.Condition()

    def take(self, amount: int) -> None:
        """Wait for memory; BusyError if none comes."""
        deadline = time.monotonic() + self.wait
        with self._changed:
            while self.taken + amount > self.size:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise BusyError(f"{amount} bytes of {self.of} do not fit: {self.taken} of {self.size} are taken")
            self.taken += amount

    def take_some(self, amount: int) -> int:
        """Take this much, or what is free of it, without waiting; returns how much that is."""
        with self._changed:
            taken = max(0, min(amount, self.size - self.taken))
            self.taken += taken
        return taken

    def give(self, amount: int) -> None:
        with self._changed:
            self.taken -= amount
            self._changed.notify_all()


class Reservation:
    """The memory of one answer, which is given back when it is sent. In a `with` block, an error gives it back too."""

    def __init__(self, budget: MemoryBudget, call: Call = ALONE, *, of: str = "a batch", beside: int = 0) -> None:
        """`of` names it in errors; `beside` are bytes of the budget that the same request has taken already."""
        self._budget, self.taken, self.call, self._of, self._beside = budget, 0, call, of, beside

    @property
    def left(self) -> int:
        """Bytes that it could still take if there were no other answers."""
        return self._budget.size - self.taken - self._beside

    def check(self, amount: int) -> None:
        """Raise ConfigError if so much can never be free."""
        if amount > self.left:
            raise ConfigError(
                f"{self._of} would take {self._budget.size - self.left + amount} bytes or more, the server has "
                f"{self._budget.size} for all "
                f"{self._budget.of}; lower the fanouts or batch_size, or give hoploom serve more --memory"
            )

    def take(self, amount: int) -> None:
        """Wait until so much more is free, and take it. Raises if the client has left."""
        self.call.check()
        self.check(amount)
        self._budget.take(amount)
        self.taken += amount

    def take_some(self, amount: int) -> int:
        """Take this much, or what is free of it; returns how much that is."""
        taken = self._budget.take_some(amount)
        self.taken += taken
        return taken

    def settle(self, amount: int) -> None:
        """Set what is taken to the size that the answer has now."""
        if amount > self.taken:
            self.take(amount - self.taken)
        self._budget.give(self.taken - amount)
        self.taken = amount

    def close(self) -> None:
        """Give all of it back. A second call does nothing."""
        taken, self.taken = self.taken, 0
        self._budget.give(taken)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()


class MeteredStore:
    """Samples and gathers from a store, and takes the memory from the reservation of this thread's batch."""

    def __init__(self, store: Store, budget: MemoryBudget) -> None:
        self.schema: Schema = store.schema
        self._graph, self._features, self._budget = store.graph, store.features, budget
        self._of_thread = threading.local()
        holders: dict[Owner, Mapping[str, Field]] = {t.name: t.fields for t in self.schema.node_types}
        holders |= {r.key: r.fields for r in self.schema.relations}
        self._row_bytes = {(o, name): f.row_bytes for o, fields in holders.items() for name, f in fields.items()}

    @contextmanager
    def batch(self, call: Call = ALONE) -> Iterator[Reservation]:
        """The reservation of the batch that this thread makes."""
        with Reservation(self._budget, call) as reservation:
            self._of_thread.reservation = reservation
            yield reservation

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """One hop; for a few nodes at a time if it is not known beforehand that the picks fit."""
        reservation: Reservation = self._of_thread.reservation
        reservation.call.check()
        if self._fit(frontiers, draw, reservation):
            picks = self._graph.sample(frontiers, draw)
            reservation.take(_num_picks(picks) * PICK_BYTES)
            return picks
        if draw.replace:  # every node with an in-edge has that many, so it would come to about this
            bounded = draw._replace(fanouts=[max(0, fanout) for fanout in draw.fanouts])
            reservation.check(self._most(frontiers, bounded) * PICK_BYTES)
        longest = max((frontier.nodes.numel() for frontier in frontiers if frontier is not None), default=1)
        answers = []
        for begin in range(0, longest, PIECE):
            answers.append(self._graph.sample([_piece(frontier, begin) for frontier in frontiers], draw))
            reservation.take(_num_picks(answers[-1]) * PICK_BYTES)
        return [_joined(picks) for picks in zip(*answers, strict=True)]

    def _fit(self, frontiers: Sequence[Frontier | None], draw: Draw, reservation: Reservation) -> bool:
        """Whether all picks fit in any case."""
        return self._most(frontiers, draw) * PICK_BYTES <= reservation.left

    def _most(self, frontiers: Sequence[Frontier | None], draw: Draw) -> int:
        """An upper bound of the picks."""
        total = 0
        for destination, fanout in zip(self.schema.destinations, draw.fanouts, strict=True):
            frontier = frontiers[destination]
            if frontier is not None:
                total += frontier.nodes.numel() * (fanout if fanout >= 0 else 1 << 40)
        return total

    def gather(self, wanted: Sequence[Triple], *, empty: Empty = ops.empty) -> list[torch.Tensor]:
        """Rows, once there is memory for them; in memory that is shared with the client, if it can be."""
        size = sum(ids.numel() * self._row_bytes[owner, name] for owner, name, ids in wanted)
        reservation: Reservation = self._of_thread.reservation
        reservation.take(size)
        return self._features.gather(wanted, empty=reservation.call.empty)


def _num_picks(picks: Sequence[Picks | None]) -> int:
    return sum(one.sources.numel() for one in picks if one is not None)


def _piece(frontier: Frontier | None, begin: int) -> Frontier | None:
    """Some nodes of a frontier; None where it has none there."""
    if frontier is None or begin >= frontier.nodes.numel():
        return None
    return Frontier(*(None if column is None else column[begin : begin + PIECE] for column in frontier))  # type: ignore[arg-type]


def _joined(pieces: Sequence[Picks | None]) -> Picks | None:
    made = [picks for picks in pieces if picks is not None]
    return Picks(*map(torch.cat, zip(*made, strict=True))) if made else None
