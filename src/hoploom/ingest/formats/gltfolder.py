"""What lies where in a partition folder of GraphLearn-for-PyTorch. META, a pickle, is not read: the names of files say
what it would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.formats.pieces import require
from hoploom.ingest.formats.torchfile import read_tensor
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
    book = read_tensor(path)
    if book.dim() != 1 or book.is_floating_point() or (book.numel() and int(book.min()) < 0):
        raise DataError(
            f"{path} has dtype {book.dtype} and shape {tuple(book.shape)}; the part of every node was expected"
        )
    return book


def _with_features(folders: Sequence[Path]) -> list[Path]:
    present = [folder for folder in folders if folder.is_dir()]
    if not present:
        return []
    for folder in present:
        for name in ("feats.pkl", "ids.pkl"):
            if (folder / name).exists() and not (folder / name).with_suffix(".pt").exists():
                raise DataError(f"{folder / name} {PICKLED}")
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
