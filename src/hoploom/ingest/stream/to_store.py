"""Write streams into a store: nodes first, then relation by relation, bucket by bucket.

Memory: an eighth of the budget for a bucket, a quarter for waiting records. Not counted are the longest list (about 20
bytes an edge), and eight bytes for each source node if source nodes carry the times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from hoploom.errors import ConfigError, DataError
from hoploom.ingest.stream.edge_lists import WrittenRelation, write_relations
from hoploom.ingest.stream.node_rows import stored_fields, write_fields, write_split
from hoploom.ingest.stream.spill import SpillBudget
from hoploom.ingest.stream.streams import EdgeStream, NodeStream, Progress, StoreOptions
from hoploom.ops import pool_trim
from hoploom.schema import NodeType, Relation, Schema, check_schema
from hoploom.store import format as layout
from hoploom.store.format import PartRange
from hoploom.store.mapping import read_array
from hoploom.store.write import StoreWriter
from hoploom.system import resident_bytes

Sizes = Mapping[str, Sequence[int]]  # split -> members by part


def write_store(
    writer: StoreWriter,
    nodes: Sequence[NodeStream],
    edges: Sequence[EdgeStream],
    options: StoreOptions,
    *,
    progress: Progress | None = None,
) -> None:
    """Write streams into a store that is open for writing.

    >>> with StoreWriter("papers.store") as writer:
    ...     write_store(writer, [papers], [cites], StoreOptions(memory=4 << 30))
    """
    begin = progress or (lambda step: None)
    check_streams(nodes, edges)
    sizes = {stream.name: _write_nodes(writer, stream, options, begin) for stream in nodes}
    relations: list[WrittenRelation] = []
    num_edges: list[list[int]] = []
    for edge_stream in edges:
        begin(" ".join(edge_stream.key))
        source_times = _source_times(writer, edge_stream, nodes, options)
        written = written_relations(edge_stream, nodes, options, source_times)
        num_edges += write_relations(writer, edge_stream, written, _budget(writer, options))
        relations += written
        pool_trim()
    writer.describe(*describe_store(nodes, sizes, relations, num_edges, options))


def check_streams(nodes: Sequence[NodeStream], edges: Sequence[EdgeStream]) -> None:
    """Raise ConfigError unless the streams make one store."""
    if len({len(stream.bounds) for stream in nodes}) != 1:
        raise ConfigError(f"node types have {[len(s.bounds) - 1 for s in nodes]} parts; give all of them as many")
    for stream in edges:
        rule = stream.rule
        if rule.undirected and stream.key[0] != stream.key[2]:
            raise ConfigError(f"{stream.key} cannot be undirected, its ends differ; give reverse instead")
        if rule.undirected and rule.reverse is not None:
            raise ConfigError(f"{stream.key} is undirected, so its reverse is itself; drop one of the two")


def _budget(writer: StoreWriter, options: StoreOptions) -> SpillBudget:
    """Return the memory that is left now, and the scratch folder."""
    left = max(options.least_memory, options.memory - resident_bytes())
    return SpillBudget(writer.scratch, left, options.chunk_rows)


def _write_nodes(writer: StoreWriter, stream: NodeStream, options: StoreOptions, begin: Progress) -> Sizes:
    begin(stream.name)
    for block in stream.blocks:
        write_fields(writer, stream, block, _budget(writer, options))
        pool_trim()
    return {split: write_split(writer, stream, split, _budget(writer, options)) for split in stream.splits}


# --- relations ------------------------------------------------------------------------------


def written_relations(
    stream: EdgeStream, nodes: Sequence[NodeStream], options: StoreOptions, source_times: Sequence[Tensor | None]
) -> list[WrittenRelation]:
    """Return the relation, and its reverse if it has one; `source_times` has an entry for each."""
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


def _source_times(
    writer: StoreWriter, stream: EdgeStream, nodes: Sequence[NodeStream], options: StoreOptions
) -> list[Tensor | None]:
    """Return the times of the source nodes of each key, [num_nodes] int64, from the files just written; or None."""
    by_name, found = {s.name: s for s in nodes}, list[Tensor | None]()
    for key in stream.keys:
        sources, times = by_name[key[0]], str(options.time)
        if not takes_node_times(stream, sources, options):
            found.append(None)
            continue
        field = stored_fields(sources)[times]
        files = [layout.node_file(part, sources.name, times) for part in range(len(sources.bounds) - 1)]
        found.append(torch.cat([read_array(writer.path_of(file), field) for file in files]).to(torch.int64))
    return found


def takes_node_times(stream: EdgeStream, sources: NodeStream, options: StoreOptions) -> bool:
    """Return whether edges take the times of their source nodes; raise DataError if these are unfit."""
    if options.time is None or options.time in stream.fields:
        return False
    field = stored_fields(sources).get(options.time)
    if field is not None and (field.shape or not field.dtype.startswith(("int", "uint"))):
        raise DataError(f"{sources.name}.{options.time} is {field}; times are one integer each")
    return field is not None


# --- the schema -------------------------------------------------------------------------------


def describe_store(
    nodes: Sequence[NodeStream],
    sizes: Mapping[str, Sizes],
    relations: Sequence[WrittenRelation],
    num_edges: Sequence[Sequence[int]],
    options: StoreOptions,
) -> tuple[Schema, list[PartRange]]:
    """Return the schema and the parts, given the counts of splits (`sizes`) and of edges (by relation and part)."""
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
