"""Small tables for tests of `hoploom build`, and what a store of them must hold by the slow, plain way."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hoploom.ingest.tables.build import BuildOptions, build
from hoploom.ingest.tables.graph_file import parse_graph
from hoploom.ingest.tables.graph_streams import Report
from hoploom.schema import ORIGINAL_ID, RelationName
from hoploom.store import Store, open_store

needs_spark = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
T = TypeVar("T", bound=Callable[..., None])
Edge = tuple[Any, Any]  # original ids: source, destination
NODES = """
[nodes.node]
files = "nodes*.parquet"
id = "id"
features = ["year", "emb"]
label = "venue"
num_classes = 7
time = "published"
split = "fold"
fields = { rank = "rank" }
[edges."node to node"]
files = "edges*.parquet"
source = "src"
destination = "dst"
features = ["a", "b"]
weight = "w"
fields = { kind = "kind" }
"""
EDGES = """
[edges."node to node"]
files = "edges.parquet"
source = "src"
destination = "dst"
"""
FOLDS = ["train", "val", None, "test"]
IDS = {
    "sparse": lambda v: 7919 * v * v - 10**6,
    "dense": lambda v: v,
    "from 100": lambda v: v + 100,
    "text": lambda v: f"user-{v}é" if v % 3 else f"{v}",
    "wide": lambda v: (2**63 - 1 - v) if v % 2 else (v - 2**63),
}


def write_table(path: Path, columns: Mapping[str, Any], *, files: int = 1, row_groups: int = 1000) -> None:
    """Parquet: one file, or several named path-0, path-1, …"""
    table = pa.table(dict(columns))
    step = -(-table.num_rows // files)
    for index in range(files):
        name = path if files == 1 else path.with_name(f"{path.stem}-{index}{path.suffix}")
        pq.write_table(table.slice(index * step, step), name, row_group_size=row_groups)


def build_here(folder: Path, text: str, out: str = "out.store", **options: Any) -> tuple[Store, Report]:
    report = build(parse_graph(text, folder=folder), folder / out, BuildOptions(**options))
    return open_store(folder / out), report


def original(store: Store, node_type: str = "node") -> list[Any]:
    index = store.schema.type_index[node_type]
    if ORIGINAL_ID not in store.schema.node_types[index].fields:
        return list(range(store.schema.node_types[index].num_nodes))
    rows = field(store, node_type, ORIGINAL_ID)
    if rows.dim() == 1:
        return rows.tolist()
    return [bytes(row).rstrip(b"\0").decode() for row in rows.tolist()]


def field(store: Store, owner: str | RelationName, name: str) -> torch.Tensor:
    return torch.cat([part.tables[owner, name].rows for part in store.parts])


def by_id(store: Store, name: str, node_type: str = "node") -> dict[Any, Any]:
    return dict(zip(original(store, node_type), field(store, node_type, name).tolist(), strict=True))


def edges_of(store: Store, key: RelationName = ("node", "to", "node")) -> list[Edge]:
    sources, destinations = original(store, key[0]), original(store, key[2])
    index, found = store.schema.relation_index[key], list[Edge]()
    for part in store.parts:
        lists = part.lists[index]
        first = part.first_nodes[store.schema.type_index[key[2]]]
        for local, (begin, end) in enumerate(zip(lists.indptr[:-1].tolist(), lists.indptr[1:].tolist(), strict=True)):
            begin, end = begin - int(lists.indptr[0]), end - int(lists.indptr[0])
            found += [(sources[s], destinations[first + local]) for s in lists.indices[begin:end].tolist()]
    return found


def shuffled(columns: Mapping[str, Sequence[Any]], seed: int) -> dict[str, list[Any]]:
    order = torch.randperm(len(next(iter(columns.values()))), generator=torch.Generator().manual_seed(seed)).tolist()
    return {name: [values[row] for row in order] for name, values in columns.items()}


def graph(of: Any, count: int = 40) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Node v links to v + 1 and to 2v; every value is arithmetic on v."""
    nodes = {
        "id": [of(v) for v in range(count)],
        "year": [1990 + v for v in range(count)],
        "emb": [[v / 2, -v] for v in range(count)],
        "venue": [None if v == 5 else v % 7 for v in range(count)],
        "published": [1000 * v for v in range(count)],
        "fold": [FOLDS[v % 4] for v in range(count)],
        "rank": [v / 4 for v in range(count)],
    }
    ends = [(v, w % count) for v in range(count) for w in (v + 1, 2 * v)]
    edges = {
        "src": [of(s) for s, _ in ends],
        "dst": [of(d) for _, d in ends],
        "a": [s for s, _ in ends],
        "b": [d / 8 for _, d in ends],
        "w": [1.0 + s for s, _ in ends],
        "kind": [(s * d) % 5 for s, d in ends],
    }
    return nodes, edges


def write_graph(folder: Path, of: Any, seed: int | None = None, **how: int) -> None:
    """That graph as tables nodes.parquet and edges.parquet; NODES describes them."""
    nodes, edges = graph(of)
    if seed is not None:
        nodes, edges = shuffled(nodes, seed), shuffled(edges, seed + 1)
    nodes["emb"] = pa.array(nodes["emb"], pa.list_(pa.float32()))
    write_table(folder / "nodes.parquet", nodes, **how)
    write_table(folder / "edges.parquet", edges, **how)


def on_spark(*fixtures: str) -> Callable[[T], T]:
    """Return the marks of a slow test that builds on Spark, with these fixtures."""

    def mark(test: T) -> T:
        used = pytest.mark.usefixtures("short_java", *fixtures)
        for one in (needs_spark, pytest.mark.slow, pytest.mark.timeout(300), used):
            test = one(test)
        return test

    return mark
