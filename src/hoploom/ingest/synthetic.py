"""Generate synthetic graphs of any size in bounded memory, identical to the last bit on every machine.

Every number is a random function of the seed and of a node's or an edge's id, so that any chunk can be made alone:
memory holds one chunk, and neither its size nor the number of parts changes the graph. Only integers and float
operations that IEEE 754 rounds exactly (+ - * / sqrt) are used. As edges are drawn one by one, a pair may be linked
twice, and a node may link to itself. A relation (writes) and its other direction (rev_writes) have different edges,
although between the same communities.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hoploom import keys, ops
from hoploom.errors import ConfigError
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, Field, NodeType, Relation, RelationName, Schema
from hoploom.store import Store, open_store
from hoploom.store import format as layout
from hoploom.store.format import PartRange, id_dtype
from hoploom.store.write import StoreWriter

Progress = Callable[[int, int], None]  # (done, total): nodes, counted again for each relation into them
Advance = Callable[[range], None]
IDS = Field("int64")
CHUNK = 1 << 18  # edges, or feature values, made at a time: few enough for the cache
FEATURE_DTYPES = ("float32", "float16", "bfloat16")
GRAPH = 0x6772617068  # mixed into the seed's key, so that samplers draw other numbers from the seed

Integers = NDArray[np.int64]
Words = NDArray[np.uint32]

SPLITS = {"train": (0.0, 0.6), "val": (0.6, 0.8), "test": (0.8, 1.0)}  # name -> the draws in [0, 1) that select it
LABEL_NOISE = 0.05  # share of the labels that are random
SIGNAL = 1.0  # the distance of a community's features from the origin, in standard deviations of the noise
MAX_DEGREE = 1 << 17  # so that the edges of one node are no more than a chunk
MAX_NODES = 1 << 31  # of one type, so that SCATTER times a rank takes 64 bits
MAX_TIME = 1_000_000
SCATTER = 2654435761  # a prime above MAX_NODES: multiplying by it permutes a community of any size
NODE, DEGREE, EDGE, FEATURE, CENTRE = range(5)  # the purposes of draws

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


# --- draws -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeDraws:
    """The random properties of the nodes of one type. Node v belongs to community v % num_classes."""

    name: str
    key: int
    type_index: int
    num_nodes: int
    num_classes: int
    num_features: int

    def labels(self, ids: range) -> Integers:
        """Return the labels [n]: the node's community, or with probability LABEL_NOISE a random class."""
        words = self._words(ids)
        drawn = (words[:, 1].astype(np.int64) * self.num_classes) >> 32
        return np.where(_below(words[:, 0], LABEL_NOISE), drawn, self._communities(ids))

    def members(self, split: str, ids: range) -> Integers:
        """Return those of `ids` whose nodes are in the split `split`."""
        begin, end = SPLITS[split]
        word = self._words(ids)[:, 2]
        return np.flatnonzero(_below(word, end) & ~_below(word, begin)) + ids.start

    def features(self, ids: range, centres: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return features [n, num_features]: the community's centre, plus noise of variance 1 in every feature."""
        blocks = -(-self.num_features // 4)
        words = _words(self.key, FEATURE, self.type_index, range(ids.start * blocks, ids.stop * blocks))
        words = words.reshape(len(ids), 4 * blocks)[:, : self.num_features]
        noise = ((words >> 16) + (words & 0xFFFF)).astype(np.float32)  # two uniform draws add up to about a bell shape
        noise -= np.float32(65535)
        noise *= np.float32(math.sqrt(6) / 65536)
        noise += centres[self._communities(ids)]
        return noise

    def centres(self) -> NDArray[np.float32]:
        """Return the centres of all communities, random corners of a cube: [num_classes, num_features]."""
        ids = range(self.num_classes * self.num_features)
        word = _words(self.key, CENTRE, self.type_index, ids)[:, 0]
        side = np.float32(SIGNAL / math.sqrt(self.num_features))
        return np.where(word & 1, side, -side).reshape(self.num_classes, self.num_features)

    def _communities(self, ids: range) -> Integers:
        return np.arange(ids.start, ids.stop) % self.num_classes

    def _words(self, ids: range) -> Words:
        """Return four random words per node: two that draw the label, one that draws the split, an unused one."""
        return _words(self.key, NODE, self.type_index, ids)


@dataclass(frozen=True)
class EdgeRun:
    """The in-edges of consecutive destination nodes: in-degrees, and the range of edge ids."""

    nodes: range
    degrees: Integers  # [n]
    edges: range  # their ids in the relation


@dataclass(frozen=True)
class RelationDraws:
    """The random edges of one relation, drawn for consecutive destination nodes."""

    name: RelationName
    key: int
    relation_index: int
    num_sources: int
    num_destinations: int
    num_classes: int
    avg_degree: float
    homophily: float

    def degrees(self, nodes: range) -> Integers:
        """Return in-degrees [n]. The share of nodes with more than d in-edges falls as 1 / d^2."""
        word = _words(self.key, DEGREE, self.relation_index, nodes)[:, 0]
        cap = min(MAX_DEGREE, max(math.ceil(2 * self.avg_degree), self.num_sources // 4))
        if self.avg_degree < 3:  # the least degree before rounding that gives this mean, given rounding and the cap
            least = math.sqrt((self.avg_degree - 1) / (math.pi * math.pi / 2 - 4))
        else:
            least = self.avg_degree / (1 + math.sqrt(1 - self.avg_degree / cap))
        drawn = np.floor(least / np.sqrt((word + 1.0) / 2**32) + 0.5)
        return np.clip(drawn, 1, cap).astype(np.int64)

    def runs(self, nodes: range, first_edge: int, chunk: int) -> Iterator[EdgeRun]:
        """Yield the in-edges of `nodes`, about `chunk` at a time; `first_edge` is the id of the first edge."""
        for piece in _spans(nodes, chunk / self.avg_degree):
            degrees = self.degrees(piece)
            run = EdgeRun(piece, degrees, range(first_edge, first_edge + int(degrees.sum())))
            yield run
            first_edge = run.edges.stop

    def sources(self, run: EdgeRun) -> NDArray[np.signedinteger[Any]]:
        """Return source ids [num_edges], mostly of the destination's community. A few nodes are drawn very often."""
        words = self._words(run)
        own = np.repeat(np.arange(run.nodes.start, run.nodes.stop) % self.num_classes, run.degrees)
        outside = int(self.homophily * 2**32)  # words from here on lead out of the community
        draw = words[:, 1].astype(np.int64) - outside
        community = np.where(draw < 0, own, draw * self.num_classes // max(1, 2**32 - outside))
        counts = [(self.num_sources - 1 - c) // self.num_classes + 1 for c in range(self.num_classes)]
        sizes = np.array(counts, dtype=np.uint64)
        offsets = np.array([keys.mix(self.key, c) % size for c, size in enumerate(counts)], dtype=np.uint64)
        word, size = words[:, 0].astype(np.uint64), sizes[community]
        rank = (((word * word) >> 32) * size) >> 32  # the square favours low ranks
        member = (rank * SCATTER + offsets[community]) % size
        return (member.astype(np.int64) * self.num_classes + community).astype(id_dtype(self.num_sources))

    def weights(self, run: EdgeRun) -> NDArray[np.float32]:
        """Return weights [num_edges] in (0, 1]."""
        return ((self._words(run)[:, 2] + 1.0) / 2**32).astype(np.float32)

    def times(self, run: EdgeRun) -> Integers:
        """Return times [num_edges]: a node's k in-edges get one time in each of k equal intervals of [0, MAX_TIME)."""
        first = np.cumsum(run.degrees) - run.degrees
        place = np.arange(len(run.edges)) - np.repeat(first, run.degrees)
        share = (place + self._words(run)[:, 3] / 2**32) / np.repeat(run.degrees, run.degrees)
        return (share * MAX_TIME).astype(np.int64)

    def _words(self, run: EdgeRun) -> Words:
        """Return random words [num_edges, 4]. They draw, in this order: source, its community, weight, time."""
        return _words(self.key, EDGE, self.relation_index, run.edges)


def _words(key: int, purpose: int, index: int, ids: range) -> Words:
    """Return random uint32 words [n, 4] for ids of node type or relation `index`. Each `purpose` gives other words."""
    counters = torch.from_numpy(np.arange(ids.start, ids.stop))  # torch's arange would wake a pool of threads
    return ops.draw_words(key, counters, purpose << 16 | index).numpy()


def _below(word: Words, chance: float) -> NDArray[np.bool_]:
    return word < np.uint64(chance * 2**32)


def _spans(ids: range, size: float) -> Iterator[range]:
    """Return consecutive ranges of about `size` ids."""
    step = max(1, int(size))
    return (ids[begin : begin + step] for begin in range(0, len(ids), step))


# --- the graph -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SyntheticGraph:
    """The settings of a synthetic graph and its files."""

    nodes: tuple[NodeDraws, ...]  # the first type is labelled
    edges: tuple[RelationDraws, ...]
    homogeneous: bool
    feature_dtype: str
    weights: bool
    times: bool
    num_parts: int
    chunk: int

    def node_fields(self, nodes: NodeDraws) -> dict[str, Field]:
        """Return the fields of a node type; only the first has labels."""
        fields = {"x": Field(self.feature_dtype, (nodes.num_features,))}
        return {**fields, "y": IDS} if nodes is self.nodes[0] else fields

    def edge_fields(self) -> dict[str, Field]:
        """Return the fields of every relation."""
        fields = {"weight": Field("float32")} if self.weights else {}
        return {**fields, "time": IDS} if self.times else fields

    def held(self, part: int, num_nodes: int) -> range:
        """Return the range of ids in part `part`, for a node type with `num_nodes` nodes."""
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
    mean over its neighbours says much. `num_nodes` is the number of nodes with labels (papers, if heterogeneous).
    `weights` and `times` add the edge fields `weight` and `time`. About `chunk` edges are held in memory at a time.

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
    for name, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise ConfigError(f"{name} is {value} for {num_nodes} nodes; give {least} to {most}")
    if feature_dtype not in FEATURE_DTYPES:
        raise ConfigError(f"feature_dtype is {feature_dtype!r}; give one of {', '.join(FEATURE_DTYPES)}")
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


def _write(path: str | Path, graph: SyntheticGraph, progress: Progress | None) -> None:
    labelled = graph.nodes[0]
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
            for nodes, own in zip(graph.nodes, held, strict=True):
                fields, centres = graph.node_fields(nodes), nodes.centres()
                files = {name: layout.node_file(part, nodes.name, name) for name in fields}
                for ids in _spans(own, graph.chunk / nodes.num_features):
                    writer.append(files["x"], fields["x"], torch.from_numpy(nodes.features(ids, centres)))
                    if "y" in fields:
                        writer.append(files["y"], fields["y"], torch.from_numpy(nodes.labels(ids)))
                    advance(ids)
                for name, field in fields.items():
                    writer.finish(files[name], field)
            sizes = {}
            for split in SPLITS:
                file = layout.split_file(part, labelled.name, split)
                for ids in _spans(held[0], graph.chunk):
                    writer.append(file, IDS, torch.from_numpy(labelled.members(split, ids)))
                sizes[split] = writer.finish(file, IDS)
            written = tuple(
                _write_edges(writer, graph, edges, part, first, advance)
                for edges, first in zip(graph.edges, first_edges, strict=True)
            )
            firsts, counts = tuple(ids.start for ids in held), tuple(len(ids) for ids in held)
            parts.append(PartRange(firsts, counts, first_edges, written, {labelled.name: sizes}))
            first_edges = tuple(map(operator.add, first_edges, written))
        fields, num_edges = graph.edge_fields(), map(sum, zip(*(part.num_edges for part in parts), strict=True))
        totals = {split: sum(part.splits[labelled.name][split] for part in parts) for split in SPLITS}
        types = [NodeType(nodes.name, nodes.num_nodes, graph.node_fields(nodes)) for nodes in graph.nodes]
        schema = Schema(
            (replace(types[0], splits=totals), *types[1:]),
            tuple(Relation(*edges.name, count, fields) for edges, count in zip(graph.edges, num_edges, strict=True)),
            graph.homogeneous,
            weight="weight" if graph.weights else None,
            time="time" if graph.times else None,
        )
        writer.describe(schema, parts)


def _write_edges(
    writer: StoreWriter, graph: SyntheticGraph, edges: RelationDraws, part: int, first_edge: int, advance: Advance
) -> int:
    """Write a part's edges of a relation; return their number. Weights and times are written as fields, too."""
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
