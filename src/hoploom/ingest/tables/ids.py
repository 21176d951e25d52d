"""From the user's ids to store ids: first id of the part + row number in the part.

Store ids follow from the ids alone, not from the order of rows or files: in a part, integers ascend, and texts
ascend by (bucket, UTF-8 bytes), the bucket being the first hex digits of their MD5. `id_buckets.py` sorts them in
one process, `spark_ids.py` on Spark.
Integers without gaps need no map in one part: the store id is a difference.
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
from hoploom.ingest.tables.engine import Engine, rows_of
from hoploom.ingest.tables.engine_rows import EngineRows
from hoploom.ingest.tables.graph_file import GraphFile, NodeTable
from hoploom.ingest.tables.id_buckets import by_buckets
from hoploom.ingest.tables.sources import TableSource

MODULUS, FACTOR = 2**31 - 1, 48271  # Lehmer's generator: no product passes 2^47, so engines agree
MOST_PARTS = 2**16  # four hex digits
UNKNOWN, NULL = -1, -2  # in place of a store id
WAY_OUT = "give every node an id"
NodeIds = tuple[Tensor, Tensor]  # store ids [n], the user's: [n] int64, or [n, width] uint8, UTF-8 padded with zeros


@dataclass(frozen=True)
class Numbering:
    """How the ids of a node type become store ids."""

    owner: str  # nodes.paper
    bounds: tuple[int, ...]  # part p holds bounds[p] to bounds[p + 1] - 1
    first: int = 0  # without a map: the store id is the id less this
    pairs: ir.Table | None = None  # the map: id, node
    width: int = 0  # bytes of the longest text; 0: ids are integers

    @property
    def num_nodes(self) -> int:
        return self.bounds[-1]

    def attach(self, table: ir.Table, column: str, name: str) -> ir.Table:
        """The table with one more column: the store ids of its ids, UNKNOWN or NULL where there is none."""
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
        """All nodes with the user's ids."""
        if self.pairs is None:
            return IdRows(self.num_nodes, partial(_shifted, self.first))
        return EngineRows(engine, self.pairs.select("node", "id"), partial(ids_of, self.width), 16 + self.width)


def _shifted(first: int, nodes: Tensor) -> NodeIds:
    return nodes, nodes + first


def ids_of(width: int, batch: pa.RecordBatch) -> NodeIds:
    """The columns `node` and `id` of a batch; width=0: ids are integers."""
    ids = batch.column("id")
    return int64_of(batch.column("node")), padded(ids, width) if width else int64_of(ids)


def cast_ids(ids: Any, source: TableSource, column: str) -> Any:
    """The ids of a column: of the same type in every table."""
    return ids.cast("string" if source.has_text(column) else "int64")


def number_nodes(engine: Engine, table: NodeTable, source: TableSource | None, parts: int) -> Numbering:
    """The numbering of a node type; DataError for nulls and duplicates."""
    if source is None:
        assert table.count is not None
        if parts == 1:
            return Numbering(table.owner, (0, table.count))
        rows, source = engine.count_up(table.count), _counted(table.name, table.count)
    else:
        rows = engine.read(source.paths)
    column = source.id_column
    number = _number_texts if source.has_text(column) else _number_integers
    ids = rows.select(id=cast_ids(rows[column], source, column))
    numbering = number(engine, source, ids, parts)
    if parts > numbering.num_nodes:
        most = f"{table.owner} has {numbering.num_nodes} nodes; give at most {numbering.num_nodes}"
        raise DataError(f"parts is {parts}, but {most}")
    return numbering


def _number_integers(engine: Engine, source: TableSource, ids: ir.Table, parts: int) -> Numbering:
    if parts == 1 and (numbering := _without_gaps(engine, source, ids)) is not None:
        return numbering
    residue = (ids["id"] % MODULUS + MODULUS) % MODULUS
    return _mapped(engine, source, ids.mutate(part=residue * FACTOR % MODULUS % parts), parts)


def _without_gaps(engine: Engine, source: TableSource, ids: ir.Table) -> Numbering | None:
    """The numbering by a difference, where integers have no gaps."""
    (found,) = rows_of(engine, ids.aggregate(rows=ids["id"].count(), low=ids["id"].min(), high=ids["id"].max()))
    if found["rows"] != source.num_rows or found["high"] - found["low"] + 1 != found["rows"]:
        return None
    (distinct,) = rows_of(engine, ids.aggregate(ids=ids["id"].nunique()))
    return Numbering(source.owner, (0, found["rows"]), found["low"]) if distinct["ids"] == found["rows"] else None


def _number_texts(engine: Engine, source: TableSource, ids: ir.Table, parts: int) -> Numbering:
    digits = ids["id"].hexdigest("md5")
    part: Any = ibis.literal(0)
    if parts > 1:  # digits of a number: `find` is what all engines have
        values = [ibis.literal("0123456789abcdef").find(digits[place : place + 1]) for place in range(3, 7)]
        part = sum(value * 16**power for power, value in enumerate(values)) % parts
    return _mapped(engine, source, ids.mutate(part=part.cast("int64"), bucket=digits[0:3]), parts)


def _mapped(engine: Engine, source: TableSource, ids: ir.Table, parts: int) -> Numbering:
    """The numbering by a map of ids [id, part], and [bucket] of texts."""
    name = file_name(source.owner)
    pairs, counts = engine.number(ids, source.num_rows, name) or by_buckets(engine, ids, name)
    if not counts.is_utf8:
        raise diagnose.not_utf8(source, source.id_column)
    if counts.nulls:
        raise diagnose.nulls(source, source.id_column, counts.nulls, WAY_OUT)
    _require_all(source, counts.num_ids)
    if counts.repeated:
        raise diagnose.duplicate_ids(engine, source, pairs)
    if counts.zero is not None:
        raise diagnose.zero_bytes(source, counts.zero)
    bounds = accumulate((counts.sizes.get(part, 0) for part in range(parts)), initial=0)
    width = counts.width if pairs["id"].type().is_string() else 0
    return Numbering(source.owner, tuple(bounds), pairs=pairs, width=width)


def _require_all(source: TableSource, rows: int) -> None:
    if rows != source.num_rows:
        why = "the table is being written, or the engine is told to leave out files that it cannot read"
        raise DataError(f"{rows:,} of the {source.num_rows:,} rows of {source.owner} came; {why}")


def _counted(name: str, count: int) -> TableSource:
    """What stands for the table of the ids 0 to count - 1."""
    table = NodeTable(name, files=("",), id="id")
    return TableSource(GraphFile({name: table}, {}), table, (), (), pa.schema([("id", pa.int64())]), count)


def file_name(owner: str) -> str:
    """A name of a file, whatever the name of the type."""
    return owner.encode().hex() if len(owner) < 80 else md5(owner.encode()).hexdigest()


def int64_of(column: pa.Array) -> Tensor:
    """A column of integers without nulls [n] int64, to be kept."""
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).astype(np.int64))


def padded(texts: pa.Array, width: int) -> Tensor:
    """UTF-8 [n, width], padded with zeros, as a store holds ids that are no integers; no text is longer."""
    texts = texts.cast(pa.large_string())
    _, offsets, values = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    rows = np.zeros((len(texts), width), np.uint8)
    inside = np.arange(width) < np.diff(ends)[:, None]
    rows[inside] = np.frombuffer(values or b"", np.uint8)[ends[0] : ends[-1]]
    return torch.from_numpy(rows)
