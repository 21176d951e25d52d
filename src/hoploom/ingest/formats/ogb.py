"""The raw folders of the Open Graph Benchmark as stores: what OGB's own reader gives, without holding it in memory.

Nodes keep their ids. What OGB's reader does is done here: inverse edges where a dataset lists one direction only,
labels that are not known, the names of splits ("valid" is "val" here).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from torch import Tensor

from hoploom.errors import ConfigError, DataError
from hoploom.ingest.formats.csvfile import csv_table, single_count, small_csv
from hoploom.ingest.formats.npz import Array, npz_pairs, npz_table, npz_whole, read_arrays
from hoploom.ingest.formats.pieces import Count, Ends, Graph, Table, block, edge_stream, flat, labels, members, require
from hoploom.ingest.formats.writing import Progress, write_graph
from hoploom.ingest.stream import EdgeRule, NodeStream, StoreOptions
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName
from hoploom.store import Store

SPLITS = {"train": "train", "val": "valid", "test": "test"}  # our name -> OGB's
AS_IT_COMES = EdgeRule(in_order=True)  # lists as from_pyg makes them of OGB's own edge_index
MERGED = EdgeRule(undirected=True, deduplicate=True)


@dataclass(frozen=True)
class Dataset:
    """What OGB's reader knows of a dataset besides its files."""

    read: Callable[["Dataset", Path, bool], Graph]
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


def read_ogb(name: str, folder: str | Path, *, undirected: bool = False) -> Graph:
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


def _read_csv(dataset: Dataset, root: Path, undirected: bool) -> Graph:
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
    ends = Ends([_two_columns(csv_table(files["edge"], "int64"))], edges, both_ways=dataset.both_ways)
    return _one_type(fields, nodes, ends, splits, undirected)


def _read_binary(dataset: Dataset, root: Path, undirected: bool) -> Graph:
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
    return _one_type(fields, nodes, Ends(npz_pairs(data["edge_index"]), edges), splits, undirected)


def _only(array: Array) -> int:
    if array.shape != (1,):
        raise DataError(f"{array.label} has shape {array.shape}; one number was expected, the size of the one graph")
    return int(npz_whole(array)[0])


def _one_type(
    fields: Mapping[str, Table], nodes: Count, ends: Ends, splits: Mapping[str, Path], undirected: bool
) -> Graph:
    rule = MERGED if undirected else AS_IT_COMES
    if undirected:
        ends = Ends(ends.tables, ends.count, ends.fields)  # both directions come from the rule
    sizes = (nodes.rows, nodes.rows)
    edges = [edge_stream(HOMOGENEOUS_RELATION, ends, sizes, rule)]
    return Graph([_node_stream(HOMOGENEOUS_TYPE, fields, nodes, splits)], edges, homogeneous=True)


def _node_stream(name: str, fields: Mapping[str, Table], nodes: Count, splits: Mapping[str, Path]) -> NodeStream:
    for table in fields.values():
        if table.num_rows is not None and table.num_rows != nodes.rows:
            raise DataError(f"{table.name} has {table.num_rows} rows for {nodes.rows} nodes ({nodes.told_by})")
    return NodeStream(
        name,
        [0, nodes.rows],
        [block(field, table, nodes) for field, table in fields.items()],
        {split: partial(_members, path, nodes.rows) for split, path in splits.items()},
    )


def _members(path: Path, num_nodes: int) -> Iterator[Tensor]:
    return members(csv_table(path, "int64"), num_nodes)()


def _split_files(folder: Path) -> dict[str, Path]:
    return {ours: folder / f"{theirs}.csv.gz" for ours, theirs in SPLITS.items()}


def _two_columns(table: Table) -> Table:
    if table.field.shape != (2,):
        raise DataError(f"{table.name} has {table.field.shape[0]} columns; an edge has a source and a destination")
    return table


# --- several types --------------------------------------------------------------------------


def _read_mag(dataset: Dataset, root: Path, undirected: bool) -> Graph:
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
        ends = Ends(
            [_two_columns(csv_table(path, "int64"))], Count("edges", single_count(counts[key]), "num-edge-list")
        )
        edge_streams.append(edge_stream(key, ends, (sizes[key[0]], sizes[key[2]]), _rule(key, undirected)))
    return Graph(streams, edge_streams, homogeneous=False)


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
