"""Rounds in which ranks ask each other: the questions of all ranks travel in one all_to_all, the answers in another.

A thread of each rank takes part in every round, whatever its rank is doing. So no rank waits for another one's steps:
ranks may ask at different times, differently often, or never. What is ready to be asked when the answers leave is
announced with them, and the next round begins without a word. Once nobody has anything to ask, all threads wait for a
note where ranks meet. The price is one thread for each rank, and a few messages to every other rank in each round.
"""

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, suppress
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from hoploom import ops
from hoploom.errors import ConfigError, HoploomError, PeerError
from hoploom.ranks.all_to_all import AllToAll, split
from hoploom.ranks.inquiries import (
    ALIGNED,
    Inquiry,
    Reply,
    aligned,
    answer_size,
    join_questions,
    read_questions,
    refusal,
    settle,
    write_answers,
)
from hoploom.ranks.rendezvous import FAREWELL, own_client
from hoploom.ranks.whereabouts import Whereabouts

CHANNEL = "exchanges"
DOING = "exchanging rows with the other ranks"
CLOSING = "closing its store, whose rows the other ranks may still need (Context.close)"
OVER = "the store is closed, so other ranks cannot be asked; close it after its last batch"
HEAD = 16  # bytes of what a rank tells each other one of the next round: flags, and the size of its questions
ASKS, OPEN, CLOSED, GONE = 1, 2, 4, 8  # flags: asks somebody, also what has answers of any size; is done; has left
IDLE = timedelta(days=365)  # that nobody may ask anything
PAUSE = 0.005  # seconds between two looks for a note, where torch cannot wait for one beside other calls

Heads = NDArray[np.int64]  # [ranks, 2]: flags, and the bytes of what each asks this rank


class RankLeft(dist.DistError):
    """A rank said that it leaves the rounds, while others still need them."""

    def __init__(self, rank: int) -> None:
        super().__init__("before all ranks had closed theirs")
        self.rank = rank


class Exchange:
    """This rank's part in the rounds. `answer` answers the other ranks, in the thread of the rounds."""

    def __init__(
        self,
        ways: AllToAll,
        store: Store,
        whereabouts: Whereabouts,
        guard: Callable[[str], AbstractContextManager[None]],
        answer: Callable[[Tensor], Reply],
        seconds: float,
    ) -> None:
        self.rank, self.world_size = ways.rank, ways.world_size
        self._ways, self._whereabouts, self._guard, self._answer = ways, whereabouts, guard, answer
        self._seconds = seconds  # that ranks wait for each other
        # two more connections, as calls of one wait for each other: torch, too, may wait for long where ranks met
        self._notes: Store | None = own_client(store)  # to ring, until the rounds are over
        self._bell = own_client(store)  # to wait
        self._lock = threading.Lock()
        self._waiting: list[Inquiry] = []  # to be announced
        self._announced: list[Inquiry] = []  # for the next round
        self._under_way: list[Inquiry] = []  # in this one
        self._flags, self._has_news = 0, False
        self._number, self._is_idle = 0, False
        self._since = time.monotonic()  # that the ranks have been in the call of torch in which they are
        self._failure: HoploomError | None = None
        self._is_told = False  # whether somebody here has been told of it
        self._over = threading.Event()
        self._traffic = dict.fromkeys(("requests", "bytes_sent", "bytes_received", "wait_seconds"), 0.0)
        self._thread = threading.Thread(target=self._work, name="hoploom exchange", daemon=True)
        self._thread.start()

    def ask(self, rank: int, content: Sequence[Tensor], answer_bytes: int | None = None) -> Callable[[], Tensor]:
        """Ask another rank now; the answer [n] uint8 when the call that comes back is made."""
        num_bytes = sum(aligned(piece.nbytes) for piece in content)
        question = Inquiry(rank, content, num_bytes, answer_bytes)
        with self._lock:
            self._check_open()
            self._waiting.append(question)
            number = self._wanted_bell()
        self._ring(number)

        def finish() -> Tensor:
            began = time.perf_counter()
            answer = self._answered(question)
            with self._lock:
                self._traffic["requests"] += 1
                self._traffic["bytes_sent"] += num_bytes
                self._traffic["bytes_received"] += answer.numel()
                self._traffic["wait_seconds"] += time.perf_counter() - began
            return answer

        return finish

    def traffic(self) -> dict[str, float]:
        """What this rank has asked so far, and how long its threads waited for answers."""
        with self._lock:
            return dict(self._traffic)

    def close(self) -> None:
        """Ask nothing more. The others are answered until all have closed; nobody waits for that here."""
        self._say(CLOSED)
        self._warn()

    def wait(self, deadline: float) -> None:
        """Until all have closed, at most to this time of time.monotonic()."""
        self._whereabouts.begin(CHANNEL)

        def is_over(seconds: float) -> bool:
            left = deadline - time.monotonic()
            return self._over.wait(max(0.0, min(seconds, left))) or left <= seconds

        with suppress(dist.DistError):  # a rank that has left needs no rows
            self._whereabouts.wait(CHANNEL, CLOSING, is_over)
        self._warn()

    def leave(self) -> None:
        """Answer nobody any more. Ranks that have not closed yet get an error."""
        leave_all([self])

    # --- what other threads tell the one of the rounds -------------------------------------------

    def _answered(self, question: Inquiry) -> Tensor:
        """The answer, as long as ranks come on: calls of torch have deadlines, but not who waits for a note."""
        asked = time.monotonic()
        while (left := max(asked, self._since) + self._seconds + FAREWELL - time.monotonic()) > 0:
            with suppress(FutureTimeoutError):
                try:
                    return question.answer.result(left)
                except HoploomError:
                    self._is_told = self._failure is not None
                    raise
        try:
            with self._guard(DOING):
                raise dist.DistError(f"no answer came within {self._seconds:g} seconds")
        except Exception as error:
            self._fail(error)
        return question.answer.result(0)

    def _check_open(self) -> None:
        if self._failure is not None:
            self._is_told = True
            raise type(self._failure)(str(self._failure)) from self._failure
        if self._flags:
            raise ConfigError(OVER)

    def _warn(self) -> None:
        """Of a failure that has not reached anybody."""
        if self._failure is not None and not self._is_told:
            self._is_told = True
            warnings.warn(f"the ranks have stopped exchanging rows: {self._failure}", stacklevel=3)

    def _fail(self, error: Exception) -> None:
        """It belongs to all who ask, now or later."""
        if isinstance(error, HoploomError):
            own, cause = type(error)(str(error)), error.__cause__
        else:
            own = PeerError(f"rank {self.rank} was {DOING}, and failed with {type(error).__name__}: {error}")
            cause = error
        own.__cause__ = None if cause is None else cause.with_traceback(None)  # its frames hold messages, and a store
        with self._lock:
            self._failure = self._failure or own
        self._end(own)

    def _end(self, reason: HoploomError) -> None:
        """Nobody is answered any more."""
        self._over.set()
        with self._lock:
            lost = [*self._under_way, *self._announced, *self._waiting]
        for question in lost:
            with suppress(InvalidStateError):  # it has its answer
                question.answer.set_exception(type(reason)(str(reason)))

    def _wanted_bell(self) -> int | None:
        """The round to ring for, if nobody here has."""
        is_idle, self._is_idle = self._is_idle, False
        return self._number if is_idle else None

    def _ring(self, number: int | None) -> None:
        notes = self._notes
        if number is not None and notes is not None:
            with suppress(RuntimeError):  # who keeps the notes is gone, as the thread will find out
                notes.set(f"bell/{number}", "")

    def _say(self, flag: int) -> None:
        with self._lock:
            self._flags, self._has_news = self._flags | flag, True
            wanted = self._wanted_bell()
            number = self._number if flag == GONE else wanted  # a ring that was lost must not keep this rank here
        self._ring(number)

    # --- the rounds ------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with self._guard(DOING):
                heads = self._next_heads()
                while not self._is_over(heads):
                    heads = self._round(heads) if _any(heads, ASKS) else self._next_heads()
            self._end(ConfigError(OVER))
        except Exception as error:  # the next call raises it
            self._fail(error)
        self._ways.close()
        self._notes = None
        self._under_way, self._announced = [], []
        with self._lock:
            self._waiting = []
        del self._bell, self._answer  # connections, and a store: the context keeps this object

    def _swap(self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]) -> list[Tensor]:
        self._since = time.monotonic()
        return self._ways.swap(sent, sent_sizes, received_sizes)

    def _is_over(self, heads: Heads) -> bool:
        """Whether this rank leaves, or all are done; raises where another one has left."""
        if int(heads[self.rank, 0]) & GONE:
            return True
        if _any(heads, GONE):
            raise RankLeft(int(np.flatnonzero(heads[:, 0] & GONE)[0]))
        return not _any(heads, ASKS) and bool((heads[:, 0] & CLOSED).all())

    def _next_heads(self) -> Heads:
        """Wait until somebody has something to say, and hear what the next round is about."""
        with self._lock:
            self._number += 1
            self._is_idle = not (self._waiting or self._has_news)
            number, is_idle = self._number, self._is_idle
        if not is_idle:
            self._ring(number)
        if self.rank == 0:
            self._bell.delete_key(f"bell/{number - 1}")  # all have heard it
        if hasattr(self._bell, "clone"):
            self._bell.wait([f"bell/{number}"], IDLE)
        else:
            while not self._bell.check([f"bell/{number}"]):
                threading.Event().wait(PAUSE)
        sizes = [HEAD] * self.world_size
        return _heads(self._swap(self._announce().view(-1), sizes, sizes))

    def _announce(self) -> Tensor:
        """What this rank will ask in the next round, for every rank: [ranks, HEAD] uint8."""
        with self._lock:
            self._announced, self._waiting = self._waiting, []
            self._is_idle = self._has_news = False
            flags = self._flags
        if self._announced:
            flags |= ASKS
        if any(question.answer_bytes is None for question in self._announced):
            flags |= OPEN
        heads = np.full((self.world_size, 2), (flags, 0), dtype=np.int64)
        for question in self._announced:
            heads[question.rank, 1] += ALIGNED + question.num_bytes
        return torch.from_numpy(heads.view(np.uint8))

    def _round(self, heads: Heads) -> Heads:
        """Ask, answer, and be answered; the heads of the next round."""
        self._under_way = self._announced
        asked = [[one for one in self._under_way if one.rank == rank] for rank in range(self.world_size)]
        questions = join_questions([question for of_rank in asked for question in of_rank])
        sizes = [sum(ALIGNED + question.num_bytes for question in of_rank) for of_rank in asked]
        received = self._swap(questions, sizes, heads[:, 1].tolist())
        answers = [[self._prepared(*one) for one in read_questions(of_rank)] for of_rank in received]
        out_sizes = [HEAD + sum(answer_size(answer.num_bytes) for answer in of_rank) for of_rank in answers]
        if _any(heads, OPEN):
            told = torch.tensor(out_sizes).view(torch.uint8)
            in_sizes = [int(size.view(torch.int64)) for size in self._swap(told, *[[8] * self.world_size] * 2)]
        else:
            in_sizes = [HEAD + sum(answer_size(question.answer_bytes or 0) for question in one) for one in asked]
        sent = ops.empty((sum(out_sizes),), torch.uint8)
        segments = split(sent, out_sizes)
        for segment, replies in zip(segments, answers, strict=True):
            write_answers(replies, segment[HEAD:])
        for segment, head in zip(segments, self._announce(), strict=True):
            segment[:HEAD] = head
        found = self._swap(sent, out_sizes, in_sizes)
        for inquiries, segment in zip(asked, found, strict=True):
            settle(inquiries, segment[HEAD:])
        self._under_way = []
        return _heads([segment[:HEAD] for segment in found])

    def _prepared(self, content: Tensor, num_bytes: int) -> Reply:
        try:
            return self._answer(content)
        except Exception as error:  # it belongs to the rank that waits for an answer
            return refusal(error, num_bytes)


def leave_all(exchanges: Sequence[Exchange]) -> None:
    """Leave these, and wait a moment for the ends of their rounds: for all together."""
    for exchange in exchanges:
        exchange._say(GONE)
    deadline = time.monotonic() + FAREWELL / 2  # the rest is for leaving the ranks themselves
    for exchange in exchanges:
        exchange._thread.join(max(0.0, deadline - time.monotonic()))


# --- heads ---------------------------------------------------------------------------------------


def _any(heads: Heads, flag: int) -> bool:
    return bool((heads[:, 0] & flag).any())


def _heads(rows: Sequence[Tensor]) -> Heads:
    return np.stack([row.numpy().view(np.int64) for row in rows])
