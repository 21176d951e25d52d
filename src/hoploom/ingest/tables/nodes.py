"""A table of nodes as a stream: its fields, the user's own ids, and the members of its splits.

Rows come in whatever order the engine has them, each with its store id.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.stream import Block, NodeStream, Rows
from hoploom.ingest.tables import diagnose
from hoploom.ingest.tables.diagnose import UnfitError
from hoploom.ingest.tables.engine import Engine
from hoploom.ingest.tables.graph_file import GraphFile, NodeTable
from hoploom.ingest.tables.ids import Numbering, file_name, id_column
from hoploom.ingest.tables.idtypes import id_kind
from hoploom.ingest.tables.plan import Planner, Role, arrays_of, row_bytes
from hoploom.ingest.tables.scan import scan
from hoploom.ingest.tables.sources import Source
from hoploom.ingest.tables.splits import MOST_SPLITS, Shares, Splits, by_column, int64_of
from hoploom.ingest.tables.standardise import standardise
from hoploom.ingest.tables.texts import padded
from hoploom.ingest.tables.transforms import FieldColumns, UnfitColumnError, check_range, signed
from hoploom.schema import DTYPES, ORIGINAL_ID, Field

if TYPE_CHECKING:
    import ibis.expr.types as ir

CHUNK = 1 << 17
ARRAY_BYTES = 4 << 20  # of a .npy file at a time


@dataclass(frozen=True)
class NodeRows:
    """A node type's table, numbered."""

    engine: Engine
    recipe: GraphFile
    table: NodeTable
    source: Source
    numbering: Numbering

    def stream(self, scratch: Path) -> NodeStream:
        """The node type as bulk takes it; ConfigError or DataError where its columns do not fit."""
        blocks = [*original_ids(self.engine, self.numbering), *self._fields(), *self._array(scratch)]
        return NodeStream(self.table.name, self.numbering.bounds, blocks, self._splits())

    # --- fields ---------------------------------------------------------------------------------

    def _fields(self) -> list[Block]:
        table, planner = self.table, Planner(self.engine, self.recipe, self.table, self.source)
        roles = [Role("features", "x", self.source.features, table.dtype)] if self.source.features else []
        roles += [Role("label", "y", [table.label], limit=table.num_classes)] if table.label else []
        roles += [Role("time", "time", [table.time])] if table.time else []
        roles += [Role(f"fields.{name}", name, [column]) for name, column in table.fields.items()]
        fields = [planner.field(role) for role in roles]
        if not fields:
            return []
        arriving = {field.name: field.arriving for field in fields}
        standardised = {field.name: field.standardised for field in fields if field.standardised}
        finish = standardise(standardised, {field.name: field.field for field in fields}) if standardised else None
        return [Block(arriving, partial(self._rows, fields), finish)]

    def _rows(self, fields: list[FieldColumns]) -> Iterator[Rows]:
        names = list(dict.fromkeys(column.name for field in fields for column in field.columns))
        aliases = {name: f"c{index}" for index, name in enumerate(names)}
        given = self._with_nodes(aliases).select("node", *aliases.values())
        # Ids without gaps often stand in order, too: then rows are written as they come.
        for batch in self.engine.stream(given, row_bytes(fields), as_read=self.numbering.pairs is None):
            arrays = arrays_of(batch, aliases)
            rows = {field.name: checked_rows(self.source, field, arrays, batch.num_rows) for field in fields}
            yield Rows(int64_of(batch.column("node")), rows)

    def _with_nodes(self, columns: Mapping[str, str]) -> "ir.Table":
        """The table with store ids as `node`, and some columns by other names."""
        assert self.table.id is not None
        rows = self.engine.read(self.source.paths)
        ids = id_column(rows, self.table.id, id_kind(self.source, self.table, self.table.id))
        chosen = rows.select(id=ids, **{alias: rows[name] for name, alias in columns.items()})
        return self.numbering.attach(chosen, "id", "node")

    # --- a .npy file beside the table -----------------------------------------------------------

    def _array(self, scratch: Path) -> list[Block]:
        if not self.source.arrays:
            return []
        field = Field(self.table.dtype, (self.source.arrays[0].shape[1],))
        return [Block({"x": field}, partial(self._array_rows, field, scratch))]

    def _array_rows(self, field: Field, scratch: Path) -> Iterator[Rows]:
        nodes, waiting = self._nodes_in_order(scratch), torch.empty(0, dtype=torch.int64)
        for file in self.source.arrays:
            array_rows = max(1, ARRAY_BYTES // (np.dtype(file.dtype).itemsize * max(1, file.shape[1])))
            for begin in range(0, file.shape[0], array_rows):
                count = min(array_rows, file.shape[0] - begin)
                while waiting.numel() < count:
                    waiting = torch.cat([waiting, next(nodes)])
                values = signed(_read_array(file.path, begin, count))
                try:
                    check_range(values, field.dtype)
                except UnfitError as error:
                    raise DataError(f"{file.path}, rows {begin + 1} to {begin + count}: {error}") from error
                rows = torch.from_numpy(values).view(count, -1).to(DTYPES[field.dtype])
                yield Rows(waiting[:count], {"x": rows})
                waiting = waiting[count:]

    def _nodes_in_order(self, scratch: Path) -> Iterator[Tensor]:
        """The store ids of the table's rows, in the order of its files."""
        assert self.table.id is not None
        if self.numbering.pairs is None:
            for _, _, ids in scan(self.source, self.table.id):
                yield int64_of(ids) - self.numbering.first
            return
        path = scratch / f"{file_name(self.source.owner)}.rows.parquet"
        _write_numbered(self.source, self.table.id, path)
        rows = self.engine.read([str(path)])
        ids = id_column(rows, "id", id_kind(self.source, self.table, self.table.id))
        numbered = self.numbering.attach(rows.select(row=rows["row"], id=ids), "id", "node")
        for batch in self.engine.stream(numbered.order_by("row").select("node")):
            yield int64_of(batch.column("node"))
        path.unlink()

    # --- splits ---------------------------------------------------------------------------------

    def _splits(self) -> Splits:
        split = self.table.split
        if split is None:
            return {}
        if not isinstance(split, str):
            return Shares(split, self.recipe.seed).of(self.engine, self.numbering)
        nodes = self._with_nodes({split: "split"})
        splits = by_column(self.engine, nodes.select("node", split=nodes["split"].cast("string")))
        if splits is None:
            at = f"{self.table.owner}.split"
            message = f"column {split!r} has more than {MOST_SPLITS} values; a split column names few, as train and val"
            raise self.recipe.problem(at, f"{at}: {message}")
        return splits


def checked_rows(source: Source, field: FieldColumns, arrays: Mapping[str, object], count: int) -> Tensor:
    """A field's rows; DataError names the first row that cannot be used."""
    try:
        return field.rows(arrays, count)
    except UnfitColumnError as error:
        check = partial(field.numbers, error.column)
        raise diagnose.unfit(source, error.column.name, check, error) from error


def original_ids(engine: Engine, numbering: Numbering) -> list[Block]:
    """The user's own ids, where they are not the store's."""
    if numbering.pairs is None and numbering.first == 0:
        return []
    field = Field("uint8", (numbering.width,)) if numbering.width else Field("int64")

    def rows() -> Iterator[Rows]:
        if numbering.pairs is None:
            for begin in range(0, numbering.num_nodes, CHUNK):
                nodes = torch.arange(begin, min(begin + CHUNK, numbering.num_nodes))
                yield Rows(nodes, {ORIGINAL_ID: nodes + numbering.first})
            return
        for batch in engine.stream(numbering.pairs.select("node", "id"), 16 + numbering.width):
            ids = batch.column("id")
            own = torch.from_numpy(padded(ids, numbering.width)) if numbering.width else int64_of(ids)
            yield Rows(int64_of(batch.column("node")), {ORIGINAL_ID: own})

    return [Block({ORIGINAL_ID: field}, rows)]


def _read_array(path: str, begin: int, count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    """Some rows of a .npy file. It is not mapped: pages that were read would count as memory."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        width = int(np.prod(shape[1:], dtype=np.int64))
        file.seek(begin * width * dtype.itemsize, 1)
        rows = np.fromfile(file, dtype, count * width).reshape(count, width)
    return rows.astype(rows.dtype.newbyteorder("="), copy=False)


def _write_numbered(source: Source, column: str, path: Path) -> None:
    """The ids of a table with the numbers of their rows, as Parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([("row", pa.int64()), ("id", source.schema.field(column).type)])
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for _, _, ids in scan(source, column):
            numbers = pa.array(np.arange(count, count + len(ids)))
            writer.write_table(pa.table([numbers, ids.cast(schema.field("id").type)], schema=schema))
            count += len(ids)
