"""Stream the rows of files into stores and check them: the common part of all importers.

Memory holds one chunk; errors name the row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
Members = Callable[[], Iterator[Tensor]]  # the ids of a split, [n] int64 each
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")


@dataclass(frozen=True)
class RowSource:
    """The rows of an array in a file, read in order and chunk by chunk."""

    name: str  # the file, and the array in it: for messages
    field: Field
    chunks: Callable[[], Iterator[Tensor]]  # [n, ...] each
    num_rows: int | None = None  # if it is known before the file is read

    def mapped(self, field: Field, change: Callable[[Tensor], Tensor]) -> "RowSource":
        """Return a source that applies `change` to each chunk; `field` describes the changed rows."""
        return replace(self, field=field, chunks=lambda: map(change, self.chunks()))


@dataclass(frozen=True)
class Count:
    """The number of rows that files must have, one per node or edge, and the array or file that gave this number."""

    of: str  # nodes or edges
    rows: int
    given_by: str


@dataclass(frozen=True)
class EdgeSource:
    """The edges of a relation: sources and destinations in one table [n, 2] or in two tables [n]."""

    tables: Sequence[RowSource]  # of the ends
    count: Count
    both_ways: bool = False  # every edge is followed by its inverse, loops too


def require_files(paths: Sequence[Path], what: str) -> None:
    """Raise DataError that lists the missing files, unless all `paths` exist; `what` names the incomplete thing."""
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"{what} is incomplete; these files are missing: {', '.join(missing)}")


# --- rows -----------------------------------------------------------------------------------


def in_step(tables: Sequence[RowSource], count: Count) -> Iterator[tuple[int, list[Tensor]]]:
    """Read tables side by side: yield (row index, a tensor per table). Raise DataError unless each has `count` rows."""
    for table in tables:
        if table.num_rows not in (None, count.rows):
            raise _miscounted(table, str(table.num_rows), count)
    readers = [filter(len, table.chunks()) for table in tables]
    held: list[Tensor | None] = [None] * len(tables)
    first = 0
    while True:
        held = [next(reader, None) if rows is None else rows for rows, reader in zip(held, readers, strict=True)]
        for table, rows in zip(tables, held, strict=True):
            if rows is None and first < count.rows:
                raise _miscounted(table, str(first), count)
            if rows is not None and first == count.rows:
                raise _miscounted(table, f"more than {count.rows}", count)
        full = [rows for rows in held if rows is not None]
        if not full:
            return
        step = min(count.rows - first, *map(len, full))
        yield first, [rows[:step] for rows in full]
        held = [rows[step:] if len(rows) > step else None for rows in full]
        first += step


def _miscounted(table: RowSource, rows: str, count: Count) -> DataError:
    return DataError(f"{table.name} has {rows} rows for {count.rows} {count.of} ({count.given_by}); give one row each")


def integers(table: RowSource, what: str) -> RowSource:
    """Return `table`; raise DataError unless it holds integers. An empty table may have any dtype."""
    if table.field.dtype not in INTEGERS and table.num_rows != 0:
        raise DataError(f"{table.name} has dtype {table.field.dtype}; {what} are integers, so save it as int64")
    return table


def check_values(rows: Tensor, limit: int, name: str, first: int, what: str) -> None:
    """Raise DataError if a value is not in [0, limit). The message names the file, the row and the value."""
    bad = ~((rows >= 0) & (rows < limit))  # so that NaN is out as well
    if bad.any():
        index = int(torch.nonzero(bad)[0])
        value = rows[index].item()
        shown = int(value) if float(value).is_integer() else value
        raise DataError(f"{name}, row {first + index + 1}: {what} {shown} is not in [0, {limit})")


# --- nodes ----------------------------------------------------------------------------------


def node_stream(name: str, fields: Mapping[str, RowSource], count: Count, splits: Mapping[str, Members]) -> NodeStream:
    """Return a node type in the form that `write_graph` takes. Row i of every field belongs to node i."""

    def rows(field: str, table: RowSource) -> Iterator[Rows]:
        for first, (chunk,) in in_step([table], count):
            yield Rows(torch.arange(first, first + len(chunk)), {field: chunk})

    blocks = [NodeFields({field: table.field}, partial(rows, field, table)) for field, table in fields.items()]
    return NodeStream(name, [0, count.rows], blocks, splits)


def flat(table: RowSource) -> RowSource:
    """Return a table with one value per row, [n] or [n, 1], as [n]; raise DataError for other shapes."""
    if table.field.shape in ((), (1,)):
        return table.mapped(Field(table.field.dtype), lambda rows: rows.view(-1))
    raise DataError(f"{table.name} has rows of shape {table.field.shape}; give one value each")


def labels(table: RowSource, num_classes: int) -> RowSource:
    """Return labels as int64. Unknown labels (NaN or -1) become -1; other values that are no class raise DataError."""
    plain = flat(table)

    def chunks() -> Iterator[Tensor]:
        first = 0
        for rows in plain.chunks():
            missing = torch.isnan(rows) | (rows == UNLABELLED)
            known = torch.where(missing, 0, rows)
            check_values(known, num_classes, table.name, first, "label")
            found = known.to(torch.int64)
            if not torch.equal(found.to(known.dtype), known):
                index = int(torch.nonzero(found.to(known.dtype) != known)[0])
                raise DataError(f"{table.name}, row {first + index + 1}: label {known[index].item()} is no class")
            yield torch.where(missing, UNLABELLED, found)
            first += len(rows)

    return RowSource(table.name, Field("int64"), chunks, table.num_rows)


def members(table: RowSource, num_nodes: int) -> Members:
    """Return a function that yields the node ids of a split. Repeated ids are found only when the split is written."""
    plain = flat(integers(table, "ids of nodes"))

    def chunks() -> Iterator[Tensor]:
        first = 0
        for rows in plain.chunks():
            check_values(rows, num_nodes, table.name, first, "node")
            yield rows.to(torch.int64)
            first += len(rows)

    return chunks


# --- edges ----------------------------------------------------------------------------------


def edge_stream(key: RelationName, ends: EdgeSource, sizes: tuple[int, int], rule: EdgeRule) -> EdgeStream:
    """Return a relation as `write_graph` takes it; raise DataError unless ids are integers. `rule` changes edges."""
    for table in ends.tables:
        integers(table, "ends of edges")
        if table.field.shape != ((2,) if len(ends.tables) == 1 else ()):
            shape = table.field.shape
            raise DataError(f"{table.name} has rows of shape {shape}; an edge has a source and a destination")
    return EdgeStream(key, {}, lambda: _edge_rows(ends, sizes), rule)


def _edge_rows(ends: EdgeSource, sizes: tuple[int, int]) -> Iterator[EdgeRows]:
    for first, rows in in_step(ends.tables, ends.count):
        pair = (rows[0][:, 0], rows[0][:, 1]) if len(ends.tables) == 1 else (rows[0], rows[1])
        check_values(pair[0], sizes[0], ends.tables[0].name, first, "source")
        check_values(pair[1], sizes[1], ends.tables[-1].name, first, "destination")
        sources, destinations = (ids.to(torch.int64).contiguous() for ids in pair)
        if ends.both_ways:
            pairs = torch.stack([sources, destinations], 1)
            sources, destinations = pairs.view(-1), pairs.flip(1).reshape(-1)
        yield EdgeRows(sources, destinations, {})


def write_graph(
    out: str | Path,
    nodes: Sequence[NodeStream],
    edges: Sequence[EdgeStream],
    options: StoreOptions,
    progress: Progress | None,
) -> Store:
    """Write streams of nodes and edges into a new store at `out`, and open the store."""
    with StoreWriter(out) as writer:
        write_store(writer, nodes, edges, options, progress=progress)
    return open_store(out)
