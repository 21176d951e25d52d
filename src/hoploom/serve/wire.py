"""Messages on an Arrow Flight stream: a header in JSON, then tensors as plain bytes.

One stream is one conversation: every request has one answer. Tensors travel in pieces of whole rows, about a megabyte
each, so that neither side holds more than that beside the tensor itself; what is small goes in one piece. Sizes are
checked before anything is allocated. Costs a copy on receipt, into memory that is recycled or pinned.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hoploom import ops
from hoploom.schema import DTYPE_NAMES, DTYPES

PROTOCOL = 3
COMMAND = f"hoploom/{PROTOCOL}".encode()  # what a stream is opened with
SCHEMA = pa.schema([("bytes", pa.uint8())])
PIECE = 1 << 20  # bytes; larger ones fall out of the cache between the two sides, smaller ones cost more calls
BEAT = pa.py_buffer(b"made")  # instead of a header: the answer is still being made
SMALL = 1 << 16  # bytes of a message that is received as one
MAX_HEADER = 1 << 20  # bytes
MAX_TENSORS = 4096
MAX_REQUEST = 1 << 28  # bytes of a request's tensors
MAX_ANSWER = 1 << 36  # bytes of an answer's tensors
MAX_DIMENSIONS = 8
NUMPY_DTYPES = DTYPE_NAMES | {torch.bfloat16: "int16"}


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
    """A tensor made while it is sent: pieces of whole rows, in order."""

    described: Described
    pieces: Iterable[Tensor]


class Message(NamedTuple):
    """A request or an answer."""

    header: dict[str, Any]
    tensors: Sequence[Tensor | Streamed] = ()
    done: Callable[[], None] | None = None  # called when an answer has been sent, or cannot be


class MessageWriter(Protocol):
    """What Flight's writers on both sides have in common."""

    def write_with_metadata(self, batch: pa.RecordBatch, metadata: bytes) -> None: ...
    def write_batch(self, batch: pa.RecordBatch) -> None: ...


class MessageReader(Protocol):
    """What Flight's readers on both sides have in common."""

    def read_chunk(self) -> Any: ...


class MalformedError(ValueError):
    """What came is no message; the conversation cannot go on."""


def write(writer: MessageWriter, message: Message) -> int:
    """Send a message; returns the bytes of its tensors."""
    described = [_describe(tensor) for tensor in message.tensors]
    listed = [[DTYPE_NAMES[one.dtype], list(one.shape)] for one in described]
    header = json.dumps({**message.header, "tensors": listed}).encode()
    total = sum(one.num_bytes for one in described)
    pieces = _packed(message.tensors, total) if total <= PIECE else _cut(message.tensors)
    writer.write_with_metadata(_record(next(pieces, NOTHING)), header)
    for piece in pieces:
        writer.write_batch(_record(piece))
    return total


NOTHING = np.empty(0, dtype=np.uint8)


def _describe(tensor: Tensor | Streamed) -> Described:
    return tensor.described if isinstance(tensor, Streamed) else Described(tensor.dtype, tuple(tensor.shape))


def _record(piece: "np.ndarray[Any, Any]") -> pa.RecordBatch:
    buffer = pa.py_buffer(piece)
    column = pa.Array.from_buffers(pa.uint8(), buffer.size, [None, buffer])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def _array(tensor: Tensor) -> Any:
    """The same memory as NumPy has it, of any dtype. One call where it can be: cold, each of torch's takes long."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return (tensor if tensor.dtype is not torch.bfloat16 else tensor.view(torch.int16)).numpy()


def _bytes_of(tensor: Tensor) -> Any:
    return _array(tensor).reshape(-1).view(np.uint8)


def _packed(tensors: Sequence[Tensor | Streamed], total: int) -> Iterator[Any]:
    """All tensors in one piece."""
    if total:
        each = [t for tensor in tensors for t in (tensor.pieces if isinstance(tensor, Streamed) else (tensor,))]
        yield _array(each[0]) if len(each) == 1 else np.concatenate([_bytes_of(tensor) for tensor in each])


def _cut(tensors: Sequence[Tensor | Streamed]) -> Iterator[Any]:
    """Pieces of whole rows, without a copy."""
    for tensor in tensors:
        if isinstance(tensor, Streamed):
            yield from (_bytes_of(piece) for piece in tensor.pieces if piece.numel())
        elif tensor.numel():
            flat, step = _bytes_of(tensor), rows_at_once(_describe(tensor)) * _describe(tensor).row_bytes
            yield from (flat[at : at + step] for at in range(0, flat.size, step))


def rows_at_once(described: Described, piece: int = PIECE) -> int:
    """How many rows make a piece."""
    return max(1, piece // max(1, described.row_bytes))


class Incoming:
    """A message whose header is here and whose tensors are still to be read, all of them."""

    def __init__(self, reader: MessageReader, limit: int) -> None:
        self._reader = reader
        chunk = reader.read_chunk()
        self.header, self.described = _parse_header(chunk.app_metadata, limit)
        self._first = chunk.data

    def pieces(self) -> Iterator[tuple[int, int, Tensor]]:
        """(which tensor, its first row, whole rows as bytes [n, row bytes]), in order."""
        waiting, self._first = _bytes_in(self._first), None
        for index, one in enumerate(self.described):
            num_rows = one.shape[0] if one.shape else 1
            row = 0 if one.num_bytes else num_rows
            while row < num_rows:
                while waiting.size == 0:
                    waiting = _bytes_in(self._reader.read_chunk().data)
                count = min(waiting.size // one.row_bytes, num_rows - row)
                if count == 0:
                    raise MalformedError("a piece does not hold whole rows")
                size = count * one.row_bytes
                yield index, row, torch.from_numpy(waiting[:size].reshape(count, one.row_bytes))
                waiting, row = waiting[size:], row + count
        if waiting.size:
            raise MalformedError("more bytes came than the header says")

    def into(self, allocate: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None) -> Message:
        """The whole message, its tensors in memory of the receiver's choice; None: recycled, or any for small ones."""
        total = sum(one.num_bytes for one in self.described)
        if allocate is None and total <= SMALL and (self._first.num_rows if self._first is not None else 0) == total:
            return Message(self.header, self._unpacked(total))
        tensors = [(allocate or ops.empty)(one.shape, one.dtype) for one in self.described]
        targets = [_bytes_of(tensor) for tensor in tensors]
        for index, row, rows in self.pieces():
            begin = row * rows.shape[1]
            targets[index][begin : begin + rows.numel()] = rows.view(-1).numpy()  # by NumPy: no team of threads
        return Message(self.header, tensors)

    def _unpacked(self, total: int) -> list[Tensor]:
        """Tensors that came in one piece: one copy, and few calls, for it is the time of these that a round trip is."""
        if total == 0:
            return [torch.empty(one.shape, dtype=one.dtype) for one in self.described]
        came = _bytes_in(self._first)
        tensors, at = [], 0
        for one in self.described:
            end = at + one.num_bytes
            own = np.array(came[at:end]).view(NUMPY_DTYPES[one.dtype]).reshape(one.shape)
            tensor = torch.from_numpy(own)
            tensors.append(tensor.view(torch.bfloat16) if one.dtype is torch.bfloat16 else tensor)
            at = end
        return tensors


class _View:
    """An Arrow buffer as NumPy takes it. Nobody writes to it; torch only wants to be able to."""

    def __init__(self, buffer: pa.Buffer, offset: int, count: int) -> None:
        self.buffer = buffer
        self.__array_interface__ = {
            "data": (buffer.address + offset, False),
            "shape": (count,),
            "typestr": "|u1",
            "version": 3,
        }


def _bytes_in(batch: pa.RecordBatch | None) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The bytes of a record, where they lie."""
    if batch is None or batch.num_rows == 0:
        return NOTHING
    if batch.num_columns != 1 or batch.schema.field(0).type != pa.uint8() or batch.column(0).null_count:
        raise MalformedError("a piece is not plain bytes")
    column = batch.column(0)
    buffer = column.buffers()[1]
    if column.offset + len(column) > buffer.size:
        raise MalformedError("a piece is shorter than it says")
    return np.asarray(_View(buffer, column.offset, len(column)))


def _parse_header(metadata: Any, limit: int) -> tuple[dict[str, Any], list[Described]]:
    if metadata is None or metadata.size > MAX_HEADER:
        raise MalformedError(f"a header of {0 if metadata is None else metadata.size} bytes; at most {MAX_HEADER}")
    try:
        header = json.loads(metadata.to_pybytes())
        listed = header.pop("tensors")
        described = [Described(DTYPES[name], _shape(shape)) for name, shape in listed]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedError(f"a header that cannot be read: {type(error).__name__}: {error}") from error
    total = sum(one.num_bytes for one in described)
    if len(described) > MAX_TENSORS or total > limit:
        raise TooLargeError(f"{len(described)} tensors of {total} bytes; at most {MAX_TENSORS} of {limit}")
    return header, described


class TooLargeError(MalformedError):
    """What is announced would not fit; nothing of it was allocated."""


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"shape {shape!r:.80}")
    if any(type(extent) is not int or not 0 <= extent < 1 << 48 for extent in shape):
        raise ValueError(f"shape {shape!r:.80}")
    return tuple(shape)


def read(reader: MessageReader, limit: int = MAX_ANSWER) -> Message:
    """A whole message, into recycled memory."""
    return Incoming(reader, limit).into()
