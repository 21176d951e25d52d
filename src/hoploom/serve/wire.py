"""Messages on a connection: a header in JSON, then the bytes of tensors. docs/protocol.md says it for other clients.

Every request has one answer. Tensors go out from where they lie and come in to where they are to be; those of an answer
that is made while it is sent come in pieces of whole rows. On one host, large tensors of answers lie in shared memory,
and only their place is sent. Sizes are checked before anything is allocated.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.schema import DTYPE_NAMES
from hoploom.serve.connection import Connection
from hoploom.serve.shared_memory import SHARED_FROM, Offered, SharedAnswers

PROTOCOL = 4
PREFIX = struct.Struct("<4sI")  # what a frame is, and the bytes of its header
MESSAGE, MADE = b"MESG", b"MADE"  # a message; or the answer is still being made
LENGTH = struct.Struct("<I")  # of a piece; then its bytes. BROKEN: a message follows that says why there are no more
BROKEN = 0xFFFFFFFF
PIECE = 1 << 20  # bytes; larger ones fall out of the cache between the two sides, smaller ones cost more calls
MAX_HEADER = 1 << 20  # bytes
MAX_NEWS = 1 << 16  # of these, kept free for new segments of shared memory
MAX_TENSORS = 4096
MAX_REQUEST = 1 << 28  # bytes of a request's tensors
MAX_ANSWER = 1 << 36  # bytes of an answer's tensors
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 48


to_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes one each time
_scan = json.JSONDecoder().raw_decode


def from_json(text: str) -> Any:
    """What is written as `to_json` does: nothing stands before or after it."""
    text = text.strip()
    found, end = _scan(text)
    if end != len(text):
        raise ValueError(f"more than one value, the second at character {end}")
    return found


class Described(NamedTuple):
    """A tensor's dtype and shape, known before it is there."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Streamed(NamedTuple):
    """A tensor made while it is sent: `fill(row, out)` makes as many rows as `out` has, from that row on."""

    described: Described
    fill: Callable[[int, Tensor], None]
    piece: int = PIECE  # bytes that are made at once


class Message(NamedTuple):
    """A request or an answer."""

    header: dict[str, Any]
    tensors: Sequence[Tensor | Streamed] = ()
    done: Callable[[], None] | None = None  # called when an answer has been sent, or cannot be


class MalformedError(ValueError):
    """What came is no message; the conversation cannot go on."""


class TooLargeError(MalformedError):
    """What is announced would not fit; nothing of it was allocated."""


class StillMakingError(TimeoutError):
    """The other side has only said, so far, that the answer is being made."""


class BrokenError(Exception):
    """The answer broke off while it was sent: the header says why."""

    def __init__(self, header: dict[str, Any]) -> None:
        super().__init__(str(header.get("message", "")))
        self.header = header


# --- out -----------------------------------------------------------------------------------------


class _Making(NamedTuple):
    """What is made and sent after the header."""

    streamed: Streamed
    memory: Tensor | None  # of the segment where it is made; None: it is sent


class Prepared(NamedTuple):
    """A message of which nothing was sent yet; `send` has to be called with it."""

    header: bytes
    contents: list[Any]  # what is sent after the header: arrays, and what is made then
    offers: Sequence[Offered]  # segments whose descriptors go along
    num_bytes: int  # of its tensors


def prepare(message: Message, shared: SharedAnswers | None = None) -> Prepared:
    """The message as it will be sent. TooLargeError for one that nobody would take."""
    if len(message.tensors) > MAX_TENSORS:
        raise TooLargeError(f"{len(message.tensors)} tensors; at most {MAX_TENSORS}")
    listed, contents, total = [], [], 0
    sent = set[int]()
    try:
        for tensor in message.tensors:
            one, content, size = _place(tensor, shared)
            listed.append(one)
            total += size
            if content is not None:
                contents.append(content)
        header = {**message.header, "tensors": listed}
        encoded = to_json(header).encode()
        limit = MAX_HEADER if shared is None else MAX_HEADER - MAX_NEWS
        if len(encoded) > limit:
            raise TooLargeError(f"a header of {len(encoded)} bytes; at most {limit}")
        sent = {one[3] for one in listed if len(one) > 3 and one[3] is not None}
    finally:
        if shared is not None:
            shared.keep(sent)
    if shared is None or not shared.has_news:
        return Prepared(encoded, contents, (), total)
    offers, dropped = shared.news()
    news = {"segments": [[one.number, one.size] for one in offers], "dropped": dropped}
    return Prepared(to_json({**header, **news}).encode(), contents, offers, total)


def send(connection: Connection, prepared: Prepared) -> int:
    """Send what was prepared; returns the bytes of its tensors."""
    header, contents, offers, total = prepared
    try:
        connection.begin(total)
        files = [offer.descriptor for offer in offers]
        waiting: list[Any] = [PREFIX.pack(MESSAGE, len(header)), header]
        for content in contents:
            if type(content) is _Making:
                connection.send(waiting, files)
                waiting, files = [], []
                _stream(connection, content)
            else:
                waiting.append(content)
        if waiting:
            connection.send(waiting, files)
    finally:
        for offer in offers:
            os.close(offer.descriptor)
    return total


def write(connection: Connection, message: Message, shared: SharedAnswers | None = None) -> int:
    """Prepare a message and send it."""
    return send(connection, prepare(message, shared))


def _place(tensor: Tensor | Streamed, shared: SharedAnswers | None) -> tuple[list[Any], Any, int]:
    """How the header lists a tensor ([dtype, shape], and for some whether it comes in pieces and the segment that it
    lies in), what is sent after the header, and its bytes.

    What is large and not in shared memory yet is copied there, where there is any: to send it costs two copies.
    """
    if isinstance(tensor, Streamed):
        described = tensor.described
        memory = None if shared is None else shared.empty(described.shape, described.dtype)
        segment = None if shared is None or memory is None else shared.number_of(memory)
        listed = [DTYPE_NAMES[described.dtype], described.shape, True, segment]
        return listed, _Making(tensor, memory), described.num_bytes
    listed, size = [DTYPE_NAMES[tensor.dtype], tensor.shape], tensor.nbytes
    if shared is None or size < SHARED_FROM:
        return listed, array_of(tensor) if size else None, size
    segment = shared.number_of(tensor) if tensor.is_contiguous() else None
    if segment is None:
        memory = shared.empty(tuple(tensor.shape), tensor.dtype)
        if memory is None:
            return listed, array_of(tensor), size
        np.copyto(array_of(memory), array_of(tensor))  # by NumPy: torch would start a team of threads
        segment = shared.number_of(memory)
    return [*listed, False, segment], None, size


def _stream(connection: Connection, making: _Making) -> None:
    """Pieces: each is made in shared memory, or in memory that is recycled, and sent."""
    streamed, memory = making
    described = streamed.described
    num_rows = described.shape[0] if described.num_bytes else 0
    step = rows_at_once(described, streamed.piece)
    for row in range(0, num_rows, step):
        count = min(step, num_rows - row)
        in_memory = None if memory is None else memory[row : row + count]
        piece = ops.empty((count, *described.shape[1:]), described.dtype) if in_memory is None else in_memory
        streamed.fill(row, piece)
        length = LENGTH.pack(piece.nbytes)
        connection.send([length] if memory is not None else [length, array_of(piece)])


def write_made(connection: Connection) -> None:
    """Tell the client that its answer is still being made."""
    connection.begin(PREFIX.size)
    connection.send([PREFIX.pack(MADE, 0)])


def write_broken(connection: Connection, header: dict[str, Any]) -> None:
    """In the middle of pieces: there are no more of them, and why."""
    connection.begin(0)
    encoded = to_json({**header, "tensors": []}).encode()
    connection.send([LENGTH.pack(BROKEN), PREFIX.pack(MESSAGE, len(encoded)), encoded])


def array_of(tensor: Tensor) -> Any:
    """The same memory as NumPy has it, of any dtype. One call where it can be: cold, each of torch's takes long."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return (tensor if tensor.dtype is not torch.bfloat16 else tensor.view(torch.int16)).numpy()


def bytes_of(tensor: Tensor) -> Any:
    return array_of(tensor).reshape(-1).view(np.uint8)


def rows_at_once(described: Described, piece: int = PIECE) -> int:
    """How many rows make a piece."""
    return max(1, piece // max(1, described.row_bytes))
