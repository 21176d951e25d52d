"""The raw folders of the Open Graph Benchmark as stores: what OGB's own reader gives, without holding it in memory.

Nodes keep their ids. What OGB's reader does is done here: inverse edges where a dataset lists one direction only,
labels that are not known, the names of splits ("valid" is "val" here).
"""

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom.config.extras import needs
from hoploom.errors import ConfigError, DataError
from hoploom.ingest.formats.npz import NpzArray, npz_pairs, npz_table, npz_whole, read_arrays
from hoploom.ingest.formats.row_source import (
    Count,
    EdgeSource,
    GraphStreams,
    RowSource,
    edge_stream,
    flat,
    labels,
    members,
    node_field,
    require,
    write_graph,
)
from hoploom.ingest.stream import EdgeRule, NodeStream, Progress, StoreOptions
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, Field, RelationName
from hoploom.store import Store

SPLITS = {"train": "train", "val": "valid", "test": "test"}  # our name -> OGB's
AS_IT_COMES = EdgeRule(in_order=True)  # lists as from_pyg makes them of OGB's own edge_index
MERGED = EdgeRule(undirected=True, deduplicate=True)


@dataclass(frozen=True)
class Dataset:
    """What OGB's reader knows of a dataset besides its files."""

    read: Callable[["Dataset", Path, bool], GraphStreams]
    num_classes: int
    split: str  # the folder of the split
    has_year: bool = False
    both_ways: bool = False  # the reader adds the inverse of every edge


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

    Edges are those of OGB's own reader. `undirected` adds the other direction, as PyG's `ToUndirected` does: an edge
    between nodes of one type counts for both directions, once; other relations get a reverse, `rev_<name>`.

    >>> import_ogb("ogbn-arxiv", "dataset/ogbn_arxiv", "arxiv.store")
    """
    return write_graph(out, read_ogb(name, folder, undirected=undirected), memory, progress)


def read_ogb(name: str, folder: str | Path, *, undirected: bool = False) -> GraphStreams:
    """The streams of a dataset; what is checked without reading much is checked here."""
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"dataset {name!r} is not known{hint} There are {', '.join(DATASETS)}")
    dataset = DATASETS[name]
    return dataset.read(dataset, _root(name, Path(folder)), undirected)


def _root(name: str, folder: Path) -> Path:
    """The folder with `raw` inside: the one given, or the one that OGB made in it."""
    made = name.replace("-", "_")
    inside = [folder, folder / made, folder / f"{made}_pyg", folder / name.removeprefix("ogbn-")]
    return next((path for path in inside if (path / "raw").is_dir()), folder)


# --- one type -------------------------------------------------------------------------------


def _read_csv(dataset: Dataset, root: Path, undirected: bool) -> GraphStreams:
    raw = root / "raw"
    names = ["edge", "num-node-list", "num-edge-list", "node-feat", "node-label"]
    names += ["node_year"] if dataset.has_year else []
    files = {name: raw / f"{name}.csv.gz" for name in names}
    splits = _split_files(root / "split" / dataset.split)
    require([*files.values(), *splits.values()], str(root))
    nodes = Count("nodes", single_count(files["num-node-list"]), files["num-node-list"].name)
    edges = Count("edges", single_count(files["num-edge-list"]), files["num-edge-list"].name)
    fields = {"x": csv_table(files["node-feat"], "float32")}
    fields["y"] = labels(csv_table(files["node-label"], "float64"), dataset.num_classes)
    if dataset.has_year:
        fields["year"] = flat(csv_table(files["node_year"], "int64"))
    ends = EdgeSource([_two_columns(csv_table(files["edge"], "int64"))], edges, both_ways=dataset.both_ways)
    return _one_type(fields, nodes, ends, splits, undirected)


def _read_binary(dataset: Dataset, root: Path, undirected: bool) -> GraphStreams:
    files, splits = [root / "raw" / name for name in ("data.npz", "node-label.npz")], {}
    splits = _split_files(root / "split" / dataset.split)
    require([*files, *splits.values()], str(root))
    data, classes = map(read_arrays, files)
    wanted = ["edge_index", "num_nodes_list", "num_edges_list", "node_feat", "node_year"]
    missing = [f"{files[0]}:{name}" for name in wanted if name not in data]
    missing += [] if "node_label" in classes else [f"{files[1]}:node_label"]
    if missing:
        raise DataError(f"{root} is incomplete; these arrays are missing: {', '.join(missing)}")
    nodes = Count("nodes", _only(data["num_nodes_list"]), "num_nodes_list")
    edges = Count("edges", _only(data["num_edges_list"]), "num_edges_list")
    fields = {
        "x": npz_table(data["node_feat"]),
        "y": labels(npz_table(classes["node_label"]), dataset.num_classes),
        "year": flat(npz_table(data["node_year"])),
    }
    return _one_type(fields, nodes, EdgeSource(npz_pairs(data["edge_index"]), edges), splits, undirected)


def _only(array: NpzArray) -> int:
    if array.shape != (1,):
        raise DataError(f"{array.label} has shape {array.shape}; one number was expected, the size of the one graph")
    return int(npz_whole(array)[0])


def _one_type(
    fields: Mapping[str, RowSource], nodes: Count, ends: EdgeSource, splits: Mapping[str, Path], undirected: bool
) -> GraphStreams:
    rule = MERGED if undirected else AS_IT_COMES
    if undirected:
        ends = EdgeSource(ends.tables, ends.count, ends.fields)  # both directions come from the rule
    sizes = (nodes.rows, nodes.rows)
    edges = [edge_stream(HOMOGENEOUS_RELATION, ends, sizes, rule)]
    return GraphStreams([_node_stream(HOMOGENEOUS_TYPE, fields, nodes, splits)], edges, homogeneous=True)


def _node_stream(name: str, fields: Mapping[str, RowSource], nodes: Count, splits: Mapping[str, Path]) -> NodeStream:
    for table in fields.values():
        if table.num_rows is not None and table.num_rows != nodes.rows:
            raise DataError(f"{table.name} has {table.num_rows} rows for {nodes.rows} nodes ({nodes.told_by})")
    return NodeStream(
        name,
        [0, nodes.rows],
        [node_field(field, table, nodes) for field, table in fields.items()],
        {split: partial(_members, path, nodes.rows) for split, path in splits.items()},
    )


def _members(path: Path, num_nodes: int) -> Iterator[Tensor]:
    return members(csv_table(path, "int64"), num_nodes)()


def _split_files(folder: Path) -> dict[str, Path]:
    return {ours: folder / f"{theirs}.csv.gz" for ours, theirs in SPLITS.items()}


def _two_columns(table: RowSource) -> RowSource:
    if table.field.shape != (2,):
        raise DataError(f"{table.name} has {table.field.shape[0]} columns; an edge has a source and a destination")
    return table


# --- several types --------------------------------------------------------------------------


def _read_mag(dataset: Dataset, root: Path, undirected: bool) -> GraphStreams:
    """Papers have features, labels, years and splits; the other types have nodes only.

    The field edge_reltype is left out: it numbers the relations, and each stands by itself here.
    """
    raw, labelled = root / "raw", "paper"
    listed = {name: raw / f"{name}.csv.gz" for name in ("num-node-dict", "triplet-type-list")}
    files = {
        "x": raw / "node-feat" / labelled / "node-feat.csv.gz",
        "y": raw / "node-label" / labelled / "node-label.csv.gz",
        "year": raw / "node-feat" / labelled / "node_year.csv.gz",
    }
    splits = _split_files(root / "split" / dataset.split / labelled)
    found = listed["triplet-type-list"].is_file()
    relations = _relations(listed["triplet-type-list"]) if found else []
    edges = {key: raw / "relations" / "___".join(key) / "edge.csv.gz" for key in relations}
    counts = {key: path.with_name("num-edge-list.csv.gz") for key, path in edges.items()}
    require([*listed.values(), *files.values(), *splits.values(), *edges.values(), *counts.values()], str(root))
    sizes = _sizes(listed["num-node-dict"], [*(end for key in relations for end in (key[0], key[2])), labelled])
    fields = {
        "x": csv_table(files["x"], "float32"),
        "y": labels(csv_table(files["y"], "float64"), dataset.num_classes),
        "year": flat(csv_table(files["year"], "int64")),
    }
    told_by = listed["num-node-dict"].name
    streams = []
    for name, size in sizes.items():
        of_type = (fields, splits) if name == labelled else ({}, {})
        streams.append(_node_stream(name, of_type[0], Count("nodes", size, told_by), of_type[1]))
    edge_streams = []
    for key, path in edges.items():
        ends = EdgeSource(
            [_two_columns(csv_table(path, "int64"))], Count("edges", single_count(counts[key]), "num-edge-list")
        )
        edge_streams.append(edge_stream(key, ends, (sizes[key[0]], sizes[key[2]]), _rule(key, undirected)))
    return GraphStreams(streams, edge_streams, homogeneous=False)


def _rule(key: RelationName, undirected: bool) -> EdgeRule:
    if not undirected:
        return AS_IT_COMES
    return MERGED if key[0] == key[2] else EdgeRule(reverse=f"rev_{key[1]}", in_order=True)


def _relations(path: Path) -> list[RelationName]:
    """In OGB's order, which is that of the names."""
    found = []
    for number, row in enumerate(small_csv(path), 1):
        if len(row) != 3 or any("/" in name or not name for name in row):
            raise DataError(f"{path}, row {number}: {row} is not a source type, a name and a destination type")
        found.append((row[0], row[1], row[2]))
    return sorted(found)


def _sizes(path: Path, named: Sequence[str]) -> dict[str, int]:
    """The number of nodes of every type, in OGB's order."""
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


BLOCK_BYTES = 1 << 20  # of text; Arrow reads up to 32 blocks ahead
PARSED = {"float32": "float64", "float64": "float64", "int64": "int64"}  # OGB's readers round twice: so do we


def csv_table(path: Path, dtype: str, block: int = BLOCK_BYTES) -> RowSource:
    """The rows of a file, [n, columns] of this dtype. An empty field is NaN among floats, an error among integers."""
    return RowSource(str(path), Field(dtype, (_num_columns(path),)), lambda: _chunks(path, dtype, block))


def small_csv(path: Path) -> list[list[str]]:
    """All rows of a small file, header and all."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return [row for row in csv.reader(file) if row]
    except (OSError, EOFError, zlib.error, UnicodeError, csv.Error) as error:
        raise _damaged(path, error) from error


def single_count(path: Path) -> int:
    """The number in a file that lists the size of every graph, where there is one graph."""
    rows = small_csv(path)
    if len(rows) != 1 or not rows[0][0].strip().isdigit():
        raise DataError(f"{path} holds {rows[:2]}; one number was expected, the size of the one graph")
    return int(rows[0][0])


def _num_columns(path: Path) -> int:
    try:
        with gzip.open(path, "rb") as file:
            line = file.readline()
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error
    return line.count(b",") + 1


def _chunks(path: Path, dtype: str, block: int) -> Iterator[Tensor]:
    with needs("tables"):
        import pyarrow as pa
        from pyarrow import csv as arrow_csv
    names = [str(column) for column in range(_num_columns(path))]
    first = 0
    try:
        with pa.input_stream(str(path), compression="gzip") as stream:
            reader = arrow_csv.open_csv(
                stream,
                arrow_csv.ReadOptions(use_threads=False, block_size=block, column_names=names),
                convert_options=arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, PARSED[dtype])),
            )
            for batch in reader:
                columns = [_values(path, column, dtype, first) for column in batch.columns]
                first += batch.num_rows
                yield torch.from_numpy(np.stack(columns, axis=1))
    except pa.ArrowInvalid as error:
        if _is_empty(path):
            return
        raise DataError(_bad_row(path, dtype, len(names), first) or f"{path}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error


def _values(path: Path, column: Any, dtype: str, first: int) -> NDArray[Any]:
    """The values of one column of a batch."""
    if column.null_count and dtype == "int64":
        row = first + column.is_null().to_pylist().index(True) + 1
        raise DataError(f"{path}, row {row}: a value is missing; fill it")
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False).astype(dtype)
    return values


def _bad_row(path: Path, dtype: str, columns: int, first: int) -> str | None:
    """Which row Arrow stumbled over: it tells the value at most. Slow, and only on the way out."""
    parse = int if dtype == "int64" else float
    with gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="") as file:
        for number, row in enumerate(filter(None, csv.reader(file)), 1):
            if number > first and len(row) != columns:
                return f"{path}, row {number}: {len(row)} values where row 1 has {columns}; give every row as many"
            for value in filter(None, row) if number > first else ():
                try:
                    parse(value)
                except ValueError:
                    return f"{path}, row {number}: {value!r} is no {'integer' if parse is int else 'number'}"
    return None


def _is_empty(path: Path) -> bool:
    with gzip.open(path, "rb") as file:
        return file.read(1) == b""


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is cut short or damaged ({error or type(error).__name__}); get it again")
