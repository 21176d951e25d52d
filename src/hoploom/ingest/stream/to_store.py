"""Streams become a store: nodes first, then relation by relation, bucket by bucket.

Memory: an eighth of the budget for a bucket, a quarter for records that wait. Beyond it go the longest list (about 20
bytes an edge), and where source nodes carry the times, eight bytes for each of them.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.stream.edge_lists import WrittenRelation, write_relations
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
from hoploom.ingest.stream.streams import Chunk, EdgeStream, NodeFields, NodeStream, Progress, StoreOptions
from hoploom.ops import KEY_BYTES, pool_trim
from hoploom.schema import Field, NodeType, Relation, Schema, check_schema
from hoploom.store import format as layout
from hoploom.store.disk import read_array
from hoploom.store.format import PartRange
from hoploom.store.system_memory import resident_bytes
from hoploom.store.write import StoreWriter

CHUNK_BYTES = 16 << 20


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
    relations: list[Relation] = []
    num_edges: list[list[int]] = []
    for edge_stream in edges:
        say(" ".join(edge_stream.key))
        written = _topologies(writer, edge_stream, nodes, options)
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
        _write_fields(writer, stream, block, _budget(writer, options))
        pool_trim()
    return {split: _write_split(writer, stream, split, _budget(writer, options)) for split in stream.splits}


def _write_fields(writer: StoreWriter, stream: NodeStream, block: NodeFields, budget: SpillBudget) -> None:
    """Write the fields of a block; a part's files are finished as soon as they are complete, so that few are open."""
    bounds, position, part = stream.bounds, 0, 0

    def finish_part() -> None:
        nonlocal part
        for name, field in block.stored.items():
            writer.finish(layout.node_file(part, stream.name, name), field)
        part += 1

    for chunk in _in_order(stream, block, budget):
        end = position + next(iter(chunk.values())).shape[0]
        while position < end and part < len(bounds) - 1:
            count = min(end, bounds[part + 1]) - position
            for name, field in block.stored.items():
                writer.append(layout.node_file(part, stream.name, name), field, chunk[name][:count])
            chunk = {name: rows[count:] for name, rows in chunk.items()}
            position += count
            if position == bounds[part + 1]:
                finish_part()
        position = end
    if position != stream.num_nodes:
        raise DataError(f"{position} rows came for the {stream.num_nodes} nodes of {stream.name!r}; give one each")
    while part < len(bounds) - 1:
        finish_part()


def _in_order(stream: NodeStream, block: NodeFields, budget: SpillBudget) -> Iterator[Chunk]:
    """The block's fields in the order of the ids, as they are stored.

    Rows that come in order already are passed on as they come; the others wait in a spool.
    """
    position, arriving = 0, block.rows()
    for rows in arriving if block.finish is None else ():
        if not _follows(rows.ids, position):
            arriving = chain([rows], arriving)
            break
        yield checked_rows(block.fields, rows.fields, rows.ids.numel())
        position += rows.ids.numel()
    else:
        if block.finish is None:
            return
    width = sum(field.row_bytes for field in block.fields.values())
    bounds = [position, *(bound for bound in stream.bounds if bound > position)]
    wanted = -(-stream.num_nodes * (width + KEY_BYTES) * 8 // budget.bytes)  # buckets of an eighth of the budget
    step = _chunk_rows(budget.chunk_rows, width)
    cuts = bucket_bounds(bounds, max(1, min(wanted, MOST_BUCKETS)), step)
    with Spool(budget.folder / "rows", cuts, width, budget.bytes, step) as spool:
        for rows in arriving:
            values = checked_rows(block.fields, rows.fields, rows.ids.numel()).values()
            spool.add(rows.ids, [ops.byte_rows(column) for column in values])
        chunks = partial(_in_chunks, spool, stream, block, step)
        yield from chunks() if block.finish is None else map(block.finish.prepare(chunks()), chunks())


def _follows(ids: Tensor, position: int) -> bool:
    """Whether these are consecutive ids from a position on."""
    count = ids.numel()
    if count and (int(ids[0]) != position or int(ids[-1]) != position + count - 1):
        return False
    return bool((ids[1:] - ids[:-1] == 1).all())


def _in_chunks(spool: Spool, stream: NodeStream, block: NodeFields, step: int) -> Iterator[Chunk]:
    """All rows, cut by their number and width alone: the same chunks whatever the memory."""
    for bucket in spool.buckets():
        values, offset = {}, KEY_BYTES
        for name, field in block.fields.items():
            raw = ops.empty((bucket.num_keys, field.row_bytes), torch.uint8)
            try:
                ops.place(bucket.records, offset, raw)
            except DataError as error:
                raise DataError(f"{stream.name!r}: {error}") from error
            values[name] = from_bytes(raw, field)
            offset += field.row_bytes
        for begin in range(0, bucket.num_keys, step):
            yield {name: rows[begin : begin + step] for name, rows in values.items()}


def _chunk_rows(rows: int, width: int) -> int:
    """So many, or fewer where rows are wide."""
    while rows > 1 and rows * width > CHUNK_BYTES:
        rows //= 2
    return rows


def _write_split(writer: StoreWriter, stream: NodeStream, split: str, budget: SpillBudget) -> list[int]:
    """Write the members of a split, ascending, part by part; returns how many each part holds."""
    sizes, field = [0] * (len(stream.bounds) - 1), Field("int64")
    cuts = bucket_bounds(stream.bounds, MOST_BUCKETS)
    try:
        with Spool(budget.folder / "split", cuts, 0, budget.bytes) as spool:
            for ids in stream.splits[split]():
                spool.add(ids, [])
            for part, buckets in by_part(stream.bounds, spool.buckets()):
                name = layout.split_file(part, stream.name, split)
                for bucket in buckets:
                    writer.append(name, field, _members(bucket))
                sizes[part] = writer.finish(name, field)
    except DataError as error:
        raise DataError(f"split {split!r} of {stream.name!r}: {error}") from error
    return sizes


def _members(bucket: Bucket) -> Tensor:
    members = torch.sort(bucket.records.view(torch.uint32).view(-1).to(torch.int64)).values + bucket.first
    repeated = torch.nonzero(members[1:] == members[:-1])
    if repeated.numel():
        raise DataError(f"node {int(members[repeated[0]])} came twice; give every member once")
    return members


def _fields(stream: NodeStream) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for block in stream.blocks:
        repeated = fields.keys() & block.stored.keys()
        if repeated:
            raise DataError(f"{stream.name!r} has two fields named {sorted(repeated)[0]!r}; rename one")
        fields |= block.stored
    return fields


# --- relations ------------------------------------------------------------------------------


def _topologies(
    writer: StoreWriter, stream: EdgeStream, nodes: Sequence[NodeStream], options: StoreOptions
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
            source_times=_node_times(writer, by_name[key[0]], options.time) if own_time is None else None,
            in_order=stream.rule.in_order,
            deduplicate=stream.rule.deduplicate,
        )
        for key in keys
    ]


def _node_times(writer: StoreWriter, stream: NodeStream, name: str | None) -> Tensor | None:
    """[num_nodes] int64, as written a moment ago; None where the type has none."""
    field = _fields(stream).get(name or "")
    if field is None or name is None:
        return None
    if field.shape or not field.dtype.startswith(("int", "uint")):
        raise DataError(f"{stream.name}.{name} is {field}; times are one integer each")
    files = [layout.node_file(part, stream.name, name) for part in range(len(stream.bounds) - 1)]
    return torch.cat([read_array(writer.path_of(file), field) for file in files]).to(torch.int64)


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
