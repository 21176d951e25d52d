"""Write streams into a store by Spark: a job for the pieces of each stream, one for its files, store.json last."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from typing import Any, Protocol

import pyarrow as pa
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from hoploom.errors import ConfigError, DataError, HoploomError, StoreError
from hoploom.ingest.spark.frames import Ranges, SharedRows, one_row_each, ranges_for, run_tasks, shuffled
from hoploom.ingest.spark.joining import (
    PIECES,
    JoinTask,
    Piece,
    WholeFile,
    join_tasks,
    joined_files,
    task_bytes,
    write_plan,
)
from hoploom.ingest.spark.range_tasks import TURNED, EdgeRangeTask, NodeRangeTask, TaskOptions, measures_in
from hoploom.ingest.spark.session import explained, watching
from hoploom.ingest.spark.target import StoreTarget
from hoploom.ingest.stream import EdgeStream, NodeFields, NodeStream, Rows, StoreOptions
from hoploom.ingest.stream.node_rows import chunk_rows, stored_fields
from hoploom.ingest.stream.streams import SOURCE_TIME, IdRows
from hoploom.ingest.stream.to_store import (
    WrittenRelation,
    check_streams,
    describe_store,
    takes_node_times,
    written_relations,
)
from hoploom.ops import KEY_BYTES
from hoploom.schema import Field
from hoploom.store import format as layout

MOST_OBJECT = 95 * 10**9  # bytes: pyarrow uploads 10,000 pieces of 10 MB at most
TOO_LARGE = (
    "a file of a part would be larger than 95 GB, the most that is written to an object store; give more --parts"
)
Frames = Callable[[Any], Any]  # from a stream's rows to SharedRows, or IdRows unchanged


class StageProgress(Protocol):
    """Shows the progress of the work."""

    def begin(self, stage: str) -> None:
        """Begin a stage."""

    def detail(self, text: str) -> None:
        """Show the progress of the stage."""


def write_shared(
    session: SparkSession,
    target: StoreTarget,
    nodes: Sequence[NodeStream],
    edges: Sequence[EdgeStream],
    options: StoreOptions,
    frames: Frames,
    *,
    progress: StageProgress | None = None,
) -> None:
    """Write streams into a store that is open for writing. `frames` returns the frame of a stream's `rows`.

    `options.memory` is the memory of a task.
    """
    check_streams(nodes, edges)
    with explained("Spark cannot write the store", DataError):
        _SharedStore(session, target, options, frames, progress).write(nodes, edges)


class _SharedStore:
    """The driver's side of a store that executors write."""

    def __init__(
        self,
        session: SparkSession,
        target: StoreTarget,
        options: StoreOptions,
        frames: Frames,
        stages: StageProgress | None,
    ) -> None:
        self._session, self._target, self._options, self._frames = session, target, options, frames
        self._stages = stages
        self._tasks = TaskOptions(target.staging, options.memory, options.chunk_rows)
        self._time_widths = [16]
        self._parallel = session.sparkContext.defaultParallelism
        self._in_ranges = target.staging.takes_ranges()
        self._plans = count()

    def write(self, nodes: Sequence[NodeStream], edges: Sequence[EdgeStream]) -> None:
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
        self._target.describe(*describe_store(nodes, sizes, relations, num_edges, self._options))

    def _begin(self, stage: str) -> None:
        if self._stages is not None:
            self._stages.begin(stage)

    def _watching(self, ranges: int, rows: str) -> AbstractContextManager[None]:
        if self._stages is None:
            return nullcontext()
        return watching(self._session, self._stages.detail, ranges, rows)

    def _ranges(self, num_ids: int, num_rows: int, row_bytes: int, step: int = 1) -> Ranges:
        return ranges_for(num_ids, num_rows, row_bytes, self._options.memory, self._parallel, step)

    # --- nodes --------------------------------------------------------------------------------------

    def _nodes(self, stream: NodeStream) -> dict[str, list[int]]:
        """Write a node type; return the number of members by split and part."""
        self._begin(stream.name)
        parts, sizes = range(len(stream.bounds) - 1), dict[str, list[int]]()
        for block in stream.blocks:
            pieces, stored = self._block(stream, block), block.stored.items()
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
        """Write the pieces of a block; return them by task and file."""
        rows, width = self._frames(block.rows), sum(field.row_bytes for field in block.fields.values())
        step = chunk_rows(self._options.chunk_rows, width) if block.finish is not None else 1
        ranges = self._ranges(stream.num_nodes, stream.num_nodes, width + KEY_BYTES, step)
        shipped = NodeFields(block.fields, _no_rows, block.finish)
        task = self._task(stream, rows, ranges, block=shipped)
        if block.finish is not None:
            names = self._run(rows, ranges, task.measure)
            applied = block.finish.prepare(measures_in(self._target.staging, names))
            finish = replace(block.finish, prepare=partial(_prepared, applied))
            task = replace(task, block=replace(shipped, finish=finish))
        return self._run(rows, ranges, task.write)

    def _task(self, stream: NodeStream, rows: Any, ranges: Ranges, **writes: Any) -> NodeRangeTask:
        decode = rows if isinstance(rows, IdRows) else rows.decode
        return NodeRangeTask(self._tasks, ranges, stream.name, tuple(stream.bounds), decode, **writes)

    def _run(self, rows: SharedRows | IdRows[Any], ranges: Ranges, task: Any) -> list[Any]:
        if ranges.count == 0:  # a type without nodes
            return []
        with self._watching(ranges.count, f"{ranges.num_ids:,} nodes"):
            if isinstance(rows, IdRows):
                return run_tasks(one_row_each(self._session, ranges.count), ranges.count, task, self._target.staging)
            moved = shuffled(rows.frame, ranges.number_of("node"), ranges.count)
            return run_tasks(moved, ranges.count, task, self._target.staging, rows.row_bytes)

    # --- edges --------------------------------------------------------------------------------------

    def _edges(
        self, stream: EdgeStream, written: Sequence[WrittenRelation], nodes: Sequence[NodeStream]
    ) -> list[list[int]]:
        """Write a relation, and its reverse if it has one; return the number of edges by part of each."""
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
                with self._watching(num_tasks, f"{rows.num_rows:,} edges"):
                    results = run_tasks(moved, num_tasks, task.write, self._target.staging, rows.row_bytes)
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
                whole = _files_of(one, part, some)
                counts[-1].append(whole[1].rows)
                files += whole
        self._join(files)
        return counts

    def _timed(
        self,
        rows: SharedRows,
        stream: EdgeStream,
        written: Sequence[WrittenRelation],
        nodes: Sequence[NodeStream],
    ) -> SharedRows:
        """Return the edges with the times of both ends, if a relation takes those of its source nodes."""
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
            frame = joined.fillna(0, [f"{end}_time"])  # of an unknown end
        return replace(rows, frame=frame, row_bytes=max(rows.row_bytes, *self._time_widths))

    def _times(self, stream: NodeStream) -> DataFrame | None:
        """Return the times of a type's nodes [node, time]; None if it has none."""
        for block in stream.blocks:
            if self._options.time in block.fields:
                rows = self._frames(stream.times or block.rows)
                assert isinstance(rows, SharedRows)
                self._time_widths.append(rows.row_bytes)  # all stages of a job have batches of one size
                decode = partial(_node_times, rows.decode, self._options.time)
                return rows.frame.mapInArrow(decode, "node long, time long")
        return None

    # --- files --------------------------------------------------------------------------------------

    def _join(self, files: Sequence[WholeFile]) -> None:
        """Join pieces into the files, and remove them."""
        if self._target.place.path is None and any(sum(p.bytes for p in file.pieces) > MOST_OBJECT for file in files):
            raise ConfigError(TOO_LARGE)
        place, staging, plan = self._target.place, self._target.staging, f"{PIECES}/plan-{next(self._plans)}"
        tasks = join_tasks(files, task_bytes(files, self._parallel), in_ranges=self._in_ranges)
        write_plan(staging, plan, tasks)
        if place.path is not None:
            for folder in {(place.path / file.name).parent for file in files}:
                folder.mkdir(parents=True, exist_ok=True)
        with self._watching(len(tasks), f"{len(files):,} files"):
            task = JoinTask(staging, place, plan, self._in_ranges)
            results = run_tasks(one_row_each(self._session, len(tasks)), len(tasks), task.write, staging)
        for name, entry in joined_files(staging, files, tasks, results).items():
            self._target.add(name, entry)
        with suppress(StoreError):  # a late task may still write pieces; the whole staging place is removed later
            self._target.staging.remove(PIECES)


def pieces_of(made: Sequence[Mapping[str, Any]], name: str) -> tuple[Piece, ...]:
    """Return the pieces of a file, in the order of their ranges."""
    return tuple(Piece(*by_file[name]) for by_file in made if name in by_file)


def _files_of(written: WrittenRelation, part: int, made: Sequence[Mapping[str, Any]]) -> list[WholeFile]:
    """Return the files of a part's lists, indptr first, indices second."""
    files = [WholeFile(name, field, pieces_of(made, name)) for name, field in written.files(part).items()]
    before = accumulate((piece.rows for piece in files[1].pieces), initial=0)
    return [replace(files[0], before=tuple(before)[:-1]), *files[1:]]


def _directed(rows: SharedRows, stream: EdgeStream, ranges: Sequence[Ranges]) -> tuple[Any, Any]:
    """Return the frame, with both directions of every edge if both are written, and the range of each row."""
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


def _no_rows() -> Any:
    raise NotImplementedError


def _prepared(applied: Any, measures: Any) -> Any:
    return applied
