"""A table as the engine reads it: Parquet files, whoever wrote them, and what is known of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ArrayFile:
    """A .npy file: rows of numbers, to be memory-mapped."""

    path: str
    dtype: str  # as NumPy calls it: "<f4"
    shape: tuple[int, int]


@dataclass(frozen=True)
class Source:
    """A table as the engine reads it."""

    owner: str  # nodes.paper, edges."author writes paper"
    paths: tuple[str, ...]  # Parquet files; in the order listed, those of a glob or folder by name
    origins: tuple[str, ...]  # the user's own file of each, as messages call it
    schema: "pa.Schema"  # of the columns that the recipe uses
    num_rows: int
    row_counts: tuple[int, ...] = ()  # of each path
    features: tuple[str, ...] = ()  # the columns of x or edge_attr, in order: globs are resolved
    arrays: tuple[ArrayFile, ...] = ()  # features_npy: their rows, one after another, go with those of `paths`


@dataclass(frozen=True)
class Spot:
    """Where a value stands."""

    value: Any
    file: str  # the user's own
    row: int  # of its data, from 1

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}"
