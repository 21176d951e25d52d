"""Tables as streams: of nodes their fields, the user's own ids and the members of splits; of edges both ends joined.

Rows come in whatever order the engine has them, each with its store ids; nothing is sorted here. Splits that are drawn
follow from the ids. An end that is unknown shows as the rows come by, so no pass over the edges looks for it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream, Rows
from hoploom.ingest.tables import diagnose
from hoploom.ingest.tables.engine import Engine, rows_of
from hoploom.ingest.tables.fields import Planner, TableFields
from hoploom.ingest.tables.graph_file import EdgeTable, NodeTable, rule_of
from hoploom.ingest.tables.ids import NULL, Numbering, cast_ids, file_name, int64_of, padded
from hoploom.ingest.tables.sources import TableSource
from hoploom.ingest.tables.table_files import array_rows
from hoploom.ingest.tables.transforms import UnfitError, check_range, signed, standardise
from hoploom.keys import mix
from hoploom.ops.mixing import Words, mix_words
from hoploom.schema import DTYPES, ORIGINAL_ID, Field

ENDS = ("source", "destination")
ARRAY_BYTES = 4 << 20  # of a .npy file at a time
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

    def stream(self, scratch: Path, report: "Report") -> NodeStream:
        """The node type as a stream; ConfigError or DataError where its columns do not fit. Counts missing labels."""
        planned, split = Planner(self.engine, self.source).fields(), self.table.split
        splits = self._named(split) if isinstance(split, str) else {}
        unlabelled = None if planned.label is None else self._count_unlabelled(planned.label)
        if unlabelled is not None:
            report.unlabelled[self.table.owner] = unlabelled
        if split is not None and not isinstance(split, str):
            splits = self._drawn(split, None if unlabelled is None else planned.label)
        fields = [*original_ids(self.engine, self.numbering), *self._fields(planned), *self._array(scratch)]
        return NodeStream(self.table.name, self.numbering.bounds, fields, splits)

    # --- fields ---------------------------------------------------------------------------------

    def _fields(self, planned: TableFields) -> list[NodeFields]:
        if not planned.fields:
            return []
        arriving = {field.name: field.arriving for field in planned.fields}
        standardised = {field.name: field.standardised for field in planned.fields if field.standardised}
        stored = {field.name: field.field for field in planned.fields}
        finish = standardise(standardised, stored) if standardised else None
        return [NodeFields(arriving, partial(self._rows, planned), finish)]

    def _rows(self, planned: TableFields) -> Iterator[Rows]:
        aliases = planned.aliases
        given = self._with_nodes(aliases).select("node", *aliases.values())
        # Ids without gaps often stand in order, too: then rows are written as they come.
        for batch in self.engine.stream(given, planned.row_bytes, as_read=self.numbering.pairs is None):
            yield Rows(int64_of(batch.column("node")), planned.rows(batch))

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
        return [NodeFields({"x": field}, partial(self._array_rows, field, scratch))]

    def _array_rows(self, field: Field, scratch: Path) -> Iterator[Rows]:
        nodes, waiting = self._nodes_in_order(scratch), torch.empty(0, dtype=torch.int64)
        for array in self.source.arrays:
            step = max(1, ARRAY_BYTES // max(1, array.dtype.itemsize * array.shape[1]))
            for begin in range(0, len(array), step):
                count = min(step, len(array) - begin)
                while waiting.numel() < count:
                    waiting = torch.cat([waiting, next(nodes)])
                values = signed(array_rows(array, begin, count))
                try:
                    check_range(values, field.dtype)
                except UnfitError as error:
                    raise DataError(f"{array.filename}, rows {begin + 1} to {begin + count}: {error}") from error
                yield Rows(waiting[:count], {"x": torch.from_numpy(values).to(DTYPES[field.dtype])})
                waiting = waiting[count:]

    def _nodes_in_order(self, scratch: Path) -> Iterator[Tensor]:
        """The store ids of the table's rows, in the order of its files."""
        column = self.source.id_column
        if self.numbering.pairs is None:
            for _, _, ids in self.source.scan(column):
                yield int64_of(ids) - self.numbering.first
            return
        path = scratch / f"{file_name(self.source.owner)}.rows.parquet"
        _write_numbered(self.source, path)
        rows = self.engine.read([str(path)])
        chosen = rows.select(row=rows["row"], id=cast_ids(rows["id"], self.source, column))
        numbered = self.numbering.attach(chosen, "id", "node")
        for batch in self.engine.stream(numbered.order_by("row").select("node")):
            yield int64_of(batch.column("node"))
        path.unlink()

    # --- splits ---------------------------------------------------------------------------------

    def _named(self, split: str) -> Splits:
        """Splits that a column names."""
        nodes = self._with_nodes({split: "split"})
        named = nodes.select("node", split=nodes["split"].cast("string"))
        named = named.filter(named["split"].notnull() & (named["split"] != ""))  # no name: in no split
        found = rows_of(self.engine, named.select("split").distinct().limit(MOST_SPLITS + 1))
        if len(found) > MOST_SPLITS:
            message = f"column {split!r} has more than {MOST_SPLITS} values; a split column names few, as train and val"
            raise self.source.problem("split", message)

        def members(word: str) -> Iterator[Tensor]:
            for batch in self.engine.stream(named.filter(named["split"] == word).select("node")):
                yield int64_of(batch.column("node"))

        return {word: partial(members, word) for word in sorted(row["split"] for row in found)}

    def _drawn(self, shares: Mapping[str, float], label: TableFields | None) -> Splits:
        """Splits drawn by shares: a node's is decided by its id and the seed alone; without a label it is in none."""
        ends = [0.0, *accumulate(shares.values())]
        ends[-1] = 1.0 if abs(ends[-1] - 1) < 1e-9 else ends[-1]

        def members(begin: float, end: float) -> Iterator[Tensor]:
            for nodes, ids in self.numbering.original(self.engine) if label is None else self._labelled(label):
                drawn = (_hashed(ids, self.source.graph.seed) >> np.uint64(11)).astype(np.float64) / 2**53
                yield nodes[torch.from_numpy((drawn >= begin) & (drawn < end))]

        return {name: partial(members, ends[i], ends[i + 1]) for i, name in enumerate(shares)}

    # --- labels ---------------------------------------------------------------------------------

    def _labelled(self, label: TableFields) -> Iterator[tuple[Tensor, Tensor]]:
        """Nodes whose label is known, as `original` of the numbering gives all."""
        nodes, width = self._with_nodes(label.aliases), self.numbering.width
        for batch in self.engine.stream(nodes.select("node", "id", *label.aliases.values()), label.row_bytes + width):
            known = ~_unlabelled(label, batch)
            ids = batch.column("id")
            yield int64_of(batch.column("node"))[known], (padded(ids, width) if width else int64_of(ids))[known]

    def _count_unlabelled(self, label: TableFields) -> "Unlabelled | None":
        """How many nodes have no label, and in which splits they are by the column that names those; None: no node."""
        rows, split, count, splits = self.engine.read(self.source.paths), self.table.split, 0, Counter[str]()
        chosen = {alias: rows[name] for name, alias in label.aliases.items()}
        if isinstance(split, str):
            chosen |= {"split": rows[split].cast("string")}
        for batch in self.engine.stream(rows.select(**chosen), label.row_bytes):
            unlabelled = _unlabelled(label, batch)
            count += int(unlabelled.sum())
            if isinstance(split, str):
                named = batch.column("split").filter(pa.array(unlabelled.numpy())).value_counts().to_pylist()
                splits.update({row["values"]: row["counts"] for row in named if row["values"]})
        null = label.fields[0].columns[0].null
        return Unlabelled(self.source, count, null, splits) if count else None


def _unlabelled(label: TableFields, batch: pa.RecordBatch) -> Tensor:
    (field,) = label.fields
    return field.unlabelled(label.rows(batch)[field.name])


def original_ids(engine: Engine, numbering: Numbering) -> list[NodeFields]:
    """The user's own ids, where they are not the store's."""
    if numbering.pairs is None and numbering.first == 0:
        return []
    field = Field("uint8", (numbering.width,)) if numbering.width else Field("int64")

    def rows() -> Iterator[Rows]:
        for nodes, ids in numbering.original(engine):
            yield Rows(nodes, {ORIGINAL_ID: ids})

    return [NodeFields({ORIGINAL_ID: field}, rows)]


def _write_numbered(source: TableSource, path: Path) -> None:
    """The ids of a table with the numbers of their rows, as Parquet."""
    column = source.id_column
    schema = pa.schema([("row", pa.int64()), ("id", source.schema.field(column).type)])
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for _, _, ids in source.scan(column):
            numbers = pa.array(np.arange(count, count + len(ids)))
            writer.write_table(pa.table([numbers, ids.cast(schema.field("id").type)], schema=schema))
            count += len(ids)


def _hashed(ids: Tensor, seed: int) -> Words:
    """Of integers [n], or of texts [n, width], eight bytes at a time; zeros behind their end count for nothing."""
    hashes: Words = np.full(len(ids), np.uint64(mix(0, seed)))
    if ids.dim() == 1:
        return mix_words(hashes, ids.numpy().view(np.uint64))
    rows = torch.nn.functional.pad(ids, (0, -ids.shape[1] % 8)).numpy()
    for word in rows.view("<u8").astype(np.uint64, copy=False).T:
        hashes = np.where(word == 0, hashes, mix_words(hashes, word))
    return hashes


# --- edges ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unlabelled:
    """Nodes of a type that have no label."""

    source: TableSource
    count: int
    null: float | int | None  # what the store holds as their label
    splits: Mapping[str, int]  # how many of them the split column names, by split

    def __str__(self) -> str:
        """What happens with them, in a line."""
        table = self.source.table
        assert isinstance(table, NodeTable)
        null = "null or NaN" if isinstance(self.null, float) else f"null or {self.null}"
        null = "null" if rule_of(table, str(table.label)).categories else null
        what = f"{table.owner}: {self.count:,} of {self.source.num_rows:,} nodes have no label (column {table.label!r}"
        ending = "training refuses them as seeds"
        if self.splits:
            named = ", ".join(f"{count:,} to {name!r}" for name, count in sorted(self.splits.items()))
            ending = f"column {table.split!r} assigns {named}, and training refuses a split that holds such nodes"
        elif table.split is not None:
            ending = "they are in no split"
        return f"{what} is {null}); {ending}"


@dataclass(frozen=True)
class Report:
    """What a build did."""

    nodes: dict[str, int] = field(default_factory=dict)  # by type
    edges: dict[str, int] = field(default_factory=dict)  # rows read, by relation
    dropped: dict[str, int] = field(default_factory=dict)  # of them with an unknown end, by relation
    unlabelled: dict[str, Unlabelled] = field(default_factory=dict)  # by type, where there are some
    seconds: dict[str, float] = field(default_factory=dict)  # by stage


@dataclass(frozen=True)
class EdgeTables:
    """A relation's table; `nodes` are the numberings of its source and destination types."""

    engine: Engine
    source: TableSource
    nodes: tuple[Numbering, Numbering]

    def stream(self, report: Report, *, drop_dangling: bool) -> EdgeStream:
        """The relation as a stream; ConfigError or DataError where its columns do not fit. Its rows are counted."""
        table, planned = self.source.table, Planner(self.engine, self.source).fields()
        assert isinstance(table, EdgeTable)
        rule = EdgeRule(
            reverse=table.reverse,
            undirected=table.undirected,
            deduplicate=table.deduplicate,
            drop_loops=table.self_loops == "drop",
        )
        report.edges[table.owner] = report.dropped[table.owner] = 0
        rows = partial(self._rows, planned, report, drop_dangling=drop_dangling)
        return EdgeStream(table.relation, {field.name: field.field for field in planned.fields}, rows, rule)

    def _rows(self, planned: TableFields, report: Report, *, drop_dangling: bool) -> Iterator[EdgeRows]:
        joined = self._joined(planned.aliases).select(*ENDS, *planned.aliases.values())
        for batch in self.engine.stream(joined, planned.row_bytes):
            sources, destinations = (int64_of(batch.column(end)) for end in ENDS)
            edges = EdgeRows(sources, destinations, planned.rows(batch))
            report.edges[self.source.owner] += batch.num_rows
            if _least(edges) < 0:
                edges = self._known(edges, drop_dangling=drop_dangling)
                report.dropped[self.source.owner] += batch.num_rows - edges.sources.numel()
            yield edges

    def _joined(self, columns: dict[str, str]) -> ir.Table:
        """The edges with store ids as `source` and `destination`, the user's ids, and some columns by other names."""
        rows = self.engine.read(self.source.paths)
        given = {
            f"{end}_given": cast_ids(rows[column], self.source, column)
            for end, column in self.source.table.id_columns.items()
        }
        edges = rows.select(**given, **{alias: rows[name] for name, alias in columns.items()})
        for end, numbering in zip(ENDS, self.nodes, strict=True):
            edges = numbering.attach(edges, f"{end}_given", end)
        return edges

    def _known(self, edges: EdgeRows, *, drop_dangling: bool) -> EdgeRows:
        """The edges whose ends are known; DataError for the others, if that is how the user wants it."""
        if not drop_dangling or _least(edges) == NULL:
            raise self._dangling()
        known = (edges.sources >= 0) & (edges.destinations >= 0)
        fields = {name: rows[known] for name, rows in edges.fields.items()}
        return EdgeRows(edges.sources[known], edges.destinations[known], fields)

    def _dangling(self) -> DataError:
        """What is wrong with the ends of the edges."""
        joined = self._joined({})
        for end, column in self.source.table.id_columns.items():
            nulls = joined.filter(joined[f"{end}_given"].isnull())
            (found,) = rows_of(self.engine, nulls.aggregate(rows=nulls.count()))
            if found["rows"]:
                return diagnose.nulls(self.source, column, found["rows"], "give every edge both ends")
        for end, numbering in zip(ENDS, self.nodes, strict=True):
            unknown = joined.filter(joined[end] < 0).select(id=f"{end}_given")
            error = diagnose.dangling(self.engine, self.source, end, numbering.owner, unknown)
            if error is not None:
                return error
        raise AssertionError("the edges were all known the second time")


def _least(edges: EdgeRows) -> int:
    """The least store id at any end. NumPy's, as torch would wake a thread for every small chunk."""
    return min((int(ends.numpy().min()) for ends in edges[:2] if ends.numel()), default=0)
