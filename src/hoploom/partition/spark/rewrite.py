"""The rows of a store under new numbers, as frames that executors write a store from.

Sources of edges find their new numbers in a join; all else is known where a row is read.
"""

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
from hoploom.ingest.spark.frames import SharedRows, binary_column, freeze_imports, numbers, rows_of_binary
from hoploom.ingest.spark.session import sent
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream, Rows
from hoploom.ingest.stream.streams import SOURCE_TIME, TIME_COLUMN
from hoploom.partition.spark.exchange import Array
from hoploom.partition.spark.numbers import NewNumbers
from hoploom.schema import ORIGINAL_ID, Field
from hoploom.store import format as layout

CHUNK_BYTES = 4 << 20
ENDS = 24  # bytes of an edge: both ends, and its position


def node_streams(
    session: SparkSession, of: NewNumbers, bounds: Sequence[Sequence[int]], changed: set[int]
) -> list[NodeStream]:
    """Every node type under its new numbers; the original ids become a field, where there is none yet."""
    streams = []
    for index, node_type in enumerate(of.store.schema.node_types):
        fields = dict(node_type.fields)
        if ORIGINAL_ID not in fields and index in changed:
            fields[ORIGINAL_ID] = Field("int64")
        width = sum(field.row_bytes for field in fields.values())
        columns = "".join(f", c{number} binary" for number in range(len(fields)))
        made = partial(_node_rows, of, index, fields)
        frame = _frame(session, of, made, f"node long{columns}")
        rows: Any = SharedRows(frame, partial(_decode_nodes, fields), node_type.num_nodes, width)
        splits: dict[str, Any] = {}
        for split in node_type.splits:
            members = _frame(session, of, partial(_members, of, index, split), "node long")
            splits[split] = SharedRows(members, _decode_members, node_type.splits[split])
        blocks = [NodeFields(fields, rows)] if fields else []
        streams.append(NodeStream(node_type.name, tuple(bounds[index]), blocks, splits))
    return streams


def edge_streams(session: SparkSession, of: NewNumbers) -> list[EdgeStream]:
    """Every relation under new numbers, with its fields, in the order it had."""
    streams = []
    for index, relation in enumerate(of.store.schema.relations):
        width = sum(field.row_bytes for field in relation.fields.values()) + ENDS
        columns = "".join(f", c{number} binary" for number in range(len(relation.fields)))
        schema = f"old long, destination long, position long{columns}"
        edges = _frame(session, of, partial(_edge_rows, of, index), schema)
        ids = _frame(session, of, partial(_numbers, of, of.store.schema.sources[index]), "id long, source long")
        frame = edges.join(ids, edges["old"] == ids["id"]).drop("old", "id")
        rows: Any = SharedRows(frame, partial(_decode_edges, relation.fields), relation.num_edges, width)
        streams.append(EdgeStream(relation.key, relation.fields, rows, EdgeRule(in_order=True)))
    return streams


# --- rows ----------------------------------------------------------------------------------------

Batches = Iterator[pa.RecordBatch]


def _frame(session: SparkSession, of: NewNumbers, made: Callable[[int], Batches], schema: str) -> DataFrame:
    """What every bucket makes."""
    return numbers(session, of.buckets.count).mapInArrow(_Making(made), schema)


@dataclass(frozen=True)
class _Making:
    made: Callable[[int], Batches]

    def __call__(self, batches: Batches) -> Batches:
        context = TaskContext.get()
        assert context is not None
        freeze_imports()
        for _ in batches:
            pass
        try:
            yield from self.made(context.partitionId())
        except HoploomError as error:
            raise sent(error) from error


def _type_span(of: NewNumbers, bucket: int, index: int) -> tuple[int, int]:
    """The nodes of a type that are in a bucket."""
    begin, end = of.buckets.span(bucket)
    first, last = of.store.bounds[index : index + 2]
    return max(begin, first), max(begin, first, min(end, last))


def _batch(ids: Mapping[str, Array], values: Sequence[Array]) -> pa.RecordBatch:
    columns: dict[str, Any] = {name: pa.array(column, pa.int64()) for name, column in ids.items()}
    for number, rows in enumerate(values):
        raw = np.ascontiguousarray(rows).reshape(rows.shape[0], -1).view(np.uint8)
        columns[f"c{number}"] = binary_column(torch.from_numpy(raw))
    return pa.RecordBatch.from_pydict(columns)


def _node_rows(of: NewNumbers, index: int, fields: Mapping[str, Field], bucket: int) -> Batches:
    low, high = _type_span(of, bucket, index)
    node_type, new = of.store.schema.node_types[index], of.new(bucket)[low - of.buckets.span(bucket)[0] :]
    step = max(1, CHUNK_BYTES // (8 + sum(field.row_bytes for field in fields.values())))
    for span in of.store.spans(low, high):
        part = of.store.parts[span.part]
        with ExitStack() as stack:
            columns = [
                stack.enter_context(
                    of.store.column(layout.node_file(span.part, node_type.name, name), field, part.num_nodes[index])
                )
                for name, field in node_type.fields.items()
            ]
            for at in range(0, span.size, step):
                end = min(span.size, at + step)
                values = [column.read(span.first + at, span.first + end) for column in columns]
                if len(fields) > len(columns):
                    original = part.first_nodes[index] + span.first
                    values.append(np.arange(original + at, original + end))
                yield _batch({"node": new[span.place + at : span.place + end]}, values)


def _members(of: NewNumbers, index: int, split: str, bucket: int) -> Batches:
    low, high = _type_span(of, bucket, index)
    new = of.new(bucket)[low - of.buckets.span(bucket)[0] :]
    yield _batch({"node": new[of.store.members(index, split, low, high)]}, [])


def _numbers(of: NewNumbers, index: int, bucket: int) -> Batches:
    low, high = _type_span(of, bucket, index)
    new, begin = of.new(bucket)[low - of.buckets.span(bucket)[0] :], of.store.bounds[index]
    for at in range(low, high, CHUNK_BYTES // 16):
        end = min(high, at + CHUNK_BYTES // 16)
        yield _batch({"id": np.arange(at - begin, end - begin), "source": new[at - low : end - low]}, [])


def _edge_rows(of: NewNumbers, index: int, bucket: int) -> Batches:
    relation, new = of.store.schema.relations[index], of.new(bucket)
    step = max(1, CHUNK_BYTES // (ENDS + sum(field.row_bytes for field in relation.fields.values())))
    for lists in of.store.in_lists(*of.buckets.span(bucket)):
        if lists.relation != index:
            continue
        part = of.store.parts[lists.part]
        offset = lists.first_edge - part.first_edges[index]
        with ExitStack() as stack:
            columns = [
                stack.enter_context(
                    of.store.column(layout.edge_file(lists.part, relation, name), field, part.num_edges[index])
                )
                for name, field in relation.fields.items()
            ]
            for at in range(0, int(lists.indptr[-1]), step):
                end = min(int(lists.indptr[-1]), at + step)
                places = np.searchsorted(lists.indptr, np.arange(at, end), side="right") - 1 + lists.place
                ids = {
                    "old": lists.edges.read(at, end),
                    "destination": new[places],
                    "position": np.arange(lists.first_edge + at, lists.first_edge + end),
                }
                yield _batch(ids, [column.read(offset + at, offset + end) for column in columns])


# --- and back ------------------------------------------------------------------------------------


def _ids(batch: pa.RecordBatch, name: str) -> Tensor:
    return torch.from_numpy(batch.column(batch.schema.get_field_index(name)).to_numpy().copy())


def _fields(batch: pa.RecordBatch, fields: Mapping[str, Field]) -> dict[str, Tensor]:
    columns = [batch.column(batch.schema.get_field_index(f"c{number}")) for number in range(len(fields))]
    return {name: rows_of_binary(column, field) for column, (name, field) in zip(columns, fields.items(), strict=True)}


def _decode_nodes(fields: Mapping[str, Field], batch: pa.RecordBatch) -> Rows:
    return Rows(_ids(batch, "node"), _fields(batch, fields))


def _decode_members(batch: pa.RecordBatch) -> Tensor:
    return _ids(batch, "node")


def _decode_edges(fields: Mapping[str, Field], batch: pa.RecordBatch) -> EdgeRows:
    found = _fields(batch, fields)
    if TIME_COLUMN in batch.schema.names:
        found[SOURCE_TIME] = _ids(batch, TIME_COLUMN)
    return EdgeRows(_ids(batch, "source"), _ids(batch, "destination"), found)
