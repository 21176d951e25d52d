"""Import partition folders of GraphLearn-for-PyTorch (GLT) as stores with the same number of parts.

The nodes of a part get consecutive ids, and GLT's ids are kept in the field original_id. Renumbering takes one integer
per node in memory, and two at the peak. The file META, a pickle, is not read: the names of files give types and
parts. Tensors are loaded with weights_only, so that nothing is unpickled.
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoploom.errors import ConfigError, DataError
from hoploom.ingest.formats.row_source import CHUNK_BYTES, check_values, require_files, write_graph
from hoploom.ingest.stream import EdgeRows, EdgeStream, NodeFields, NodeStream, Progress, Rows, StoreOptions
from hoploom.schema import (
    DTYPE_NAMES,
    EDGE_ID,
    HOMOGENEOUS_RELATION,
    HOMOGENEOUS_TYPE,
    ORIGINAL_ID,
    Field,
    RelationName,
)
from hoploom.store import Store

PICKLED = "is a pickle, which Hoploom never loads; rewrite it with torch.save as a .pt (docs/importing.md shows how)"
Features = tuple[Path, Tensor, Tensor]  # the folder, its feats.pt and its ids.pt
COMPUTED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # torch lacks operations for other integers


def import_glt(
    folder: str | Path,
    out: str | Path,
    *,
    labels: Any = None,
    splits: Mapping[str, Any] | None = None,
    memory: int = StoreOptions.memory,
    progress: Progress | None = None,
) -> Store:
    """Write a store with the parts of a GLT partition folder and open it. GLT's edge ids become the field `edge_id`.

    GLT keeps labels and splits in other folders: give the .pt file of the labels, and for each split a .pt file of ids,
    a folder of such files, or a list of files and folders. With several node types, give dicts from node type to these.

    >>> import_glt("products-partitions", "products.store", labels="label.pt", splits={"train": "train-partitions"})
    """
    layout = _read_folder(Path(folder))
    labels, splits = ({} if given is None else given for given in (labels, splits))
    if layout.homogeneous:
        labels = labels if isinstance(labels, Mapping) else {HOMOGENEOUS_TYPE: labels}
        splits = {HOMOGENEOUS_TYPE: splits}
    for what, given in (("labels", labels), ("splits", splits)):
        unknown = sorted(given.keys() - layout.books.keys()) if isinstance(given, Mapping) else given
        if unknown or not isinstance(given, Mapping):
            raise ConfigError(f"{what} are given for {unknown}; give them by node type, of {list(layout.books)}")
    orders = {}
    for name, book in layout.books.items():
        store_ids = torch.empty(book.numel(), dtype=torch.int64)
        store_ids[torch.argsort(book, stable=True)] = torch.arange(book.numel())
        sizes = torch.bincount(book.to(torch.int64), minlength=layout.num_parts)
        orders[name] = Renumbering(store_ids, [0, *torch.cumsum(sizes, 0).tolist()])
    nodes = [_nodes(layout, name, new, labels.get(name), splits.get(name, {})) for name, new in orders.items()]
    edges = [_edges(layout, key, orders[key[0]], orders[key[2]]) for key in layout.relations]
    weight = "weight" if any("weight" in stream.fields for stream in edges) else None
    options = StoreOptions(weight=weight, homogeneous=layout.homogeneous, memory=memory)
    return write_graph(out, nodes, edges, options, progress)


# --- the folder -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _GltFolder:
    """The content of a GLT partition folder: the number of parts, the part of each node, and the types."""

    root: Path
    num_parts: int
    books: dict[str, Tensor]  # node type -> [num_nodes], the part of every node
    relations: Sequence[RelationName]
    homogeneous: bool

    def folders(self, kind: str, owner: str | RelationName) -> list[Path]:
        """Return each part's folder of `kind` (graph, node_feat or edge_feat) for the node type or relation `owner`."""
        name = "" if self.homogeneous else owner if isinstance(owner, str) else "__".join(owner)
        return [self.root / f"part{number}" / kind / name for number in range(self.num_parts)]

    def features(self, kind: str, owner: str | RelationName, num_rows: Sequence[int]) -> list[Features]:
        """Return (folder, features, ids) for each part with rows of type `owner`; [] if the type has no features."""
        folders = [path for path, rows in zip(self.folders(kind, owner), num_rows, strict=True) if rows]
        if not any(folder.is_dir() for folder in folders):
            return []
        for path in (folder / name for folder in folders for name in ("feats.pkl", "ids.pkl")):
            if path.exists() and not path.with_suffix(".pt").exists():
                raise DataError(f"{path} {PICKLED}")
        require_files([folder / name for folder in folders for name in ("feats.pt", "ids.pt")], "the features")
        files = [(folder, _read_tensor(folder / "feats.pt"), _read_ids(folder / "ids.pt")) for folder in folders]
        field = _field(files[0][1], folders[0] / "feats.pt")
        for folder, feats, ids in files:
            if _field(feats, folder / "feats.pt") != field or len(feats) != len(ids):
                found = f"{feats.dtype} {tuple(feats.shape)}"
                raise DataError(f"{folder / 'feats.pt'} has {found}; as many rows as ids.pt of {field} fit")
        return files


def _read_folder(root: Path) -> _GltFolder:
    """Return what a GLT partition folder contains; raise DataError if files are missing."""
    homogeneous = not (root / "node_pb").is_dir()
    if homogeneous:
        require_files([root / "node_pb.pt"], str(root))
        files = {HOMOGENEOUS_TYPE: root / "node_pb.pt"}
    else:
        files = {path.stem: path for path in sorted((root / "node_pb").glob("*.pt"))}
    books = {name: _read_ids(path) for name, path in files.items()}
    for name, book in books.items():
        if book.numel() and int(book.min()) < 0:
            raise DataError(f"{files[name]} holds {int(book.min())}; the part of every node was expected")
    found = len([path for path in root.glob("part*") if path.is_dir() and path.name[4:].isdigit()])
    named = max((int(book.max()) + 1 for book in books.values() if book.numel()), default=0)
    relations = [HOMOGENEOUS_RELATION]
    if not homogeneous:
        names = {path.name for path in root.glob("part*/graph/*") if path.is_dir()}
        relations = [_relation(root, name, list(books)) for name in sorted(names)]
    folder = _GltFolder(root, max(found, named, 1), books, relations, homogeneous)
    graphs = [graph for key in relations for graph in folder.folders("graph", key)]
    require_files([graph / name for graph in graphs for name in ("rows.pt", "cols.pt")], str(root))
    return folder


def _relation(root: Path, name: str, types: Sequence[str]) -> RelationName:
    """Return (source, name, destination) from a folder's name source__name__destination; each may have underscores."""
    found = [
        (source, name[len(source) + 2 : -len(destination) - 2], destination)
        for source in types
        for destination in types
        if name.startswith(f"{source}__")
        and name.endswith(f"__{destination}")
        and len(name) > len(source) + len(destination) + 4
    ]
    if len(found) != 1:
        meant = f"it may mean {found}" if found else f"no two of the node types {list(types)} are its ends"
        raise DataError(f"{root} has edges named {name!r}, but {meant}; rename the folder and its files")
    return found[0]


def _read_tensor(path: Path) -> Tensor:
    """Return the tensor in a .pt file, memory-mapped if the file's format allows."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; give the path of a tensor that torch.save wrote")
    try:
        rows = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises what its unpickler, its reader or the system do
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        if "weights only" in reason.lower() or type(error).__name__ == "UnpicklingError":
            hint = f"save a plain tensor with torch.save ({reason:.100})"
            raise DataError(f"{path} cannot be read without unpickling, which Hoploom never does; {hint}") from error
        raise DataError(f"{path} is cut short or damaged ({reason:.100}); get it again") from error
    if not isinstance(rows, Tensor) or rows.layout != torch.strided:
        raise DataError(f"{path} holds a {type(rows).__name__}; save a plain tensor with torch.save")
    if rows.dim() == 0:
        raise DataError(f"{path} holds a single value; rows were expected, so save a tensor with one per node or edge")
    return rows.detach()


def _read_ids(path: Path) -> Tensor:
    """Return the integer ids in a .pt file as [n]; the file may hold [n] or [n, 1]."""
    ids = _read_tensor(path)
    is_integer = not (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex())
    if ids.shape[1:] not in ((), (1,)) or (ids.numel() and not is_integer):
        found = f"dtype {ids.dtype} and shape {tuple(ids.shape)}"
        raise DataError(f"{path} has {found}; ids are integers in a list, so save it as int64")
    return (ids if ids.dtype in COMPUTED else ids.to(torch.int64)).reshape(-1)


# --- nodes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Renumbering:
    """The map from GLT's ids of one node type to store ids."""

    store_ids: Tensor  # [num_nodes] int64, by GLT's id
    bounds: Sequence[int]  # part p holds the store ids bounds[p] to bounds[p + 1] - 1

    @property
    def num_nodes(self) -> int:
        return self.store_ids.numel()

    def renumbered(self, ids: Tensor, path: Path, first: int = 0) -> Tensor:
        """Return the store ids of GLT's `ids`. Errors name the file `path` and the row, counted from `first`."""
        check_values(ids, self.num_nodes, str(path), first, "node")
        return self.store_ids[ids.to(torch.int64)]


def _nodes(layout: _GltFolder, name: str, new: Renumbering, labels: Any, splits: Mapping[str, Any]) -> NodeStream:
    sizes = torch.bincount(layout.books[name].to(torch.int64), minlength=layout.num_parts)
    files, blocks = layout.features("node_feat", name, sizes.tolist()), []
    if files:
        blocks.append(_feature_block(files, new))
    if labels is not None:
        values = _read_tensor(Path(labels))
        if len(values) != new.num_nodes:
            raise DataError(f"{labels} has {len(values)} rows for {new.num_nodes} nodes; give one row per node")
        values = values.view(-1) if values.shape[1:] == (1,) else values
        blocks.append(_in_order("y", _field(values, Path(labels)), new, values))
    if not torch.equal(new.store_ids, torch.arange(new.num_nodes)):
        blocks.append(_in_order(ORIGINAL_ID, Field("int64"), new))
    members = {split: partial(_members, _id_files(split, given), new) for split, given in splits.items()}
    return NodeStream(name, new.bounds, blocks, members)


def _in_order(name: str, field: Field, new: Renumbering, values: Tensor | None = None) -> NodeFields:
    """Return a field with its rows in the order of store ids. `values` are in GLT's order; None stores GLT's ids."""

    def rows() -> Iterator[Rows]:
        originals = torch.empty_like(new.store_ids)
        originals[new.store_ids] = torch.arange(new.num_nodes)
        for first, ids in _pieces(originals, field.row_bytes):
            yield Rows(torch.arange(first, first + len(ids)), {name: ids if values is None else values[ids]})

    return NodeFields({name: field}, rows)


def _feature_block(files: Sequence[Features], new: Renumbering) -> NodeFields:
    field, counts = _field(files[0][1], files[0][0]), torch.zeros(new.num_nodes, dtype=torch.int64)
    for folder, _, ids in files:
        counts += torch.bincount(new.renumbered(ids, folder / "ids.pt"), minlength=new.num_nodes)
    wrong = torch.nonzero(counts[new.store_ids] != 1).view(-1)
    if wrong.numel():
        times = int(counts[new.store_ids[wrong[0]]])
        raise DataError(f"{files[0][0]} and its like have {times} rows for node {int(wrong[0])}; give one each")

    def rows() -> Iterator[Rows]:
        for _, feats, ids in files:
            for first, some in _pieces(ids, field.row_bytes):
                yield Rows(new.store_ids[some.to(torch.int64)], {"x": feats[first : first + len(some)]})

    return NodeFields({"x": field}, rows)


def _id_files(split: str, given: Any) -> list[Path]:
    """Return the .pt files of a split, which is given as a file, a folder of files, or a list of files and folders."""
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
    return files


def _members(files: Sequence[Path], new: Renumbering) -> Iterator[Tensor]:
    found = [new.renumbered(_read_ids(file), file) for file in files]
    counts = torch.bincount(torch.cat(found), minlength=new.num_nodes)[new.store_ids]
    if (counts > 1).any():
        node = int(counts.argmax())
        having = [str(file) for file, ids in zip(files, found, strict=True) if (ids == new.store_ids[node]).any()]
        where = f"in {having[0]} and {having[1]}" if len(having) > 1 else f"twice in {having[0]}"
        raise DataError(f"node {node} is {where}; list a node once")
    yield torch.cat(found)


# --- edges ----------------------------------------------------------------------------------


def _edges(layout: _GltFolder, key: RelationName, sources: Renumbering, destinations: Renumbering) -> EdgeStream:
    folders = layout.folders("graph", key)
    parts = [_edge_columns(folder) for folder in folders]
    tables = layout.features("edge_feat", key, [1] * len(parts))
    for folder, columns, (_, feats, ids) in zip(folders, parts, tables, strict=False):  # no tables: no features
        columns["edge_attr"] = _by_edge(feats, ids, columns, folder)
    name, found = "" if layout.homogeneous else "__".join(key), sum(len(columns["rows"]) for columns in parts)
    book = layout.root / "edge_pb" / f"{name}.pt" if name else layout.root / "edge_pb.pt"
    if book.is_file() and (counted := len(_read_tensor(book))) != found:
        raise DataError(f"{book} counts {counted} edges, the parts hold {found}; partition again")
    described = [
        {name: _field(values, folder) for name, values in columns.items() if name not in ("rows", "cols")}
        for columns, folder in zip(parts, folders, strict=True)
    ]
    for fields, folder in zip(described, folders, strict=True):
        if fields != described[0]:
            others = f"{folders[0]} has {described[0]}"
            raise DataError(f"{folder} has the fields {fields}, {others}; all parts need the same")

    def rows() -> Iterator[EdgeRows]:
        for folder, columns in zip(folders, parts, strict=True):
            yield from _edge_rows(folder, columns, sources, destinations)

    return EdgeStream(key, described[0], rows)


def _edge_columns(folder: Path) -> dict[str, Tensor]:
    """Return a part's edges as tensors by name: rows, cols, and edge ids and weights if `folder` has files of them."""
    names = {"rows": "rows.pt", "cols": "cols.pt", EDGE_ID: "eids.pt", "weight": "weights.pt"}
    columns = {
        ours: (_read_tensor if ours == "weight" else _read_ids)(folder / file)
        for ours, file in names.items()
        if (folder / file).is_file()
    }
    for name, values in columns.items():
        if values.shape != columns["rows"].shape or values.dim() != 1:
            shape = tuple(columns["rows"].shape)
            raise DataError(f"{folder / names[name]} has shape {tuple(values.shape)}, rows.pt has {shape}; give a list")
    return columns


def _by_edge(feats: Tensor, ids: Tensor, columns: Mapping[str, Tensor], folder: Path) -> Tensor:
    """Return `feats` in the order of the edges in `columns`; row i of `feats` belongs to the edge with id ids[i]."""
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


def _edge_rows(
    folder: Path, columns: Mapping[str, Tensor], sources: Renumbering, destinations: Renumbering
) -> Iterator[EdgeRows]:
    row_bytes = sum(max(1, values[:1].numel()) * values.element_size() for values in columns.values())
    for first, rows in _pieces(columns["rows"], row_bytes):
        piece = {name: values[first : first + len(rows)] for name, values in columns.items()}
        from_ids = sources.renumbered(piece.pop("rows"), folder / "rows.pt", first)
        to_ids = destinations.renumbered(piece.pop("cols"), folder / "cols.pt", first)
        yield EdgeRows(from_ids, to_ids, piece)


def _pieces(values: Tensor, row_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """Yield consecutive rows of `values`, about CHUNK_BYTES at a time, each with the index of its first row."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    for begin in range(0, len(values), step):
        yield begin, values[begin : begin + step]


def _field(values: Tensor, path: Path) -> Field:
    if values.dtype not in DTYPE_NAMES:
        raise DataError(f"{path} has dtype {values.dtype}; save it as one of {sorted(DTYPE_NAMES.values())}")
    return Field(DTYPE_NAMES[values.dtype], tuple(values.shape[1:]))
