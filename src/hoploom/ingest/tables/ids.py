"""Map the user's ids to store ids: the first store id of the part plus the id's index among the part's sorted ids.

Store ids follow from the user's ids alone, not from the order of rows or files: in a part, integers ascend, and texts
ascend by (bucket, UTF-8 bytes), where the bucket is the first hex digits of their MD5. Integers without gaps need no
map if there is one part: the store id is the user's id minus the smallest id.
"""

from dataclasses import dataclass
from functools import partial
from hashlib import md5
from itertools import accumulate
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.stream.streams import IdRows
from hoploom.ingest.tables import diagnose
from hoploom.ingest.tables.engine import Engine, EngineRows, result_rows
from hoploom.ingest.tables.graph_file import GraphFile, NodeTable
from hoploom.ingest.tables.sources import TableSource

MODULUS, FACTOR = 2**31 - 1, 48271  # Lehmer's generator: no product passes 2^47, so engines agree
UNKNOWN, NULL = -1, -2  # in place of a store id
NodeIds = tuple[Tensor, Tensor]  # store ids [n], the user's: [n] int64, or [n, width] uint8, UTF-8 padded with zeros


@dataclass(frozen=True)
class Numbering:
    """The map from the ids of a node type to store ids."""

    owner: str  # nodes.paper
    bounds: tuple[int, ...]  # part p holds bounds[p] to bounds[p + 1] - 1
    first: int = 0  # without a map: the store id is the user's id minus `first`
    pairs: ir.Table | None = None  # the map: columns `id` (the user's) and `node` (store id)
    width: int = 0  # bytes of the longest text; 0: ids are integers

    @property
    def num_nodes(self) -> int:
        return self.bounds[-1]

    def attach(self, table: ir.Table, column: str, name: str) -> ir.Table:
        """Return `table` with a column `name`: the store ids of `column`.

        Ids without a node become UNKNOWN, nulls NULL.
        """
        if self.pairs is None:
            given = table[column]
            known = given.between(self.first, self.first + self.num_nodes - 1)
            found = ibis.cases((given.isnull(), NULL), (known, given - self.first), else_=UNKNOWN)
            return table.mutate(**{name: found.cast("int64")})
        pairs = self.pairs.select(**{f"{name}_id": self.pairs["id"], f"{name}_node": self.pairs["node"]})
        joined = table.left_join(pairs, table[column] == pairs[f"{name}_id"])
        missing = ibis.ifelse(joined[column].isnull(), NULL, UNKNOWN)
        found = ibis.coalesce(joined[f"{name}_node"], missing).cast("int64")
        return joined.select(*table.columns, **{name: found})

    def original(self, engine: Engine) -> EngineRows[NodeIds] | IdRows[NodeIds]:
        """Return a stream of all nodes' ids, as pairs of tensors (store ids, the user's ids)."""
        if self.pairs is None:
            return IdRows(self.num_nodes, partial(_shifted, self.first))
        return EngineRows(engine, self.pairs.select("node", "id"), partial(read_node_ids, self.width), 16 + self.width)


def _shifted(first: int, nodes: Tensor) -> NodeIds:
    return nodes, nodes + first


def read_node_ids(width: int, batch: pa.RecordBatch) -> NodeIds:
    """Return a batch's columns `node` and `id` as tensors. `width` is the width of text ids, or 0 for integer ids."""
    ids = batch.column("id")
    return int64_of(batch.column("node")), padded(ids, width) if width else int64_of(ids)


def cast_ids(ids: Any, source: TableSource, column: str) -> Any:
    """Return a column of ids, cast to string or int64, so that ids have one type in all tables."""
    return ids.cast("string" if source.has_text(column) else "int64")


def number_nodes(engine: Engine, table: NodeTable, source: TableSource | None, parts: int) -> Numbering:
    """Return the map from a node type's ids to store ids; raise DataError for null or repeated ids."""
    if source is None:
        assert table.count is not None
        if parts == 1:
            return Numbering(table.owner, (0, table.count))
        rows = engine.count_up(table.count)
        stand_in = NodeTable(table.name, files=("",), id="id")  # for the table of the ids 0 to count - 1
        schema = pa.schema([("id", pa.int64())])
        source = TableSource(GraphFile({table.name: stand_in}, {}), stand_in, (), (), schema, table.count)
    else:
        rows = engine.read(source.paths)
    column = source.id_column
    ids = rows.select(id=cast_ids(rows[column], source, column))
    numbering = None
    if source.has_text(column):
        digits = ids["id"].hexdigest("md5")
        part: Any = ibis.literal(0)
        if parts > 1:  # digits of a number: all engines have `find`
            values = [ibis.literal("0123456789abcdef").find(digits[place : place + 1]) for place in range(3, 7)]
            part = sum(value * 16**power for power, value in enumerate(values)) % parts
        ids = ids.mutate(part=part.cast("int64"), bucket=digits[0:3])
    else:
        numbering = _without_gaps(engine, source, ids) if parts == 1 else None
        residue = (ids["id"] % MODULUS + MODULUS) % MODULUS
        ids = ids.mutate(part=residue * FACTOR % MODULUS % parts)
    numbering = numbering or _mapped(engine, source, ids, parts)
    if parts > numbering.num_nodes:
        most = f"{table.owner} has {numbering.num_nodes} nodes; give at most {numbering.num_nodes}"
        raise DataError(f"parts is {parts}, but {most}")
    return numbering


def _without_gaps(engine: Engine, source: TableSource, ids: ir.Table) -> Numbering | None:
    """Return a Numbering that subtracts the smallest id; None if this is impossible, as ids have gaps or repeats."""
    (found,) = result_rows(engine, ids.aggregate(rows=ids["id"].count(), low=ids["id"].min(), high=ids["id"].max()))
    if found["rows"] != source.num_rows or found["high"] - found["low"] + 1 != found["rows"]:
        return None
    (distinct,) = result_rows(engine, ids.aggregate(ids=ids["id"].nunique()))
    return Numbering(source.owner, (0, found["rows"]), found["low"]) if distinct["ids"] == found["rows"] else None


def _mapped(engine: Engine, source: TableSource, ids: ir.Table, parts: int) -> Numbering:
    """Return a Numbering with a table of all ids; raise DataError for ids that are null, repeated or damaged."""
    owner = source.owner.encode()  # in hex digits, because a section's name may have any characters
    pairs, counts = engine.number(ids, source.num_rows, owner.hex() if len(owner) < 80 else md5(owner).hexdigest())
    column = source.id_column
    if not counts.is_utf8:
        raise diagnose.not_utf8(source, column)
    if counts.nulls:
        raise diagnose.nulls(source, column, counts.nulls, "give every node an id")
    if counts.num_ids != source.num_rows:
        why = "the table is being written, or the engine is told to leave out files that it cannot read"
        raise DataError(f"{counts.num_ids:,} of the {source.num_rows:,} rows of {source.owner} came; {why}")
    if counts.repeated:
        raise diagnose.duplicate_ids(engine, source, pairs)
    if counts.zero is not None:
        raise diagnose.zero_bytes(source, counts.zero)
    bounds = accumulate((counts.sizes.get(part, 0) for part in range(parts)), initial=0)
    width = counts.width if pairs["id"].type().is_string() else 0
    return Numbering(source.owner, tuple(bounds), pairs=pairs, width=width)


def int64_of(column: pa.Array) -> Tensor:
    """Return a copy of a column of integers without nulls, [n] int64."""
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).astype(np.int64))


def padded(texts: pa.Array, width: int) -> Tensor:
    """Return texts of at most `width` bytes as UTF-8 [n, width], padded with zeros: the form of text ids in a store."""
    texts = texts.cast(pa.large_string())
    _, offsets, values = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    rows = np.zeros((len(texts), width), np.uint8)
    inside = np.arange(width) < np.diff(ends)[:, None]
    rows[inside] = np.frombuffer(values or b"", np.uint8)[ends[0] : ends[-1]]
    return torch.from_numpy(rows)
