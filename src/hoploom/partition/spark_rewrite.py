"""A store's rows with new ids, as the frames from which Spark's executors write the parts.

The driver writes the new ids of each range of nodes into a file. A join adds the new id of an edge's source; a task
reads everything else for itself.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor

from hoploom.errors import HoploomError
from hoploom.ingest.spark.frames import SharedRows, binary_column, freeze_imports, one_row_each, rows_of_binary
from hoploom.ingest.spark.session import sendable
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream, Rows
from hoploom.ingest.stream.streams import SOURCE_TIME, TIME_COLUMN
from hoploom.partition.store_files import CHUNK_EDGES, Array, StoreFiles
from hoploom.schema import ORIGINAL_ID, Field
from hoploom.store import format as layout
from hoploom.store.storage_path import StoragePath

Batches = Iterator[pa.RecordBatch]
CHUNK_BYTES = 4 << 20
ENDS = 24  # bytes of an edge: both ends, and its position


@dataclass(frozen=True)
class Buckets:
    """Equal ranges of node ids, one for each task."""

    num_ids: int
    size: int

    @property
    def count(self) -> int:
        return max(1, -(-self.num_ids // self.size))

    def span(self, bucket: int) -> tuple[int, int]:
        """Return the first id of a bucket, and the end."""
        return min(self.num_ids, bucket * self.size), min(self.num_ids, (bucket + 1) * self.size)


@dataclass(frozen=True)
class NewIds:
    """A store and the new ids of its nodes, within their types, in one file per bucket."""

    store: StoreFiles
    buckets: Buckets
    staging: StoragePath

    def save(self, bucket: int, new_ids: Array) -> None:
        """Write the new ids of a bucket's nodes: [n] int64."""
        with self.staging.create(self._name(bucket)) as file:
            np.lib.format.write_array(file, new_ids, allow_pickle=False)

    def nodes_of(self, bucket: int, type_index: int) -> tuple[int, int, Array]:
        """Return the nodes [begin, end) of a type that are in a bucket, and their new ids: [end - begin] int64."""
        first, end = self.buckets.span(bucket)
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
    """Return a stream of each node type with its new ids.

    `bounds` are the parts' bounds by type. Where `changed`, original ids become a field, unless the type has it.
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
    """Return a stream of each relation with its new ids and its fields, in the order of its edges."""
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
    """Return by relation how many in-edges of a bucket's nodes have their source in the same part; a task of Spark."""
    inside = [0] * len(to.store.schema.relations)
    for lists in to.store.in_lists(*to.buckets.span(bucket)):
        part, source = to.store.parts[lists.part], to.store.schema.sources[lists.relation]
        first, end = part.first_nodes[source], part.first_nodes[source] + part.num_nodes[source]
        for at in range(0, int(lists.indptr[-1]), CHUNK_EDGES):
            sources = lists.edges.read(at, min(int(lists.indptr[-1]), at + CHUNK_EDGES))
            inside[lists.relation] += int(((sources >= first) & (sources < end)).sum())
    return inside


# --- rows, in the tasks --------------------------------------------------------------------------


def _frame(session: SparkSession, to: NewIds, rows_of: Callable[[int], Batches], schema: str) -> DataFrame:
    """Return the frame of the rows that `rows_of` makes of every bucket."""
    return one_row_each(session, to.buckets.count).mapInArrow(partial(_run, rows_of), schema)


def _run(rows_of: Callable[[int], Batches], batches: Batches) -> Batches:
    context = TaskContext.get()
    assert context is not None
    freeze_imports()
    deque(batches, maxlen=0)
    try:
        yield from rows_of(context.partitionId())
    except HoploomError as error:
        raise sendable(error) from error


def _batch(ids: Mapping[str, Array], values: Sequence[Array]) -> pa.RecordBatch:
    columns: dict[str, Any] = {name: pa.array(column, pa.int64()) for name, column in ids.items()}
    for number, rows in enumerate(values):
        raw = np.ascontiguousarray(rows).reshape(rows.shape[0], -1).view(np.uint8)
        columns[f"c{number}"] = binary_column(torch.from_numpy(raw))
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
        first, end_of_lists = lists.first_edge - part.first_edges[index], int(lists.indptr[-1])
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
                    "old": lists.edges.read(at, end),
                    "destination": new_ids[destinations],
                    "position": np.arange(lists.first_edge + at, lists.first_edge + end),
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
