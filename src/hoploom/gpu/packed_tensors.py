"""Pack the tensors of a relation or a field into one block of bytes, a piece at a time.

Pieces are copied from the mapped files straight into the block, so that this process never has a second copy of a whole
tensor.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import ConfigError, DataError
from hoploom.ops import EdgeLists
from hoploom.ops.kernels.gather import quantise
from hoploom.schema import DTYPES, EDGE_ID, Field, Owner
from hoploom.store.base import Part, Wanted

PIECE = 64 << 20  # bytes copied at once
ALIGNED = 256  # bytes, of the offsets of tensors
INT32_IDS = 2**31
SCALE_BYTES = 4  # per row of int8
WIDENED = torch.float32, torch.float16, torch.bfloat16  # dtypes that gathering converts to

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PackedTensors:
    """Tensors that are stored in one block of bytes."""

    columns: tuple[tuple[Shape, torch.dtype], ...]
    fill: Callable[[Sequence[Tensor]], None]

    @property
    def num_bytes(self) -> int:
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in self.columns)

    def views(self, raw: Tensor) -> list[Tensor]:
        """Return the tensors as views of [num_bytes] uint8."""
        begin, out = 0, []
        for shape, dtype in self.columns:
            size = math.prod(shape) * dtype.itemsize
            out.append(raw[begin : begin + size].view(dtype).view(shape))
            begin += _aligned(size)
        return out

    def fill_bytes(self, raw: Tensor) -> None:
        """Write the tensors to [num_bytes] uint8."""
        self.fill(self.views(raw))


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


# --- topology ------------------------------------------------------------------------------------

WEIGHT, EDGE_TIME, SOURCE_TIME = "weight", "edge_time", "source_time"


def columns_of(parts: Sequence[EdgeLists]) -> tuple[str, ...]:
    """Return the columns that a relation has beside indptr and indices."""
    return tuple(name for name in (WEIGHT, EDGE_TIME, SOURCE_TIME) if getattr(parts[0], name) is not None)


def pack_topology(parts: Sequence[EdgeLists], num_sources: int) -> PackedTensors:
    """Pack a relation's lists, all parts merged: indptr, indices, and the columns that it has."""
    num_nodes = sum(lists.indptr.numel() - 1 for lists in parts)
    num_edges = sum(lists.num_edges for lists in parts)
    ids = torch.int32 if num_sources < INT32_IDS else torch.int64
    kinds = {WEIGHT: (num_edges, torch.float32), EDGE_TIME: (num_edges, torch.int64)}
    kinds[SOURCE_TIME] = (num_sources, torch.int64)
    others = columns_of(parts)
    columns = [(num_nodes + 1, torch.int64), (num_edges, ids), *(kinds[name] for name in others)]

    def fill(tensors: Sequence[Tensor]) -> None:
        indptr, indices, *rest = tensors
        indptr[:1].zero_()
        _fill_edges(indptr, [lists.indptr[1:] for lists in parts], 1, [lists.first_edge for lists in parts])
        _fill_edges(indices, [lists.indices for lists in parts])
        for name, tensor in zip(others, rest, strict=True):
            owners = parts[:1] if name == SOURCE_TIME else parts  # every part has the times of all sources
            _fill_edges(tensor, [getattr(lists, name) for lists in owners])
        ops.require_whole(column for lists in parts for column in lists.columns)

    return PackedTensors(tuple(((length,), dtype) for length, dtype in columns), fill)


def _fill_edges(out: Tensor, pieces: Sequence[Tensor], begin: int = 0, added: Sequence[int] | None = None) -> None:
    """Write these tensors one after the other to out[begin:], each plus its entry of `added`."""
    at_once = PIECE // out.element_size()
    for number, source in enumerate(pieces):
        for first in range(0, source.numel(), at_once):
            some = source[first : first + at_once]
            out[begin : begin + some.numel()].copy_(some + added[number] if added and added[number] else some)
            begin += some.numel()


# --- features ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldColumn:
    """The rows of one field over all parts."""

    owner: Owner
    name: str
    field: Field
    kept: torch.dtype  # dtype as placed
    parts: tuple[Part, ...]
    counts: tuple[int, ...]  # rows per part

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    @property
    def firsts(self) -> list[int]:
        """First id of every part."""
        return [sum(self.counts[:number]) for number in range(len(self.counts))]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as placed, without alignment."""
        return math.prod(self.field.shape) * self.kept.itemsize + (SCALE_BYTES if self.is_scaled else 0)

    @property
    def is_scaled(self) -> bool:
        """Whether rows are int8 with a scale each."""
        return self.kept == torch.int8 and DTYPES[self.field.dtype] != torch.int8

    def block(self, spans: Sequence[tuple[int, int]]) -> PackedTensors:
        """Pack the rows of these ranges of ids, and their scales."""
        count = sum(end - begin for begin, end in spans)
        columns: list[tuple[Shape, torch.dtype]] = [((count, *self.field.shape), self.kept)]
        if self.is_scaled:
            columns.append(((count,), torch.float32))
        return PackedTensors(tuple(columns), lambda tensors: self._fill(tensors, spans))

    def _fill(self, tensors: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> None:
        begin = 0
        for some in self._pieces(spans):
            end = begin + some.shape[0]
            kept = self._narrowed(some)
            for out, values in zip(tensors, kept, strict=True):
                out[begin:end].copy_(values)
            begin = end
        ops.require_whole(part.tables[self.owner, self.name].rows for part in self.parts)

    def _pieces(self, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Yield the rows of ranges of ids in order, some at a time."""
        at_once = max(1, PIECE // max(1, self.field.row_bytes))
        for begin, end in spans:
            for part, first, count in zip(self.parts, self.firsts, self.counts, strict=True):
                start, high = max(begin, first), min(end, first + count)
                table = part.tables[self.owner, self.name]
                in_order = not table.by_edge_id or (self.owner, EDGE_ID) not in part.tables
                for low in range(start, high, at_once):
                    until = min(high, low + at_once)
                    if in_order:
                        yield table.rows[low - first : until - first]
                    else:
                        yield part.gather([Wanted(self.owner, self.name, torch.arange(low, until))])[0]

    def _narrowed(self, rows: Tensor) -> tuple[Tensor, ...]:
        if self.kept == rows.dtype:
            return (rows,)
        if self.is_scaled:
            try:
                return quantise(rows)
            except DataError as error:
                raise self._too_wide("values that are not finite") from error
        narrow = rows.to(self.kept)
        if (narrow.isinf() & ~rows.isinf()).any():
            raise self._too_wide(f"values beyond {torch.finfo(self.kept).max:g}")
        return (narrow,)

    def _too_wide(self, what: str) -> ConfigError:
        has = f"{self.name!r} of {self.owner!r} has {what}"
        kept = str(self.kept).removeprefix("torch.")
        return ConfigError(f"{has}, which {kept} cannot hold; leave dtype out")


def kept_dtype(field: Field, narrow: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a field is placed: `narrow` only if it saves memory, and never for scalar rows."""
    own = DTYPES[field.dtype]
    if narrow is None or own not in WIDENED or not field.shape:
        return own
    scale = SCALE_BYTES if narrow == torch.int8 else 0
    return narrow if math.prod(field.shape) * narrow.itemsize + scale < field.row_bytes else own
