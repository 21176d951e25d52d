"""Streams become a store: nodes first, then relation by relation. Nothing is held whole but what lists are ordered by.

Memory: an eighth of the budget for a bucket, a quarter for records that wait. Beyond it go the longest list (about 20
bytes an edge), and where source nodes carry the times, eight bytes for each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hoploom.errors import ConfigError, DataError
from hoploom.ingest.stream.edge_lists import WrittenRelation, write_relations
from hoploom.ingest.stream.node_rows import write_fields, write_split
from hoploom.ingest.stream.spill import SpillBudget
from hoploom.ingest.stream.streams import EdgeStream, NodeStream, Progress, StoreOptions
from hoploom.ops import pool_trim
from hoploom.schema import Field, NodeType, Relation, Schema, check_schema
from hoploom.store import format as layout
from hoploom.store.disk import read_array
from hoploom.store.format import PartRange
from hoploom.store.system_memory import resident_bytes
from hoploom.store.write import StoreWriter


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
    say = progress or (lambda what: None)
    _check(nodes, edges)
    sizes = {stream.name: _write_nodes(writer, stream, options, say) for stream in nodes}
    times = SourceTimes(writer, nodes, options.time)
    relations: list[Relation] = []
    num_edges: list[list[int]] = []
    for edge_stream in edges:
        say(" ".join(edge_stream.key))
        written = _topologies(edge_stream, nodes, options, times)
        counts = write_relations(writer, edge_stream, written, _budget(writer, options))
        relations += [
            Relation(*topology.relation.key, sum(count), topology.relation.fields)
            for topology, count in zip(written, counts, strict=True)
        ]
        num_edges += counts
        pool_trim()
    node_types = [
        NodeType(s.name, s.num_nodes, _fields(s), {split: sum(count) for split, count in sizes[s.name].items()})
        for s in nodes
    ]
    schema = Schema(tuple(node_types), tuple(relations), options.homogeneous, options.weight, options.time)
    check_schema(schema)
    writer.describe(schema, _parts(nodes, sizes, num_edges))


def _check(nodes: Sequence[NodeStream], edges: Sequence[EdgeStream]) -> None:
    if len({len(stream.bounds) for stream in nodes}) != 1:
        raise ConfigError(f"node types have {[len(s.bounds) - 1 for s in nodes]} parts; give all of them as many")
    for stream in edges:
        rule = stream.rule
        if rule.undirected and stream.key[0] != stream.key[2]:
            raise ConfigError(f"{stream.key} cannot be undirected, its ends differ; give reverse instead")
        if rule.undirected and rule.reverse is not None:
            raise ConfigError(f"{stream.key} is undirected, so its reverse is itself; drop one of the two")


def _budget(writer: StoreWriter, options: StoreOptions) -> SpillBudget:
    """What of the memory is left now."""
    left = max(options.least_memory, options.memory - resident_bytes())
    return SpillBudget(writer.scratch, left, options.chunk_rows)


# --- nodes ----------------------------------------------------------------------------------

Sizes = dict[str, list[int]]  # split -> members by part


def _write_nodes(writer: StoreWriter, stream: NodeStream, options: StoreOptions, say: Progress) -> Sizes:
    say(stream.name)
    for block in stream.blocks:
        write_fields(writer, stream, block, _budget(writer, options))
        pool_trim()
    return {split: write_split(writer, stream, split, _budget(writer, options)) for split in stream.splits}


def _fields(stream: NodeStream) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for block in stream.blocks:
        repeated = fields.keys() & block.stored.keys()
        if repeated:
            raise DataError(f"{stream.name!r} has two fields named {sorted(repeated)[0]!r}; rename one")
        fields |= block.stored
    return fields


# --- relations ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceTimes:
    """The times of nodes, as written a moment ago."""

    writer: StoreWriter
    nodes: Sequence[NodeStream]
    field: str | None

    def of(self, stream: NodeStream) -> Tensor | None:
        """[num_nodes] int64, None where the type has none."""
        described = _fields(stream).get(self.field or "")
        if described is None or self.field is None:
            return None
        if described.shape or not described.dtype.startswith(("int", "uint")):
            raise DataError(f"{stream.name}.{self.field} is {described}; times are one integer each")
        files = [layout.node_file(part, stream.name, self.field) for part in range(len(stream.bounds) - 1)]
        rows = [read_array(self.writer.path_of(file), described) for file in files]
        return torch.cat(rows).to(torch.int64)


def _topologies(
    stream: EdgeStream, nodes: Sequence[NodeStream], options: StoreOptions, times: SourceTimes
) -> list[WrittenRelation]:
    """The relation, and its reverse where there is one."""
    by_name = {s.name: s for s in nodes}
    source, name, destination = stream.key
    keys = [(source, name, destination)]
    if stream.rule.reverse is not None:
        keys.append((destination, stream.rule.reverse, source))
    own_time = options.time if options.time in stream.fields else None
    return [
        WrittenRelation(
            Relation(*key, 0, stream.fields),
            by_name[key[0]].num_nodes,
            by_name[key[2]].bounds,
            weight=options.weight if options.weight in stream.fields else None,
            time=own_time,
            source_times=times.of(by_name[key[0]]) if own_time is None else None,
            in_order=stream.rule.in_order,
            deduplicate=stream.rule.deduplicate,
        )
        for key in keys
    ]


def _parts(nodes: Sequence[NodeStream], sizes: dict[str, Sizes], num_edges: Sequence[Sequence[int]]) -> list[PartRange]:
    first_edges = [[0, *accumulate(counts)] for counts in num_edges]
    return [
        PartRange(
            tuple(stream.bounds[part] for stream in nodes),
            tuple(stream.part_sizes[part] for stream in nodes),
            tuple(firsts[part] for firsts in first_edges),
            tuple(counts[part] for counts in num_edges),
            {stream.name: {split: counts[part] for split, counts in sizes[stream.name].items()} for stream in nodes},
        )
        for part in range(len(nodes[0].bounds) - 1)
    ]
