"""Synthetic graphs of any size, written out of core and the same to the bit on every machine.

Every number is drawn from a counter (a node's or an edge's id) under the seed's key, so that any chunk can be made
alone: memory holds one chunk, and neither its size nor the number of parts changes the graph. The price of drawing
each edge by itself: a pair may be linked twice, a node may link to itself, and the two directions of a relation
(writes, rev_writes) are drawn afresh, between the same communities but not between the same nodes.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom import keys
from hoploom.errors import ConfigError, StoreError
from hoploom.ingest.synthetic_draws import (
    MAX_DEGREE,
    MAX_NODES,
    SPLITS,
    EdgeRun,
    Integers,
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

Progress = Callable[[int, int], None]  # (bytes written, bytes in all)
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
class Recipe:
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

    def held(self, part: int, num_nodes: int) -> range:
        """Which nodes of a type a part holds."""
        return range(num_nodes * part // self.num_parts, num_nodes * (part + 1) // self.num_parts)


@dataclass(frozen=True)
class DrawnFile:
    """One file, its values yet to be drawn."""

    name: str
    field: Field
    num_rows: int
    chunks: Iterator[NDArray[Any]]


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
    """Write a synthetic graph and open it: power-law degrees, planted communities, weak features, splits.

    Nodes have `x`, and `y`, which is their community but for a little noise. A node's own features tell little, the
    mean over its neighbourhood tells most. `num_nodes` counts the labelled type (papers, if heterogeneous).
    `weights` and `times` add the edge fields `weight` and `time`. Memory is for about `chunk` edges.

    >>> store = generate("small.store", num_nodes=10_000)
    """
    shares = HETEROGENEOUS if heterogeneous else HOMOGENEOUS
    key = keys.mix(keys.mix(0, GRAPH), seed)
    _check_counts(num_nodes, num_features, num_classes, num_parts)
    _check_choices(num_nodes, avg_degree, homophily, feature_dtype)
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
    recipe = Recipe(nodes, edges, not heterogeneous, feature_dtype, weights, times, num_parts, chunk)
    _write(path, recipe, progress)
    return open_store(path)


def _check_counts(num_nodes: int, num_features: int, num_classes: int, num_parts: int) -> None:
    if not 1 <= num_nodes <= MAX_NODES:
        raise ConfigError(f"num_nodes is {num_nodes}; synthetic graphs take 1 to {MAX_NODES} nodes a type")
    if not 1 <= num_classes <= num_nodes:
        raise ConfigError(f"num_classes is {num_classes} for {num_nodes} nodes; give each class a node at least")
    if num_features < 1:
        raise ConfigError(f"num_features is {num_features}; give at least 1")
    if not 1 <= num_parts <= num_nodes:
        raise ConfigError(f"num_parts is {num_parts} for {num_nodes} nodes; give each part a node at least")


def _check_choices(num_nodes: int, avg_degree: float, homophily: float, feature_dtype: str) -> None:
    limit = min(num_nodes, MAX_DEGREE // 2)
    if not 1 <= avg_degree <= limit:
        raise ConfigError(f"avg_degree is {avg_degree} for {num_nodes} nodes; give 1 to {limit}")
    if not 0 <= homophily <= 1:
        raise ConfigError(f"homophily is {homophily}; it is a share, give 0 to 1")
    if feature_dtype not in FEATURE_DTYPES:
        raise ConfigError(f"feature_dtype is {feature_dtype!r}; give one of {', '.join(FEATURE_DTYPES)}")


def _write(path: str | Path, recipe: Recipe, progress: Progress | None) -> None:
    if Path(path).exists():  # said before every degree is drawn
        raise StoreError(f"{path} exists; give another path, or remove it first")
    parts = _count(recipe)
    schema = _schema(recipe, parts)
    arrays = [array for number in range(recipe.num_parts) for array in _arrays(recipe, schema, parts, number)]
    total = sum(array.num_rows * array.field.row_bytes for array in arrays)
    done = 0

    def drawn(array: DrawnFile) -> Iterator[Tensor]:
        nonlocal done
        for values in array.chunks:
            yield torch.from_numpy(values)
            done += len(values) * array.field.row_bytes
            if progress is not None:
                progress(done, total)

    with StoreWriter(path, schema, parts) as writer:
        for array in arrays:
            writer.write(array.name, array.field.dtype, (array.num_rows, *array.field.shape), drawn(array))


def _count(recipe: Recipe) -> list[PartRange]:
    """Draw every degree and split once, to know the sizes of the files."""
    parts: list[PartRange] = []
    first_edges = (0,) * len(recipe.edges)
    for part in range(recipe.num_parts):
        held = [recipe.held(part, nodes.num_nodes) for nodes in recipe.nodes]
        first_nodes, num_nodes = tuple(ids.start for ids in held), tuple(len(ids) for ids in held)
        num_edges = tuple(_num_edges(recipe, edges, part) for edges in recipe.edges)
        sizes = {split: sum(map(len, _members(recipe, split, part))) for split in SPLITS}
        parts.append(PartRange(first_nodes, num_nodes, first_edges, num_edges, {recipe.labelled.name: sizes}))
        first_edges = tuple(map(operator.add, first_edges, num_edges))
    return parts


def _num_edges(recipe: Recipe, edges: RelationDraws, part: int) -> int:
    held = recipe.held(part, edges.num_destinations)
    return sum(len(run.edges) for run in edges.runs(held, 0, recipe.chunk))


def _members(recipe: Recipe, split: str, part: int) -> Iterator[Integers]:
    held = recipe.held(part, recipe.labelled.num_nodes)
    return (recipe.labelled.members(split, ids) for ids in pieces(held, recipe.chunk))


def _schema(recipe: Recipe, parts: Sequence[PartRange]) -> Schema:
    node_fields = {"x": Field(recipe.feature_dtype, (recipe.labelled.num_features,))}
    edge_fields = {"weight": Field("float32")} if recipe.weights else {}
    edge_fields |= {"time": Field("int64")} if recipe.times else {}
    node_types = [NodeType(nodes.name, nodes.num_nodes, node_fields) for nodes in recipe.nodes]
    sizes = {split: sum(part.splits[recipe.labelled.name][split] for part in parts) for split in SPLITS}
    node_types[0] = replace(node_types[0], fields=node_fields | {"y": Field("int64")}, splits=sizes)
    num_edges = [sum(counts) for counts in zip(*(part.num_edges for part in parts), strict=True)]
    return Schema(
        tuple(node_types),
        tuple(Relation(*e.name, count, edge_fields) for e, count in zip(recipe.edges, num_edges, strict=True)),
        recipe.homogeneous,
        weight="weight" if recipe.weights else None,
        time="time" if recipe.times else None,
    )


def _arrays(recipe: Recipe, schema: Schema, parts: Sequence[PartRange], part: int) -> Iterator[DrawnFile]:
    """Every file of a part."""
    for nodes, node_type in zip(recipe.nodes, schema.node_types, strict=True):
        yield from _node_arrays(recipe, nodes, node_type, part)
    for split, size in parts[part].splits[recipe.labelled.name].items():
        name = layout.split_file(part, recipe.labelled.name, split)
        yield DrawnFile(name, Field("int64"), size, _members(recipe, split, part))
    for edges, relation in zip(recipe.edges, schema.relations, strict=True):
        yield from _edge_arrays(recipe, edges, relation, parts[part], part)


def _node_arrays(recipe: Recipe, nodes: NodeDraws, node_type: NodeType, part: int) -> Iterator[DrawnFile]:
    held = recipe.held(part, nodes.num_nodes)
    draws: dict[str, Callable[[range], NDArray[Any]]] = {
        "x": partial(nodes.features, centres=nodes.centres()),
        "y": nodes.labels,
    }
    for name, field in node_type.fields.items():
        rows = map(draws[name], pieces(held, recipe.chunk / math.prod(field.shape)))
        yield DrawnFile(layout.node_file(part, nodes.name, name), field, len(held), rows)


def _edge_arrays(
    recipe: Recipe, edges: RelationDraws, relation: Relation, counts: PartRange, part: int
) -> Iterator[DrawnFile]:
    held = recipe.held(part, edges.num_destinations)
    first_edge, num_edges = (of[edges.relation_index] for of in (counts.first_edges, counts.num_edges))

    def column(file: str, field: Field, draw: Callable[[EdgeRun], NDArray[Any]]) -> DrawnFile:
        return DrawnFile(file, field, num_edges, map(draw, edges.runs(held, first_edge, recipe.chunk)))

    indptr = layout.topology_file(part, relation, "indptr")
    yield DrawnFile(indptr, Field("int64"), len(held) + 1, _indptr(edges.runs(held, 0, recipe.chunk)))
    ids = Field(id_dtype(edges.num_sources))
    yield column(layout.topology_file(part, relation, "indices"), ids, edges.sources)
    draws: dict[str, Callable[[EdgeRun], NDArray[Any]]] = {"weight": edges.weights, "time": edges.times}
    for name, field in relation.fields.items():  # once for the sampler, once as a field
        yield column(layout.topology_file(part, relation, name), field, draws[name])
        yield column(layout.edge_file(part, relation, name), field, draws[name])


def _indptr(runs: Iterator[EdgeRun]) -> Iterator[Integers]:
    yield np.zeros(1, dtype=np.int64)
    for run in runs:
        yield run.edges.start + np.cumsum(run.degrees)
