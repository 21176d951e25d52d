"""Messages that come in, as wire.py sends them. Sizes are checked before anything is allocated."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hoploom import ops
from hoploom.schema import DTYPES
from hoploom.serve.connection import Connection
from hoploom.serve.shared_memory import SharedMemory
from hoploom.serve.wire import (
    BROKEN,
    LENGTH,
    MADE,
    MAX_ANSWER,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_HEADER,
    MAX_TENSORS,
    MESSAGE,
    PREFIX,
    BrokenError,
    Described,
    MalformedError,
    Message,
    StillMakingError,
    TooLargeError,
    array_of,
    bytes_of,
    from_json,
    rows_at_once,
)

SOON = 1 << 16  # bytes of tensors that are looked for in what was read ahead


class Coming(NamedTuple):
    """A tensor of a message that is read."""

    described: Described
    num_bytes: int
    in_pieces: bool
    segment: int | None


class Incoming:
    """A message whose header is here and whose tensors are still to be read, all of them."""

    def __init__(
        self,
        connection: Connection,
        limit: int,
        shared: SharedMemory | None = None,
        begin_header: Callable[[int], None] = lambda length: None,
    ) -> None:
        """Waits for the header, through as many frames that say it is being made as there are. `begin_header` is
        called with the header's length before it is read."""
        self._connection, self._shared = connection, shared
        kind, length = PREFIX.unpack(connection.take(PREFIX.size))
        while kind == MADE and length == 0:
            connection.begin(PREFIX.size)
            try:
                kind, length = PREFIX.unpack(connection.take(PREFIX.size))
            except TimeoutError as error:
                raise StillMakingError from error
        if kind != MESSAGE:
            raise MalformedError(f"a frame of kind {kind!r}; {MESSAGE!r} is a message")
        if length > MAX_HEADER:
            raise MalformedError(f"a header of {length} bytes; at most {MAX_HEADER}")
        begin_header(length)
        self.header, self._coming, self.num_bytes = _parse_header(connection, length, limit, shared)
        if self.num_bytes:
            connection.begin(self.num_bytes)

    @property
    def described(self) -> list[Described]:
        return [one.described for one in self._coming]

    @property
    def widened_bytes(self) -> int:
        """Bytes of the tensors together with their copies of 64 bits, if they are narrower."""
        widths = [one.described.dtype.itemsize for one in self._coming]
        return sum(one.num_bytes * (1 + (8 // n if n < 8 else 0)) for one, n in zip(self._coming, widths, strict=True))

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
        """Wait until all rows are where they are to be: in shared memory, else they are dropped."""
        row = 0
        while one.in_pieces and row < one.described.shape[0] and one.num_bytes:
            length = self._piece_length(one, one.described.shape[0] - row)
            row += length // one.described.row_bytes
            self._connection.skip(length if one.segment is None else 0)

    def skip(self) -> None:
        """Read the tensors without keeping them."""
        for one in self._coming:
            self._skip_pieces(one) if one.in_pieces else self._connection.skip(one.num_bytes)


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
    size = 1
    for extent in shape:
        if type(extent) is not int or not 0 <= extent < MAX_ELEMENTS:
            raise ValueError(f"shape {shape!r:.80}")
        size *= extent or 1  # without elements, too, a tensor has strides
    if size >= MAX_ELEMENTS:
        raise ValueError(f"shape {shape!r:.80}")
    return tuple(shape)
