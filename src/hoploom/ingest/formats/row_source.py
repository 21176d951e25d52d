"""What every importer reads, and how it becomes a store: sources of rows in order, checked as they pass.

Rows are seen once, in the order of the file: memory holds a chunk, and what is wrong is found where it stands.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.stream import (
    EdgeRows,
    EdgeRule,
    EdgeStream,
    NodeFields,
    NodeStream,
    Progress,
    Rows,
    StoreOptions,
    write_store,
)
from hoploom.schema import Field, RelationName
from hoploom.store import Store, open_store
from hoploom.store.write import StoreWriter

CHUNK_BYTES = 8 << 20
UNLABELLED = -1
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")


@dataclass(frozen=True)
class RowSource:
    """Rows of a file, in order."""

    name: str  # the file, and the array inside it
    field: Field
    chunks: Callable[[], Iterator[Tensor]]  # [n, ...] each
    num_rows: int | None = None  # where the file tells before it is read

    def mapped(self, field: Field, change: Callable[[Tensor], Tensor]) -> "RowSource":
        """The same rows, each chunk changed."""
        return replace(self, field=field, chunks=lambda: map(change, self.chunks()))


@dataclass(frozen=True)
class Count:
    """How many rows there must be, and what says so."""

    of: str  # nodes or edges
    rows: int
    told_by: str


@dataclass(frozen=True)
class GraphStreams:
    """All that is written to a store."""

    nodes: Sequence[NodeStream]
    edges: Sequence[EdgeStream]
    homogeneous: bool
    weight: str | None = None


@dataclass(frozen=True)
class EdgeSource:
    """The edges of a relation in a file: both ends in one table [n, 2], or each in its own [n], and their fields."""

    tables: Sequence[RowSource]  # of the ends
    count: Count
    fields: Mapping[str, RowSource] = field(default_factory=dict)
    both_ways: bool = False  # every edge is followed by its inverse, loops too


def require(paths: Sequence[Path], what: str) -> None:
    """Raise unless all of these files are there."""
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"{what} is incomplete; these files are missing: {', '.join(missing)}")


# --- rows -----------------------------------------------------------------------------------


def numbered(table: RowSource, count: Count) -> Iterator[tuple[int, Tensor]]:
    """The chunks, each with the number of its first row; raise if there are more or fewer than counted."""
    if table.num_rows is not None and table.num_rows != count.rows:
        raise _miscounted(table, str(table.num_rows), count)
    first = 0
    for chunk in table.chunks():
        if first + len(chunk) > count.rows:
            raise _miscounted(table, f"more than {count.rows}", count)
        yield first, chunk
        first += len(chunk)
    if first != count.rows:
        raise _miscounted(table, str(first), count)


def _miscounted(table: RowSource, rows: str, count: Count) -> DataError:
    return DataError(f"{table.name} has {rows} rows for {count.rows} {count.of} ({count.told_by}); give one row each")


def in_step(tables: Sequence[RowSource]) -> Iterator[list[Tensor]]:
    """The same rows of several tables at a time."""
    readers = [table.chunks() for table in tables]
    held: list[Tensor | None] = [None] * len(tables)
    while True:
        held = [_next_rows(rows, reader) for rows, reader in zip(held, readers, strict=True)]
        full = [rows for rows in held if rows is not None]
        if not full:
            return
        if len(full) < len(held):
            ended = [table.name for table, rows in zip(tables, held, strict=True) if rows is None]
            longer = [table.name for table, rows in zip(tables, held, strict=True) if rows is not None]
            raise DataError(f"{ended[0]} has fewer rows than {longer[0]}; give both one row each")
        step = min(map(len, full))
        yield [rows[:step] for rows in full]
        held = [rows[step:] for rows in full]  # full holds one of each table here


def _next_rows(rows: Tensor | None, reader: Iterator[Tensor]) -> Tensor | None:
    """What is held already, else the next chunk with rows in it."""
    while rows is None or not len(rows):
        rows = next(reader, None)
        if rows is None:
            return None
    return rows


def integers(table: RowSource, what: str) -> RowSource:
    """The table itself; raise unless it holds integers. An empty one may be of any dtype, as NumPy makes it."""
    if table.field.dtype not in INTEGERS and table.num_rows != 0:
        raise DataError(f"{table.name} has dtype {table.field.dtype}; {what} are integers, so save it as int64")
    return table


def check_values(rows: Tensor, limit: int, name: str, first: int, what: str) -> None:
    """Raise if a value is out of [0, limit): name the file, the row and the value."""
    bad = ~((rows >= 0) & (rows < limit))  # so that NaN is out as well
    if bad.any():
        index = int(torch.nonzero(bad)[0])
        value = rows[index].item()
        shown = int(value) if float(value).is_integer() else value
        raise DataError(f"{name}, row {first + index + 1}: {what} {shown} is not in [0, {limit})")


# --- nodes ----------------------------------------------------------------------------------


def node_field(name: str, table: RowSource, count: Count) -> NodeFields:
    """One field of every node, row i for node i."""

    def rows() -> Iterator[Rows]:
        for first, chunk in numbered(table, count):
            yield Rows(torch.arange(first, first + len(chunk)), {name: chunk})

    return NodeFields({name: table.field}, rows)


def flat(table: RowSource) -> RowSource:
    """A table of one column as plain values."""
    if table.field.shape in ((), (1,)):
        return table.mapped(Field(table.field.dtype), lambda rows: rows.view(-1))
    raise DataError(f"{table.name} has rows of shape {table.field.shape}; give one value each")


def labels(table: RowSource, num_classes: int | None) -> RowSource:
    """Classes, int64, as the store keeps them: a label that is not known (NaN, or -1) is -1."""
    plain = flat(table)

    def chunks() -> Iterator[Tensor]:
        first = 0
        for rows in plain.chunks():
            missing = torch.isnan(rows) | (rows == UNLABELLED)
            known = torch.where(missing, 0, rows)
            check_values(known, 1 << 53 if num_classes is None else num_classes, table.name, first, "label")
            found = known.to(torch.int64)
            if not torch.equal(found.to(known.dtype), known):
                index = int(torch.nonzero(found.to(known.dtype) != known)[0])
                raise DataError(f"{table.name}, row {first + index + 1}: label {known[index].item()} is no class")
            yield torch.where(missing, UNLABELLED, found)
            first += len(rows)

    return RowSource(table.name, Field("int64"), chunks, table.num_rows)


def members(table: RowSource, num_nodes: int) -> Callable[[], Iterator[Tensor]]:
    """The nodes of a split, from their ids. A map of a byte per node finds those that come twice."""
    plain = flat(integers(table, "ids of nodes"))

    def chunks() -> Iterator[Tensor]:
        first, seen = 0, torch.zeros(num_nodes, dtype=torch.bool)
        for rows in plain.chunks():
            check_values(rows, num_nodes, table.name, first, "node")
            ids = rows.to(torch.int64)
            mark_once(ids, seen, table.name, first)
            yield ids
            first += len(rows)

    return chunks


def mark_once(ids: Tensor, seen: Tensor, name: str, first: int) -> None:
    """Note in `seen` that these nodes were met; raise if one was before."""
    again = seen[ids]
    if not again.any() and torch.unique(ids).numel() == ids.numel():
        seen[ids] = True
        return
    met: set[int] = set()
    for index, node in enumerate(ids.tolist()):
        if node in met or again[index]:
            raise DataError(f"{name}, row {first + index + 1}: node {node} is there twice; list a node once")
        met.add(node)


def masked(table: RowSource, count: Count) -> Callable[[], Iterator[Tensor]]:
    """The nodes of a split, from a mask."""

    def chunks() -> Iterator[Tensor]:
        for first, mask in numbered(flat(table), count):
            yield torch.nonzero(mask != 0).view(-1) + first

    return chunks


# --- edges ----------------------------------------------------------------------------------


def edge_stream(key: RelationName, ends: EdgeSource, sizes: tuple[int, int], rule: EdgeRule) -> EdgeStream:
    """The edges of a relation between this many sources and destinations."""
    for table in ends.tables:
        integers(table, "ends of edges")
    fields = {name: table.field for name, table in ends.fields.items()}
    return EdgeStream(key, fields, lambda: _edge_rows(ends, sizes), rule)


def _edge_rows(ends: EdgeSource, sizes: tuple[int, int]) -> Iterator[EdgeRows]:
    first, tables = 0, [*ends.tables, *ends.fields.values()]
    for table in tables:
        if table.num_rows is not None and table.num_rows != ends.count.rows:
            raise _miscounted(table, str(table.num_rows), ends.count)
    for rows in in_step(tables):
        if first + len(rows[0]) > ends.count.rows:
            raise _miscounted(tables[0], f"more than {ends.count.rows}", ends.count)
        pair = (rows[0][:, 0], rows[0][:, 1]) if len(ends.tables) == 1 else (rows[0], rows[1])
        for what, table, ids, size in zip(
            ("source", "destination"), (ends.tables[0], ends.tables[-1]), pair, sizes, strict=True
        ):
            check_values(ids, size, table.name, first, what)
        first += len(rows[0])
        fields = dict(zip(ends.fields, rows[len(ends.tables) :], strict=True))
        sources, destinations = (ids.to(torch.int64).contiguous() for ids in pair)
        yield _both_ways(sources, destinations, fields) if ends.both_ways else EdgeRows(sources, destinations, fields)
    if first != ends.count.rows:
        raise _miscounted(tables[0], str(first), ends.count)


def _both_ways(sources: Tensor, destinations: Tensor, fields: Mapping[str, Tensor]) -> EdgeRows:
    doubled = {name: rows.repeat_interleave(2, dim=0) for name, rows in fields.items()}
    there, back = torch.stack([sources, destinations], 1), torch.stack([destinations, sources], 1)
    return EdgeRows(there.view(-1), back.view(-1), doubled)


def write_graph(out: str | Path, graph: GraphStreams, memory: int, progress: Progress | None) -> Store:
    """Write a store and open it."""
    options = StoreOptions(weight=graph.weight, homogeneous=graph.homogeneous, memory=memory)
    with StoreWriter(out) as writer:
        write_store(writer, graph.nodes, graph.edges, options, progress=progress)
    return open_store(out)
