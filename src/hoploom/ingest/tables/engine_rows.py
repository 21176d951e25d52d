"""Rows that an engine has: an expression, and what decodes its batches, which may be sent to other processes.

So one process can read all of them, as with DuckDB, or many processes a range each, as on Spark.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import ibis.expr.types as ir
import pyarrow as pa

from hoploom.ingest.stream.streams import in_turn
from hoploom.ingest.tables.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True)
class EngineRows(Generic[T]):
    """The rows of an expression, and what a batch of them becomes."""

    engine: Engine
    table: ir.Table
    decode: Callable[[pa.RecordBatch], T]
    row_bytes: int = 16
    as_read: bool = False  # better in the order of the files

    def __call__(self) -> Iterator[T]:
        for batch in self.engine.stream(self.table, self.row_bytes, as_read=self.as_read):
            yield self.decode(batch)

    def then(self, further: Callable[[T], Any]) -> "EngineRows[Any]":
        """The same rows, turned into something else."""
        return replace(self, decode=partial(in_turn, self.decode, further))
