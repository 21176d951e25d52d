"""Write the rows of all nodes of a type, or of a range, in the order of their ids; a split's members are ascending."""

from collections.abc import Iterator
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import DataError
from hoploom.ingest.stream.spill import (
    MOST_BUCKETS,
    SpillBudget,
    Spool,
    bucket_bounds,
    by_part,
    checked_rows,
    from_bytes,
)
from hoploom.ingest.stream.streams import Chunk, NodeFields, NodeStream
from hoploom.ops.spool import KEY_BYTES, place_column
from hoploom.schema import Field
from hoploom.store import format as layout


class ArraySink(Protocol):
    """The interface through which a store's files are written, whole or in pieces."""

    def append(self, name: str, field: Field, rows: Tensor) -> None:
        """Append rows of `field` to the file `name`."""

    def finish(self, name: str, field: Field) -> int:
        """Complete the file `name`; return its number of rows."""


def write_fields(writer: ArraySink, stream: NodeStream, block: NodeFields, budget: SpillBudget) -> None:
    """Write the fields in `block`; finish the files of a part as soon as they are complete, so that few are open."""
    bounds, position, part = stream.bounds, stream.bounds[0], 0

    def finish_part() -> None:
        nonlocal part
        for name, field in block.fields.items():
            writer.finish(layout.node_file(stream.first_part + part, stream.name, name), field)
        part += 1

    for chunk in _in_order(stream, block, budget):
        end = position + next(iter(chunk.values())).shape[0]
        while position < end and part < len(bounds) - 1:
            count = min(end, bounds[part + 1]) - position
            for name, field in block.fields.items():
                writer.append(layout.node_file(stream.first_part + part, stream.name, name), field, chunk[name][:count])
            chunk = {name: rows[count:] for name, rows in chunk.items()}
            position += count
            if position == bounds[part + 1]:
                finish_part()
        position = end
    if position != bounds[-1]:
        came, wanted = position - bounds[0], bounds[-1] - bounds[0]
        raise DataError(f"{came} rows came for the {wanted} nodes of {stream.name!r}; give one each")
    while part < len(bounds) - 1:
        finish_part()


def _in_order(stream: NodeStream, block: NodeFields, budget: SpillBudget) -> Iterator[Chunk]:
    """Yield a block's fields in the order of ids; rows are spooled from the first disorder on."""
    position, arriving = stream.bounds[0], block.rows()
    for rows in arriving:
        count = rows.ids.numel()
        follows = not count or (int(rows.ids[0]) == position and int(rows.ids[-1]) == position + count - 1)
        if not (follows and bool((rows.ids[1:] - rows.ids[:-1] == 1).all())):
            arriving = chain([rows], arriving)
            break
        yield checked_rows(block.fields, rows.fields, count)
        position += count
    else:
        return
    width = sum(field.row_bytes for field in block.fields.values())
    bounds = [position, stream.bounds[-1]]
    wanted = -(-(bounds[1] - position) * (width + KEY_BYTES) * 8 // budget.bytes)  # buckets of an eighth of the budget
    cuts = bucket_bounds(bounds, max(1, min(wanted, MOST_BUCKETS)))
    with Spool(budget.folder / "rows", cuts, width, budget.bytes) as spool:
        for rows in arriving:
            columns = checked_rows(block.fields, rows.fields, rows.ids.numel()).values()
            spool.add(rows.ids, [ops.byte_rows(column) for column in columns])
        for bucket in spool.buckets():
            values, offset = {}, KEY_BYTES
            for name, field in block.fields.items():
                raw = ops.empty((bucket.num_keys, field.row_bytes), torch.uint8)
                try:
                    place_column(bucket.records, offset, raw)
                except DataError as error:
                    raise DataError(f"{stream.name!r}: {error}") from error
                values[name] = from_bytes(raw, field)
                offset += field.row_bytes
            yield values


def write_split(writer: ArraySink, stream: NodeStream, split: str, budget: SpillBudget) -> list[int]:
    """Write the members of a split, ascending, part by part; return the number of members by part."""
    sizes, field = [0] * (len(stream.bounds) - 1), Field("int64")
    cuts = bucket_bounds(stream.bounds, MOST_BUCKETS)
    where = f"split {split!r} of {stream.name!r}"
    try:
        with Spool(budget.folder / "split", cuts, 0, budget.bytes) as spool:
            for ids in stream.splits[split]():
                spool.add(ids, [])
            for part, buckets in by_part(stream.bounds, spool.buckets()):
                name = layout.split_file(stream.first_part + part, stream.name, split)
                for bucket in buckets:
                    keys = bucket.records.view(torch.uint32).view(-1).to(torch.int64)
                    members = torch.sort(keys).values + bucket.first
                    repeated = torch.nonzero(members[1:] == members[:-1])
                    if repeated.numel():
                        raise DataError(f"node {int(members[repeated[0]])} came twice; give every member once")
                    writer.append(name, field, members)
                sizes[part] = writer.finish(name, field)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    return sizes


def stored_fields(stream: NodeStream) -> dict[str, Field]:
    """Return the fields of a type by name; raise DataError if two fields have the same name."""
    fields: dict[str, Field] = {}
    for block in stream.blocks:
        repeated = fields.keys() & block.fields.keys()
        if repeated:
            raise DataError(f"{stream.name!r} has two fields named {sorted(repeated)[0]!r}; rename one")
        fields |= block.fields
    return fields
