"""Write streams into a store on Spark: per stream, a job writes pieces and a job joins them; store.json is last.

Each task writes the rows of a range of ids as pieces of the store's files, in bounded memory. To do so, it runs the
code of `hoploom.ingest.stream`, which writes a store in one process, for its range alone.
"""

import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyspark import SparkFiles
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from hoploom.errors import ConfigError, DataError, HoploomError, StoreError
from hoploom.ingest.spark.frames import Ranges, SharedRows, one_row_each, ranges_for, run_tasks, shuffled
from hoploom.ingest.spark.joining import (
    PIECES,
    JoinTask,
    Piece,
    PieceWriter,
    WholeFile,
    join_tasks,
    joined_files,
    write_plan,
)
from hoploom.ingest.spark.session import explained
from hoploom.ingest.spark.target import StoreTarget
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream, Progress, Rows, StoreOptions
from hoploom.ingest.stream.node_rows import stored_fields, write_fields, write_split
from hoploom.ingest.stream.spill import SpillBudget
from hoploom.ingest.stream.streams import LEAST_MEMORY, SOURCE_TIME, IdRows
from hoploom.ingest.stream.to_store import (
    WrittenRelation,
    check_streams,
    describe_store,
    takes_node_times,
    write_relations,
    written_relations,
)
from hoploom.ops import give_back_freed_memory
from hoploom.ops.spool import KEY_BYTES
from hoploom.schema import Field, Schema
from hoploom.store import format as layout
from hoploom.store.format import PartRange
from hoploom.store.storage_path import StoragePath
from hoploom.system import resident_bytes

MOST_OBJECT = 95 * 10**9  # bytes: pyarrow uploads 10,000 pieces of 10 MB at most
TOO_LARGE = (
    "a file of a part would be larger than 95 GB, the most that is written to an object store; give more --parts"
)
Batches = Iterator[pa.RecordBatch]
TURNED = "turned"  # the column that is true in the rows of the reverse direction
Decode = Callable[[pa.RecordBatch], Any] | IdRows[Any]  # from a batch, or from ids alone, to rows
Frames = Callable[[Any], Any]  # from a stream's rows to SharedRows, or IdRows unchanged


def write_shared(
    session: SparkSession,
    target: StoreTarget,
    nodes: Sequence[NodeStream],
    edges: Sequence[EdgeStream],
    options: StoreOptions,
    frames: Frames,
    *,
    progress: Progress = lambda stage: None,
) -> tuple[Schema, tuple[PartRange, ...]]:
    """Write streams, of which `frames` makes SharedRows, into the store `target`; return its schema and part ranges."""
    check_streams(nodes, edges)
    with explained("Spark cannot write the store", DataError):
        return _SharedStore(session, target, options, frames, progress).write(nodes, edges)


class _SharedStore:
    """Plans and runs, on the driver, the jobs in which executors write a store."""

    def __init__(
        self, session: SparkSession, target: StoreTarget, options: StoreOptions, frames: Frames, begin: Progress
    ) -> None:
        self._session, self._target, self._options, self._frames = session, target, options, frames
        self._begin = begin
        self._tasks = TaskOptions(target.staging, options.memory)
        self._time_widths = [16]
        self._parallel = session.sparkContext.defaultParallelism
        self._plans = count()

    def write(self, nodes: Sequence[NodeStream], edges: Sequence[EdgeStream]) -> tuple[Schema, tuple[PartRange, ...]]:
        for stream in nodes if self._target.place.path is None else ():  # before anything is written
            for field in stored_fields(stream).values():
                if max(stream.part_sizes, default=0) * field.row_bytes > MOST_OBJECT:
                    raise ConfigError(TOO_LARGE)
        sizes = {stream.name: self._nodes(stream) for stream in nodes}
        by_name = {node.name: node for node in nodes}
        relations: list[WrittenRelation] = []
        num_edges: list[list[int]] = []
        for edge_stream in edges:
            self._begin(" ".join(edge_stream.key))
            written = written_relations(edge_stream, nodes, self._options, [None] * len(edge_stream.keys))
            for number, (source, _, _) in enumerate(edge_stream.keys):
                if takes_node_times(edge_stream, by_name[source], self._options):
                    written[number] = replace(written[number], time=SOURCE_TIME)
            num_edges += self._edges(edge_stream, written, nodes)
            relations += written
        schema, ranges = describe_store(nodes, sizes, relations, num_edges, self._options)
        self._target.described = schema, tuple(ranges)
        return self._target.described

    def _ranges(self, num_ids: int, num_rows: int, row_bytes: int) -> Ranges:
        return ranges_for(num_ids, num_rows, row_bytes, self._options.memory, self._parallel)

    def _nodes(self, stream: NodeStream) -> dict[str, list[int]]:
        """Write the fields and splits of a node type; return, by split, the number of members in each part."""
        self._begin(stream.name)
        parts, sizes = range(len(stream.bounds) - 1), dict[str, list[int]]()
        for block in stream.blocks:
            pieces, stored = self._block(stream, block), block.fields.items()
            files = [(layout.node_file(part, stream.name, name), field) for part in parts for name, field in stored]
            self._join([WholeFile(name, field, pieces_of(pieces, name)) for name, field in files])
        for split, given in stream.splits.items():
            rows, ranges = self._frames(given), self._ranges(stream.num_nodes, stream.num_nodes, 2 * KEY_BYTES)
            task = self._task(stream, rows, ranges, split=split)
            pieces = self._run(rows, ranges, task.write)
            names = [layout.split_file(part, stream.name, split) for part in parts]
            members = [WholeFile(name, Field("int64"), pieces_of(pieces, name)) for name in names]
            self._join(members)
            sizes[split] = [file.rows for file in members]
        return sizes

    def _block(self, stream: NodeStream, block: NodeFields) -> list[Any]:
        """Write the fields of a block as pieces of files; return, for each task, a dict from file name to piece."""
        rows, width = self._frames(block.rows), sum(field.row_bytes for field in block.fields.values())
        ranges = self._ranges(stream.num_nodes, stream.num_nodes, width + KEY_BYTES)
        shipped = NodeFields(block.fields, partial(iter, ()))  # without its rows
        return self._run(rows, ranges, self._task(stream, rows, ranges, block=shipped).write)

    def _task(self, stream: NodeStream, rows: Any, ranges: Ranges, **writes: Any) -> "NodeRangeTask":
        decode = rows if isinstance(rows, IdRows) else rows.decode
        return NodeRangeTask(self._tasks, ranges, stream.name, tuple(stream.bounds), decode, **writes)

    def _run(self, rows: SharedRows | IdRows[Any], ranges: Ranges, task: Any) -> list[Any]:
        if ranges.count == 0:  # a type without nodes
            return []
        if isinstance(rows, IdRows):
            return run_tasks(one_row_each(self._session, ranges.count), ranges.count, task)
        moved = shuffled(rows.frame, ranges.number_of("node"), ranges.count)
        return run_tasks(moved, ranges.count, task, rows.row_bytes)

    def _edges(
        self, stream: EdgeStream, written: Sequence[WrittenRelation], nodes: Sequence[NodeStream]
    ) -> list[list[int]]:
        """Write a relation, and its reverse if it has one; return, for each of the two, the number of edges by part."""
        rows = self._timed(self._frames(stream.rows), stream, written, nodes)
        assert rows.num_rows is not None
        ranges = []
        for one in written:
            width = KEY_BYTES + sum(field.row_bytes for field in one.columns().values())
            num_rows = rows.num_rows * (2 if stream.rule.undirected else 1)
            ranges.append(self._ranges(one.bounds[-1], num_rows, width))
        task = EdgeRangeTask(self._tasks, tuple(ranges), tuple(written), stream.rule, rows.decode)
        order = ["position"] if stream.rule.in_order else []
        frame, number = _directed(rows, stream, ranges)
        num_tasks = sum(each.count for each in ranges)
        results: list[Any] = []
        try:
            if num_tasks:
                moved = shuffled(frame, number, num_tasks, order)
                results = run_tasks(moved, num_tasks, task.write, rows.row_bytes)
        except HoploomError as error:
            if rows.explained is None or (better := rows.explained(error)) is None:
                raise
            raise better from error
        if rows.counted is not None:
            rows.counted(sum(result[1] for result in results), sum(result[2] for result in results))
        pieces = [result[0] for result in results]
        counts = list[list[int]]()
        files: list[WholeFile] = []
        for one, some in zip(written, [pieces[: ranges[0].count], pieces[ranges[0].count :]], strict=False):
            counts.append([])
            for part in range(len(one.bounds) - 1):
                described = one.files(part).items()
                whole = [WholeFile(name, field, pieces_of(some, name)) for name, field in described]
                counts[-1].append(whole[1].rows)  # indptr is first, indices second
                before = accumulate((piece.rows for piece in whole[1].pieces), initial=0)
                files += [replace(whole[0], before=tuple(before)[:-1]), *whole[1:]]
        self._join(files)
        return counts

    def _timed(
        self, rows: SharedRows, stream: EdgeStream, written: Sequence[WrittenRelation], nodes: Sequence[NodeStream]
    ) -> SharedRows:
        """Return `rows`. If edges take the times of their source nodes, add columns of the times of both end nodes."""
        if not any(one.time == SOURCE_TIME for one in written):
            return rows
        by_name, frame = {node.name: node for node in nodes}, rows.frame
        for end, name in (("source", stream.key[0]), ("destination", stream.key[2])):
            times = self._times(by_name[name])
            if times is None:
                frame = frame.withColumn(f"{end}_time", sql.lit(0).cast("long"))
                continue
            times = times.withColumnsRenamed({"node": f"{end}_node", "time": f"{end}_time"})
            joined = frame.join(times, frame[end] == times[f"{end}_node"], "left").drop(f"{end}_node")
            frame = joined.fillna(0, [f"{end}_time"])  # for an end that is not a known node
        return replace(rows, frame=frame, row_bytes=max(rows.row_bytes, *self._time_widths))

    def _times(self, stream: NodeStream) -> DataFrame | None:
        """Return a frame [node, time] of a type's nodes; None if the type has no times."""
        for block in stream.blocks:
            if self._options.time in block.fields:
                rows = self._frames(stream.times or block.rows)
                assert isinstance(rows, SharedRows)
                self._time_widths.append(rows.row_bytes)  # all stages of a job have batches of one size
                decode = partial(_node_times, rows.decode, self._options.time)
                return rows.frame.mapInArrow(decode, "node long, time long")
        return None

    def _join(self, files: Sequence[WholeFile]) -> None:
        """Let executors join pieces into `files`, and remove the pieces."""
        if self._target.place.path is None and any(sum(p.bytes for p in file.pieces) > MOST_OBJECT for file in files):
            raise ConfigError(TOO_LARGE)
        place, staging, plan = self._target.place, self._target.staging, f"{PIECES}/plan-{next(self._plans)}"
        tasks = join_tasks(files, self._parallel)
        write_plan(staging, plan, tasks)
        task = JoinTask(staging, place, plan)
        results = run_tasks(one_row_each(self._session, len(tasks)), len(tasks), task.write)
        for name, entry in joined_files(staging, files, tasks, results).items():
            self._target.files[name] = entry
        with suppress(StoreError):  # a late task may still write pieces; the whole staging place is removed later
            staging.remove(PIECES)


def pieces_of(made: Sequence[Mapping[str, Any]], name: str) -> tuple[Piece, ...]:
    """Return the pieces of the file `name` in the order of ranges; `made` has, for each range, its pieces by file."""
    return tuple(Piece(*by_file[name]) for by_file in made if name in by_file)


def _directed(rows: SharedRows, stream: EdgeStream, ranges: Sequence[Ranges]) -> tuple[Any, Any]:
    """Return a frame of all edges to write, also the reversed ones, and an expression for the range of a row."""
    frame, rule = rows.frame, stream.rule
    if not rule.undirected and rule.reverse is None:
        return frame, ranges[0].number_of("destination")
    both = frame.withColumn(TURNED, sql.explode(sql.array(sql.lit(False), sql.lit(True))))
    turned = dict[str, Any]()
    for one, other in (("source", "destination"), ("source_time", "destination_time")):
        if one in frame.columns:
            turned |= {one: sql.expr(f"if({TURNED}, {other}, {one})"), other: sql.expr(f"if({TURNED}, {one}, {other})")}
    both = both.withColumns(turned)
    if rule.undirected:
        return both.filter(f"not {TURNED} or source != destination"), ranges[0].number_of("destination")
    second = ranges[-1].number_of("destination") + ranges[0].count
    return both, sql.when(sql.col(TURNED), second).otherwise(ranges[0].number_of("destination"))


def _node_times(decode: Callable[[Any], Rows], name: str | None, batches: Any) -> Any:
    for batch in batches:
        rows = decode(batch)
        times = rows.fields[str(name)].to(torch.int64)
        yield pa.RecordBatch.from_pydict({"node": rows.ids.numpy(), "time": times.numpy()})


# --- tasks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskOptions:
    """The options that all tasks share."""

    staging: StoragePath
    memory: int  # bytes that a task's process may hold

    @contextmanager
    def budget(self) -> Iterator[SpillBudget]:
        """Yield a task's budget: the memory that is left now, and a folder on the executor's disk."""
        torch.set_num_threads(1)  # there are as many tasks as cores
        give_back_freed_memory()
        left = max(LEAST_MEMORY, self.memory - resident_bytes())
        with tempfile.TemporaryDirectory(prefix="hoploom-", dir=SparkFiles.getRootDirectory()) as folder:
            yield SpillBudget(Path(folder), left)


@dataclass(frozen=True)
class NodeRangeTask:
    """A Spark task that writes, for a range of nodes, either a block of fields or the members of a split."""

    options: TaskOptions
    ranges: Ranges
    name: str  # of the type
    bounds: tuple[int, ...]  # of its parts
    decode: Decode
    block: NodeFields | None = None  # without its rows
    split: str = ""  # if there is no block

    def write(self, number: int, batches: Batches) -> Any:
        """Write this range's pieces (what range `number` adds to each file); return a dict from file name to piece."""
        stream, rows = self._within(number, batches)
        with self.options.budget() as budget, PieceWriter(self.options.staging, number) as writer:
            if self.block is not None:
                write_fields(writer, stream, replace(self.block, rows=rows), budget)
            else:
                write_split(writer, replace(stream, splits={self.split: rows}), self.split, budget)
            return writer.pieces

    def _within(self, number: int, batches: Batches) -> tuple[NodeStream, Callable[[], Iterator[Any]]]:
        """Return a NodeStream of range `number` without fields, and a function that yields the rows of this range."""
        (first, end), decode = self.ranges.limits(number), self.decode
        bounds, first_part = _parts_within(self.bounds, first, end)

        def rows() -> Iterator[Any]:
            return decode.within(first, end) if isinstance(decode, IdRows) else map(decode, batches)

        return NodeStream(self.name, bounds, first_part=first_part), rows


def _parts_within(bounds: Sequence[int], first: int, end: int) -> tuple[tuple[int, ...], int]:
    """Cut the parts' `bounds` to the ids [first, end); return the cut bounds, and the number of the part of `first`."""
    part = bisect_right(bounds, first) - 1
    return (first, *(bound for bound in bounds[part + 1 :] if bound < end), end), part


@dataclass(frozen=True)
class EdgeRangeTask:
    """A Spark task that writes the in-edges of a range of nodes. Ranges of the reverse relation are numbered last."""

    options: TaskOptions
    ranges: tuple[Ranges, ...]  # of destinations
    written: tuple[WrittenRelation, ...]
    rule: EdgeRule
    decode: Callable[[pa.RecordBatch], EdgeRows]  # leaves out dropped edges

    def write(self, number: int, batches: Batches) -> Any:
        """Write the pieces of edge range `number`; return them by file name, the rows read, and the rows dropped."""
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
