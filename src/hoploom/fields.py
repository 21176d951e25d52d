"""The dtype and row shape of a field of a graph. Does not import torch, which takes seconds."""

from dataclasses import dataclass

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


@dataclass(frozen=True)
class Field:
    """The dtype and row shape of a field, which has one row per node or edge.

    `mean` and `deviation` are what standardising took out of each value of a row, (value - mean) / deviation. They are
    0 and 1 for values that were left as they are, and empty if all were.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    @property
    def row_bytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * ITEM_BYTES[self.dtype]
