"""Which files a key such as `files = "papers/*.parquet"` means: paths, globs, folders and URLs, in one fixed order.

The order is that of the list; what a glob or a folder gives is sorted by name, without names that begin with . or _.
"""

import fnmatch
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from hoploom.config.toml import quoted
from hoploom.config.values import nearest
from hoploom.ingest.tables.graph_file import GraphFile

KINDS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
COMPRESSED = (".gz", ".bz2", ".zst")  # of text
MAGIC = "*?["


@dataclass(frozen=True)
class TableFile:
    """A file of a table."""

    path: str  # absolute, or a URL
    shown: str  # as messages call it
    kind: str  # "parquet", "csv", "tsv", "arrow" or "npy"

    def open(self) -> Any:
        """The file for pyarrow to read; a .csv.gz is unpacked on the way."""
        filesystem, path = fs.FileSystem.from_uri(self.path) if is_url(self.path) else (fs.LocalFileSystem(), self.path)
        if self.kind in ("csv", "tsv"):
            return filesystem.open_input_stream(path, compression="detect")
        return filesystem.open_input_file(path)


def is_url(path: str) -> bool:
    return "://" in path


def kind_of(name: str, *, arrays: bool = False) -> str | None:
    """The format by the name's end; None: none that is read."""
    lowered = name.lower()
    if arrays:
        return "npy" if lowered.endswith(".npy") else None
    for ending in COMPRESSED:
        if lowered.endswith(ending):
            kind = kind_of(lowered.removesuffix(ending))
            return kind if kind in ("csv", "tsv") else None
    return KINDS.get(os.path.splitext(lowered)[1])


def find_files(
    recipe: GraphFile, key: str, patterns: tuple[str, ...], *, arrays: bool = False
) -> tuple[TableFile, ...]:
    """The files that a key names, e.g. those of nodes.paper.files."""
    found: dict[str, TableFile] = {}
    for pattern in patterns:
        for path, shown in _matches(recipe, key, pattern, arrays=arrays):
            if path in found:
                raise recipe.problem(key, f"{key} names {shown} twice; list every file once")
            kind = kind_of(path, arrays=arrays)
            if kind is None:
                known = ".npy" if arrays else ", ".join(sorted(KINDS))
                raise recipe.problem(key, f"{key}: {shown} has no known format; give one of {known}")
            found[path] = TableFile(path, shown, kind)
    return tuple(found.values())


def _matches(recipe: GraphFile, key: str, pattern: str, *, arrays: bool) -> Iterator[tuple[str, str]]:
    """Absolute paths, and as messages call them."""
    if is_url(pattern):
        yield from ((url, url) for url in _remote(recipe, key, pattern, arrays=arrays))
        return
    exact = recipe.folder / pattern
    if exact.is_file():
        yield os.path.abspath(exact), str(exact)
        return
    entries = [pattern] if exact.is_dir() else sorted(glob.glob(pattern, root_dir=recipe.folder, recursive=True))
    if not entries:
        raise recipe.problem(key, f"{key}: {_nothing(exact, pattern)}")
    files = [file for entry in entries for file in _files_in(recipe.folder / entry, arrays=arrays)]
    if not files:
        known = "a .npy file" if arrays else "a table: Parquet, CSV or Arrow"
        raise recipe.problem(key, f"{key}: nothing in {exact} ends like {known}; name the files")
    yield from ((os.path.abspath(file), str(file)) for file in files)


def _nothing(exact: Path, pattern: str) -> str:
    """Why there is no file, with the nearest name."""
    if any(sign in pattern for sign in MAGIC):
        return f"nothing matches {exact}; paths are relative to the recipe's folder"
    beside = sorted(os.listdir(exact.parent)) if exact.parent.is_dir() else []
    alike = nearest(exact.name, beside)
    hint = f"did you mean {quoted(alike)}?" if alike else "paths are relative to the recipe's folder"
    return f"{exact} does not exist; {hint}"


def _files_in(entry: Path, *, arrays: bool) -> Iterator[Path]:
    """An entry itself, or the tables below a folder."""
    if not entry.is_dir():
        if kind_of(entry.name, arrays=arrays) and entry.name[0] not in "._":
            yield entry
        return
    for child in sorted(entry.iterdir()):
        if child.name[0] not in "._":
            yield from _files_in(child, arrays=arrays)


def _remote(recipe: GraphFile, key: str, url: str, *, arrays: bool) -> list[str]:
    """The objects that a URL names: one, those below it, or those that match it."""
    scheme, _, path = url.partition("://")
    begin = path
    for sign in MAGIC:
        begin = begin.partition(sign)[0]
    base = path if begin == path else begin.rpartition("/")[0]
    try:
        filesystem, root = fs.FileSystem.from_uri(f"{scheme}://{base}")
        if filesystem.get_file_info(root).is_file:
            return [url]
        listed = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise recipe.problem(key, f"{key}: {url} cannot be listed ({reason}); give a URL such as s3://…") from error
    wanted = root + path.removeprefix(base)
    names = [entry.path for entry in listed if entry.is_file and _is_table(entry.base_name, arrays=arrays)]
    matching = sorted(name for name in names if begin == path or fnmatch.fnmatchcase(name, wanted))
    if not matching:
        raise recipe.problem(key, f"{key}: nothing matches {url}; name objects that are there")
    prefix = f"{scheme}://{base}".removesuffix(root)
    return [prefix + name for name in matching]


def _is_table(name: str, *, arrays: bool) -> bool:
    return name[0] not in "._" and kind_of(name, arrays=arrays) is not None
