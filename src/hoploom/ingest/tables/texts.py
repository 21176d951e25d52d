"""Texts as rows of bytes, padded with zeros: ids that are no integers, as a store holds them."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def padded(texts: "pa.Array", width: int) -> Bytes:
    """UTF-8 [n, width]; no text is longer."""
    import pyarrow as pa

    texts = texts.cast(pa.large_string())
    _, offsets, values = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    rows = np.zeros((len(texts), width), np.uint8)
    lengths = np.diff(ends)
    inside = np.arange(width) < lengths[:, None]
    rows[inside] = np.frombuffer(values or b"", np.uint8)[ends[0] : ends[-1]]
    return rows
