"""Rows of numbers as a column of bytes, which Spark moves without looking inside."""

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hoploom import ops
from hoploom.ingest.stream.spill import from_bytes
from hoploom.schema import Field


def packed(rows: Tensor) -> pa.Array:
    """Rows [n, …] as bytes; less than 2 GiB."""
    raw = ops.byte_rows(rows.contiguous())
    ends = np.arange(len(raw) + 1, dtype=np.int64) * raw.shape[1]
    buffers = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(raw.numpy())]
    return pa.Array.from_buffers(pa.binary(), len(raw), buffers)


def unpacked(column: pa.Array, field: Field) -> Tensor:
    """The rows of a field."""
    _, offsets, values = column.buffers()
    begin = int(np.frombuffer(offsets, np.int32)[column.offset]) if len(column) else 0
    count = len(column) * field.row_bytes
    raw = np.frombuffer(values, np.uint8)[begin : begin + count] if count else np.empty(0, np.uint8)
    return from_bytes(torch.from_numpy(raw.copy()).view(len(column), field.row_bytes), field)
