"""Import the raw folders of the Open Graph Benchmark in bounded memory, with the nodes and edges of OGB's own reader.

Nodes keep their ids. As in OGB's reader, the inverse of every edge is added to ogbn-products. Unknown labels become -1.
The split "valid" is called "val".
"""

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom.config.values import nearest
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.formats.archives import npz_pairs, npz_table, npz_values, read_arrays
from hoploom.ingest.formats.row_source import (
    Count,
    EdgeSource,
    Members,
    RowSource,
    edge_stream,
    flat,
    labels,
    members,
    node_stream,
    require_files,
    write_graph,
)
from hoploom.ingest.stream import EdgeRule, EdgeStream, NodeStream, Progress, StoreOptions
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, Field, RelationName
from hoploom.store import Store
from hoploom.system import needs

Streams = tuple[list[NodeStream], list[EdgeStream]]
SPLITS = {"train": "train", "val": "valid", "test": "test"}  # our name -> OGB's
AS_IT_COMES = EdgeRule(in_order=True)  # the adjacency lists that from_pyg makes of OGB's edge_index
MERGED = EdgeRule(undirected=True, deduplicate=True)
EDGES, NUM_EDGES = "edge.csv.gz", "num-edge-list.csv.gz"  # of a relation


@dataclass(frozen=True)
class Dataset:
    """The properties of a dataset that its files do not contain, although OGB's reader knows them."""

    read: Callable[["Dataset", Path, bool], Streams]
    num_classes: int
    split: str  # the folder of the split
    has_year: bool = False
    both_ways: bool = False  # the inverse of every edge is added


def import_ogb(
    name: str,
    folder: str | Path,
    out: str | Path,
    *,
    undirected: bool = False,
    memory: int = StoreOptions.memory,
    progress: Progress | None = None,
) -> Store:
    """Write a store from a downloaded OGB folder (with `raw` and `split` inside) and open it.

    Edges are those of OGB's own reader. `undirected` adds the other direction, as PyG's `ToUndirected` does: within one
    node type, edges are written in both directions without repeats; other relations get a reverse, `rev_<name>`.

    >>> import_ogb("ogbn-arxiv", "dataset/ogbn_arxiv", "arxiv.store")
    """
    if name not in DATASETS:
        near = nearest(name, list(DATASETS))
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"dataset {name!r} is not known{hint} There are {', '.join(DATASETS)}")
    dataset, folder, made = DATASETS[name], Path(folder), name.replace("-", "_")
    inside = [folder, folder / made, folder / f"{made}_pyg", folder / name.removeprefix("ogbn-")]  # as OGB names it
    root = next((path for path in inside if (path / "raw").is_dir()), folder)
    nodes, edges = dataset.read(dataset, root, undirected)
    options = StoreOptions(homogeneous=nodes[0].name == HOMOGENEOUS_TYPE, memory=memory)
    return write_graph(out, nodes, edges, options, progress)


# --- one type -------------------------------------------------------------------------------


def _read_csv(dataset: Dataset, root: Path, undirected: bool) -> Streams:
    raw = root / "raw"
    names = ["edge", "num-node-list", "num-edge-list", "node-feat", "node-label"]
    names += ["node_year"] if dataset.has_year else []
    files = {name: raw / f"{name}.csv.gz" for name in names}
    splits = _split_files(root / "split" / dataset.split)
    require_files([*files.values(), *splits.values()], str(root))
    nodes, edges = _count("nodes", files["num-node-list"]), _count("edges", files["num-edge-list"])
    fields = _node_fields(dataset, files["node-feat"], files["node-label"], files.get("node_year"))
    ends = EdgeSource([csv_table(files["edge"], "int64")], edges, both_ways=dataset.both_ways and not undirected)
    return _one_type(fields, nodes, ends, splits, undirected)


def _node_fields(dataset: Dataset, features: Path, classes: Path, years: Path | None) -> dict[str, RowSource]:
    fields = {"x": csv_table(features, "float32"), "y": labels(csv_table(classes, "float64"), dataset.num_classes)}
    return fields if years is None else {**fields, "year": flat(csv_table(years, "int64"))}


def _read_binary(dataset: Dataset, root: Path, undirected: bool) -> Streams:
    files = [root / "raw" / name for name in ("data.npz", "node-label.npz")]
    splits = _split_files(root / "split" / dataset.split)
    require_files([*files, *splits.values()], str(root))
    data, classes = map(read_arrays, files)
    wanted = ["edge_index", "num_nodes_list", "num_edges_list", "node_feat", "node_year"]
    missing = [f"{files[0]}:{name}" for name in wanted if name not in data]
    missing += [] if "node_label" in classes else [f"{files[1]}:node_label"]
    if missing:
        raise DataError(f"{root} is incomplete; these arrays are missing: {', '.join(missing)}")
    counts = []
    for of in ("nodes", "edges"):
        array = data[f"num_{of}_list"]
        if array.shape != (1,):
            raise DataError(f"{array.label} has shape {array.shape}; one number was expected, the size of one graph")
        counts.append(Count(of, int(npz_values(array).item()), array.name))
    fields = {
        "x": npz_table(data["node_feat"]),
        "y": labels(npz_table(classes["node_label"]), dataset.num_classes),
        "year": flat(npz_table(data["node_year"])),
    }
    return _one_type(fields, counts[0], EdgeSource(npz_pairs(data["edge_index"]), counts[1]), splits, undirected)


def _one_type(
    fields: Mapping[str, RowSource], nodes: Count, ends: EdgeSource, splits: Mapping[str, Path], undirected: bool
) -> Streams:
    rule = MERGED if undirected else AS_IT_COMES
    edges = edge_stream(HOMOGENEOUS_RELATION, ends, (nodes.rows, nodes.rows), rule)
    return [node_stream(HOMOGENEOUS_TYPE, fields, nodes, _members(splits, nodes))], [edges]


def _members(splits: Mapping[str, Path], nodes: Count) -> dict[str, Members]:
    return {split: members(csv_table(path, "int64"), nodes.rows) for split, path in splits.items()}


def _split_files(folder: Path) -> dict[str, Path]:
    return {ours: folder / f"{theirs}.csv.gz" for ours, theirs in SPLITS.items()}


# --- several types --------------------------------------------------------------------------


def _read_mag(dataset: Dataset, root: Path, undirected: bool) -> Streams:
    """Return ogbn-mag as streams of nodes and edges, without edge_reltype, which only numbers the relations."""
    raw, labelled = root / "raw", "paper"
    sizes_file, relations_file = raw / "num-node-dict.csv.gz", raw / "triplet-type-list.csv.gz"
    files = [
        raw / "node-feat" / labelled / "node-feat.csv.gz",
        raw / "node-label" / labelled / "node-label.csv.gz",
        raw / "node-feat" / labelled / "node_year.csv.gz",
    ]
    splits = _split_files(root / "split" / dataset.split / labelled)
    relations: list[RelationName] = []
    for number, row in enumerate(small_csv(relations_file) if relations_file.is_file() else (), 1):
        if len(row) != 3 or any("/" in name or not name for name in row):
            message = f"{row} is not a source type, a name and a destination type"
            raise DataError(f"{relations_file}, row {number}: {message}")
        relations.append((row[0], row[1], row[2]))
    relations.sort()  # as OGB does
    folders = {key: raw / "relations" / "___".join(key) for key in relations}
    files_of_edges = [folder / name for folder in folders.values() for name in (EDGES, NUM_EDGES)]
    require_files([sizes_file, relations_file, *files, *splits.values(), *files_of_edges], str(root))
    sizes = _sizes(sizes_file, [*(end for key in relations for end in (key[0], key[2])), labelled])
    nodes = []
    for name, size in sizes.items():
        count, has_rows = Count("nodes", size, sizes_file.name), name == labelled
        fields = _node_fields(dataset, *files) if has_rows else {}
        nodes.append(node_stream(name, fields, count, _members(splits, count) if has_rows else {}))
    edges = []
    for key, folder in folders.items():
        ends = EdgeSource([csv_table(folder / EDGES, "int64")], _count("edges", folder / NUM_EDGES))
        both_ways = MERGED if key[0] == key[2] else EdgeRule(reverse=f"rev_{key[1]}", in_order=True)
        rule = both_ways if undirected else AS_IT_COMES
        edges.append(edge_stream(key, ends, (sizes[key[0]], sizes[key[2]]), rule))
    return nodes, edges


def _sizes(path: Path, named: Sequence[str]) -> dict[str, int]:
    """Return the number of nodes by type, in OGB's order; raise DataError if the file lacks a type in `named`."""
    rows = small_csv(path)
    if len(rows) != 2 or len(rows[0]) != len(rows[1]) or not all(size.strip().isdigit() for size in rows[1]):
        raise DataError(f"{path} holds {rows[:3]}; the names of the types and one row of sizes were expected")
    sizes = {name: int(size) for name, size in sorted(zip(*rows, strict=True))}
    unknown = sorted(set(named) - set(sizes))
    if unknown:
        raise DataError(f"{path} does not name {unknown}; its types are {list(sizes)}")
    return sizes


DATASETS = {
    "ogbn-arxiv": Dataset(_read_csv, 40, "time", has_year=True),
    "ogbn-products": Dataset(_read_csv, 47, "sales_ranking", both_ways=True),
    "ogbn-papers100M": Dataset(_read_binary, 172, "time", has_year=True),
    "ogbn-mag": Dataset(_read_mag, 349, "time", has_year=True),
}


# --- files ----------------------------------------------------------------------------------

BLOCK_BYTES = 1 << 20  # of text; Arrow reads up to 32 blocks ahead
DAMAGE = (OSError, EOFError, zlib.error, UnicodeError, csv.Error)


def csv_table(path: Path, dtype: str, block: int = BLOCK_BYTES) -> RowSource:
    """Return a CSV file's rows as a RowSource of [n, columns]. Empty fields become NaN, or an error for integers."""
    with _reading(path), gzip.open(path, "rb") as file:
        line = file.readline()
    columns = line.count(b",") + 1

    def chunks() -> Iterator[Tensor]:
        return _chunks(path, dtype, columns, block) if line else iter(())

    return RowSource(str(path), Field(dtype, (columns,)), chunks)


def small_csv(path: Path) -> list[list[str]]:
    """Return all rows of a small CSV file, including the header."""
    with _reading(path), gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [row for row in csv.reader(file) if row]


def _count(of: str, path: Path) -> Count:
    """Read the number of nodes or edges (`of`) from the file `path`; raise DataError unless it holds one number."""
    rows = small_csv(path)
    if len(rows) != 1 or not rows[0][0].strip().isdigit():
        raise DataError(f"{path} holds {rows[:2]}; one number was expected, the size of the one graph")
    return Count(of, int(rows[0][0]), path.name)


def _chunks(path: Path, dtype: str, columns: int, block: int) -> Iterator[Tensor]:
    with needs("tables"):
        import pyarrow as pa
        from pyarrow import csv as arrow_csv
    names = [str(column) for column in range(columns)]
    nulls: list[str] | None = [] if dtype == "int64" else None  # None: the words that pandas takes for NaN, too
    types = dict.fromkeys(names, "int64" if dtype == "int64" else "float64")  # rounded twice, as by OGB's reader
    parsed = arrow_csv.ConvertOptions(column_types=types, null_values=nulls)
    with _reading(path):
        try:
            with pa.input_stream(str(path), compression="gzip") as stream:
                read = arrow_csv.ReadOptions(use_threads=False, block_size=block, column_names=names)
                for batch in arrow_csv.open_csv(stream, read, convert_options=parsed):
                    rows = [column.to_numpy(zero_copy_only=False).astype(dtype) for column in batch.columns]
                    yield torch.from_numpy(np.stack(rows, axis=1))
        except pa.ArrowInvalid as error:  # it names row and value
            raise DataError(f"{path}: {error}; correct the file, or get it again") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise DataError(f"{path} is cut short or damaged ({error or type(error).__name__}); get it again") from error
