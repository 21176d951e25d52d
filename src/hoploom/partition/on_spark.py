"""Cut a store into parts on Spark: this process assigns and renumbers the nodes, the executors write the parts.

This process writes the new node ids to files, and tasks read the files. Only edges' sources get new ids by a join.
Within a part, nodes are ordered by expected visits, estimated hop by hop from the seeds, without sampling. Each hop
but the first reads all edges once.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor

from hoploom.errors import HoploomError
from hoploom.ingest.spark import SharedRows, write_shared
from hoploom.ingest.spark.frames import (
    Ranges,
    binary_column,
    freeze_imports,
    one_row_each,
    rows_of_binary,
    run_tasks,
    task_number,
)
from hoploom.ingest.spark.session import active_session, check_java, check_master, sendable, spark_page, spark_session
from hoploom.ingest.spark.target import opened_target
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream, Progress, Rows, StoreOptions
from hoploom.ingest.stream.streams import SOURCE_TIME, TIME_COLUMN
from hoploom.load.presample import BATCH_SIZE
from hoploom.ops.assign_parts import NODE_BYTES, spread_visits
from hoploom.partition.assign import USUAL, assign, check_method, named_seeds, split_of, topology_of
from hoploom.partition.renumber import NewOrder, order_nodes
from hoploom.partition.report import FANOUTS, Cut, PartCost, PartitionReport
from hoploom.partition.store_files import CHUNK_EDGES, READERS, Array, StoreFiles
from hoploom.sample.hops import Fanouts, resolve_fanouts
from hoploom.schema import ORIGINAL_ID, Field
from hoploom.store import format as layout
from hoploom.store.storage_path import StoragePath

ONE = 1 << 20  # one visit, as an integer: sums count about millionths of visits
SQUARINGS = 10  # e^-x is 1 - x / 2^10, squared 10 times: unlike exp, the same bits on all processors
MOST_PER_BATCH = 64  # visits to a node; e^-64 is about 0
PER_DOUBLING = 16  # visit classes between x and 2 x visits
CHUNK_NODES = 1 << 20


def expected_visits(
    files: StoreFiles, node_type: str, split: str, fanouts: Sequence[Sequence[int]], memory: int
) -> Tensor:
    """Return each node's expected visits in an epoch from the seeds `split`: [num_nodes] int64, in units of 1 / ONE."""
    first, num_nodes = files.bounds[files.schema.type_index[node_type]], files.bounds[-1]
    visits, before = torch.zeros(num_nodes, dtype=torch.int64), torch.zeros(num_nodes, dtype=torch.int64)
    num_seeds = 0
    for _, ids in files.members(node_type, split):
        visits[ids + first] = ONE
        num_seeds += ids.numel()
    num_batches, new = max(1, -(-num_seeds // BATCH_SIZE)), torch.empty(num_nodes)
    with topology_of(files, memory) as topology:
        for hop in fanouts:
            for chunk, was, given in zip(*(torch.split(of, CHUNK_NODES) for of in (visits, before, new)), strict=True):
                given.copy_(_reached(chunk, num_batches) - _reached(was, num_batches))
            before.copy_(visits)
            spread_visits(topology, new, hop, visits, READERS)
    return visits


def _reached(visits: Tensor, num_batches: int) -> Tensor:
    """Return, for each node, the expected number of batches that contain it, in units of 1 / ONE: [n] float64."""
    per_batch = (visits.double() / (ONE * num_batches)).clamp_(max=MOST_PER_BATCH)
    absent = 1 - per_batch / (1 << SQUARINGS)
    for _ in range(SQUARINGS):
        absent = absent * absent
    return (1 - absent) * (ONE * num_batches)


def visit_classes(visits: Tensor) -> Tensor:
    """Return a rounded logarithm of each node's visits, [n] int16. Twice the visits add PER_DOUBLING; none give 0."""
    classes = torch.empty(visits.shape, dtype=torch.int16)
    for chunk, found in zip(torch.split(visits, CHUNK_NODES), torch.split(classes, CHUNK_NODES), strict=True):
        share, doublings = torch.frexp(chunk.double())
        found.copy_((PER_DOUBLING * (doublings - 1) + (2 * PER_DOUBLING * share).int()).clamp_(min=0))
    return classes


ROW_BYTES = 100  # most memory that a task takes per node of its bucket
PROCESS_BYTES = 450 << 20  # memory of a task's process after its imports
MOST_NODES, LEAST_NODES, TASKS = 1 << 22, 1 << 16, 256  # limits of a bucket's nodes, and the usual number of buckets
CHUNK_BYTES = 4 << 20
ENDS = 24  # bytes of an edge: both ends, and its position
Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """Settings of the Spark cluster that writes the parts. The parts do not depend on them."""

    master: str = "local[*]"
    conf: Mapping[str, str] = field(default_factory=dict)  # further Spark settings
    memory: int = 4 << 30  # bytes of each task's process


def partition_on_spark(
    store: str | Path,
    out: str | Path,
    num_parts: int,
    options: SparkOptions,
    *,
    method: str = "stream",
    seeds: Any = USUAL,
    fanouts: Fanouts | None = FANOUTS,
    progress: Progress | None = None,
) -> PartitionReport:
    """Cut a store into parts on Spark, and report counts. All executors must be able to reach `store` and `out`.

    `method` is "hash", "range" or "stream", `seeds` the name of a split, or (node type, name). This process assigns the
    nodes, in at most 24 bytes of memory a node; the executors write the parts. Within a part, nodes are ordered by how
    often training from these seeds with `fanouts` is expected to visit them, most first. With seeds=None or
    fanouts=None, nodes keep their order.

    >>> partition_on_spark("s3://graphs/papers", "s3://graphs/papers.parts", 64, SparkOptions(master="yarn"))
    """
    files, begin = StoreFiles.at(StoragePath(str(store))), progress or (lambda stage: None)
    schema, num_nodes = files.schema, files.bounds[-1]
    named = named_seeds(schema, seeds)
    split = None if named is None else split_of(schema, named)
    check_method(schema, num_parts, method)
    hops = None if fanouts is None else resolve_fanouts(schema, fanouts)
    if active_session() is None:  # before the work of this process
        check_java()
        check_master(options.master)
    free = max(options.memory - PROCESS_BYTES, options.memory // 8)
    buckets = Ranges(num_nodes, max(1, min(MOST_NODES, free // ROW_BYTES, max(LEAST_NODES, num_nodes // TASKS))))
    with opened_target(out) as target:
        renumbering = NewIds(files, buckets, target.staging)
        begin(f"assigning nodes by {method} in this process, in about {num_nodes * NODE_BYTES / 1e9:.1f} GB")
        parts = assign(str(store), num_parts, method, seeds=split, memory=options.memory)
        visits = None
        if split is not None and hops is not None:
            begin("finding the most used nodes")
            classes = visit_classes(expected_visits(files, *split, hops, options.memory))
            visits = dict(zip(schema.type_index, classes.tensor_split(files.bounds[1:-1]), strict=True))
            del classes
        orders = list(order_nodes(parts, num_parts, visits).values())
        del parts, visits
        renumbering.save(orders)
        bounds, changed = [order.bounds for order in orders], [not order.moves_nothing for order in orders]
        del orders
        begin("starting Spark")
        scratch = target.local_scratch("spark")
        with spark_session(scratch, options.memory, options.master, options.conf) as session:
            nodes = spark_node_streams(session, renumbering, bounds, changed)
            edges = spark_edge_streams(session, renumbering)
            written = StoreOptions(
                weight=schema.weight, time=schema.time, homogeneous=schema.homogeneous, memory=options.memory
            )
            begin(f"writing the parts{spark_page(session)}")
            described = write_shared(session, target, nodes, edges, written, lambda rows: rows, progress=begin)
            begin("counting cut edges")
            result = StoreFiles(target.place, *described)
            task = partial(count_inside, NewIds(result, buckets, target.staging))
            counts = run_tasks(one_row_each(session, buckets.count), buckets.count, task)
            return _report(result, [sum(of_relation) for of_relation in zip(*counts, strict=True)], split)


def _report(written: StoreFiles, inside: Sequence[int], split: tuple[str, str] | None) -> PartitionReport:
    """Return a report without sampled figures. `inside` has, by relation, the number of edges that stay in one part."""
    schema = written.schema
    cuts = tuple(
        Cut(" ".join(relation.key), relation.num_edges, relation.num_edges - count)
        for relation, count in zip(schema.relations, inside, strict=True)
    )
    parts = []
    for part in written.parts:
        num_seeds = 0 if split is None else part.splits[split[0]][split[1]]
        nodes = dict(zip(schema.type_index, part.num_nodes, strict=True))
        parts.append(PartCost(nodes, sum(part.num_edges), num_seeds))
    return PartitionReport(cuts, tuple(parts))


# --- streams of the new store ----------------------------------------------------------------------


@dataclass(frozen=True)
class NewIds:
    """The new ids of a store's nodes, numbered within each type. A bucket is a range of nodes; each has a file."""

    store: StoreFiles
    buckets: Ranges
    staging: StoragePath

    def save(self, orders: Sequence[NewOrder]) -> None:
        """Write the new ids in `orders` (one per node type), one file per bucket of nodes."""
        for bucket in range(self.buckets.count):
            begin, end = self.buckets.limits(bucket)
            found = [
                order.new_of_old[max(begin, first) - first : max(begin, first, min(end, last)) - first]
                for order, (first, last) in zip(orders, pairwise(self.store.bounds), strict=True)
            ]
            with self.staging.create(self._name(bucket)) as file:
                np.lib.format.write_array(file, torch.cat(found).numpy(), allow_pickle=False)

    def nodes_of(self, bucket: int, type_index: int) -> tuple[int, int, Array]:
        """Return (begin, end, new ids): the range of a type's nodes in a bucket, and new ids [end - begin] int64."""
        first, end = self.buckets.limits(bucket)
        type_first, type_end = self.store.bounds[type_index : type_index + 2]
        low = max(first, type_first)
        high = max(low, min(end, type_end))
        with self.staging.open(self._name(bucket)) as file:
            new_ids = np.lib.format.read_array(file, allow_pickle=False)
        return low, high, new_ids[low - first : high - first]

    def _name(self, bucket: int) -> str:
        return f"new/{bucket:06d}.npy"


def spark_node_streams(
    session: SparkSession, to: NewIds, bounds: Sequence[Sequence[int]], changed: Sequence[bool]
) -> list[NodeStream]:
    """Return a stream per node type with new ids, read by Spark tasks.

    `bounds[i]` divides the ids of type i. If `changed[i]`, type i gets a field `original_id` if it has none.
    """
    streams = []
    for index, node_type in enumerate(to.store.schema.node_types):
        fields = dict(node_type.fields)
        if ORIGINAL_ID not in fields and changed[index]:
            fields[ORIGINAL_ID] = Field("int64")
        width = sum(field.row_bytes for field in fields.values())
        columns = "".join(f", c{number} binary" for number in range(len(fields)))
        frame = _frame(session, to, partial(_node_rows, to, index, fields), f"node long{columns}")
        rows: Any = SharedRows(frame, partial(_decode_nodes, fields), node_type.num_nodes, width)
        splits: dict[str, Any] = {}
        for split in node_type.splits:
            members = _frame(session, to, partial(_members, to, index, split), "node long")
            splits[split] = SharedRows(members, partial(_ids, name="node"), node_type.splits[split])
        blocks = [NodeFields(fields, rows)] if fields else []
        streams.append(NodeStream(node_type.name, tuple(bounds[index]), blocks, splits))
    return streams


def spark_edge_streams(session: SparkSession, to: NewIds) -> list[EdgeStream]:
    """Return, for each relation, a stream of its edges with new node ids and all fields, in stored order."""
    streams = []
    for index, relation in enumerate(to.store.schema.relations):
        width = sum(field.row_bytes for field in relation.fields.values()) + ENDS
        columns = "".join(f", c{number} binary" for number in range(len(relation.fields)))
        schema = f"old long, destination long, position long{columns}"
        edges = _frame(session, to, partial(_edge_rows, to, index), schema)
        ids = _frame(session, to, partial(_source_ids, to, to.store.schema.sources[index]), "id long, source long")
        frame = edges.join(ids, edges["old"] == ids["id"]).drop("old", "id")
        rows: Any = SharedRows(frame, partial(_decode_edges, relation.fields), relation.num_edges, width)
        streams.append(EdgeStream(relation.key, relation.fields, rows, EdgeRule(in_order=True)))
    return streams


def count_inside(to: NewIds, bucket: int, batches: Batches) -> list[int]:
    """Count, by relation, the in-edges of a bucket's nodes that come from the same part. Runs in a Spark task."""
    inside = [0] * len(to.store.schema.relations)
    for lists in to.store.in_lists(*to.buckets.limits(bucket)):
        part, source = to.store.parts[lists.part], to.store.schema.sources[lists.relation]
        first, end = part.first_nodes[source], part.first_nodes[source] + part.num_nodes[source]
        for at in range(0, int(lists.indptr[-1]), CHUNK_EDGES):
            sources = lists.sources(at, min(int(lists.indptr[-1]), at + CHUNK_EDGES))
            inside[lists.relation] += int(((sources >= first) & (sources < end)).sum())
    return inside


# --- rows, in the tasks --------------------------------------------------------------------------


def _frame(session: SparkSession, to: NewIds, rows_of: Callable[[int], Batches], schema: str) -> DataFrame:
    return one_row_each(session, to.buckets.count).mapInArrow(partial(_run, rows_of), schema)


def _run(rows_of: Callable[[int], Batches], batches: Batches) -> Batches:
    freeze_imports()
    deque(batches, maxlen=0)
    try:
        yield from rows_of(task_number())
    except HoploomError as error:
        raise sendable(error) from error


def _batch(ids: Mapping[str, Array], values: Sequence[Array]) -> pa.RecordBatch:
    columns: dict[str, Any] = {name: pa.array(column, pa.int64()) for name, column in ids.items()}
    for number, rows in enumerate(values):
        columns[f"c{number}"] = binary_column(rows)
    return pa.RecordBatch.from_pydict(columns)


def _node_rows(to: NewIds, index: int, fields: Mapping[str, Field], bucket: int) -> Batches:
    low, high, new_ids = to.nodes_of(bucket, index)
    node_type = to.store.schema.node_types[index]
    step = max(1, CHUNK_BYTES // (8 + sum(field.row_bytes for field in fields.values())))
    for span in to.store.spans(low, high):
        part = to.store.parts[span.part]
        names = [layout.node_file(span.part, node_type.name, name) for name in node_type.fields]
        with ExitStack() as stack:
            columns = [
                stack.enter_context(to.store.column(name, field, part.num_nodes[index]))
                for name, field in zip(names, node_type.fields.values(), strict=True)
            ]
            for at in range(0, span.size, step):
                end = min(span.size, at + step)
                values = [column.read(span.first + at, span.first + end) for column in columns]
                if len(fields) > len(columns):
                    original = part.first_nodes[index] + span.first
                    values.append(np.arange(original + at, original + end))
                yield _batch({"node": new_ids[span.offset + at : span.offset + end]}, values)


def _members(to: NewIds, index: int, split: str, bucket: int) -> Batches:
    low, high, new_ids = to.nodes_of(bucket, index)
    node_type = to.store.schema.node_types[index].name
    yield _batch({"node": new_ids[to.store.members_among(node_type, split, low, high)]}, [])


def _source_ids(to: NewIds, index: int, bucket: int) -> Batches:
    low, high, new_ids = to.nodes_of(bucket, index)
    for at in range(low, high, CHUNK_BYTES // 16):
        end = min(high, at + CHUNK_BYTES // 16)
        old = np.arange(at, end) - to.store.bounds[index]
        yield _batch({"id": old, "source": new_ids[at - low : end - low]}, [])


def _edge_rows(to: NewIds, index: int, bucket: int) -> Batches:
    relation = to.store.schema.relations[index]
    low, high, new_ids = to.nodes_of(bucket, to.store.schema.destinations[index])
    step = max(1, CHUNK_BYTES // (ENDS + sum(field.row_bytes for field in relation.fields.values())))
    for lists in to.store.in_lists(low, high):
        if lists.relation != index:
            continue
        part = to.store.parts[lists.part]
        first, end_of_lists = lists.first, int(lists.indptr[-1])
        names = [layout.edge_file(lists.part, relation, name) for name in relation.fields]
        with ExitStack() as stack:
            columns = [
                stack.enter_context(to.store.column(name, field, part.num_edges[index]))
                for name, field in zip(names, relation.fields.values(), strict=True)
            ]
            for at in range(0, end_of_lists, step):
                end = min(end_of_lists, at + step)
                destinations = np.searchsorted(lists.indptr, np.arange(at, end), side="right") - 1 + lists.offset
                ids = {
                    "old": lists.sources(at, end),
                    "destination": new_ids[destinations],
                    "position": np.arange(at, end) + part.first_edges[index] + first,
                }
                yield _batch(ids, [column.read(first + at, first + end) for column in columns])


# --- and back ------------------------------------------------------------------------------------


def _ids(batch: pa.RecordBatch, name: str) -> Tensor:
    return torch.from_numpy(batch.column(batch.schema.get_field_index(name)).to_numpy().copy())


def _fields(batch: pa.RecordBatch, fields: Mapping[str, Field]) -> dict[str, Tensor]:
    columns = [batch.column(batch.schema.get_field_index(f"c{number}")) for number in range(len(fields))]
    return {name: rows_of_binary(column, field) for column, (name, field) in zip(columns, fields.items(), strict=True)}


def _decode_nodes(fields: Mapping[str, Field], batch: pa.RecordBatch) -> Rows:
    return Rows(_ids(batch, "node"), _fields(batch, fields))


def _decode_edges(fields: Mapping[str, Field], batch: pa.RecordBatch) -> EdgeRows:
    found = _fields(batch, fields)
    if TIME_COLUMN in batch.schema.names:
        found[SOURCE_TIME] = _ids(batch, TIME_COLUMN)
    return EdgeRows(_ids(batch, "source"), _ids(batch, "destination"), found)
