"""Put edges that arrive in any order into lists by destination, and write them: CSC, bucket by bucket.

An edge waits as a record: its destination, its source, its time if lists are in time order, and its fields.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import DataError
from hoploom.ingest.stream.node_rows import ArraySink
from hoploom.ingest.stream.spill import (
    MOST_BUCKETS,
    Bucket,
    SpillBudget,
    Spool,
    bucket_bounds,
    by_part,
    checked_rows,
    from_bytes,
)
from hoploom.ingest.stream.streams import EdgeRows, EdgeStream
from hoploom.ops import KEY_BYTES
from hoploom.schema import DTYPES, Field, Relation, check_ids
from hoploom.store import format as layout
from hoploom.store.format import id_dtype

INDPTR, WEIGHT, TIME = Field("int64"), Field("float32"), Field("int64")


@dataclass(frozen=True)
class WrittenRelation:
    """A relation to write: its ends, its fields, and the order of its lists."""

    relation: Relation  # its number of edges is not known yet
    num_sources: int
    bounds: Sequence[int]  # of the destination type's parts
    weight: str | None  # the field with the weights
    time: str | None  # the field with the times
    source_times: Tensor | None  # [num_sources] int64, if times belong to the source nodes
    in_order: bool
    deduplicate: bool
    first_part: int = 0  # the number of the part that begins at bounds[0]

    @property
    def is_timed(self) -> bool:
        return self.time is not None or self.source_times is not None

    def files(self, part: int) -> dict[str, Field]:
        """Return every file of a part, in the order of store.json."""
        columns = {"indptr": INDPTR, "indices": Field(id_dtype(self.num_sources))}
        columns |= {"weight": WEIGHT} if self.weight is not None else {}
        columns |= {"time": TIME} if self.is_timed else {}
        files = {layout.topology_file(part, self.relation, name): field for name, field in columns.items()}
        return files | {layout.edge_file(part, self.relation, name): f for name, f in self.relation.fields.items()}

    def columns(self, part: int = 0) -> dict[str, Field]:
        """Return the columns of a record behind its key, by the file that each goes to."""
        derived = {layout.topology_file(part, self.relation, name) for name in ("indptr", "weight")}
        return {name: field for name, field in self.files(part).items() if name not in derived}


def write_relations(
    writer: ArraySink, stream: EdgeStream, written: Sequence[WrittenRelation], budget: SpillBudget
) -> list[list[int]]:
    """Write a stream's relation, and its reverse if it has one; return the number of edges by part of each."""
    with ExitStack() as stack:
        spools = []
        for number, topology in enumerate(written):
            width = sum(field.row_bytes for field in topology.columns().values())
            bounds, folder = bucket_bounds(topology.bounds, MOST_BUCKETS), budget.folder / f"edges-{number}"
            spools.append(stack.enter_context(Spool(folder, bounds, width, budget.bytes // len(written))))
        for rows in stream.rows():
            for topology, spool, turned in zip(written, spools, _directions(stream, rows), strict=True):
                spool.add(turned.destinations, _record_columns(topology, turned))
        counts = []
        for topology, spool in zip(written, spools, strict=True):
            counts.append(_write_lists(writer, topology, spool))
            spool.close()
        return counts


def _directions(stream: EdgeStream, rows: EdgeRows) -> Iterator[EdgeRows]:
    """Yield the edges of the relation, then those of its reverse if it has one."""
    rule = stream.rule
    if rule.drop_loops:
        rows = rows.where(rows.sources != rows.destinations)
    if rule.undirected:
        turned = rows.where(rows.sources != rows.destinations)
        fields = {name: torch.cat([values, turned.fields[name]]) for name, values in rows.fields.items()}
        sources = torch.cat([rows.sources, turned.destinations])
        rows = EdgeRows(sources, torch.cat([rows.destinations, turned.sources]), fields)
    yield rows
    if rule.reverse is not None:
        yield EdgeRows(rows.destinations, rows.sources, rows.fields)


def _record_columns(topology: WrittenRelation, rows: EdgeRows) -> list[Tensor]:
    """Return the columns of a record behind its key, as bytes."""
    sources = rows.sources
    check_ids(f"sources of {topology.relation.key}", sources, topology.num_sources)
    columns = [sources.to(DTYPES[id_dtype(topology.num_sources)])]
    if topology.source_times is not None:
        columns.append(topology.source_times[sources])
    elif topology.time is not None:
        columns.append(rows.fields[topology.time].to(torch.int64))
    columns += checked_rows(topology.relation.fields, rows.fields, sources.numel()).values()
    return [ops.byte_rows(column) for column in columns]


def _write_lists(writer: ArraySink, topology: WrittenRelation, spool: Spool) -> list[int]:
    """Write the lists of all parts, part by part; return the number of edges by part."""
    num_edges = []
    for number, buckets in by_part(topology.bounds, spool.buckets()):
        part = topology.first_part + number
        files = topology.files(part)
        writer.append(next(iter(files)), INDPTR, torch.zeros(1, dtype=torch.int64))
        written = 0
        for bucket in buckets:
            written += _append_lists(writer, topology, bucket, part, written)
        for name, field in files.items():
            writer.finish(name, field)
        num_edges.append(written)
    return num_edges


def _append_lists(writer: ArraySink, topology: WrittenRelation, bucket: Bucket, part: int, first_edge: int) -> int:
    """Append the lists of a bucket to the files of its part; return the number of edges."""
    relation, columns = topology.relation, topology.columns(part)
    source_bytes = next(iter(columns.values())).row_bytes
    lists = ops.order_edges(
        bucket.records,
        bucket.num_keys,
        source_bytes,
        time_offset=KEY_BYTES + source_bytes if topology.is_timed else None,
        canonical=not topology.in_order,
        deduplicate=topology.deduplicate,
    )
    writer.append(layout.topology_file(part, relation, "indptr"), INDPTR, lists.indptr[1:] + first_edge)
    offset = KEY_BYTES
    for name, field in columns.items():
        values = from_bytes(ops.take(bucket.records, lists.order, offset, field.row_bytes), field)
        offset += field.row_bytes
        writer.append(name, field, values)
        if topology.weight is not None and name == layout.edge_file(part, relation, topology.weight):
            weights = values.view(values.shape[0]).to(torch.float32)
            bad = ~(torch.isfinite(weights) & (weights >= 0))
            if bad.any():
                found = f"an edge of {relation.key} has weight {float(weights[bad][0])}"
                raise DataError(f"{found}; give finite weights, none negative")
            writer.append(layout.topology_file(part, relation, "weight"), WEIGHT, weights)
    return lists.order.numel()
