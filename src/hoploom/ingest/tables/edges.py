"""A table of edges as a stream: one expression joins both ends with the ids of their nodes, and nothing is sorted.

An end that is unknown shows as the rows come by, so no pass over the edges looks for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import ibis.expr.types as ir

from hoploom.errors import DataError
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream
from hoploom.ingest.tables import diagnose
from hoploom.ingest.tables.columns import id_kind
from hoploom.ingest.tables.engine import Engine
from hoploom.ingest.tables.fields import Planner, TableFields
from hoploom.ingest.tables.graph_file import EdgeTable, GraphFile
from hoploom.ingest.tables.ids import NULL, Numbering, id_column, int64_of
from hoploom.ingest.tables.parquet import Source

ENDS = ("source", "destination")


@dataclass
class EdgeCounts:
    """What was counted on the way."""

    rows: dict[str, int] = field(default_factory=dict)  # read, by table
    dropped: dict[str, int] = field(default_factory=dict)  # of them, edges with an unknown end


@dataclass(frozen=True)
class EdgeTables:
    """A relation's table; `nodes` are the numberings of its source and destination types."""

    engine: Engine
    recipe: GraphFile
    table: EdgeTable
    source: Source
    nodes: tuple[Numbering, Numbering]

    def stream(self, counts: EdgeCounts, *, drop_dangling: bool) -> EdgeStream:
        """The relation as a stream; ConfigError or DataError where its columns do not fit."""
        table, planned = self.table, Planner(self.engine, self.recipe, self.table, self.source).fields()
        rule = EdgeRule(
            reverse=table.reverse,
            undirected=table.undirected,
            deduplicate=table.deduplicate,
            drop_loops=table.self_loops == "drop",
        )
        counts.rows[self.source.owner] = counts.dropped[self.source.owner] = 0
        rows = partial(self._rows, planned, counts, drop_dangling=drop_dangling)
        return EdgeStream(table.relation, {field.name: field.field for field in planned.fields}, rows, rule)

    def _rows(self, planned: TableFields, counts: EdgeCounts, *, drop_dangling: bool) -> Iterator[EdgeRows]:
        joined = self._joined(planned.aliases).select(*ENDS, *planned.aliases.values())
        for batch in self.engine.stream(joined, planned.row_bytes):
            sources, destinations = (int64_of(batch.column(end)) for end in ENDS)
            edges = EdgeRows(sources, destinations, planned.rows(batch))
            counts.rows[self.source.owner] += batch.num_rows
            if _least(edges) < 0:
                edges = self._known(edges, drop_dangling=drop_dangling)
                counts.dropped[self.source.owner] += batch.num_rows - edges.sources.numel()
            yield edges

    def _joined(self, columns: dict[str, str]) -> ir.Table:
        """The edges with store ids as `source` and `destination`, the user's ids, and some columns by other names."""
        rows = self.engine.read(self.source.paths)
        given = {
            f"{end}_given": id_column(rows, column, id_kind(self.source, self.table, column))
            for end, column in zip(ENDS, self._columns, strict=True)
        }
        edges = rows.select(**given, **{alias: rows[name] for name, alias in columns.items()})
        for end, numbering in zip(ENDS, self.nodes, strict=True):
            edges = numbering.attach(edges, f"{end}_given", end)
        return edges

    @property
    def _columns(self) -> tuple[str, str]:
        return self.table.source, self.table.destination

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
        for end, column in zip(ENDS, self._columns, strict=True):
            nulls = joined.filter(joined[f"{end}_given"].isnull())
            error = diagnose.null_ends(self.engine, self.source, nulls, column)
            if error is not None:
                return error
        for end, column, numbering in zip(ENDS, self._columns, self.nodes, strict=True):
            unknown = joined.filter(joined[end] < 0).select(id=f"{end}_given")
            error = diagnose.dangling(self.engine, self.source, unknown, (end, column, numbering.owner))
            if error is not None:
                return error
        raise AssertionError("the edges were all known when asked again")


def _least(edges: EdgeRows) -> int:
    """The least store id at any end. NumPy's, as torch would wake a thread for every small chunk."""
    return min((int(ends.numpy().min()) for ends in edges[:2] if ends.numel()), default=0)
