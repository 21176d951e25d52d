"""Messages of the protocol: a JSON header, then the bytes of tensors. docs/protocol.md specifies them for all clients.

Tensors are sent from their own memory and received into their final memory. Rows that are produced while they are sent
come in pieces. On one host, large tensors of responses are in shared memory, and only the number of their segment is
sent. Sizes are checked before memory is allocated.
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
from hoploom.serve.shared_memory import SHARED_FROM, ClientSegments, Segment, ServerSegments

PROTOCOL = 6
PREFIX = struct.Struct("<4sI")  # kind of the frame, length of its header
MESSAGE, HEARTBEAT = b"MESG", b"MADE"  # a heartbeat says that the response is still being made
LENGTH = struct.Struct("<I")  # of a piece, whose bytes follow
DRAINING = "draining"  # the error of a server that stops
BROKEN = 0xFFFFFFFF  # in place of a piece's length: a message with the error follows
PIECE = 1 << 20  # bytes; larger pieces fall out of the cache between the two sides, smaller ones cost more system calls
SMALL = 1 << 16  # bytes of a tensor that is read through the connection's buffer
MAX_HEADER = 1 << 20  # bytes
MAX_SEGMENT_LIST = 1 << 16  # bytes of a header that are kept free for the list of new segments
MAX_TENSORS = 4096
MAX_REQUEST = 1 << 28  # bytes of a request's tensors
MAX_RESPONSE = 1 << 36  # bytes of a response's tensors
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 48

encode_json = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each call
_raw_decode = json.JSONDecoder().raw_decode
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


class TensorSpec(NamedTuple):
    """A tensor's dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StreamedTensor(NamedTuple):
    """A tensor whose rows are produced while they are sent: `fill(row, out)` writes rows into `out`, from `row` on."""

    spec: TensorSpec
    fill: Callable[[int, Tensor], None]
    piece: int = PIECE  # bytes that are produced at once


class Message(NamedTuple):
    """A request or a response: a JSON header and tensors."""

    header: dict[str, Any]
    tensors: Sequence[Tensor | StreamedTensor] = ()
    done: Callable[[], None] | None = None  # called when a response was sent, or sending has failed

    @property
    def whole_tensors(self) -> list[Tensor]:
        """The tensors that are not streamed. A received message has only such tensors."""
        return [tensor for tensor in self.tensors if isinstance(tensor, Tensor)]


class MalformedError(ValueError):
    """The received bytes are not a message; the connection cannot be used again."""


class TooLargeError(MalformedError):
    """The message exceeds a limit; nothing was allocated for it."""


class StillPendingError(TimeoutError):
    """The server has sent heartbeats, but no response yet."""


class BrokenError(Exception):
    """The response failed while it was sent; `header` has the error."""

    def __init__(self, header: dict[str, Any]) -> None:
        super().__init__(str(header.get("message", "")))
        self.header = header


def decode_json(text: str) -> Any:
    """Return the JSON value of a text; raise ValueError if there is more than one, or none."""
    text = text.strip()
    found, end = _raw_decode(text)
    if end != len(text):
        raise ValueError(f"more than one value, the second at character {end}")
    return found


def array_of(tensor: Tensor) -> Any:
    """Return a tensor as a NumPy array, without a copy if it is contiguous. bfloat16 is returned as int16."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return (tensor if tensor.dtype is not torch.bfloat16 else tensor.view(torch.int16)).numpy()


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor as a flat NumPy array."""
    return array_of(tensor).reshape(-1).view(np.uint8)


class _Production(NamedTuple):
    """A streamed tensor to send, through `memory` in a shared segment or, if that is None, through the socket."""

    streamed: StreamedTensor
    memory: Tensor | None


class PreparedMessage(NamedTuple):
    """An encoded message to pass to `send_message`, which sends it and closes the descriptors of `segments`."""

    header: bytes
    contents: list[Any]  # arrays and productions, in the order of the tensors
    segments: Sequence[Segment]  # new ones, whose descriptors are sent and then closed
    num_bytes: int  # of all tensors


def prepare_message(message: Message, segments: ServerSegments | None = None) -> PreparedMessage:
    """Encode a message; raise TooLargeError if it exceeds the protocol's limits."""
    if len(message.tensors) > MAX_TENSORS:
        raise TooLargeError(f"{len(message.tensors)} tensors; at most {MAX_TENSORS}")
    listed, contents, total = [], [], 0
    sent = set[int]()
    try:
        for tensor in message.tensors:
            entry, content, size = _encode_tensor(tensor, segments)
            listed.append(entry)
            total += size
            if content is not None:
                contents.append(content)
        header = {**message.header, "tensors": listed}
        encoded = encode_json(header).encode()
        limit = MAX_HEADER if segments is None else MAX_HEADER - MAX_SEGMENT_LIST
        if len(encoded) > limit:
            raise TooLargeError(f"a header of {len(encoded)} bytes; at most {limit}")
        sent = {entry[3] for entry in listed if len(entry) > 3 and entry[3] is not None}
    finally:
        if segments is not None:
            segments.keep(sent)
    if segments is None or not segments.has_changes:
        return PreparedMessage(encoded, contents, (), total)
    new, dropped = segments.take_changes()
    changes = {"segments": [[segment.number, segment.size] for segment in new], "dropped": dropped}
    return PreparedMessage(encode_json({**header, **changes}).encode(), contents, new, total)


def send_message(connection: Connection, prepared: PreparedMessage) -> int:
    """Send a prepared message; return the number of bytes of its tensors."""
    header, contents, new_segments, total = prepared
    files = [segment.descriptor for segment in new_segments]
    try:
        connection.begin(total)
        waiting: list[Any] = [PREFIX.pack(MESSAGE, len(header)), header]
        for content in contents:
            if type(content) is _Production:
                connection.send(waiting, files)
                waiting, files = [], []
                _send_pieces(connection, content)
            else:
                waiting.append(content)
        if waiting:
            connection.send(waiting, files)
    finally:
        for segment in new_segments:
            os.close(segment.descriptor)
    return total


def write_message(connection: Connection, message: Message, segments: ServerSegments | None = None) -> int:
    """Prepare and send a message; return the number of bytes of its tensors."""
    return send_message(connection, prepare_message(message, segments))


def _encode_tensor(tensor: Tensor | StreamedTensor, segments: ServerSegments | None) -> tuple[list[Any], Any, int]:
    """Return a tensor's header entry, what to send or None, and its bytes. Large tensors go to a segment, if any."""
    if isinstance(tensor, StreamedTensor):
        spec = tensor.spec
        memory = None if segments is None else segments.empty(spec.shape, spec.dtype)
        segment = None if segments is None or memory is None else segments.number_of(memory)
        return [DTYPE_NAMES[spec.dtype], spec.shape, True, segment], _Production(tensor, memory), spec.num_bytes
    listed, size = [DTYPE_NAMES[tensor.dtype], tensor.shape], tensor.nbytes
    if segments is None or size < SHARED_FROM:
        return listed, array_of(tensor) if size else None, size
    segment = segments.number_of(tensor) if tensor.is_contiguous() else None
    if segment is None:
        memory = segments.empty(tuple(tensor.shape), tensor.dtype)
        if memory is None:
            return listed, array_of(tensor), size
        np.copyto(array_of(memory), array_of(tensor))  # torch would start a team of threads
        segment = segments.number_of(memory)
    return [*listed, False, segment], None, size


def _send_pieces(connection: Connection, production: _Production) -> None:
    """Produce the rows of a streamed tensor and send them, piece by piece."""
    (spec, fill, piece_bytes), memory = production
    num_rows = spec.shape[0] if spec.num_bytes else 0
    step = max(1, piece_bytes // max(1, spec.row_bytes))
    for row in range(0, num_rows, step):
        count = min(step, num_rows - row)
        piece = ops.empty((count, *spec.shape[1:]), spec.dtype) if memory is None else memory[row : row + count]
        fill(row, piece)
        length = LENGTH.pack(piece.nbytes)
        connection.send([length] if memory is not None else [length, array_of(piece)])


def send_heartbeat(connection: Connection) -> None:
    """Tell the client that its response is still being made."""
    connection.begin(PREFIX.size)
    connection.send([PREFIX.pack(HEARTBEAT, 0)])


def send_broken(connection: Connection, header: dict[str, Any]) -> None:
    """End a response in the middle of a streamed tensor, with the error in `header`."""
    connection.begin(0)
    encoded = encode_json({**header, "tensors": []}).encode()
    connection.send([LENGTH.pack(BROKEN), PREFIX.pack(MESSAGE, len(encoded)), encoded])


# --- receiving -----------------------------------------------------------------------------------


class _Announced(NamedTuple):
    """A tensor's entry in the header of a received message."""

    spec: TensorSpec
    num_bytes: int
    in_pieces: bool
    segment: int | None


class IncomingMessage:
    """A message whose header was read. All of its tensors must be read next, by `into`, `pieces` or `skip`."""

    def __init__(
        self,
        connection: Connection,
        limit: int,
        segments: ClientSegments | None = None,
        reserve_header: Callable[[int], None] = lambda length: None,
    ) -> None:
        """Read a message's header, after any heartbeats.

        `reserve_header(length)` is called first; tensors may have `limit` bytes in total.
        """
        self._connection, self._segments = connection, segments
        kind, length = PREFIX.unpack(connection.take(PREFIX.size))
        while kind == HEARTBEAT and length == 0:
            connection.begin(PREFIX.size)
            try:
                kind, length = PREFIX.unpack(connection.take(PREFIX.size))
            except TimeoutError as error:
                raise StillPendingError from error
        if kind != MESSAGE:
            raise MalformedError(f"a frame of kind {kind!r}; {MESSAGE!r} is a message")
        if length > MAX_HEADER:
            raise MalformedError(f"a header of {length} bytes; at most {MAX_HEADER}")
        reserve_header(length)
        text = connection.take(length)
        try:
            self.header: dict[str, Any] = decode_json(text.decode())
            self._tensors = [_read_announced(*entry) for entry in self.header.pop("tensors")]
            for number, size in self.header.pop("segments", ()):
                fits = type(number) is int and type(size) is int and 0 < size <= MAX_RESPONSE
                if segments is None or not connection.files or not fits:
                    shown = f"{number!r:.20} of {size!r:.20} bytes"
                    raise ValueError(f"shared memory {shown}, or its descriptor has not come")
                segments.add(number, size, connection.files.pop(0))
            if segments is not None and "dropped" in self.header:
                segments.drop(self.header.pop("dropped"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise MalformedError(f"a header that cannot be read: {type(error).__name__}: {error}") from error
        self.num_bytes = sum([tensor.num_bytes for tensor in self._tensors])
        if len(self._tensors) > MAX_TENSORS or self.num_bytes > limit:
            found = f"{len(self._tensors)} tensors of {self.num_bytes} bytes"
            raise TooLargeError(f"{found}; at most {MAX_TENSORS} of {limit}")
        if segments is None and any(tensor.segment is not None for tensor in self._tensors):
            raise MalformedError("tensors in shared memory, which this connection has not")
        if self.num_bytes:
            connection.begin(self.num_bytes)

    @property
    def specs(self) -> list[TensorSpec]:
        return [tensor.spec for tensor in self._tensors]

    @property
    def widened_bytes(self) -> int:
        """The bytes of all tensors and of 64-bit copies of the narrower ones, which decoding may make."""
        widths = [tensor.spec.dtype.itemsize for tensor in self._tensors]
        return sum(one.num_bytes * (1 + (8 // n if n < 8 else 0)) for one, n in zip(self._tensors, widths, strict=True))

    def into(self, allocate: Allocate | None = None) -> Message:
        """Read all tensors; return the message with them. `allocate`, if given, makes the memory for each tensor."""
        return Message(self.header, [self._read_tensor(tensor, allocate) for tensor in self._tensors])

    def pieces(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (tensor's index, first row, rows as uint8 [n, row bytes]).

        The next piece may overwrite these rows unless they are in shared memory.
        """
        scratch = torch.empty(0, dtype=torch.uint8)
        for index, tensor in enumerate(self._tensors):
            spec, num_bytes, in_pieces, segment = tensor
            row_bytes = spec.row_bytes
            if num_bytes <= SMALL and not in_pieces and segment is None:
                if num_bytes:
                    rows = _read_small(self._connection, torch.uint8, (num_bytes,), num_bytes)
                    yield index, 0, rows.view(-1, row_bytes)
                continue
            memory = None if segment is None else self._in_segment(segment, TensorSpec(torch.uint8, (num_bytes,)))
            for begin, size in self._spans(tensor):
                if memory is not None:
                    rows = memory[begin : begin + size]
                else:
                    if scratch.numel() < size:
                        scratch = ops.empty((size,), torch.uint8)
                    rows = scratch[:size]
                    self._connection.receive(memoryview(bytes_of(rows)))
                yield index, begin // row_bytes, rows.view(-1, row_bytes)

    def skip(self) -> None:
        """Read and discard the tensors."""
        for tensor in self._tensors:
            for _, size in self._spans(tensor):
                self._connection.skip(size if tensor.segment is None else 0)

    def _read_tensor(self, tensor: _Announced, allocate: Allocate | None) -> Tensor:
        spec, size, in_pieces, segment = tensor
        if segment is not None:
            shared = self._in_segment(segment, spec)
            for _ in self._spans(tensor):  # its rows are complete when all pieces have come
                pass
            if allocate is None:
                return shared
            own = allocate(spec.shape, spec.dtype)
            np.copyto(array_of(own), array_of(shared))
            return own
        if allocate is None and size <= SMALL and not in_pieces:
            return _read_small(self._connection, spec.dtype, spec.shape, size)
        result = (allocate or ops.empty)(spec.shape, spec.dtype)
        target = memoryview(bytes_of(result))
        if in_pieces:
            for begin, length in self._spans(tensor):
                self._connection.receive(target[begin : begin + length])
        else:
            self._connection.receive(target)
        return result

    def _spans(self, tensor: _Announced) -> Iterator[tuple[int, int]]:
        """Yield (first byte, length) of each piece of a tensor. If it was sent in pieces, read their lengths."""
        spec, num_bytes, in_pieces, segment = tensor
        row_bytes, begin = spec.row_bytes, 0
        step = num_bytes if segment is not None else max(1, PIECE // max(1, row_bytes)) * row_bytes
        while begin < num_bytes:
            length = min(step, num_bytes - begin)
            if in_pieces:
                (length,) = LENGTH.unpack(self._connection.take(LENGTH.size))
                if length == BROKEN:
                    raise BrokenError(IncomingMessage(self._connection, 0).header)
                if length == 0 or length % row_bytes or length > num_bytes - begin:
                    missing = (num_bytes - begin) // row_bytes
                    raise MalformedError(
                        f"a piece of {length} bytes; at most {missing} rows of {row_bytes} are missing"
                    )
            yield begin, length
            begin += length

    def _in_segment(self, segment: int, spec: TensorSpec) -> Tensor:
        assert self._segments is not None
        try:
            return self._segments.tensor(segment, spec.shape, spec.dtype)
        except ValueError as error:
            raise MalformedError(str(error)) from error


def _read_small(connection: Connection, dtype: torch.dtype, shape: tuple[int, ...], num_bytes: int) -> Tensor:
    """Read a small tensor with few calls, because calls take most of the time of a short round trip."""
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(connection.take(num_bytes), dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def _read_announced(name: str, shape: Any, in_pieces: Any = False, segment: Any = None) -> _Announced:
    """Return a tensor's entry in a header; raise ValueError, KeyError or TypeError if it is wrong."""
    fits = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
    size = 1
    for extent in shape if fits else ():
        fits = fits and type(extent) is int and 0 <= extent < MAX_ELEMENTS
        size *= extent or 1 if fits else 1  # an empty tensor has strides, too
    if not fits or size >= MAX_ELEMENTS:
        raise ValueError(f"shape {shape!r:.80}")
    if not isinstance(in_pieces, bool) or (in_pieces and not shape):
        raise ValueError(f"pieces {in_pieces!r:.80}")
    if segment is not None and (type(segment) is not int or segment < 0):
        raise ValueError(f"segment {segment!r:.80}")
    spec = TensorSpec(DTYPES[name], tuple(shape))
    return _Announced(spec, spec.num_bytes, in_pieces, segment)
