"""The tasks of executors: each writes the rows of a range of ids as pieces of the store's files, in bounded memory.

They run the code of `stream`, which writes a store in one process, over one range.
"""

import json
import secrets
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyspark import SparkFiles

from hoploom.ingest.spark.frames import Ranges
from hoploom.ingest.spark.joining import PIECES, PieceWriter
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream
from hoploom.ingest.stream.node_rows import measured_chunks, write_fields, write_split
from hoploom.ingest.stream.spill import SpillBudget
from hoploom.ingest.stream.streams import LEAST_MEMORY, IdRows, Measures
from hoploom.ingest.stream.to_store import WrittenRelation, write_relations
from hoploom.ops import give_back_freed_memory
from hoploom.store.storage_path import StoragePath
from hoploom.system import resident_bytes

Batches = Iterator[pa.RecordBatch]
TURNED = "turned"  # the column that marks an edge's other direction
Decode = Callable[[pa.RecordBatch], Any] | IdRows[Any]  # from a batch, or from ids alone, to rows


@dataclass(frozen=True)
class TaskOptions:
    """The options of every task."""

    staging: StoragePath
    memory: int  # bytes of its process
    chunk_rows: int

    @contextmanager
    def budget(self) -> Iterator[SpillBudget]:
        """Return the memory that is left now, and a folder on the executor's own disk."""
        torch.set_num_threads(1)  # there are as many tasks as cores
        give_back_freed_memory()
        left = max(LEAST_MEMORY, self.memory - resident_bytes())
        with tempfile.TemporaryDirectory(prefix="hoploom-", dir=SparkFiles.getRootDirectory()) as folder:
            yield SpillBudget(Path(folder), left, self.chunk_rows)


@dataclass(frozen=True)
class NodeRangeTask:
    """Writes a block of a node type's fields, or the members of a split."""

    options: TaskOptions
    ranges: Ranges
    name: str  # of the type
    bounds: tuple[int, ...]  # of its parts
    decode: Decode
    block: NodeFields | None = None  # without its rows
    split: str = ""  # if there is no block

    def write(self, number: int, batches: Batches) -> Any:
        """Write the pieces of a range; return them by file."""
        stream, rows = self._within(number, batches)
        with self.options.budget() as budget, PieceWriter(self.options.staging, number) as writer:
            if self.block is not None:
                write_fields(writer, stream, replace(self.block, rows=rows), budget)
            else:
                write_split(writer, replace(stream, splits={self.split: rows}), self.split, budget)
            return writer.pieces

    def measure(self, number: int, batches: Batches) -> Any:
        """Write the measures of the range's chunks, for a block with a last step; return the name of their file."""
        assert self.block is not None
        stream, rows = self._within(number, batches)
        name = f"{PIECES}/measures/{number:06d}-{secrets.token_hex(8)}"
        with self.options.budget() as budget, self.options.staging.create(name) as file:
            for measures in measured_chunks(stream, replace(self.block, rows=rows), budget):
                file.write(json.dumps(measures).encode() + b"\n")
        return name

    def _within(self, number: int, batches: Batches) -> tuple[NodeStream, Callable[[], Iterator[Any]]]:
        """Return the node type, cut to a range, and its rows there."""
        (first, end), decode = self.ranges.limits(number), self.decode
        bounds, first_part = _parts_within(self.bounds, first, end)

        def rows() -> Iterator[Any]:
            return decode.within(first, end) if isinstance(decode, IdRows) else map(decode, batches)

        return NodeStream(self.name, bounds, first_part=first_part), rows


def measures_in(staging: StoragePath, names: Sequence[str]) -> Iterator[Measures]:
    """Yield the measures that tasks have written, file by file."""
    for name in names:
        with staging.open(name) as file:
            yield from map(json.loads, file)


def _parts_within(bounds: Sequence[int], first: int, end: int) -> tuple[tuple[int, ...], int]:
    """Return the bounds of the parts that a range overlaps, cut to the range, and the number of the first."""
    part = bisect_right(bounds, first) - 1
    return (first, *(bound for bound in bounds[part + 1 :] if bound < end), end), part


@dataclass(frozen=True)
class EdgeRangeTask:
    """Writes the lists of a relation, and of its reverse: first the ranges of the one, then of the other."""

    options: TaskOptions
    ranges: tuple[Ranges, ...]  # of destinations
    written: tuple[WrittenRelation, ...]
    rule: EdgeRule
    decode: Callable[[pa.RecordBatch], EdgeRows]  # without the edges that are left out

    def write(self, number: int, batches: Batches) -> Any:
        """Write the pieces of a range; return them by file, the number of rows, and how many were left out."""
        direction = 0 if number < self.ranges[0].count else 1
        within = number - direction * self.ranges[0].count
        first, end = self.ranges[direction].limits(within)
        bounds, first_part = _parts_within(self.written[direction].bounds, first, end)
        topology = replace(self.written[direction], bounds=bounds, first_part=first_part)
        rule = EdgeRule(deduplicate=self.rule.deduplicate, drop_loops=self.rule.drop_loops, in_order=self.rule.in_order)
        came, left_out = 0, 0

        def rows() -> Iterator[EdgeRows]:
            nonlocal came, left_out
            for batch in batches:
                if TURNED in batch.schema.names and direction == 0:
                    turned = batch.column(TURNED)
                    yield self.decode(batch.filter(turned))
                    batch = batch.filter(pc.invert(turned))
                edges = self.decode(batch)
                if direction == 0:  # rows are counted in one direction
                    came += batch.num_rows
                    left_out += batch.num_rows - edges.sources.numel()
                yield edges

        stream = EdgeStream(topology.relation.key, topology.relation.fields, rows, rule)
        with self.options.budget() as budget, PieceWriter(self.options.staging, within) as writer:
            write_relations(writer, stream, [topology], budget)
            return writer.pieces, came, left_out
