"""A relation's table as a stream: both ends joined to the store's ids, and its columns.

An end that is unknown shows as the rows come by, so no pass over the edges looks for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import ibis.expr.types as ir
import pyarrow as pa

from hoploom.errors import DataError
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream
from hoploom.ingest.stream.streams import SOURCE_TIME, TIME_COLUMN
from hoploom.ingest.tables import diagnose
from hoploom.ingest.tables.build_report import Report
from hoploom.ingest.tables.engine import Engine, rows_of
from hoploom.ingest.tables.engine_rows import EngineRows
from hoploom.ingest.tables.fields import Planner, TableFields
from hoploom.ingest.tables.graph_file import EdgeTable
from hoploom.ingest.tables.ids import NULL, Numbering, cast_ids, int64_of
from hoploom.ingest.tables.sources import TableSource

ENDS = ("source", "destination")


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
        joined = self._joined(planned.aliases).select(*ENDS, *planned.aliases.values())
        rows = EngineRows(self.engine, joined, partial(_edge_rows, planned.shipped()), planned.row_bytes)
        known = KnownEdges(rows, self.source.num_rows, table.owner, report, drop_dangling, self._dangling)
        return EdgeStream(table.relation, {field.name: field.field for field in planned.fields}, known, rule)

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


class UnknownEndError(DataError):
    """An edge has an end that is in no table of nodes; which, its table says."""


@dataclass(frozen=True)
class KnownEdges:
    """The rows of a table of edges but those with an unknown end, if these are to be dropped; else an error."""

    rows: EngineRows[EdgeRows]  # unknown ends are negative
    num_rows: int
    owner: str
    report: Report  # rows are counted
    drop_dangling: bool
    explained: Callable[[], DataError]  # what is wrong with the ends

    def __call__(self) -> Iterator[EdgeRows]:
        for edges in self.rows():
            try:
                known = known_edges(self.drop_dangling, edges)
            except UnknownEndError as error:
                raise self.explained() from error
            self.count(edges.sources.numel(), edges.sources.numel() - known.sources.numel())
            yield known

    def count(self, rows: int, dropped: int) -> None:
        """So many rows have come, and so many of them were left out."""
        self.report.edges[self.owner] += rows
        self.report.dropped[self.owner] += dropped


def known_edges(drop_dangling: bool, edges: EdgeRows) -> EdgeRows:
    """The edges whose ends are known. UnknownEndError for others, unless they are to be dropped; for nulls always."""
    least = min((int(ends.numpy().min()) for ends in edges[:2] if ends.numel()), default=0)  # torch wakes threads
    if least >= 0:
        return edges
    if not drop_dangling or least == NULL:
        raise UnknownEndError("an end of an edge is in no table of nodes")
    known = (edges.sources >= 0) & (edges.destinations >= 0)
    fields = {name: rows[known] for name, rows in edges.fields.items()}
    return EdgeRows(edges.sources[known], edges.destinations[known], fields)


def _edge_rows(planned: TableFields, batch: pa.RecordBatch) -> EdgeRows:
    sources, destinations = (int64_of(batch.column(end)) for end in ENDS)
    fields = planned.rows(batch)
    if TIME_COLUMN in batch.schema.names:
        fields[SOURCE_TIME] = int64_of(batch.column(TIME_COLUMN))
    return EdgeRows(sources, destinations, fields)
