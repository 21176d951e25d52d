"""Rows of nodes that come in any order, put in the order of their ids and written.

Rows that come in order already are written as they come; the others wait in a spool.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import DataError
from hoploom.ingest.stream.spill import MOST_BUCKETS, Bucket, SpillBudget, Spool, from_bytes
from hoploom.ingest.stream.streams import Chunk, NodeFields, NodeStream, Rows
from hoploom.ops import KEY_BYTES
from hoploom.schema import DTYPES, Field
from hoploom.store import format as layout
from hoploom.store.write import StoreWriter

CHUNK_BYTES = 16 << 20


def write_fields(writer: StoreWriter, stream: NodeStream, block: NodeFields, budget: SpillBudget) -> None:
    """Write the fields of a block, part by part."""
    position, part = 0, 0
    for chunk in _finished(stream, block, budget):
        _append(writer, stream, block.stored, position, chunk)
        position += next(iter(chunk.values())).shape[0]
        while part + 1 < len(stream.bounds) and stream.bounds[part + 1] <= position:  # many parts, few open files
            _finish(writer, stream, block.stored, part)
            part += 1
    if position != stream.num_nodes:
        raise DataError(f"{position} rows came for the {stream.num_nodes} nodes of {stream.name!r}; give one each")
    for last in range(part, len(stream.bounds) - 1):
        _finish(writer, stream, block.stored, last)


def write_split(writer: StoreWriter, stream: NodeStream, split: str, budget: SpillBudget) -> list[int]:
    """Write the members of a split, ascending, part by part; returns how many each part holds."""
    sizes, field = [0] * (len(stream.bounds) - 1), Field("int64")
    with budget.spool("split", bucket_bounds(stream.bounds, MOST_BUCKETS), 0) as spool, _naming(stream, split):
        for ids in stream.splits[split]():
            spool.add(ids, [])
        for part, buckets in by_part(stream.bounds, spool.buckets()):
            name = layout.split_file(part, stream.name, split)
            for bucket in buckets:
                writer.append(name, field, _members(bucket))
            sizes[part] = writer.finish(name, field)
    return sizes


def _members(bucket: Bucket) -> Tensor:
    members = torch.sort(bucket.records.view(torch.uint32).view(-1).to(torch.int64)).values + bucket.first
    repeated = torch.nonzero(members[1:] == members[:-1])
    if repeated.numel():
        raise DataError(f"node {int(members[repeated[0]])} came twice; give every member once")
    return members


def by_part(bounds: Sequence[int], buckets: Iterator[Bucket]) -> Iterator[tuple[int, Iterator[Bucket]]]:
    """The buckets of each part, of those without any too."""
    grouped = groupby(buckets, key=lambda bucket: min(bisect_right(bounds, bucket.first), len(bounds) - 1) - 1)
    done = 0
    for part, some in grouped:
        yield from ((empty, iter(())) for empty in range(done, part))
        yield part, some
        done = part + 1
    yield from ((empty, iter(())) for empty in range(done, len(bounds) - 1))


@contextmanager
def _naming(stream: NodeStream, split: str) -> Iterator[None]:
    """Errors say whose split it is."""
    try:
        yield
    except DataError as error:
        raise DataError(f"split {split!r} of {stream.name!r}: {error}") from error


def _append(writer: StoreWriter, stream: NodeStream, fields: Mapping[str, Field], first: int, chunk: Chunk) -> None:
    """Write consecutive rows from a node on to their parts."""
    count = next(iter(chunk.values())).shape[0]
    for part in range(bisect_right(stream.bounds, first) - 1, len(stream.bounds) - 1):
        begin = max(stream.bounds[part] - first, 0)
        end = min(stream.bounds[part + 1] - first, count)
        if begin >= count:
            return
        for name, field in fields.items() if begin < end else ():
            writer.append(layout.node_file(part, stream.name, name), field, chunk[name][begin:end])


def _finish(writer: StoreWriter, stream: NodeStream, fields: Mapping[str, Field], part: int) -> None:
    for name, field in fields.items():
        file = layout.node_file(part, stream.name, name)
        if (rows := writer.finish(file, field)) != stream.part_sizes[part]:
            raise DataError(f"{file} got {rows} rows for {stream.part_sizes[part]} nodes; give one each")


def _finished(stream: NodeStream, block: NodeFields, budget: SpillBudget) -> Iterator[Chunk]:
    """The block's fields in the order of the ids, as they are stored."""
    rows = block.rows()
    if block.finish is None:
        yield from _ordered(stream, block, rows, budget)
        return
    with _spool(stream, block, 0, budget) as spool:
        for chunk in rows:
            _add(spool, block, chunk)
        finish = block.finish.prepare(_in_chunks(spool, stream, block, budget))
        for values in _in_chunks(spool, stream, block, budget):
            yield finish(values)


def _ordered(stream: NodeStream, block: NodeFields, rows: Iterator[Rows], budget: SpillBudget) -> Iterator[Chunk]:
    position = 0
    for chunk in rows:
        if not _follows(chunk.ids, position):
            with _spool(stream, block, position, budget) as spool:
                _add(spool, block, chunk)
                for later in rows:
                    _add(spool, block, later)
                yield from _in_chunks(spool, stream, block, budget)
            return
        yield _checked(block, chunk)
        position += chunk.ids.numel()


def _follows(ids: Tensor, position: int) -> bool:
    """Whether these are consecutive ids from a position on."""
    count = ids.numel()
    if count and (int(ids[0]) != position or int(ids[-1]) != position + count - 1):
        return False
    return bool((ids[1:] - ids[:-1] == 1).all())


def _spool(stream: NodeStream, block: NodeFields, first: int, budget: SpillBudget) -> Spool:
    """A spool for the nodes from `first` on, its buckets whole chunks."""
    width = sum(field.row_bytes for field in block.fields.values())
    bounds = [first, *(bound for bound in stream.bounds if bound > first)]
    wanted = -(-stream.num_nodes * (width + KEY_BYTES) * 8 // budget.bytes)  # buckets of an eighth of the budget
    step = _chunk_rows(budget.chunk_rows, width)
    return budget.spool("rows", bucket_bounds(bounds, max(1, min(wanted, MOST_BUCKETS)), step), width, step)


def _add(spool: Spool, block: NodeFields, rows: Rows) -> None:
    spool.add(rows.ids, [ops.byte_rows(values) for values in _checked(block, rows).values()])


def _checked(block: NodeFields, rows: Rows) -> Chunk:
    """The fields of a chunk; an error unless each is what the block says."""
    for name, field in block.fields.items():
        values = rows.fields[name]
        if values.dtype != DTYPES[field.dtype] or tuple(values.shape) != (rows.ids.numel(), *field.shape):
            raise DataError(f"field {name!r} came as {values.dtype} {tuple(values.shape)}, not {field}")
    return {name: rows.fields[name] for name in block.fields}


def _in_chunks(spool: Spool, stream: NodeStream, block: NodeFields, budget: SpillBudget) -> Iterator[Chunk]:
    """All rows, cut by their number and width alone: the same chunks whatever the memory."""
    step = _chunk_rows(budget.chunk_rows, sum(field.row_bytes for field in block.fields.values()))
    for bucket in spool.buckets():
        try:
            values = _placed(bucket, block)
        except DataError as error:
            raise DataError(f"{stream.name!r}: {error}") from error
        for begin in range(0, bucket.num_keys, step):
            yield {name: rows[begin : begin + step] for name, rows in values.items()}


def _placed(bucket: Bucket, block: NodeFields) -> Chunk:
    values, offset = {}, KEY_BYTES
    for name, field in block.fields.items():
        raw = ops.empty((bucket.num_keys, field.row_bytes), torch.uint8)
        ops.place(bucket.records, offset, raw)
        values[name] = from_bytes(raw, DTYPES[field.dtype], field.shape)
        offset += field.row_bytes
    return values


def _chunk_rows(rows: int, width: int) -> int:
    """So many, or fewer where rows are wide."""
    while rows > 1 and rows * width > CHUNK_BYTES:
        rows //= 2
    return rows


def bucket_bounds(bounds: Sequence[int], wanted: int, step: int = 1) -> list[int]:
    """About so many buckets over the parts, none in two parts, each of whole steps from its part's first node on."""
    span = max(-(-(bounds[-1] - bounds[0]) // wanted), 1)
    span = -(-span // step) * step
    cuts = {bounds[0]}
    for begin, end in pairwise(bounds):
        cuts.update(range(begin, end, span))
        cuts.add(end)
    return sorted(cuts) if len(cuts) > 1 else [bounds[0], bounds[0]]
