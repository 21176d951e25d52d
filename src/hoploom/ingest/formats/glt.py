"""Partition folders of GraphLearn-for-PyTorch as stores of as many parts.

A store numbers the nodes of a part in a row, so nodes get new ids, and their own are kept in the field original_id.
That takes two integers per node in memory.
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
from hoploom.ingest.formats.row_source import (
    CHUNK_BYTES,
    GraphStreams,
    RowSource,
    check_values,
    mark_once,
    members,
    write_graph,
)
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

    GLT keeps labels and splits elsewhere: give the .pt (or .npy) file of the labels, and for each split a file of ids,
    or a folder of them. With several node types, give both by type.

    >>> import_glt("products-partitions", "products.store", labels="label.pt", splits={"train": "train-partitions"})
    """
    return write_graph(out, read_glt(folder, labels=labels, splits=splits), memory, progress)


def read_glt(folder: str | Path, *, labels: Any = None, splits: Mapping[str, Any] | None = None) -> GraphStreams:
    """The streams of a partition folder."""
    layout = read_folder(Path(folder))
    labels, splits = ({} if given is None else given for given in (labels, splits))
    if layout.homogeneous:
        labels = {HOMOGENEOUS_TYPE: labels} if not isinstance(labels, Mapping) else labels
        splits = {HOMOGENEOUS_TYPE: splits}
    _check_names(layout, labels, "labels")
    _check_names(layout, splits, "splits")
    renumberings = {name: _renumber(book, layout.num_parts) for name, book in layout.books.items()}
    nodes = [_nodes(layout, name, new, labels.get(name), splits.get(name, {})) for name, new in renumberings.items()]
    edges = [_edges(layout, key, renumberings[key[0]], renumberings[key[2]]) for key in layout.relations]
    return GraphStreams(nodes, edges, layout.homogeneous, weight=_weight(edges))


def _check_names(layout: GltFolder, given: Any, what: str) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} is {given!r}; give one per node type, of {list(layout.books)}")
    for name in given:
        if name not in layout.books:
            raise ConfigError(f"{what} names node type {name!r}; the node types are {list(layout.books)}")


def _weight(edges: Sequence[EdgeStream]) -> str | None:
    return "weight" if any("weight" in stream.fields for stream in edges) else None


# --- nodes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Renumbering:
    """GLT's ids and the store's."""

    store_ids: Tensor  # [num_nodes] int64, by GLT's id
    originals: Tensor  # [num_nodes] int64, by store id
    bounds: Sequence[int]

    @property
    def is_identity(self) -> bool:
        return torch.equal(self.originals, torch.arange(self.originals.numel()))


def _renumber(book: Tensor, num_parts: int) -> Renumbering:
    originals = torch.argsort(book, stable=True)
    store_ids = torch.empty_like(originals)
    store_ids[originals] = torch.arange(originals.numel())
    sizes = torch.bincount(book.to(torch.int64), minlength=num_parts)
    return Renumbering(store_ids, originals, [0, *torch.cumsum(sizes, 0).tolist()])


def _nodes(layout: GltFolder, name: str, new: Renumbering, labels: Any, splits: Mapping[str, Any]) -> NodeStream:
    blocks = []
    folders = layout.node_features(name)
    if folders:
        blocks.append(_feature_block(folders, new))
    if labels is not None:
        blocks.append(_by_original(("y", Path(labels)), new))
    if not new.is_identity:
        blocks.append(NodeFields({ORIGINAL_ID: Field("int64")}, lambda: _originals(new)))
    found = {split: partial(_members, Path(path), new) for split, path in splits.items()}
    return NodeStream(name, new.bounds, blocks, found)


def _originals(new: Renumbering) -> Iterator[Rows]:
    for begin, ids in _pieces(new.originals):
        yield Rows(torch.arange(begin, begin + len(ids)), {ORIGINAL_ID: ids})


def _feature_block(folders: Sequence[Path], new: Renumbering) -> NodeFields:
    files = [(read_tensor(folder / "feats.pt"), folder / "ids.pt") for folder in folders]
    field = _field(files[0][0], folders[0] / "feats.pt")
    for (feats, ids_file), folder in zip(files, folders, strict=True):
        if _field(feats, folder / "feats.pt") != field or len(feats) != len(read_ids(ids_file)):
            shape = tuple(feats.shape)
            raise DataError(f"{folder / 'feats.pt'} has {feats.dtype} {shape}; as many rows as ids.pt of {field} fit")

    def rows() -> Iterator[Rows]:
        seen = torch.zeros(new.store_ids.numel(), dtype=torch.bool)
        for feats, ids_file in files:
            for first, ids in _pieces(read_ids(ids_file), field.row_bytes):
                check_values(ids, seen.numel(), str(ids_file), first, "node")
                ids = ids.to(torch.int64)
                mark_once(ids, seen, str(ids_file), first)
                yield Rows(new.store_ids[ids], {"x": feats[first : first + len(ids)]})
        if not seen.all():
            raise DataError(f"{folders[0]} and its like have no features of node {int(torch.nonzero(~seen)[0])}")

    return NodeFields({"x": field}, rows)


def _by_original(source: tuple[str, Path], new: Renumbering) -> NodeFields:
    """A field from a file with a row for every node, by GLT's ids."""
    name, path = source
    values = read_tensor(path)
    count = new.store_ids.numel()
    if len(values) != count:
        raise DataError(f"{path} has {len(values)} rows for {count} nodes; give one row per node")
    values = values.view(-1) if values.dim() == 2 and values.shape[1] == 1 else values

    def rows() -> Iterator[Rows]:
        for begin, ids in _pieces(new.originals):
            yield Rows(torch.arange(begin, begin + len(ids)), {name: values[ids]})

    return NodeFields({name: _field(values, path)}, rows)


def _members(path: Path, new: Renumbering) -> Iterator[Tensor]:
    files = sorted(path.glob("*.pt")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no .pt file; give a file of node ids, or a folder of them")

    def chunks() -> Iterator[Tensor]:
        for file in files:
            yield from (piece for _, piece in _pieces(read_ids(file)))

    for ids in members(RowSource(str(path), Field("int64"), chunks), new.store_ids.numel())():
        yield new.store_ids[ids]


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
    _check_total(layout, key, parts)

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
            raise DataError(
                f"{folder} has the fields {fields}, {folders[0]} has {described[0]}; all parts need the same"
            )
    return described[0]


def _check_total(layout: GltFolder, key: RelationName, parts: Sequence[Mapping[str, Tensor]]) -> None:
    book = layout.edge_book(key)
    found = sum(len(columns["rows"]) for columns in parts)
    if book.is_file() and len(read_tensor(book)) != found:
        raise DataError(f"{book} counts {len(read_tensor(book))} edges, the parts hold {found}; partition again")


def _edge_rows(
    folder: Path, columns: Mapping[str, Tensor], sources: Renumbering, destinations: Renumbering
) -> Iterator[EdgeRows]:
    row_bytes = sum(max(1, values[:1].numel()) * values.element_size() for values in columns.values())
    for first, rows in _pieces(columns["rows"], row_bytes):
        piece = {name: values[first : first + len(rows)] for name, values in columns.items()}
        for name, new in (("rows", sources), ("cols", destinations)):
            check_values(piece[name], new.store_ids.numel(), str(folder / f"{name}.pt"), first, "node")
        yield EdgeRows(
            sources.store_ids[piece.pop("rows").to(torch.int64)],
            destinations.store_ids[piece.pop("cols").to(torch.int64)],
            piece,
        )


# --- tensors --------------------------------------------------------------------------------


def _pieces(values: Tensor, row_bytes: int = 8) -> Iterator[tuple[int, Tensor]]:
    """Consecutive rows, with the number of the first."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    for begin in range(0, len(values), step):
        yield begin, values[begin : begin + step]


def _field(values: Tensor, path: Path) -> Field:
    if values.dtype not in DTYPE_NAMES:
        raise DataError(f"{path} has dtype {values.dtype}; save it as one of {sorted(DTYPE_NAMES.values())}")
    return Field(DTYPE_NAMES[values.dtype], tuple(values.shape[1:]))
