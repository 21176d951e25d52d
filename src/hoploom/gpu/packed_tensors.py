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
from hoploom.ops import EdgeLists
from hoploom.schema import DTYPES, EDGE_ID, Field, Owner
from hoploom.store.base import Part, Wanted

PIECE = 64 << 20  # bytes copied at once
ALIGNED = 256  # bytes, of the offsets of tensors
INT32_IDS = 2**31

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
    parts: tuple[Part, ...]
    counts: tuple[int, ...]  # rows per part

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    @property
    def firsts(self) -> list[int]:
        """First id of every part."""
        return [sum(self.counts[:number]) for number in range(len(self.counts))]

    def block(self, spans: Sequence[tuple[int, int]]) -> PackedTensors:
        """Pack the rows of these ranges of ids."""
        count = sum(end - begin for begin, end in spans)
        rows = (count, *self.field.shape), DTYPES[self.field.dtype]
        return PackedTensors((rows,), lambda tensors: self._fill(tensors[0], spans))

    def _fill(self, out: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        begin = 0
        for some in self._pieces(spans):
            out[begin : begin + some.shape[0]].copy_(some)
            begin += some.shape[0]
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
