"""A table of nodes as a stream: its fields, the user's own ids and the members of splits.

Rows come in whatever order the engine has them, each with its store id; nothing is sorted here. Splits that are drawn
follow from the ids.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hoploom.ingest.stream import NodeFields, NodeStream, Rows
from hoploom.ingest.tables import diagnose
from hoploom.ingest.tables.array_rows import ArrayRows
from hoploom.ingest.tables.build_report import Report, Unlabelled
from hoploom.ingest.tables.engine import Engine, rows_of
from hoploom.ingest.tables.engine_rows import EngineRows
from hoploom.ingest.tables.fields import Planner, TableFields
from hoploom.ingest.tables.graph_file import NodeTable
from hoploom.ingest.tables.ids import NodeIds, Numbering, cast_ids, ids_of, int64_of
from hoploom.ingest.tables.sources import TableSource
from hoploom.ingest.tables.transforms import standardise
from hoploom.keys import mix
from hoploom.ops.mixing import Words, mix_words
from hoploom.schema import ORIGINAL_ID, Field

MOST_SPLITS = 100  # each is read by itself
Splits = Mapping[str, Callable[[], Iterator[Tensor]]]


@dataclass(frozen=True)
class NodeRows:
    """A node type's table, numbered."""

    engine: Engine
    source: TableSource
    numbering: Numbering

    @property
    def table(self) -> NodeTable:
        assert isinstance(self.source.table, NodeTable)
        return self.source.table

    def stream(self, scratch: Path, report: Report) -> NodeStream:
        """The node type as a stream; ConfigError or DataError where its columns do not fit. Counts missing labels."""
        planned, split = Planner(self.engine, self.source).fields(), self.table.split
        splits = self._named(split) if isinstance(split, str) else {}
        unlabelled = None if planned.label is None else self._count_unlabelled(planned.label)
        if unlabelled is not None:
            report.unlabelled[self.table.owner] = unlabelled
        if split is not None and not isinstance(split, str):
            splits = self._drawn(split, None if unlabelled is None else planned.label)
        fields = [*original_ids(self.engine, self.numbering), *self._fields(planned), *self._array(scratch)]
        timed = [one for one in planned.fields if one.name == "time"]
        times = self._rows(replace(planned, fields=timed)) if timed else None
        return NodeStream(self.table.name, self.numbering.bounds, fields, splits, times=times)

    # --- fields ---------------------------------------------------------------------------------

    def _fields(self, planned: TableFields) -> list[NodeFields]:
        if not planned.fields:
            return []
        arriving = {field.name: field.arriving for field in planned.fields}
        standardised = {field.name: field.standardised for field in planned.fields if field.standardised}
        stored = {field.name: field.field for field in planned.fields}
        finish = standardise(standardised, stored) if standardised else None
        return [NodeFields(arriving, self._rows(planned), finish)]

    def _rows(self, planned: TableFields) -> EngineRows[Rows]:
        given = self._with_nodes(planned.aliases).select("node", *planned.aliases.values())
        # Ids without gaps often stand in order, too: then rows are written as they come.
        in_order = self.numbering.pairs is None
        return EngineRows(
            self.engine, given, partial(_node_rows, planned.shipped()), planned.row_bytes, as_read=in_order
        )

    def _with_nodes(self, columns: Mapping[str, str]) -> ir.Table:
        """The table with store ids as `node`, and some columns by other names."""
        rows, column = self.engine.read(self.source.paths), self.source.id_column
        ids = cast_ids(rows[column], self.source, column)
        chosen = rows.select(id=ids, **{alias: rows[name] for name, alias in columns.items()})
        return self.numbering.attach(chosen, "id", "node")

    # --- a .npy file beside the table -----------------------------------------------------------

    def _array(self, scratch: Path) -> list[NodeFields]:
        if not self.source.arrays:
            return []
        field = Field(self.table.dtype, (self.source.arrays[0].shape[1],))
        rows = ArrayRows(self.engine, self.source, self.numbering, field, scratch)
        return [NodeFields({"x": field}, rows)]

    # --- splits ---------------------------------------------------------------------------------

    def _named(self, split: str) -> Splits:
        """Splits that a column names."""
        nodes = self._with_nodes({split: "split"})
        named = nodes.select("node", split=nodes["split"].cast("string"))
        named = named.filter(named["split"].notnull() & (named["split"] != ""))  # no name: in no split
        with diagnose.naming_texts(self.source, split):
            found = rows_of(self.engine, named.select("split").distinct().limit(MOST_SPLITS + 1))
        if len(found) > MOST_SPLITS:
            message = f"column {split!r} has more than {MOST_SPLITS} values; a split column names few, as train and val"
            raise self.source.problem("split", message)

        words = sorted(row["split"] for row in found)
        members = {word: named.filter(named["split"] == word).select("node") for word in words}
        return {word: EngineRows(self.engine, table, _members) for word, table in members.items()}

    def _drawn(self, shares: Mapping[str, float], label: TableFields | None) -> Splits:
        """Splits drawn by shares: a node's is decided by its id and the seed alone; without a label it is in none."""
        ends = [0.0, *accumulate(shares.values())]
        ends[-1] = 1.0 if abs(ends[-1] - 1) < 1e-9 else ends[-1]

        ids = self.numbering.original(self.engine) if label is None else self._labelled(label)
        seed = self.source.graph.seed
        return {name: ids.then(partial(_drawn_between, seed, ends[i], ends[i + 1])) for i, name in enumerate(shares)}

    # --- labels ---------------------------------------------------------------------------------

    def _labelled(self, label: TableFields) -> EngineRows[NodeIds]:
        """Nodes whose label is known, as `original` of the numbering gives all."""
        nodes, width = self._with_nodes(label.aliases), self.numbering.width
        chosen = nodes.select("node", "id", *label.aliases.values())
        return EngineRows(self.engine, chosen, partial(_labelled_ids, label.shipped(), width), label.row_bytes + width)

    def _count_unlabelled(self, label: TableFields) -> Unlabelled | None:
        """How many nodes have no label, and in which splits they are by the column that names those; None: no node."""
        rows, split = self.engine.read(self.source.paths), self.table.split
        chosen = {alias: rows[name] for name, alias in label.aliases.items()}
        if isinstance(split, str):
            chosen |= {"split": rows[split].cast("string")}
        found = self.engine.fold(rows.select(**chosen), partial(_unlabelled_rows, label.shipped()), label.row_bytes)
        count, splits = sum(counted["rows"] for counted in found), Counter[str]()
        for counted in found:
            splits.update(counted["splits"])
        null = label.fields[0].columns[0].null
        return Unlabelled(self.source, count, null, splits) if count else None


def _node_rows(planned: TableFields, batch: pa.RecordBatch) -> Rows:
    return Rows(int64_of(batch.column("node")), planned.rows(batch))


def _members(batch: pa.RecordBatch) -> Tensor:
    return int64_of(batch.column("node"))


def _drawn_between(seed: int, begin: float, end: float, given: NodeIds) -> Tensor:
    nodes, ids = given
    drawn = (_hashed(ids, seed) >> np.uint64(11)).astype(np.float64) / 2**53
    return nodes[torch.from_numpy((drawn >= begin) & (drawn < end))]


def _labelled_ids(label: TableFields, width: int, batch: pa.RecordBatch) -> NodeIds:
    known = ~_unlabelled(label, batch)
    nodes, ids = ids_of(width, batch)
    return nodes[known], ids[known]


def _unlabelled_rows(label: TableFields, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """How many rows have no label, and how many of them a split names, if a column names splits."""
    rows, splits = 0, Counter[str]()
    for batch in batches:
        unlabelled = _unlabelled(label, batch)
        rows += int(unlabelled.sum())
        if "split" in batch.schema.names:
            named = batch.column("split").filter(pa.array(unlabelled.numpy())).value_counts().to_pylist()
            splits.update({row["values"]: row["counts"] for row in named if row["values"]})
    return {"rows": rows, "splits": dict(splits)}


def _unlabelled(label: TableFields, batch: pa.RecordBatch) -> Tensor:
    (field,) = label.fields
    return field.unlabelled(label.rows(batch)[field.name])


def original_ids(engine: Engine, numbering: Numbering) -> list[NodeFields]:
    """The user's own ids, where they are not the store's."""
    if numbering.pairs is None and numbering.first == 0:
        return []
    field = Field("uint8", (numbering.width,)) if numbering.width else Field("int64")
    return [NodeFields({ORIGINAL_ID: field}, numbering.original(engine).then(_as_field))]


def _as_field(given: NodeIds) -> Rows:
    nodes, ids = given
    return Rows(nodes, {ORIGINAL_ID: ids})


def _hashed(ids: Tensor, seed: int) -> Words:
    """Of integers [n], or of texts [n, width], eight bytes at a time; zeros behind their end count for nothing."""
    hashes: Words = np.full(len(ids), np.uint64(mix(0, seed)))
    if ids.dim() == 1:
        return mix_words(hashes, ids.numpy().view(np.uint64))
    rows = torch.nn.functional.pad(ids, (0, -ids.shape[1] % 8)).numpy()
    for word in rows.view("<u8").astype(np.uint64, copy=False).T:
        hashes = np.where(word == 0, hashes, mix_words(hashes, word))
    return hashes
