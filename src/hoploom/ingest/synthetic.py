"""Synthetic graphs of any size, written out of core and the same to the bit on every machine.

Every number is drawn from a counter (a node's or an edge's id) under the seed's key, so that any chunk can be made
alone: memory holds one chunk, and neither its size nor the number of parts changes the graph. The price of drawing
each edge by itself: a pair may be linked twice, a node may link to itself, and the two directions of a relation
(writes, rev_writes) are drawn afresh, between the same communities but not between the same nodes.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hoploom import keys
from hoploom.errors import ConfigError
from hoploom.ingest.synthetic_draws import (
    MAX_DEGREE,
    MAX_NODES,
    SPLITS,
    EdgeRun,
    NodeDraws,
    RelationDraws,
    pieces,
)
from hoploom.schema import (
    HOMOGENEOUS_RELATION,
    HOMOGENEOUS_TYPE,
    Field,
    NodeType,
    Relation,
    RelationName,
    Schema,
)
from hoploom.store import Store, open_store
from hoploom.store import format as layout
from hoploom.store.format import PartRange, id_dtype
from hoploom.store.write import StoreWriter

Progress = Callable[[int, int], None]  # (nodes written, or their in-edges; all of them)
Advance = Callable[[range], None]
IDS = Field("int64")
CHUNK = 1 << 18  # edges, or feature values, made at a time: few enough for the cache
FEATURE_DTYPES = ("float32", "float16", "bfloat16")
GRAPH = 0x6772617068  # folded into the seed's key, to stay apart from what samplers draw

# Node types in multiples of num_nodes, relations in multiples of avg_degree. The first type is labelled.
HOMOGENEOUS: tuple[Mapping[str, float], Mapping[RelationName, float]] = (
    {HOMOGENEOUS_TYPE: 1.0},
    {HOMOGENEOUS_RELATION: 1.0},
)
HETEROGENEOUS: tuple[Mapping[str, float], Mapping[RelationName, float]] = (
    {"paper": 1.0, "author": 1.0, "institution": 0.01},
    {
        ("paper", "cites", "paper"): 1.0,
        ("author", "writes", "paper"): 0.25,
        ("paper", "rev_writes", "author"): 0.25,
        ("author", "affiliated_with", "institution"): 1.0,
        ("institution", "rev_affiliated_with", "author"): 0.1,
    },
)


@dataclass(frozen=True)
class SyntheticGraph:
    """All that a synthetic graph and its files follow from."""

    nodes: tuple[NodeDraws, ...]  # the first type is labelled
    edges: tuple[RelationDraws, ...]
    homogeneous: bool
    feature_dtype: str
    weights: bool
    times: bool
    num_parts: int
    chunk: int

    @property
    def labelled(self) -> NodeDraws:
        return self.nodes[0]

    def node_fields(self, nodes: NodeDraws) -> dict[str, Field]:
        """Labels are of the first type alone."""
        fields = {"x": Field(self.feature_dtype, (nodes.num_features,))}
        return {**fields, "y": IDS} if nodes is self.labelled else fields

    def edge_fields(self) -> dict[str, Field]:
        """Of every relation."""
        fields = {"weight": Field("float32")} if self.weights else {}
        return {**fields, "time": IDS} if self.times else fields

    def held(self, part: int, num_nodes: int) -> range:
        """Which nodes of a type a part holds."""
        return range(num_nodes * part // self.num_parts, num_nodes * (part + 1) // self.num_parts)


def generate(
    path: str | Path,
    *,
    num_nodes: int,
    avg_degree: float = 20.0,
    num_features: int = 100,
    num_classes: int = 16,
    seed: int = 0,
    heterogeneous: bool = False,
    homophily: float = 0.8,
    num_parts: int = 1,
    feature_dtype: str = "float32",
    weights: bool = False,
    times: bool = False,
    progress: Progress | None = None,
    chunk: int = CHUNK,
) -> Store:
    """Write a synthetic graph and open it: power-law degrees, communities, weak features, labels and splits.

    The label `y` of a node is its community, with a little noise. The features `x` of one node say little about it; the
    mean over its neighbours says much. `num_nodes` counts the labelled type (papers, if heterogeneous). `weights` and
    `times` add the edge fields `weight` and `time`. `chunk` is about the number of edges held in memory.

    >>> store = generate("small.store", num_nodes=10_000)
    """
    shares = HETEROGENEOUS if heterogeneous else HOMOGENEOUS
    key = keys.mix(keys.mix(0, GRAPH), seed)
    limits: dict[str, tuple[float, float, float]] = {
        "num_nodes": (num_nodes, 1, MAX_NODES),
        "num_classes": (num_classes, 1, num_nodes),
        "num_features": (num_features, 1, MAX_NODES),
        "num_parts": (num_parts, 1, num_nodes),
        "avg_degree": (avg_degree, 1, min(num_nodes, MAX_DEGREE // 2)),
        "homophily": (homophily, 0, 1),
    }
    _check(num_nodes, limits, feature_dtype)
    sizes = {name: max(num_classes, int(num_nodes * share)) for name, share in shares[0].items()}
    nodes = tuple(
        NodeDraws(name, key, index, size, num_classes, num_features) for index, (name, size) in enumerate(sizes.items())
    )
    edges = tuple(
        RelationDraws(
            name, key, index, sizes[name[0]], sizes[name[2]], num_classes, max(1.0, avg_degree * share), homophily
        )
        for index, (name, share) in enumerate(shares[1].items())
    )
    graph = SyntheticGraph(nodes, edges, not heterogeneous, feature_dtype, weights, times, num_parts, chunk)
    _write(path, graph, progress)
    return open_store(path)


def _check(num_nodes: int, limits: Mapping[str, tuple[float, float, float]], feature_dtype: str) -> None:
    """`limits`: what was given, the least and the most that may be given."""
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise ConfigError(f"{name} is {value} for {num_nodes} nodes; give {least} to {most}")
    if feature_dtype not in FEATURE_DTYPES:
        raise ConfigError(f"feature_dtype is {feature_dtype!r}; give one of {', '.join(FEATURE_DTYPES)}")


def _write(path: str | Path, graph: SyntheticGraph, progress: Progress | None) -> None:
    owners = [*(nodes.num_nodes for nodes in graph.nodes), *(edges.num_destinations for edges in graph.edges)]
    done = 0

    def advance(ids: range) -> None:
        nonlocal done
        done += len(ids)
        if progress is not None:
            progress(done, sum(owners))

    parts: list[PartRange] = []
    first_edges = (0,) * len(graph.edges)
    with StoreWriter(path) as writer:
        for part in range(graph.num_parts):
            held = [graph.held(part, nodes.num_nodes) for nodes in graph.nodes]
            for nodes, ids in zip(graph.nodes, held, strict=True):
                _write_nodes(writer, graph, nodes, part, ids, advance)
            sizes = {split: _write_split(writer, graph, split, part) for split in SPLITS}
            num_edges = tuple(
                _write_edges(writer, graph, edges, part, first, advance)
                for edges, first in zip(graph.edges, first_edges, strict=True)
            )
            firsts, counts = tuple(ids.start for ids in held), tuple(len(ids) for ids in held)
            parts.append(PartRange(firsts, counts, first_edges, num_edges, {graph.labelled.name: sizes}))
            first_edges = tuple(map(operator.add, first_edges, num_edges))
        writer.describe(_schema(graph, parts), parts)


def _write_nodes(
    writer: StoreWriter, graph: SyntheticGraph, nodes: NodeDraws, part: int, held: range, advance: Advance
) -> None:
    fields, centres = graph.node_fields(nodes), nodes.centres()
    files = {name: layout.node_file(part, nodes.name, name) for name in fields}
    for ids in pieces(held, graph.chunk / nodes.num_features):
        writer.append(files["x"], fields["x"], torch.from_numpy(nodes.features(ids, centres)))
        if "y" in fields:
            writer.append(files["y"], fields["y"], torch.from_numpy(nodes.labels(ids)))
        advance(ids)
    for name, field in fields.items():
        writer.finish(files[name], field)


def _write_split(writer: StoreWriter, graph: SyntheticGraph, split: str, part: int) -> int:
    """Returns the number of members."""
    name = layout.split_file(part, graph.labelled.name, split)
    for ids in pieces(graph.held(part, graph.labelled.num_nodes), graph.chunk):
        writer.append(name, IDS, torch.from_numpy(graph.labelled.members(split, ids)))
    return writer.finish(name, IDS)


def _write_edges(
    writer: StoreWriter, graph: SyntheticGraph, edges: RelationDraws, part: int, first_edge: int, advance: Advance
) -> int:
    """Returns the number of edges. Weights and times are written once for the sampler, once as a field."""
    fields, relation = graph.edge_fields(), Relation(*edges.name, 0)
    columns: list[tuple[str, Field, Callable[[EdgeRun], NDArray[Any]]]] = [
        (layout.topology_file(part, relation, "indices"), Field(id_dtype(edges.num_sources)), edges.sources)
    ]
    draws: dict[str, Callable[[EdgeRun], NDArray[Any]]] = {"weight": edges.weights, "time": edges.times}
    for name, field in fields.items():
        columns.append((layout.topology_file(part, relation, name), field, draws[name]))
        columns.append((layout.edge_file(part, relation, name), field, draws[name]))
    indptr, end = layout.topology_file(part, relation, "indptr"), first_edge
    writer.append(indptr, IDS, torch.zeros(1, dtype=torch.int64))
    for run in edges.runs(graph.held(part, edges.num_destinations), first_edge, graph.chunk):
        writer.append(indptr, IDS, torch.from_numpy(end - first_edge + np.cumsum(run.degrees)))
        for name, field, draw in columns:
            writer.append(name, field, torch.from_numpy(draw(run)))
        end = run.edges.stop
        advance(run.nodes)
    writer.finish(indptr, IDS)
    for name, field, _ in columns:
        writer.finish(name, field)
    return end - first_edge


def _schema(graph: SyntheticGraph, parts: Sequence[PartRange]) -> Schema:
    fields = graph.edge_fields()
    sizes = {split: sum(part.splits[graph.labelled.name][split] for part in parts) for split in SPLITS}
    node_types = [NodeType(nodes.name, nodes.num_nodes, graph.node_fields(nodes)) for nodes in graph.nodes]
    node_types[0] = replace(node_types[0], splits=sizes)
    num_edges = map(sum, zip(*(part.num_edges for part in parts), strict=True))
    return Schema(
        tuple(node_types),
        tuple(Relation(*edges.name, count, fields) for edges, count in zip(graph.edges, num_edges, strict=True)),
        graph.homogeneous,
        weight="weight" if graph.weights else None,
        time="time" if graph.times else None,
    )
