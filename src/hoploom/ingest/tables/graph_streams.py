"""Turn the tables of a graph into streams of node rows and edges with store ids.

Rows arrive in any order, each with its store id; nothing is sorted here. Edges of unknown nodes are found while the
edges are read, without another pass.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hoploom.config.values import as_int
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.stream import EdgeRows, EdgeRule, EdgeStream, NodeFields, NodeStream, Rows, StoreOptions
from hoploom.ingest.stream.streams import SOURCE_TIME, TIME_COLUMN
from hoploom.ingest.tables import diagnose
from hoploom.ingest.tables.engine import Engine, EngineRows, UnreadableError, result_rows
from hoploom.ingest.tables.graph_file import EdgeTable, GraphFile, NodeTable
from hoploom.ingest.tables.ids import NULL, NodeIds, Numbering, cast_ids, int64_of, number_nodes, read_node_ids
from hoploom.ingest.tables.sources import TableSource
from hoploom.ingest.tables.transforms import Planner, TableFields, measured
from hoploom.keys import mix
from hoploom.ops.sample import Words, mix_words
from hoploom.schema import ORIGINAL_ID, Field

ENGINES = ("duckdb", "spark")
MOST_PARTS = 2**16  # the four hex digits that choose the part of a text id
MOST_SPLITS = 100  # each takes a pass over the table
ENDS = ("source", "destination")
Splits = Mapping[str, Callable[[], Iterator[Tensor]]]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a build from tables. Only `parts` and `drop_dangling` change the store."""

    parts: int = 1
    memory: int = 4 << 30  # bytes of this process; with Spark, of each task's process
    threads: int | None = None  # of the engine; None: all cores
    engine: str = "duckdb"
    master: str = "local[*]"  # of Spark
    conf: Mapping[str, str] = field(default_factory=dict)  # further Spark settings
    drop_dangling: bool = False  # leave out edges of unknown nodes, and count them

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine is {self.engine!r}; give one of {', '.join(ENGINES)}")
        if self.threads is not None:
            as_int("threads", self.threads, 1, "give at least 1")
        if as_int("parts", self.parts, 1, f"give 1 to {MOST_PARTS}") > MOST_PARTS:
            raise ConfigError(f"parts is {self.parts}; give 1 to {MOST_PARTS}")


@dataclass(frozen=True)
class Report:
    """Counts and times of a build."""

    nodes: dict[str, int] = field(default_factory=dict)  # by type
    edges: dict[str, int] = field(default_factory=dict)  # rows read, by relation
    dropped: dict[str, int] = field(default_factory=dict)  # edges left out for an unknown end, by relation
    unlabelled: dict[str, int] = field(default_factory=dict)  # nodes without a label by type, if there are some
    notes: list[str] = field(default_factory=list)  # what happens to nodes without a label
    seconds: dict[str, float] = field(default_factory=dict)  # by stage


@dataclass(frozen=True)
class GraphTables:
    """The tables of a graph, and the engine that reads them."""

    graph: GraphFile
    sources: Mapping[str, TableSource]
    engine: Engine

    def streams(self, parts: int, report: Report, *, drop_dangling: bool) -> tuple[list[NodeStream], list[EdgeStream]]:
        """Number all nodes; return node and edge streams, counted in `report`. Raise an error for bad columns."""
        numberings, nodes, edges = dict[str, Numbering](), list[NodeStream](), list[EdgeStream]()
        for name, node_table in self.graph.nodes.items():
            source = self.sources.get(node_table.owner)
            numberings[name] = number_nodes(self.engine, node_table, source, parts)
            report.nodes[name] = numberings[name].num_nodes
        for name, node_table in self.graph.nodes.items():
            numbering = numberings[name]
            if node_table.files:
                nodes.append(NodeRows(self.engine, self.sources[node_table.owner], numbering).stream(report))
            else:
                nodes.append(NodeStream(name, numbering.bounds, _original_ids(self.engine, numbering)))
        for (begin, _, end), table in self.graph.edges.items():
            ends = _EdgeTables(self.engine, self.sources[table.owner], (numberings[begin], numberings[end]))
            edges.append(ends.stream(report, drop_dangling=drop_dangling))
        return nodes, edges

    def store_options(self, memory: int) -> StoreOptions:
        """Return the options with which the store is written; writing may take `memory` bytes."""
        tables, edges = self.graph.tables, self.graph.edges.values()
        return StoreOptions(
            weight="weight" if any(table.weight for table in edges) else None,
            time="time" if any(table.time for table in tables) else None,
            homogeneous=self.graph.homogeneous and not any(table.reverse for table in edges),
            memory=memory,
        )

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """If this block cannot read a table, read all files again, to raise an error that names the damaged file."""
        try:
            yield
        except UnreadableError:
            for source in self.sources.values():
                for column in source.schema.names:
                    deque(source.scan(column), maxlen=0)
            raise


# --- nodes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeRows:
    """The table of a node type, and the numbering that gives its rows store ids."""

    engine: Engine
    source: TableSource
    numbering: Numbering

    def stream(self, report: Report) -> NodeStream:
        """Return the node type as a stream; add the number of nodes without a label to `report`."""
        table, planned = self.source.table, Planner(self.engine, self.source).fields()
        assert isinstance(table, NodeTable)
        label, split = planned.label, table.split
        splits = self._named_splits(split) if isinstance(split, str) else {}
        if label is not None:
            self._report_unlabelled(label, report)
        if split is not None and not isinstance(split, str):
            splits = self._drawn_splits(split, label if table.owner in report.unlabelled else None)
        fields = _original_ids(self.engine, self.numbering)
        if planned.fields:
            whole = measured(self.engine, planned)
            stored = {field.name: field.field for field in whole.fields}
            fields.append(NodeFields(stored, self._rows(whole)))
        timed = [one for one in planned.fields if one.name == "time"]
        times = self._rows(replace(planned, fields=timed)) if timed else None
        return NodeStream(table.name, self.numbering.bounds, fields, splits, times=times)

    def _rows(self, planned: TableFields) -> EngineRows[Rows]:
        given = self._with_nodes(planned.aliases).select("node", *planned.aliases.values())
        # Rows with ids without gaps are often in order, too: then they are written as they come.
        in_order = self.numbering.pairs is None
        return EngineRows(self.engine, given, partial(_node_rows, planned), planned.row_bytes, as_read=in_order)

    def _with_nodes(self, columns: Mapping[str, str]) -> ir.Table:
        """Return a table of store ids (`node`), user's ids (`id`), and `columns`, a dict from column to new name."""
        rows, column = self.engine.read(self.source.paths), self.source.id_column
        ids = cast_ids(rows[column], self.source, column)
        chosen = rows.select(id=ids, **{alias: rows[name] for name, alias in columns.items()})
        return self.numbering.attach(chosen, "id", "node")

    def _named_splits(self, split: str) -> Splits:
        """Return the members of each split that the column `split` names."""
        nodes = self._with_nodes({split: "split"})
        named = nodes.select("node", split=nodes["split"].cast("string"))
        named = named.filter(named["split"].notnull() & (named["split"] != ""))  # no name: in no split
        with diagnose.naming_texts(self.source, split):
            found = result_rows(self.engine, named.select("split").distinct().limit(MOST_SPLITS + 1))
        if len(found) > MOST_SPLITS:
            message = f"column {split!r} has more than {MOST_SPLITS} values; a split column names few, as train and val"
            raise self.source.problem("split", message)
        words = sorted(row["split"] for row in found)
        members = {word: named.filter(named["split"] == word).select("node") for word in words}
        return {word: EngineRows(self.engine, table, _members) for word, table in members.items()}

    def _drawn_splits(self, shares: Mapping[str, float], label: TableFields | None) -> Splits:
        """Return random splits with these `shares` of the nodes. With `label`, nodes without a label are in none."""
        ends = [0.0, *accumulate(shares.values())]
        ends[-1] = 1.0 if abs(ends[-1] - 1) < 1e-9 else ends[-1]
        ids = self.numbering.original(self.engine)
        if label is not None:
            nodes, width = self._with_nodes(label.aliases), self.numbering.width
            chosen = nodes.select("node", "id", *label.aliases.values())
            ids = EngineRows(self.engine, chosen, partial(_labelled_ids, label, width), label.row_bytes + width)
        seed = self.source.graph.seed
        return {name: ids.then(partial(_drawn_between, seed, ends[i], ends[i + 1])) for i, name in enumerate(shares)}

    def _report_unlabelled(self, label: TableFields, report: Report) -> None:
        """Count the nodes without a label; if there are some, add the count and a note about their use to `report`."""
        table, rows = self.source.table, self.engine.read(self.source.paths)
        chosen = rows.select(**{alias: rows[name] for name, alias in label.aliases.items()})
        count = sum(one["rows"] for one in self.engine.fold(chosen, partial(_count_unlabelled, label), label.row_bytes))
        if not count:
            return
        assert isinstance(table, NodeTable)
        column, ending = label.fields[0].columns[0], "training refuses them as seeds"
        null = "null or NaN" if isinstance(column.null, float) else f"null or {column.null}"
        null = "null" if column.rule.categories else null
        if isinstance(table.split, str):
            ending = f"training refuses a split of column {table.split!r} that holds such nodes"
        elif table.split is not None:
            ending = "they are in no split"
        what = f"{table.owner}: {count:,} of {self.source.num_rows:,} nodes have no label"
        report.unlabelled[table.owner] = count
        report.notes.append(f"{what} (column {table.label!r} is {null}); {ending}")


def _node_rows(planned: TableFields, batch: pa.RecordBatch) -> Rows:
    return Rows(int64_of(batch.column("node")), planned.rows(batch))


def _members(batch: pa.RecordBatch) -> Tensor:
    return int64_of(batch.column("node"))


def _drawn_between(seed: int, begin: float, end: float, given: NodeIds) -> Tensor:
    nodes, ids = given
    drawn = (_hashed(ids, seed) >> np.uint64(11)).astype(np.float64) / 2**53
    return nodes[torch.from_numpy((drawn >= begin) & (drawn < end))]


def _hashed(ids: Tensor, seed: int) -> Words:
    """Return hashes of integer ids [n], or of padded texts [n, width]. The width of the padding has no effect."""
    hashes: Words = np.full(len(ids), np.uint64(mix(0, seed)))
    if ids.dim() == 1:
        return mix_words(hashes, ids.numpy().view(np.uint64))
    rows = torch.nn.functional.pad(ids, (0, -ids.shape[1] % 8)).numpy()
    for word in rows.view("<u8").astype(np.uint64, copy=False).T:
        hashes = np.where(word == 0, hashes, mix_words(hashes, word))
    return hashes


def _labelled_ids(label: TableFields, width: int, batch: pa.RecordBatch) -> NodeIds:
    known = ~_unlabelled(label, batch)
    nodes, ids = read_node_ids(width, batch)
    return nodes[known], ids[known]


def _count_unlabelled(label: TableFields, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    return {"rows": sum(int(_unlabelled(label, batch).sum()) for batch in batches)}


def _unlabelled(label: TableFields, batch: pa.RecordBatch) -> Tensor:
    (field,) = label.fields
    return field.unlabelled(label.rows(batch)[field.name])


def _original_ids(engine: Engine, numbering: Numbering) -> list[NodeFields]:
    """Return the user's ids as a field of the store; an empty list if they equal the store ids."""
    if numbering.pairs is None and numbering.first == 0:
        return []
    field = Field("uint8", (numbering.width,)) if numbering.width else Field("int64")
    return [NodeFields({ORIGINAL_ID: field}, numbering.original(engine).then(_as_field))]


def _as_field(given: NodeIds) -> Rows:
    nodes, ids = given
    return Rows(nodes, {ORIGINAL_ID: ids})


# --- edges ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _EdgeTables:
    """A relation's table, with the numberings of its source and destination types."""

    engine: Engine
    source: TableSource
    nodes: tuple[Numbering, Numbering]

    def stream(self, report: Report, *, drop_dangling: bool) -> EdgeStream:
        table, planned = self.source.table, measured(self.engine, Planner(self.engine, self.source).fields())
        assert isinstance(table, EdgeTable)
        rule = EdgeRule(
            reverse=table.reverse,
            undirected=table.undirected,
            deduplicate=table.deduplicate,
            drop_loops=table.self_loops == "drop",
        )
        report.edges[table.owner] = report.dropped[table.owner] = 0
        joined = self._joined(planned.aliases).select(*ENDS, *planned.aliases.values())
        rows = EngineRows(self.engine, joined, partial(_edge_rows, planned), planned.row_bytes)
        known = KnownEdges(rows, self.source.num_rows, table.owner, report, drop_dangling, self._dangling)
        return EdgeStream(table.relation, {field.name: field.field for field in planned.fields}, known, rule)

    def _joined(self, columns: dict[str, str]) -> ir.Table:
        """Return the edges' store ids, the user's ids (`source_given`, ...), and `columns` under their new names."""
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
        """Return the error about edges whose ends are null or unknown, after reading the table again."""
        joined = self._joined({})
        for end, column in self.source.table.id_columns.items():
            nulls = joined.filter(joined[f"{end}_given"].isnull())
            (found,) = result_rows(self.engine, nulls.aggregate(rows=nulls.count()))
            if found["rows"]:
                return diagnose.nulls(self.source, column, found["rows"], "give every edge both ends")
        for end, numbering in zip(ENDS, self.nodes, strict=True):
            unknown = joined.filter(joined[end] < 0).select(id=f"{end}_given")
            error = diagnose.dangling(self.engine, self.source, end, numbering.owner, unknown)
            if error is not None:
                return error
        raise AssertionError("the edges were all known the second time")


class UnknownEndError(DataError):
    """An edge has an end that is in no table of nodes."""


@dataclass(frozen=True)
class KnownEdges:
    """The rows of an edge table. Edges with an unknown end are dropped if `drop_dangling`, else raise an error."""

    rows: EngineRows[EdgeRows]  # unknown ends are negative
    num_rows: int
    owner: str
    report: Report  # gets the counts of rows
    drop_dangling: bool
    explained: Callable[[], DataError]  # returns the error about unknown ends

    def __call__(self) -> Iterator[EdgeRows]:
        for edges in self.rows():
            try:
                known = known_edges(self.drop_dangling, edges)
            except UnknownEndError as error:
                raise self.explained() from error
            self.count(edges.sources.numel(), edges.sources.numel() - known.sources.numel())
            yield known

    def count(self, rows: int, dropped: int) -> None:
        """Add the number of rows read, and of rows dropped, to the report."""
        self.report.edges[self.owner] += rows
        self.report.dropped[self.owner] += dropped


def known_edges(drop_dangling: bool, edges: EdgeRows) -> EdgeRows:
    """Return the edges with known ends. Raise UnknownEndError for null ids and, unless `drop_dangling`, unknown ids."""
    least = min((int(ends.numpy().min()) for ends in edges[:2] if ends.numel()), default=0)  # torch wakes threads
    if least >= 0:
        return edges
    if not drop_dangling or least == NULL:
        raise UnknownEndError("an end of an edge is in no table of nodes")
    return edges.where((edges.sources >= 0) & (edges.destinations >= 0))


def _edge_rows(planned: TableFields, batch: pa.RecordBatch) -> EdgeRows:
    sources, destinations = (int64_of(batch.column(end)) for end in ENDS)
    fields = planned.rows(batch)
    if TIME_COLUMN in batch.schema.names:
        fields[SOURCE_TIME] = int64_of(batch.column(TIME_COLUMN))
    return EdgeRows(sources, destinations, fields)
