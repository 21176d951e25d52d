"""External sort of rows by key: pack rows into records, grouped by bucket (a range of keys), then sort each bucket.

A record holds the bytes of a row: its key minus the bucket's first key, in 32 bits, then its columns. Costs one more
pass over all bytes, and memory for one bucket.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hoploom import _core
from hoploom.errors import DataError
from hoploom.ops.rows import empty
from hoploom.system import num_cores

KEY_BYTES = 4
MOST_THREADS = 8


class Packed(NamedTuple):
    records: Tensor  # [n, width] uint8, bucket after bucket
    counts: Tensor  # [num_buckets] int64


class Ordered(NamedTuple):
    indptr: Tensor  # [num_lists + 1] int64
    order: Tensor  # [num_edges] uint32: the index of each entry's record


def pack(keys: Tensor, columns: Sequence[Tensor], bounds: Tensor) -> Packed:
    """Pack rows (columns [n, bytes] uint8), grouped by bucket: bucket b has the keys bounds[b] to bounds[b + 1] - 1."""
    width = KEY_BYTES + sum(column.shape[1] for column in columns)
    records = empty((keys.numel(), width), torch.uint8)
    counts = torch.empty(bounds.numel() - 1, dtype=torch.int64)
    try:
        _core.pack_records(
            keys.numpy(), [column.numpy() for column in columns], bounds.numpy(), records.numpy(), counts.numpy()
        )
    except IndexError as error:
        raise DataError(f"{error}; number the nodes from 0") from error
    return Packed(records, counts)


def place_column(records: Tensor, offset: int, out: Tensor) -> None:
    """Copy the bytes at `offset` of each record to row `key` of `out`; raise DataError unless every key occurs once."""
    try:
        _core.place_column(records.numpy(), offset, out.numpy())
    except IndexError as error:
        raise DataError(f"{error}; every node must come once") from error


def take(records: Tensor, order: Tensor, offset: int, row_bytes: int) -> Tensor:
    """Return `row_bytes` bytes at `offset` of each record, for the records in `order`: [n, row_bytes] uint8."""
    out = empty((order.numel(), row_bytes), torch.uint8)
    _core.take_column(records.numpy(), order.numpy(), offset, out.numpy())
    return out


def order_edges(
    records: Tensor,
    num_lists: int,
    source_bytes: int,  # 4 or 8
    *,
    time_offset: int | None = None,  # of an int64 time in each record, by which to sort a list first
    canonical: bool = True,  # then sort by source and by the bytes after it; else edges keep their input order
    deduplicate: bool = False,  # keep only the first edge of each source in a list
) -> Ordered:
    """Group the records of edges into one list per key (the destination), and sort every list."""
    indptr = torch.empty(num_lists + 1, dtype=torch.int64)
    order = empty((records.shape[0],), torch.uint32)
    kept = _core.order_records(
        records.numpy(),
        source_bytes,
        -1 if time_offset is None else time_offset,
        canonical,
        deduplicate,
        min(MOST_THREADS, num_cores()),
        indptr.numpy(),
        order.numpy(),
    )
    return Ordered(indptr, order[:kept])
