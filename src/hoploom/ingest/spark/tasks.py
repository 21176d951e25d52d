"""What runs in executors: the rows of a range of ids become pieces of the store's files, within a task's memory.

The same code as for a store that one process writes, over one range.
"""

import json
import secrets
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyspark import SparkFiles

from hoploom.ingest.spark.frames import Ranges
from hoploom.ingest.spark.pieces import PIECES, PieceWriter
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream
from hoploom.ingest.stream.edge_lists import WrittenRelation, write_relations
from hoploom.ingest.stream.node_rows import measured_chunks, write_fields, write_split
from hoploom.ingest.stream.spill import SpillBudget
from hoploom.ingest.stream.streams import LEAST_MEMORY, IdRows, Measures
from hoploom.ops import give_back_freed_memory
from hoploom.store.storage_path import StoragePath
from hoploom.system import resident_bytes

Batches = Iterator[pa.RecordBatch]
TURNED = "turned"  # the column that says which rows are an edge's other direction
Decode = Callable[[pa.RecordBatch], Any] | IdRows[Any]  # a batch, or ids alone, to rows


@dataclass(frozen=True)
class TaskOptions:
    """What every task is given."""

    staging: StoragePath
    memory: int  # bytes of its process
    chunk_rows: int

    @contextmanager
    def budget(self) -> Iterator[SpillBudget]:
        """What of the memory is left now, and a folder on the executor's own disk."""
        torch.set_num_threads(1)  # tasks are as many as cores
        give_back_freed_memory()
        left = max(LEAST_MEMORY, self.memory - resident_bytes())
        with tempfile.TemporaryDirectory(prefix="hoploom-", dir=SparkFiles.getRootDirectory()) as folder:
            yield SpillBudget(Path(folder), left, self.chunk_rows)


# --- nodes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockTask:
    """Writes a block of a node type's fields."""

    options: TaskOptions
    ranges: Ranges
    name: str  # of the type
    bounds: tuple[int, ...]  # of its parts
    block: NodeFields  # but for its rows
    decode: Decode

    def write(self, number: int, batches: Batches) -> Any:
        """Write the pieces of a range; returns them by file."""
        stream, block = self._within(number, batches)
        with self.options.budget() as budget, PieceWriter(self.options.staging, number) as writer:
            write_fields(writer, stream, block, budget)
            return writer.made

    def measure(self, number: int, batches: Batches) -> Any:
        """Write the measures of the range's chunks, for a block with a last step; returns the name of their file."""
        stream, block = self._within(number, batches)
        name = f"{PIECES}/measures/{number:06d}-{secrets.token_hex(8)}"
        with self.options.budget() as budget, self.options.staging.create(name) as file:
            for measures in measured_chunks(stream, block, budget):
                file.write(json.dumps(measures).encode() + b"\n")
        return name

    def _within(self, number: int, batches: Batches) -> tuple[NodeStream, NodeFields]:
        first, end = self.ranges.limits(number)
        bounds, first_part = _parts_within(self.bounds, first, end)
        stream = NodeStream(self.name, bounds, first_part=first_part)
        return stream, replace(self.block, rows=lambda: _rows(self.decode, batches, first, end))


def measures_in(staging: StoragePath, names: Sequence[str]) -> Iterator[Measures]:
    """The measures that tasks have written, one after the other."""
    for name in names:
        with staging.open(name) as file:
            yield from map(json.loads, file)


@dataclass(frozen=True)
class SplitTask:
    """Writes the members of a split."""

    options: TaskOptions
    ranges: Ranges
    name: str  # of the type
    bounds: tuple[int, ...]
    split: str
    decode: Decode

    def write(self, number: int, batches: Batches) -> Any:
        """Write the pieces of a range; returns them by file."""
        first, end = self.ranges.limits(number)
        bounds, first_part = _parts_within(self.bounds, first, end)
        members = {self.split: lambda: _rows(self.decode, batches, first, end)}
        stream = NodeStream(self.name, bounds, splits=members, first_part=first_part)
        with self.options.budget() as budget, PieceWriter(self.options.staging, number) as writer:
            write_split(writer, stream, self.split, budget)
            return writer.made


def _rows(decode: Decode, batches: Batches, first: int, end: int) -> Iterator[Any]:
    return decode.within(first, end) if isinstance(decode, IdRows) else map(decode, batches)


def _parts_within(bounds: Sequence[int], first: int, end: int) -> tuple[tuple[int, ...], int]:
    """The bounds of the parts that a range lies in, cut to the range, and the first of these parts."""
    part = bisect_right(bounds, first) - 1
    return (first, *(bound for bound in bounds[part + 1 :] if bound < end), end), part


# --- edges ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EdgeTask:
    """Writes the lists of a relation, and of its reverse: ranges of the one, then of the other."""

    options: TaskOptions
    ranges: tuple[Ranges, ...]  # of destinations
    written: tuple[WrittenRelation, ...]
    rule: EdgeRule
    decode: Callable[[pa.RecordBatch], EdgeRows]  # edges that are left out are not among them

    def write(self, number: int, batches: Batches) -> Any:
        """Write the pieces of a range; returns them by file, the rows that came, and how many were left out."""
        direction = 0 if number < self.ranges[0].count else 1
        within = number - direction * self.ranges[0].count
        first, end = self.ranges[direction].limits(within)
        bounds, first_part = _parts_within(self.written[direction].bounds, first, end)
        topology = replace(self.written[direction], bounds=bounds, first_part=first_part)
        rule = EdgeRule(deduplicate=self.rule.deduplicate, drop_loops=self.rule.drop_loops, in_order=self.rule.in_order)
        counted = _Decoded(self.decode, batches, counts=direction == 0)
        stream = EdgeStream(topology.relation.key, topology.relation.fields, counted.rows, rule)
        with self.options.budget() as budget, PieceWriter(self.options.staging, within) as writer:
            write_relations(writer, stream, [topology], budget)
            return writer.made, counted.came, counted.left_out


@dataclass
class _Decoded:
    """The edges of batches. Rows are counted in one direction."""

    decode: Callable[[pa.RecordBatch], EdgeRows]
    batches: Batches
    counts: bool
    came: int = field(default=0)
    left_out: int = field(default=0)

    def rows(self) -> Iterator[EdgeRows]:
        for batch in self.batches:
            if TURNED in batch.schema.names and self.counts:
                turned = batch.column(TURNED)
                yield self.decode(batch.filter(turned))
                batch = batch.filter(pc.invert(turned))
            edges = self.decode(batch)
            if self.counts:
                self.came += batch.num_rows
                self.left_out += batch.num_rows - edges.sources.numel()
            yield edges
