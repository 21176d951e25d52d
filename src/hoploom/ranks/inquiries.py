"""What ranks ask each other in an exchange, and what is answered, as the bytes of a message.

The messages of one rank to another stand one after the other, each after its length. An answer has room for an error.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom import errors, ops
from hoploom.errors import BatchError, HoploomError, PeerError

ALIGNED = 16  # bytes: where each part of a message begins
TEXT = 512 - ALIGNED  # bytes of an answer that may hold an error


class Reply(NamedTuple):
    """What a question has been answered with."""

    num_bytes: int
    write: Callable[[Tensor], object]  # fills [num_bytes] uint8


@dataclass(frozen=True, eq=False)
class Inquiry:
    """What this rank asks another one."""

    rank: int
    content: Sequence[Tensor]  # of any dtype, each aligned in the message
    num_bytes: int  # of all
    answer_bytes: int | None  # None: only who answers knows it
    answer: "Future[Tensor]" = field(default_factory=Future)  # [n] uint8


def aligned(num_bytes: int) -> int:
    """What so many bytes take in a message."""
    return -(-num_bytes // ALIGNED) * ALIGNED


def join_questions(questions: Sequence[Inquiry]) -> Tensor:
    """Each after its length, and that of its answer where that is known."""
    out = ops.empty((sum(ALIGNED + question.num_bytes for question in questions),), torch.uint8)
    left = out
    for question in questions:
        left.numpy()[:ALIGNED].view(np.int64)[:] = question.num_bytes, question.answer_bytes or 0
        write_pieces(question.content, left[ALIGNED:])
        left = left[ALIGNED + question.num_bytes :]
    return out


def write_pieces(pieces: Sequence[Tensor], out: Tensor) -> None:
    """One after the other, each aligned."""
    array, begin = out.numpy(), 0
    for piece in pieces:  # torch would start a team of threads
        array[begin : begin + piece.nbytes] = piece.contiguous().view(torch.uint8).numpy()
        begin += aligned(piece.nbytes)


def read_questions(message: Tensor) -> list[tuple[Tensor, int]]:
    """What was joined, each with the length of its answer; 0: only who answers knows it."""
    found, begin = [], 0
    while begin < message.numel():
        size, answer_bytes = message[begin : begin + ALIGNED].numpy().view(np.int64).tolist()
        end = begin + ALIGNED + size
        found.append((message[begin + ALIGNED : end], answer_bytes))
        begin = end
    return found


def answer_size(num_bytes: int) -> int:
    """What an answer of so many bytes takes in a message."""
    return ALIGNED + TEXT + aligned(num_bytes)


def refusal(error: Exception, num_bytes: int) -> Reply:
    """An answer that is an error, as long as the one that is waited for."""

    def refuse(out: Tensor) -> None:
        raise error

    return Reply(num_bytes, refuse)


def write_answers(answers: Sequence[Reply], out: Tensor) -> None:
    """Each after its length and that of the error that it is, if it is one."""
    for answer in answers:
        said = b""
        try:
            answer.write(out[ALIGNED + TEXT :][: answer.num_bytes])
        except Exception as error:  # it belongs to the rank that waits for an answer
            own = error if isinstance(error, HoploomError) else BatchError(f"{type(error).__name__}: {error}")
            said = f"{type(own).__name__}|{own}".encode()[:TEXT]
        array = out.numpy()
        array[:ALIGNED].view(np.int64)[:] = answer.num_bytes, len(said)
        array[ALIGNED : ALIGNED + len(said)] = np.frombuffer(said, dtype=np.uint8)
        out = out[answer_size(answer.num_bytes) :]


def settle(questions: Sequence[Inquiry], answers: Tensor) -> None:
    """Give each question its answer, or the error that was sent instead."""
    for question in questions:
        array = answers.numpy()
        num_bytes, num_letters = array[:ALIGNED].view(np.int64).tolist()
        if num_letters:
            said = array[ALIGNED : ALIGNED + num_letters].tobytes().decode(errors="ignore")
            kind, _, text = said.partition("|")
            answer = getattr(errors, kind, PeerError)(f"rank {question.rank}: {text}")
            finish = partial(question.answer.set_exception, answer)
        else:
            finish = partial(question.answer.set_result, answers[ALIGNED + TEXT :][:num_bytes])
        with suppress(InvalidStateError):  # who asked has given up
            finish()
        answers = answers[answer_size(num_bytes) :]
