"""Partition folders of GraphLearn-for-PyTorch as stores of as many parts.

A store numbers the nodes of a part in a row, so nodes get new ids, and their own are kept in the field original_id.
That takes an integer per node in memory, and two for a while.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoploom.errors import ConfigError, DataError
from hoploom.ingest.formats.glt_folder import GltFolder, read_folder, read_ids, read_tensor
from hoploom.ingest.formats.row_source import CHUNK_BYTES, check_values, write_graph
from hoploom.ingest.stream import EdgeRows, EdgeStream, NodeFields, NodeStream, Progress, Rows, StoreOptions
from hoploom.schema import DTYPE_NAMES, EDGE_ID, HOMOGENEOUS_TYPE, ORIGINAL_ID, Field, RelationName
from hoploom.store import Store


def import_glt(
    folder: str | Path,
    out: str | Path,
    *,
    labels: Any = None,
    splits: Mapping[str, Any] | None = None,
    memory: int = StoreOptions.memory,
    progress: Progress | None = None,
) -> Store:
    """Write a store from a GLT partition folder and open it: a part for each of GLT's, `edge_id` for its edge ids.

    GLT keeps labels and splits in other folders: give the .pt (or .npy) file of the labels, and for each split a file
    of ids, a folder of them, or a list of either. With several node types, give both by type.

    >>> import_glt("products-partitions", "products.store", labels="label.pt", splits={"train": "train-partitions"})
    """
    layout = read_folder(Path(folder))
    labels, splits = ({} if given is None else given for given in (labels, splits))
    if layout.homogeneous:
        labels = labels if isinstance(labels, Mapping) else {HOMOGENEOUS_TYPE: labels}
        splits = {HOMOGENEOUS_TYPE: splits}
    for what, given in (("labels", labels), ("splits", splits)):
        unknown = sorted(given.keys() - layout.books.keys()) if isinstance(given, Mapping) else given
        if unknown or not isinstance(given, Mapping):
            raise ConfigError(f"{what} are given for {unknown}; give them by node type, of {list(layout.books)}")
    orders = {name: _renumber(book, layout.num_parts) for name, book in layout.books.items()}
    nodes = [_nodes(layout, name, new, labels.get(name), splits.get(name, {})) for name, new in orders.items()]
    edges = [_edges(layout, key, orders[key[0]], orders[key[2]]) for key in layout.relations]
    weight = "weight" if any("weight" in stream.fields for stream in edges) else None
    options = StoreOptions(weight=weight, homogeneous=layout.homogeneous, memory=memory)
    return write_graph(out, nodes, edges, options, progress)


# --- nodes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Renumbering:
    """GLT's ids and the store's."""

    store_ids: Tensor  # [num_nodes] int64, by GLT's id
    bounds: Sequence[int]  # of the parts

    @property
    def num_nodes(self) -> int:
        return self.store_ids.numel()

    def of(self, ids: Tensor, path: Path, first: int = 0) -> Tensor:
        """The store's ids of these of GLT's, in a file from row `first` on."""
        check_values(ids, self.num_nodes, str(path), first, "node")
        return self.store_ids[ids.to(torch.int64)]


def _renumber(book: Tensor, num_parts: int) -> Renumbering:
    store_ids = torch.empty(book.numel(), dtype=torch.int64)
    store_ids[torch.argsort(book, stable=True)] = torch.arange(book.numel())
    sizes = torch.bincount(book.to(torch.int64), minlength=num_parts)
    return Renumbering(store_ids, [0, *torch.cumsum(sizes, 0).tolist()])


def _nodes(layout: GltFolder, name: str, new: Renumbering, labels: Any, splits: Mapping[str, Any]) -> NodeStream:
    blocks = []
    if folders := layout.node_features(name):
        blocks.append(_feature_block(folders, new))
    if labels is not None:
        values = read_tensor(Path(labels))
        if len(values) != new.num_nodes:
            raise DataError(f"{labels} has {len(values)} rows for {new.num_nodes} nodes; give one row per node")
        values = values.view(-1) if values.shape[1:] == (1,) else values
        blocks.append(_in_order("y", _field(values, Path(labels)), new, values))
    if not torch.equal(new.store_ids, torch.arange(new.num_nodes)):
        blocks.append(_in_order(ORIGINAL_ID, Field("int64"), new))
    members = {split: partial(_members, _id_files(split, given), new) for split, given in splits.items()}
    return NodeStream(name, new.bounds, blocks, members)


def _in_order(name: str, field: Field, new: Renumbering, values: Tensor | None = None) -> NodeFields:
    """Values by GLT's ids, or these ids themselves, in the store's order: rows that come so need no spool."""

    def rows() -> Iterator[Rows]:
        originals = torch.empty_like(new.store_ids)
        originals[new.store_ids] = torch.arange(new.num_nodes)
        for first, ids in _pieces(originals, field.row_bytes):
            yield Rows(torch.arange(first, first + len(ids)), {name: ids if values is None else values[ids]})

    return NodeFields({name: field}, rows)


def _feature_block(folders: Sequence[Path], new: Renumbering) -> NodeFields:
    files = [(read_tensor(folder / "feats.pt"), read_ids(folder / "ids.pt")) for folder in folders]
    field = _field(files[0][0], folders[0] / "feats.pt")
    counts = torch.zeros(new.num_nodes, dtype=torch.int64)
    for (feats, ids), folder in zip(files, folders, strict=True):
        if _field(feats, folder / "feats.pt") != field or len(feats) != len(ids):
            shape = tuple(feats.shape)
            raise DataError(f"{folder / 'feats.pt'} has {feats.dtype} {shape}; as many rows as ids.pt of {field} fit")
        counts += torch.bincount(new.of(ids, folder / "ids.pt"), minlength=new.num_nodes)
    wrong = torch.nonzero(counts[new.store_ids] != 1).view(-1)
    if wrong.numel():
        times = int(counts[new.store_ids[wrong[0]]])
        raise DataError(f"{folders[0]} and its like have {times} rows for node {int(wrong[0])}; give one each")

    def rows() -> Iterator[Rows]:
        for feats, ids in files:
            for first, some in _pieces(ids, field.row_bytes):
                yield Rows(new.store_ids[some.to(torch.int64)], {"x": feats[first : first + len(some)]})

    return NodeFields({"x": field}, rows)


def _id_files(split: str, given: Any) -> list[Path]:
    """The files of a split: of a file, a folder of them, or a list of either."""
    paths = given if isinstance(given, list | tuple) else [given]
    if not paths or not all(isinstance(path, str | Path) for path in paths):
        what = f"{given!r:.80}" if isinstance(given, list | tuple) else f"a {type(given).__name__}"
        raise ConfigError(f"split {split!r} is {what}; give a file of node ids, a folder of them, or a list of either")
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("*.pt")) if path.is_dir() else [path]
        if not found:
            raise DataError(f"{path} holds no .pt file; give a file of node ids, or a folder of them")
        files += found
    resolved = [file.resolve() for file in files]
    for place, file in enumerate(resolved):
        if file in resolved[:place]:
            raise ConfigError(f"split {split!r} has {files[place]} twice; list it once, by itself or by its folder")
    return files


def _members(files: Sequence[Path], new: Renumbering) -> Iterator[Tensor]:
    found = [new.of(read_ids(file), file) for file in files]
    counts = torch.bincount(torch.cat(found), minlength=new.num_nodes)[new.store_ids]
    if (counts > 1).any():
        node = int(counts.argmax())
        having = [str(file) for file, ids in zip(files, found, strict=True) if (ids == new.store_ids[node]).any()]
        where = f"in {having[0]} and {having[1]}" if len(having) > 1 else f"twice in {having[0]}"
        raise DataError(f"node {node} is {where}; list a node once")
    yield torch.cat(found)


# --- edges ----------------------------------------------------------------------------------


def _edges(layout: GltFolder, key: RelationName, sources: Renumbering, destinations: Renumbering) -> EdgeStream:
    folders = layout.graph_folders(key)
    features = layout.edge_features(key)
    parts = [_edge_columns(folder) for folder in folders]
    if features:
        tables = [(read_tensor(folder / "feats.pt"), read_ids(folder / "ids.pt")) for folder in features]
        if layout.cached:
            tables = [(torch.cat([feats for feats, _ in tables]), torch.cat([ids for _, ids in tables]))]
        for columns, folder, (feats, ids) in zip(parts, folders, tables, strict=True):
            columns["edge_attr"] = _by_edge(feats, ids, columns, folder)
    described = _same_fields(parts, folders)
    book, found = layout.edge_book(key), sum(len(columns["rows"]) for columns in parts)
    if book.is_file() and (counted := len(read_tensor(book))) != found:
        raise DataError(f"{book} counts {counted} edges, the parts hold {found}; partition again")

    def rows() -> Iterator[EdgeRows]:
        for folder, columns in zip(folders, parts, strict=True):
            yield from _edge_rows(folder, columns, sources, destinations)

    return EdgeStream(key, described, rows)


def _edge_columns(folder: Path) -> dict[str, Tensor]:
    """rows, cols, and what else is there, each with an entry per edge."""
    names = {"rows": "rows.pt", "cols": "cols.pt", EDGE_ID: "eids.pt", "weight": "weights.pt"}
    columns = {
        ours: (read_tensor if ours == "weight" else read_ids)(folder / file)
        for ours, file in names.items()
        if (folder / file).is_file()
    }
    for name, values in columns.items():
        if values.shape != columns["rows"].shape or values.dim() != 1:
            shape = tuple(columns["rows"].shape)
            raise DataError(f"{folder / names[name]} has shape {tuple(values.shape)}, rows.pt has {shape}; give a list")
    return columns


def _by_edge(feats: Tensor, ids: Tensor, columns: Mapping[str, Tensor], folder: Path) -> Tensor:
    """Features in the order of the edges."""
    if EDGE_ID not in columns:
        raise DataError(f"{folder} has no eids.pt, so that edges cannot find their features; partition with edge ids")
    wanted = columns[EDGE_ID]
    if torch.equal(ids, wanted):
        return feats
    ordered, positions = torch.sort(ids)
    places = torch.searchsorted(ordered, wanted).clamp_(max=max(0, len(ordered) - 1))
    if len(wanted) and (not len(ordered) or not torch.equal(ordered[places], wanted)):
        missing = wanted if not len(ordered) else wanted[ordered[places] != wanted]
        raise DataError(f"{folder} has edge {int(missing[0])}, but its edge_feat has no features of it")
    return feats[positions[places]]


def _same_fields(parts: Sequence[Mapping[str, Tensor]], folders: Sequence[Path]) -> dict[str, Field]:
    described = [
        {name: _field(values, folder) for name, values in columns.items() if name not in ("rows", "cols")}
        for columns, folder in zip(parts, folders, strict=True)
    ]
    for fields, folder in zip(described, folders, strict=True):
        if fields != described[0]:
            others = f"{folders[0]} has {described[0]}"
            raise DataError(f"{folder} has the fields {fields}, {others}; all parts need the same")
    return described[0]


def _edge_rows(
    folder: Path, columns: Mapping[str, Tensor], sources: Renumbering, destinations: Renumbering
) -> Iterator[EdgeRows]:
    row_bytes = sum(max(1, values[:1].numel()) * values.element_size() for values in columns.values())
    for first, rows in _pieces(columns["rows"], row_bytes):
        piece = {name: values[first : first + len(rows)] for name, values in columns.items()}
        from_ids = sources.of(piece.pop("rows"), folder / "rows.pt", first)
        to_ids = destinations.of(piece.pop("cols"), folder / "cols.pt", first)
        yield EdgeRows(from_ids, to_ids, piece)


def _pieces(values: Tensor, row_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """Consecutive rows, with the number of the first."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    for begin in range(0, len(values), step):
        yield begin, values[begin : begin + step]


def _field(values: Tensor, path: Path) -> Field:
    if values.dtype not in DTYPE_NAMES:
        raise DataError(f"{path} has dtype {values.dtype}; save it as one of {sorted(DTYPE_NAMES.values())}")
    return Field(DTYPE_NAMES[values.dtype], tuple(values.shape[1:]))
