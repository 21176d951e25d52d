"""Streams whose rows Spark has become a store: a job for each stream's pieces, one for its files, store.json last."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol

import pyarrow as pa
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from hoploom.errors import ConfigError, DataError, HoploomError, StoreError
from hoploom.ingest.spark.frames import (
    Ranges,
    SharedRows,
    numbers,
    ranges_for,
    returned,
    shuffled,
)
from hoploom.ingest.spark.joining import (
    JoinTask,
    WholeFile,
    join_tasks,
    joined_files,
    task_bytes,
    whole_indptr,
    write_plan,
)
from hoploom.ingest.spark.pieces import PIECES, Piece
from hoploom.ingest.spark.session import explained
from hoploom.ingest.spark.target import StoreTarget
from hoploom.ingest.spark.tasks import TURNED, BlockTask, EdgeTask, SplitTask, TaskOptions, measures_in
from hoploom.ingest.spark.watch_jobs import watching
from hoploom.ingest.stream import EdgeStream, NodeFields, NodeStream, Rows, StoreOptions
from hoploom.ingest.stream.edge_lists import WrittenRelation
from hoploom.ingest.stream.node_rows import chunk_rows, stored_fields
from hoploom.ingest.stream.streams import SOURCE_TIME, IdRows
from hoploom.ingest.stream.to_store import check_streams, described, takes_node_times, written_relations
from hoploom.ops import KEY_BYTES
from hoploom.schema import Field
from hoploom.store import format as layout

MOST_OBJECT = 95 * 10**9  # bytes: pyarrow uploads 10,000 pieces of 10 MB at most
TOO_LARGE = (
    "a file of a part would be larger than 95 GB, the most that is written to an object store; give more --parts"
)


class Shown(Protocol):
    """What is told how far the work is."""

    def begin(self, stage: str) -> None:
        """The next stage begins."""

    def detail(self, text: str) -> None:
        """How far the stage is."""


Frames = Callable[[Any], Any]  # SharedRows, or IdRows as they are


def write_shared(
    session: SparkSession,
    target: StoreTarget,
    nodes: Sequence[NodeStream],
    edges: Sequence[EdgeStream],
    options: StoreOptions,
    frames: Frames,
    *,
    progress: Shown | None = None,
) -> None:
    """Write streams into a store that is open for writing. `frames` finds the frame of a stream's `rows`.

    `options.memory` is what a task may hold.
    """
    check_streams(nodes, edges)
    with explained("Spark cannot write the store", DataError):
        _SharedStore(session, target, options, frames, progress).write(nodes, edges)


class _SharedStore:
    def __init__(
        self, session: SparkSession, target: StoreTarget, options: StoreOptions, frames: Frames, shown: Shown | None
    ) -> None:
        self._session, self._target, self._options, self._frames, self._shown = session, target, options, frames, shown
        self._tasks = TaskOptions(target.staging, options.memory, options.chunk_rows)
        self._time_widths = [16]
        self._parallel = session.sparkContext.defaultParallelism
        self._in_ranges = target.staging.takes_ranges()
        self._plans = count()

    def write(self, nodes: Sequence[NodeStream], edges: Sequence[EdgeStream]) -> None:
        self._check_sizes(nodes)
        sizes = {stream.name: self._nodes(stream) for stream in nodes}
        relations: list[WrittenRelation] = []
        num_edges: list[list[int]] = []
        for stream in edges:
            self._say(" ".join(stream.key))
            written = self._relations(stream, nodes)
            num_edges += self._edges(stream, written, nodes)
            relations += written
        self._target.describe(*described(nodes, sizes, relations, num_edges, self._options))

    def _say(self, stage: str) -> None:
        if self._shown is not None:
            self._shown.begin(stage)

    def _watching(self, ranges: int, rows: str) -> AbstractContextManager[None]:
        if self._shown is None:
            return nullcontext()
        return watching(self._session, self._shown.detail, ranges, rows)

    # --- nodes --------------------------------------------------------------------------------------

    def _check_sizes(self, nodes: Sequence[NodeStream]) -> None:
        """ConfigError before anything is written where a field of a part is too large for an object."""
        for stream in nodes if self._target.place.path is None else ():
            for field in stored_fields(stream).values():
                if max(stream.part_sizes, default=0) * field.row_bytes > MOST_OBJECT:
                    raise ConfigError(TOO_LARGE)

    def _nodes(self, stream: NodeStream) -> dict[str, list[int]]:
        self._say(stream.name)
        parts = range(len(stream.bounds) - 1)
        for block in stream.blocks:
            made = self._block(stream, block)
            files = {
                layout.node_file(part, stream.name, name): field
                for part in parts
                for name, field in block.stored.items()
            }
            self._join([WholeFile(name, field, pieces_of(made, name)) for name, field in files.items()])
        return {split: self._split(stream, split, parts) for split in stream.splits}

    def _block(self, stream: NodeStream, block: NodeFields) -> list[Any]:
        rows, width = self._frames(block.rows), sum(field.row_bytes for field in block.fields.values())
        step = chunk_rows(self._options.chunk_rows, width) if block.finish is not None else 1
        ranges = self._ranges(stream.num_nodes, stream.num_nodes, width + KEY_BYTES, step)
        decode = rows if isinstance(rows, IdRows) else rows.decode
        shipped = NodeFields(block.fields, _nothing, block.finish)
        task = BlockTask(self._tasks, ranges, stream.name, tuple(stream.bounds), shipped, decode)
        if block.finish is not None:
            names = self._run(rows, ranges, task.measure)
            applied = block.finish.prepare(measures_in(self._target.staging, names))
            finish = replace(block.finish, prepare=partial(_known, applied))
            task = replace(task, block=replace(shipped, finish=finish))
        return self._run(rows, ranges, task.write)

    def _split(self, stream: NodeStream, split: str, parts: range) -> list[int]:
        rows, field = self._frames(stream.splits[split]), Field("int64")
        ranges = self._ranges(stream.num_nodes, stream.num_nodes, 2 * KEY_BYTES)
        decode = rows if isinstance(rows, IdRows) else rows.decode
        made = self._run(
            rows, ranges, SplitTask(self._tasks, ranges, stream.name, tuple(stream.bounds), split, decode).write
        )
        names = [layout.split_file(part, stream.name, split) for part in parts]
        files = [WholeFile(name, field, pieces_of(made, name)) for name in names]
        self._join(files)
        return [file.rows for file in files]

    def _run(self, rows: SharedRows | IdRows[Any], ranges: Ranges, task: Any) -> list[Any]:
        if ranges.count == 0:  # a type without nodes
            return []
        with self._watching(ranges.count, f"{ranges.num_ids:,} nodes"):
            if isinstance(rows, IdRows):
                return returned(numbers(self._session, ranges.count), ranges.count, task, self._target.staging)
            moved = shuffled(rows.frame, ranges.number_of("node"), ranges.count)
            return returned(moved, ranges.count, task, self._target.staging, rows.row_bytes)

    # --- edges --------------------------------------------------------------------------------------

    def _relations(self, stream: EdgeStream, nodes: Sequence[NodeStream]) -> list[WrittenRelation]:
        written = written_relations(stream, nodes, self._options, [None] * len(stream.keys))
        by_name = {node.name: node for node in nodes}
        timed = [takes_node_times(stream, by_name[key[0]], self._options) for key in stream.keys]
        return [replace(one, time=SOURCE_TIME) if has else one for one, has in zip(written, timed, strict=True)]

    def _edges(
        self, stream: EdgeStream, written: Sequence[WrittenRelation], nodes: Sequence[NodeStream]
    ) -> list[list[int]]:
        """Write a relation, and its reverse if there is one; returns the number of edges by part of each."""
        rows = self._timed(self._frames(stream.rows), stream, written, nodes)
        assert rows.num_rows is not None
        ranges = []
        for one in written:
            width = KEY_BYTES + sum(field.row_bytes for field in one.columns().values())
            num_rows = rows.num_rows * (2 if stream.rule.undirected else 1)
            ranges.append(self._ranges(one.bounds[-1], num_rows, width))
        task = EdgeTask(self._tasks, tuple(ranges), tuple(written), stream.rule, rows.decode)
        order = ["position"] if stream.rule.in_order else []
        frame, number = _directed(rows, stream, ranges)
        tasks = sum(each.count for each in ranges)
        answers: list[Any] = []
        try:
            if tasks:
                moved = shuffled(frame, number, tasks, order)
                with self._watching(tasks, f"{rows.num_rows:,} edges"):
                    answers = returned(moved, tasks, task.write, self._target.staging, rows.row_bytes)
        except HoploomError as error:
            if rows.explained is None or (told := rows.explained(error)) is None:
                raise
            raise told from error
        if rows.counted is not None:
            rows.counted(sum(answer[1] for answer in answers), sum(answer[2] for answer in answers))
        made = [answer[0] for answer in answers]
        halves = [made[: ranges[0].count], made[ranges[0].count :]]
        counts = list[list[int]]()
        files: list[WholeFile] = []
        for one, pieces in zip(written, halves, strict=False):
            counts.append([])
            for part in range(len(one.bounds) - 1):
                whole = _files_of(one, part, pieces)
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
        """The edges with the times of both ends, where a relation takes those of its source nodes."""
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
            frame = joined.fillna(0, [f"{end}_time"])  # of an end that is unknown
        return replace(rows, frame=frame, row_bytes=max(rows.row_bytes, *self._time_widths))

    def _times(self, stream: NodeStream) -> DataFrame | None:
        """The times of a type's nodes: node, time; None where it has none."""
        for block in stream.blocks:
            if self._options.time in block.fields:
                rows = self._frames(stream.times or block.rows)
                assert isinstance(rows, SharedRows)
                self._time_widths.append(rows.row_bytes)  # one size of batches counts for all of a job
                return rows.frame.mapInArrow(
                    partial(_node_times, rows.decode, self._options.time), "node long, time long"
                )
        return None

    # --- files --------------------------------------------------------------------------------------

    def _ranges(self, num_ids: int, num_rows: int, row_bytes: int, step: int = 1) -> Ranges:
        return ranges_for(num_ids, num_rows, row_bytes, self._options.memory, self._parallel, step)

    def _join(self, files: Sequence[WholeFile]) -> None:
        """Make the files of their pieces, which are then removed."""
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
            answers = returned(numbers(self._session, len(tasks)), len(tasks), task.write, staging)
        for name, entry in joined_files(staging, files, tasks, answers).items():
            self._target.add(name, entry)
        with suppress(StoreError):  # a late task may still write there; all goes with the staging place
            self._target.staging.remove(PIECES)


def pieces_of(made: Sequence[Mapping[str, Any]], name: str) -> tuple[Piece, ...]:
    """The pieces of a file, in the order of their ranges."""
    return tuple(Piece(*answer[name]) for answer in made if name in answer)


def _files_of(written: WrittenRelation, part: int, made: Sequence[Mapping[str, Any]]) -> list[WholeFile]:
    """The files of a part's lists, indptr first, indices second."""
    names = list(written.files(part).items())
    (indptr, _), (indices, _), *_ = names
    edges = [piece.rows for piece in pieces_of(made, indices)]
    first = whole_indptr(indptr, pieces_of(made, indptr), edges)
    return [first, *(WholeFile(name, field, pieces_of(made, name)) for name, field in names[1:])]


def _directed(rows: SharedRows, stream: EdgeStream, ranges: Sequence[Ranges]) -> tuple[Any, Any]:
    """The frame with both directions of every edge, where both are wanted, and the range of each row."""
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
    """Rows of nodes with their times alone."""
    for batch in batches:
        rows = decode(batch)
        yield pa.RecordBatch.from_pydict(
            {"node": rows.ids.numpy(), "time": rows.fields[str(name)].to(torch.int64).numpy()}
        )


def _nothing() -> Any:
    raise NotImplementedError


def _known(applied: Any, measures: Any) -> Any:
    return applied
