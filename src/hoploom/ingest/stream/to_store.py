"""Write streams into a store: nodes first, then each relation as in-edge lists, by buckets of destination nodes.

Until its in-edge list is written, an edge is kept as a record: destination, source, time if there are times, and
fields. Records take a quarter of the memory budget, and the bucket that is sorted takes an eighth. The budget does not
count the longest in-edge list (about 20 bytes an edge), nor the times of source nodes, eight bytes each.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.stream.node_rows import ArraySink, stored_fields, write_fields, write_split
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
from hoploom.ingest.stream.streams import EdgeRows, EdgeStream, NodeStream, Progress, StoreOptions
from hoploom.ops import pool_trim
from hoploom.ops.spool import KEY_BYTES, order_edges, take
from hoploom.schema import DTYPES, Field, NodeType, Relation, Schema, check_ids, check_schema
from hoploom.store import format as layout
from hoploom.store.format import PartRange, id_dtype
from hoploom.store.store import read_array
from hoploom.store.write import StoreWriter
from hoploom.system import resident_bytes

Sizes = Mapping[str, Sequence[int]]  # split -> members by part
INDPTR, WEIGHT, TIME = Field("int64"), Field("float32"), Field("int64")


@dataclass(frozen=True)
class WrittenRelation:
    """The layout of a relation to write: ranges of ids, fields, and the order of edges within in-edge lists."""

    relation: Relation  # its number of edges is not known yet
    num_sources: int
    bounds: Sequence[int]  # of the destination type: part p holds its ids bounds[p] to bounds[p + 1] - 1
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
        """Return a dict from the name of each file of a part to the file's field, in the order of store.json."""
        columns = {"indptr": INDPTR, "indices": Field(id_dtype(self.num_sources))}
        columns |= {"weight": WEIGHT} if self.weight is not None else {}
        columns |= {"time": TIME} if self.is_timed else {}
        files = {layout.topology_file(part, self.relation, name): field for name, field in columns.items()}
        return files | {layout.edge_file(part, self.relation, name): f for name, f in self.relation.fields.items()}

    def columns(self, part: int = 0) -> dict[str, Field]:
        """Return the columns of an edge's record after the destination id: a dict from file name to field."""
        derived = {layout.topology_file(part, self.relation, name) for name in ("indptr", "weight")}
        return {name: field for name, field in self.files(part).items() if name not in derived}


def write_store(
    writer: StoreWriter,
    nodes: Sequence[NodeStream],
    edges: Sequence[EdgeStream],
    options: StoreOptions,
    *,
    progress: Progress | None = None,
) -> None:
    """Write streams into a store that is open for writing."""
    begin = progress or (lambda step: None)
    check_streams(nodes, edges)
    sizes: dict[str, Sizes] = {}
    for stream in nodes:
        begin(stream.name)
        for block in stream.blocks:
            write_fields(writer, stream, block, _budget(writer, options))
            pool_trim()
        sizes[stream.name] = {
            split: write_split(writer, stream, split, _budget(writer, options)) for split in stream.splits
        }
    relations, num_edges = list[WrittenRelation](), list[list[int]]()
    by_name = {stream.name: stream for stream in nodes}
    for edge_stream in edges:
        begin(" ".join(edge_stream.key))
        source_times = list[Tensor | None]()  # for each of the keys, from the files just written
        for source, _, _ in edge_stream.keys:
            times = None
            if takes_node_times(edge_stream, by_name[source], options):
                field = stored_fields(by_name[source])[str(options.time)]
                parts = range(len(by_name[source].bounds) - 1)
                files = [layout.node_file(part, source, str(options.time)) for part in parts]
                times = torch.cat([read_array(writer.path_of(file), field) for file in files]).to(torch.int64)
            source_times.append(times)
        written = written_relations(edge_stream, nodes, options, source_times)
        num_edges += write_relations(writer, edge_stream, written, _budget(writer, options))
        relations += written
        pool_trim()
    writer.describe(*describe_store(nodes, sizes, relations, num_edges, options))


def check_streams(nodes: Sequence[NodeStream], edges: Sequence[EdgeStream]) -> None:
    """Raise ConfigError if node types differ in their number of parts, or if an edge rule contradicts itself."""
    if len({len(stream.bounds) for stream in nodes}) != 1:
        raise ConfigError(f"node types have {[len(s.bounds) - 1 for s in nodes]} parts; give all of them as many")
    for stream in edges:
        rule = stream.rule
        if rule.undirected and stream.key[0] != stream.key[2]:
            raise ConfigError(f"{stream.key} cannot be undirected, its ends differ; give reverse instead")
        if rule.undirected and rule.reverse is not None:
            raise ConfigError(f"{stream.key} is undirected, so its reverse is itself; drop one of the two")


def _budget(writer: StoreWriter, options: StoreOptions) -> SpillBudget:
    """Return the budget of the next step: the memory that is left now, and the writer's scratch folder."""
    left = max(options.least_memory, options.memory - resident_bytes())
    return SpillBudget(writer.scratch, left)


def written_relations(
    stream: EdgeStream, nodes: Sequence[NodeStream], options: StoreOptions, source_times: Sequence[Tensor | None]
) -> list[WrittenRelation]:
    """Return the layouts of the relations in `stream.keys`. `source_times` has times, or None, for each of them."""
    by_name = {s.name: s for s in nodes}
    return [
        WrittenRelation(
            Relation(*key, 0, stream.fields, reverse),
            by_name[key[0]].num_nodes,
            by_name[key[2]].bounds,
            weight=options.weight if options.weight in stream.fields else None,
            time=options.time if options.time in stream.fields else None,
            source_times=times,
            in_order=stream.rule.in_order,
            deduplicate=stream.rule.deduplicate,
        )
        for key, reverse, times in zip(stream.keys, stream.reverses, source_times, strict=True)
    ]


def takes_node_times(stream: EdgeStream, sources: NodeStream, options: StoreOptions) -> bool:
    """Return whether edges take the times of their source nodes; raise DataError if these are not one integer each."""
    if options.time is None or options.time in stream.fields:
        return False
    field = stored_fields(sources).get(options.time)
    if field is not None and (field.shape or not field.dtype.startswith(("int", "uint"))):
        raise DataError(f"{sources.name}.{options.time} is {field}; times are one integer each")
    return field is not None


def write_relations(
    writer: ArraySink, stream: EdgeStream, written: Sequence[WrittenRelation], budget: SpillBudget
) -> list[list[int]]:
    """Write a stream's relation, and its reverse if it has one; return, for each, the number of edges by part."""
    with ExitStack() as stack:
        spools = []
        for number, topology in enumerate(written):
            width = sum(field.row_bytes for field in topology.columns().values())
            bounds, folder = bucket_bounds(topology.bounds, MOST_BUCKETS), budget.folder / f"edges-{number}"
            spools.append(stack.enter_context(Spool(folder, bounds, width, budget.bytes // len(written))))
        for rows in stream.rows():
            for topology, spool, turned in zip(written, spools, _directions(stream, rows), strict=True):
                sources = turned.sources
                check_ids(f"sources of {topology.relation.key}", sources, topology.num_sources)
                columns = [sources.to(DTYPES[id_dtype(topology.num_sources)])]
                if topology.source_times is not None:
                    columns.append(topology.source_times[sources])
                elif topology.time is not None:
                    columns.append(turned.fields[topology.time].to(torch.int64))
                columns += checked_rows(topology.relation.fields, turned.fields, sources.numel()).values()
                spool.add(turned.destinations, [ops.byte_rows(column) for column in columns])
        counts = list[list[int]]()
        for topology, spool in zip(written, spools, strict=True):
            counts.append([])
            for number, buckets in by_part(topology.bounds, spool.buckets()):
                part, num_edges = topology.first_part + number, 0
                files = topology.files(part)
                writer.append(next(iter(files)), INDPTR, torch.zeros(1, dtype=torch.int64))
                for bucket in buckets:
                    num_edges += _append_lists(writer, topology, bucket, part, num_edges)
                for name, field in files.items():
                    writer.finish(name, field)
                counts[-1].append(num_edges)
            spool.close()
        return counts


def _directions(stream: EdgeStream, rows: EdgeRows) -> Iterator[EdgeRows]:
    """Yield the edges of the relation, changed by its rule, then the edges of its reverse if it has one."""
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


def _append_lists(writer: ArraySink, topology: WrittenRelation, bucket: Bucket, part: int, first_edge: int) -> int:
    """Sort a bucket's edges into in-edge lists, and append these to the part's files; return the number of edges."""
    relation, columns = topology.relation, topology.columns(part)
    source_bytes = next(iter(columns.values())).row_bytes
    lists = order_edges(
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
        values = from_bytes(take(bucket.records, lists.order, offset, field.row_bytes), field)
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


def describe_store(
    nodes: Sequence[NodeStream],
    sizes: Mapping[str, Sizes],
    relations: Sequence[WrittenRelation],
    num_edges: Sequence[Sequence[int]],
    options: StoreOptions,
) -> tuple[Schema, list[PartRange]]:
    """Return the schema and the parts. `sizes` and `num_edges` count, by part, the members of splits and the edges."""
    node_types = [
        NodeType(s.name, s.num_nodes, stored_fields(s), {split: sum(count) for split, count in sizes[s.name].items()})
        for s in nodes
    ]
    counted = [
        replace(written.relation, num_edges=sum(counts)) for written, counts in zip(relations, num_edges, strict=True)
    ]
    schema = Schema(tuple(node_types), tuple(counted), options.homogeneous, options.weight, options.time)
    check_schema(schema)
    first_edges = [[0, *accumulate(counts)] for counts in num_edges]
    parts = [
        PartRange(
            tuple(stream.bounds[part] for stream in nodes),
            tuple(stream.part_sizes[part] for stream in nodes),
            tuple(firsts[part] for firsts in first_edges),
            tuple(counts[part] for counts in num_edges),
            {stream.name: {split: counts[part] for split, counts in sizes[stream.name].items()} for stream in nodes},
        )
        for part in range(len(nodes[0].bounds) - 1)
    ]
    return schema, parts
