"""Messages on a connection: a header in JSON, then the bytes of tensors. docs/protocol.md says it for other clients.

Every request has one answer. Tensors go out from where they lie and come in to where they are to be; those of an answer
that is made while it is sent come in pieces of whole rows. On one host, large tensors of answers lie in shared memory,
and only their place is sent. Sizes are checked before anything is allocated.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.schema import DTYPE_NAMES, DTYPES
from hoploom.serve.connection import Connection
from hoploom.serve.shared_memory import SHARED_FROM, Offered, SharedAnswers, SharedMemory

PROTOCOL = 4
PREFIX = struct.Struct("<4sI")  # what a frame is, and the bytes of its header
MESSAGE, MADE = b"MESG", b"MADE"  # a message; or the answer is still being made
LENGTH = struct.Struct("<I")  # of a piece; then its bytes. BROKEN: a message follows that says why there are no more
BROKEN = 0xFFFFFFFF
PIECE = 1 << 20  # bytes; larger ones fall out of the cache between the two sides, smaller ones cost more calls
MAX_HEADER = 1 << 20  # bytes
MAX_NEWS = 1 << 16  # of these, for what is new in shared memory
MAX_TENSORS = 4096
MAX_REQUEST = 1 << 28  # bytes of a request's tensors
MAX_ANSWER = 1 << 36  # bytes of an answer's tensors
MAX_DIMENSIONS = 8
SOON = 1 << 16  # bytes of tensors that are looked for in what was read ahead


to_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes one each time
_scan = json.JSONDecoder().raw_decode


def from_json(text: str) -> Any:
    """What is written as `to_json` does: nothing stands before or after it."""
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


def write(connection: Connection, message: Message, shared: SharedAnswers | None = None) -> int:
    """Send a message; returns the bytes of its tensors. TooLargeError before anything is sent."""
    listed, contents, total = [], [], 0
    for tensor in message.tensors:
        one, content, size = _place(tensor, shared)
        listed.append(one)
        total += size
        if content is not None:
            contents.append(content)
    header = {**message.header, "tensors": listed}
    encoded = to_json(header).encode()
    is_too_large = len(encoded) > MAX_HEADER - MAX_NEWS
    offers: list[Offered] = []
    if shared is not None:
        shared.keep(set() if is_too_large else {one[3] for one in listed if len(one) > 3 and one[3] is not None})
    if is_too_large:
        raise TooLargeError(f"a header of {len(encoded)} bytes; at most {MAX_HEADER - MAX_NEWS}")
    try:
        if shared is not None and shared.has_news:
            offers, dropped = shared.news()
            news = {"segments": [[one.number, one.size] for one in offers], "dropped": dropped}
            encoded = to_json({**header, **news}).encode()
        connection.begin(total)
        files = [offer.descriptor for offer in offers]
        waiting: list[Any] = [PREFIX.pack(MESSAGE, len(encoded)), encoded]
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


# --- in ------------------------------------------------------------------------------------------


class Coming(NamedTuple):
    """A tensor of a message that is read."""

    described: Described
    num_bytes: int
    in_pieces: bool
    segment: int | None


class Incoming:
    """A message whose header is here and whose tensors are still to be read, all of them."""

    def __init__(self, connection: Connection, limit: int, shared: SharedMemory | None = None) -> None:
        """Waits for the header, through as many frames that say it is being made as there are."""
        self._connection, self._shared = connection, shared
        kind, length = PREFIX.unpack(connection.take(PREFIX.size))
        while kind == MADE and length == 0:
            connection.begin(PREFIX.size)
            kind, length = PREFIX.unpack(connection.take(PREFIX.size))
        if kind != MESSAGE:
            raise MalformedError(f"a frame of kind {kind!r}; {MESSAGE!r} is a message")
        self.header, self._coming, self.num_bytes = _parse_header(connection, length, limit, shared)
        if self.num_bytes:
            connection.begin(self.num_bytes)

    @property
    def described(self) -> list[Described]:
        return [one.described for one in self._coming]

    def pieces(self) -> Iterator[tuple[int, int, Tensor]]:
        """(which tensor, its first row, whole rows as bytes [n, row bytes]), in order. What is not in shared memory
        stays as it is only until the next one is asked for."""
        scratch: Tensor | None = None
        for index, one in enumerate(self._coming):
            described, num_bytes = one.described, one.num_bytes
            row_bytes, num_rows = described.row_bytes, described.shape[0] if described.shape else 1
            memory = self._in_segment(one)
            if one.in_pieces or memory is not None or num_bytes > SOON:
                row = 0 if num_bytes else num_rows
                step = num_rows if memory is not None and not one.in_pieces else rows_at_once(described)
                while row < num_rows:
                    left = num_rows - row
                    size = self._piece_length(one, left) if one.in_pieces else min(step, left) * row_bytes
                    if memory is None:
                        if scratch is None or scratch.numel() < size:
                            scratch = ops.empty((size,), torch.uint8)
                        rows = scratch[:size]
                        self._connection.receive(memoryview(bytes_of(rows)))
                    else:
                        rows = memory[row * row_bytes : row * row_bytes + size]
                    yield index, row, rows.view(-1, row_bytes)
                    row += size // row_bytes
            elif num_bytes:
                yield index, 0, _small(self._connection.take(num_bytes), torch.uint8, (num_rows, row_bytes))

    def _in_segment(self, one: Coming) -> Tensor | None:
        if one.segment is None:
            return None
        return self._lies(one.segment, (one.num_bytes,), torch.uint8)

    def _lies(self, segment: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self._shared is not None
        try:
            return self._shared.tensor(segment, shape, dtype)
        except ValueError as error:
            raise MalformedError(str(error)) from error

    def _piece_length(self, one: Coming, rows_left: int) -> int:
        """The bytes of the next piece."""
        (length,) = LENGTH.unpack(self._connection.take(LENGTH.size))
        if length == BROKEN:
            raise BrokenError(Incoming(self._connection, 0).header)
        row_bytes = one.described.row_bytes
        if length == 0 or length % row_bytes or length > rows_left * row_bytes:
            raise MalformedError(f"a piece of {length} bytes; at most {rows_left} rows of {row_bytes} are missing")
        return int(length)

    def into(self, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None) -> Message:
        """The whole message, its tensors in memory of the receiver's choice. None: where they lie, if that is shared
        memory; else in recycled memory, and small ones in any."""
        return Message(self.header, [self._whole(one, allocate) for one in self._coming])

    def _whole(self, one: Coming, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor] | None) -> Tensor:
        described, size = one.described, one.num_bytes
        if one.segment is not None:
            lies = self._lies(one.segment, described.shape, described.dtype)
            self._skip_pieces(one)
            if allocate is None:
                return lies
            own = allocate(described.shape, described.dtype)
            np.copyto(array_of(own), array_of(lies))
            return own
        if allocate is None and size <= SOON and not one.in_pieces:
            return _small(self._connection.take(size), *described)
        tensor = (allocate or ops.empty)(described.shape, described.dtype)
        target = memoryview(bytes_of(tensor))
        row = 0
        while one.in_pieces and row < described.shape[0] and size:
            length = self._piece_length(one, described.shape[0] - row)
            begin, row = row * described.row_bytes, row + length // described.row_bytes
            self._connection.receive(target[begin : begin + length])
        if not one.in_pieces:
            self._connection.receive(target)
        return tensor

    def _skip_pieces(self, one: Coming) -> None:
        """Wait until all rows are where they are to be."""
        row = 0
        while one.in_pieces and row < one.described.shape[0] and one.num_bytes:
            row += self._piece_length(one, one.described.shape[0] - row) // one.described.row_bytes


def _small(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """In memory of its own: few calls, for it is the time of these that a round trip is."""
    if not content:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(content, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def _parse_header(
    connection: Connection, length: int, limit: int, shared: SharedMemory | None
) -> tuple[dict[str, Any], list[Coming], int]:
    """The header, its tensors, and their bytes."""
    if length > MAX_HEADER:
        raise MalformedError(f"a header of {length} bytes; at most {MAX_HEADER}")
    text = connection.take(length)
    try:
        header = from_json(text.decode())
        listed = header.pop("tensors")
        coming = [_coming(*one) for one in listed]
        for number, size in header.pop("segments", ()):
            _add_segment(connection, shared, number, size)
        if shared is not None and "dropped" in header:
            shared.drop(header.pop("dropped"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise MalformedError(f"a header that cannot be read: {type(error).__name__}: {error}") from error
    total = sum([one.num_bytes for one in coming])
    if len(coming) > MAX_TENSORS or total > limit:
        raise TooLargeError(f"{len(coming)} tensors of {total} bytes; at most {MAX_TENSORS} of {limit}")
    if any(one.segment is not None for one in coming) and shared is None:
        raise MalformedError("tensors in shared memory, which this connection has not")
    return header, coming, total


def _add_segment(connection: Connection, shared: SharedMemory | None, number: Any, size: Any) -> None:
    fits = type(number) is int and type(size) is int and 0 < size <= MAX_ANSWER
    if shared is None or not connection.files or not fits:
        raise ValueError(f"shared memory {number!r:.20} of {size!r:.20} bytes, or its descriptor has not come")
    shared.add(number, size, connection.files.pop(0))


def _coming(name: str, given: Any, in_pieces: Any = False, segment: Any = None) -> Coming:
    dtype, shape = DTYPES[name], _shape(given)
    if not isinstance(in_pieces, bool) or (in_pieces and not shape):
        raise ValueError(f"pieces {in_pieces!r:.80}")
    if segment is not None and (type(segment) is not int or segment < 0):
        raise ValueError(f"segment {segment!r:.80}")
    return Coming(Described(dtype, shape), math.prod(shape) * dtype.itemsize, in_pieces, segment)


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"shape {shape!r:.80}")
    for extent in shape:
        if type(extent) is not int or not 0 <= extent < 1 << 48:
            raise ValueError(f"shape {shape!r:.80}")
    return tuple(shape)


def read(connection: Connection, limit: int = MAX_ANSWER) -> Message:
    """A whole message, into recycled memory."""
    return Incoming(connection, limit).into()
