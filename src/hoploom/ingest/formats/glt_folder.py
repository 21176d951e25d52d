"""What lies where in a partition folder of GraphLearn-for-PyTorch, and the tensors in its files.

META, a pickle, is not read: the names of files say what it would. Tensors are loaded with weights only, so nothing but
tensors is ever made of a file.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.formats.row_source import require
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE, RelationName

PICKLED = "is a pickle, which Hoploom never loads; rewrite it with torch.save as a .pt (docs/importing.md shows how)"


@dataclass(frozen=True)
class GltFolder:
    """The folder, the number of its parts, and its types."""

    root: Path
    num_parts: int
    books: dict[str, Tensor]  # node type -> [num_nodes], the part of every node
    relations: Sequence[RelationName]
    homogeneous: bool
    cached: bool  # the topology is in one folder for all parts

    def graph_folders(self, key: RelationName) -> list[Path]:
        """Where the edges of a relation are."""
        if self.cached:
            return [self._of_relation(self.root / "graph", key)]
        return [self._of_relation(part / "graph", key) for part in self._parts()]

    def edge_features(self, key: RelationName) -> list[Path]:
        """Folders with feats.pt and ids.pt, one per part; none if edges have no features."""
        return _with_features([self._of_relation(part / "edge_feat", key) for part in self._parts()])

    def node_features(self, name: str) -> list[Path]:
        """Folders with feats.pt and ids.pt, one per part that has nodes; none if nodes have no features."""
        sizes = torch.bincount(self.books[name].to(torch.int64), minlength=self.num_parts).tolist()
        folders = [part / "node_feat" for part, size in zip(self._parts(), sizes, strict=True) if size]
        return _with_features([folder if self.homogeneous else folder / name for folder in folders])

    def edge_book(self, key: RelationName) -> Path:
        return self.root / "edge_pb.pt" if self.homogeneous else self.root / "edge_pb" / f"{'__'.join(key)}.pt"

    def _parts(self) -> list[Path]:
        return [self.root / f"part{number}" for number in range(self.num_parts)]

    def _of_relation(self, folder: Path, key: RelationName) -> Path:
        return folder if self.homogeneous else folder / "__".join(key)


def read_folder(root: Path) -> GltFolder:
    """Look around; raise if files are missing."""
    homogeneous = not (root / "node_pb").is_dir()
    if homogeneous:
        require([root / "node_pb.pt"], str(root))
        files = {HOMOGENEOUS_TYPE: root / "node_pb.pt"}
    else:
        files = {path.stem: path for path in sorted((root / "node_pb").glob("*.pt"))}
    books = {name: _read_book(path) for name, path in files.items()}
    found = len([path for path in root.glob("part*") if path.is_dir() and path.name[4:].isdigit()])
    named = max((int(book.max()) + 1 for book in books.values() if book.numel()), default=0)
    cached = (root / "graph").is_dir()
    relations = [HOMOGENEOUS_RELATION] if homogeneous else _relations(root, list(books))
    folder = GltFolder(root, max(found, named, 1), books, relations, homogeneous, cached)
    graphs = [
        graph / name for key in relations for graph in folder.graph_folders(key) for name in ("rows.pt", "cols.pt")
    ]
    require(graphs, str(root))
    return folder


def _read_book(path: Path) -> Tensor:
    book = read_ids(path)
    if book.numel() and int(book.min()) < 0:
        raise DataError(f"{path} holds {int(book.min())}; the part of every node was expected")
    return book


def _with_features(folders: Sequence[Path]) -> list[Path]:
    present = [folder for folder in folders if folder.is_dir()]
    if not present:
        return []
    for path in (folder / name for folder in present for name in ("feats.pkl", "ids.pkl")):
        if path.exists() and not path.with_suffix(".pt").exists():
            raise DataError(f"{path} {PICKLED}")
    require([folder / name for folder in folders for name in ("feats.pt", "ids.pt")], "the features")
    return list(folders)


def _relations(root: Path, types: Sequence[str]) -> list[RelationName]:
    folders = [root / "graph", *root.glob("part*/graph")]
    names = sorted({path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir()})
    return [_relation(root, name, types) for name in names]


def _relation(root: Path, name: str, types: Sequence[str]) -> RelationName:
    """The relation that is written source__name__destination, where all three may hold underscores."""
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


COMPUTED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # torch hardly computes with other integers


def read_tensor(path: Path) -> Tensor:
    """The rows in a .pt or .npy file, mapped into memory where its format allows."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; give the path of a tensor that torch.save wrote")
    rows = _read_npy(path) if path.suffix == ".npy" else _read_pt(path)
    if rows.dim() == 0:
        raise DataError(f"{path} holds a single value; rows were expected, so save a tensor with one per node or edge")
    return rows


def read_ids(path: Path) -> Tensor:
    """The ids in a .pt or .npy file, [n]: integers, in a list or in one column."""
    ids = read_tensor(path)
    is_integer = not (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex())
    if ids.shape[1:] not in ((), (1,)) or (ids.numel() and not is_integer):
        found = f"dtype {ids.dtype} and shape {tuple(ids.shape)}"
        raise DataError(f"{path} has {found}; ids are integers in a list, so save it as int64")
    return (ids if ids.dtype in COMPUTED else ids.to(torch.int64)).reshape(-1)


def _read_pt(path: Path) -> Tensor:
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises what its unpickler, its reader or the system do
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        if "weights only" in reason.lower() or type(error).__name__ == "UnpicklingError":
            what = "cannot be read without unpickling, which Hoploom never does"
            raise DataError(f"{path} {what}; save a plain tensor with torch.save ({reason:.100})") from error
        raise DataError(f"{path} is cut short or damaged ({reason:.100}); get it again") from error
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise DataError(f"{path} holds a {type(value).__name__}; save a plain tensor with torch.save")
    return value.detach()


def _read_npy(path: Path) -> Tensor:
    try:
        values = np.load(path, mmap_mode="c", allow_pickle=False)
        if not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("="))
        return torch.from_numpy(values)
    except (TypeError, ValueError, OSError, EOFError) as error:
        reason = str(error).split(". ", 1)[0]
        raise DataError(f"{path} cannot be read ({reason}); save an array of plain numbers with numpy.save") from error
