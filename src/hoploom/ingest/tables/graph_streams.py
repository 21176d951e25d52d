"""All tables of a graph as streams, once all nodes are numbered."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hoploom.ingest.stream import EdgeStream, NodeStream, StoreOptions
from hoploom.ingest.tables.build_report import Report
from hoploom.ingest.tables.edge_tables import EdgeTables
from hoploom.ingest.tables.engine import Engine, UnreadableError
from hoploom.ingest.tables.graph_file import GraphFile
from hoploom.ingest.tables.ids import Numbering, number_nodes
from hoploom.ingest.tables.node_tables import NodeRows, original_ids
from hoploom.ingest.tables.sources import TableSource


@dataclass(frozen=True)
class GraphTables:
    """The tables of a graph, and what reads them."""

    graph: GraphFile
    sources: Mapping[str, TableSource]
    engine: Engine
    scratch: Path

    def streams(self, parts: int, report: Report, *, drop_dangling: bool) -> tuple[list[NodeStream], list[EdgeStream]]:
        """The node types and the relations."""
        numberings, nodes, edges = dict[str, Numbering](), list[NodeStream](), list[EdgeStream]()
        for name, node_table in self.graph.nodes.items():
            source = self.sources.get(node_table.owner)
            numberings[name] = number_nodes(self.engine, node_table, source, parts)
            report.nodes[name] = numberings[name].num_nodes
        for name, node_table in self.graph.nodes.items():
            numbering = numberings[name]
            if node_table.files:
                rows = NodeRows(self.engine, self.sources[node_table.owner], numbering)
                nodes.append(rows.stream(self.scratch, report))
            else:
                nodes.append(NodeStream(name, numbering.bounds, original_ids(self.engine, numbering)))
        for (begin, _, end), table in self.graph.edges.items():
            ends = EdgeTables(self.engine, self.sources[table.owner], (numberings[begin], numberings[end]))
            edges.append(ends.stream(report, drop_dangling=drop_dangling))
        return nodes, edges

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Where an engine cannot read on, the file that is damaged is named, at the cost of reading all again."""
        try:
            yield
        except UnreadableError:
            for source in self.sources.values():
                for column in source.schema.names:
                    deque(source.scan(column), maxlen=0)
            raise


def store_options(graph: GraphFile, memory: int) -> StoreOptions:
    """What the store is prepared for."""
    return StoreOptions(
        weight="weight" if any(table.weight for table in graph.edges.values()) else None,
        time="time" if any(table.time for table in graph.tables) else None,
        homogeneous=graph.homogeneous and not any(table.reverse for table in graph.edges.values()),
        memory=memory,
    )
