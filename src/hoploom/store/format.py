"""The format of stores on disk: file names, store.json, .npy headers (docs/format.md is its specification).

Files and folders are written so that a power cut leaves them complete or absent; each write waits for the disk.
"""

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints
from urllib.parse import quote

import numpy as np

from hoploom.errors import StoreError
from hoploom.schema import DTYPES, Relation, Schema

FORMAT, VERSION = "hoploom-store", 1
ID_LIMIT = 2**31
STORE_FILE = "store.json"
MOST_BYTES = 256 << 20  # of store.json
OPTIONAL_KEYS = ("reverse", "mean", "deviation")  # of store.json
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NPY_DTYPES = {"bfloat16": "<u2", "bool": "|b1", "uint8": "|u1", "int8": "|i1"}
PARSING = threading.Lock()  # the parser of Python 3.11 counts its depth wrongly if threads parse at the same time


@dataclass(frozen=True)
class PartRange:
    """The contents of one part: a range of node ids per node type, and a range of edge positions per relation."""

    first_nodes: tuple[int, ...]
    num_nodes: tuple[int, ...]
    first_edges: tuple[int, ...]
    num_edges: tuple[int, ...]
    splits: Mapping[str, Mapping[str, int]]  # node type -> split -> size


@dataclass(frozen=True)
class FileEntry:
    """The size and checksum of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The contents of store.json."""

    schema: Schema
    parts: tuple[PartRange, ...]
    files: Mapping[str, FileEntry]
    identity: str = ""  # SHA-256 of the bytes of store.json, in hex: equal for two copies of a store


def _plain(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")


def part_folder(part: int) -> str:
    return f"part-{part:05d}"


def node_file(part: int, node_type: str, field: str) -> str:
    return f"{part_folder(part)}/nodes/{_plain(node_type)}/{_plain(field)}.npy"


def split_file(part: int, node_type: str, split: str) -> str:
    return f"{part_folder(part)}/nodes/{_plain(node_type)}/split.{_plain(split)}.npy"


def edge_file(part: int, relation: Relation, field: str) -> str:
    """Return the name, within the store, of the file of an edge field; its rows are in CSC order."""
    return f"{relation_folder(part, relation)}/{_plain(field)}.npy"


def topology_file(part: int, relation: Relation, column: str) -> str:
    """Return the name, within the store, of a file that the sampler reads: indptr, indices, weight or time."""
    return f"{relation_folder(part, relation)}/csc.{column}.npy"


def relation_folder(part: int, relation: Relation) -> str:
    return f"{part_folder(part)}/relations/{'~'.join(map(_plain, relation.key))}"


def id_dtype(num_nodes: int) -> str:
    """Return the dtype of stored node ids: int32 if all ids fit, else int64."""
    return "int32" if num_nodes < ID_LIMIT else "int64"


def npy_descr(dtype: str) -> str:
    return NPY_DTYPES.get(dtype) or f"<{np.dtype(dtype).kind}{np.dtype(dtype).itemsize}"


def write_npy_header(file: BinaryIO, dtype: str, shape: tuple[int, ...]) -> int:
    """Write a .npy header and return its size in bytes."""
    header = {"descr": npy_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def read_npy_header(file: BinaryIO, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Read a .npy header; return the offset of the values, or raise StoreError if dtype or shape is unexpected."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not .npy version 1.0")
        with PARSING:
            found, fortran, descr = np.lib.format.read_array_header_1_0(file)
    except Exception as error:  # NumPy evaluates a literal, so Python's parser may raise anything
        raise StoreError(f"{name} has no readable .npy header ({error}); copy the file again") from error
    if fortran or descr != np.dtype(npy_descr(dtype)) or found != shape:
        raise StoreError(f"{name} holds {descr} {found}, but store.json says {dtype} {shape}; copy the store again")
    return file.tell()


def manifest_to_json(manifest: Manifest) -> str:
    schema = manifest.schema
    contents = {
        "format": FORMAT,
        "version": VERSION,
        "homogeneous": schema.homogeneous,
        "weight": schema.weight,
        "time": schema.time,
        "node_types": [asdict(t, dict_factory=_without_empty) for t in schema.node_types],
        "relations": [asdict(r, dict_factory=_without_empty) for r in schema.relations],
        "parts": [asdict(part) for part in manifest.parts],
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
    }
    return json.dumps(contents, indent=1)


def _without_empty(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if value or key not in ("mean", "deviation")}


def read_manifest(folder: Path) -> Manifest:
    """Read and check store.json."""
    path = folder / STORE_FILE
    try:
        with regular(path).open("rb") as file:
            return parse_manifest(file.read(MOST_BYTES + 1), str(path))
    except StoreError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(f"{folder} {_why_no_store(Path(folder))}") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def _why_no_store(folder: Path) -> str:
    """Return the end of an error message: the reason why a path is no store, and a hint."""
    way_out = "give the folder of a store; `hoploom build`, `hoploom import` and `hoploom generate` make one"
    if (folder / "run.toml").is_file():
        return f"is the folder of a run, not of a store; give the store that {folder / 'run.toml'} names"
    if not folder.exists():
        if folder.parts[:1] in (("s3:",), ("gs:",)):
            return "is in an object store; bring it to this host with `hoploom fetch`, and give the folder it makes"
        return f"does not exist; {way_out}"
    return f"is no store: {f'it has no {STORE_FILE}' if folder.is_dir() else 'it is not a directory'}; {way_out}"


def parse_manifest(written: bytes, path: str) -> Manifest:
    """Parse and check the bytes of a store.json; `path` names the file in error messages."""
    if len(written) > MOST_BYTES:
        raise StoreError(f"{path} has more than {MOST_BYTES >> 20} MiB, so it is no store.json; copy the store again")
    try:
        contents = json.loads(written.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: {error}; copy the store again") from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise StoreError(f"{path} is no store: its format is not {FORMAT!r}")
    version = contents.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise StoreError(f"{path} has format version {version!r}, this Hoploom reads up to {VERSION}; upgrade Hoploom")
    try:
        return replace(manifest_from_json(contents), identity=hashlib.sha256(written).hexdigest())
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}; copy the store again") from error


def manifest_from_json(contents: Mapping[str, Any]) -> Manifest:
    """Return the manifest from the parsed store.json; raise ValueError for an invalid value."""
    schema: Schema = _read(Schema, contents, STORE_FILE)
    for fields in [*(t.fields for t in schema.node_types), *(r.fields for r in schema.relations)]:
        for field in fields.values():
            if field.dtype not in DTYPES:
                raise ValueError(f"dtype {field.dtype!r} is unknown")
            if len(field.shape) > 32 or math.prod(max(1, extent) for extent in field.shape) >= 2**40:
                raise ValueError(f"shape {field.shape!r:.80} is too large for a row")
            counts = {len(field.mean), len(field.deviation)}
            if counts != {0} and counts != {math.prod(field.shape)}:
                raise ValueError(f"mean and deviation have {sorted(counts)} numbers for rows of {field.shape!r:.80}")
    parts = _read(tuple[PartRange, ...], contents.get("parts"), "parts")
    return Manifest(schema, parts, _read(Mapping[str, FileEntry], contents.get("files"), "files"))


def _read(kind: Any, value: Any, name: str) -> Any:
    """Return a JSON value as the type `kind`, or raise ValueError; integers must be >= 0. `name` is for messages."""
    if is_dataclass(kind) and isinstance(value, Mapping):
        hints = _hints(kind)  # type: ignore[arg-type]
        missing = [key for key in hints if key not in value and key not in OPTIONAL_KEYS]
        if missing:
            raise ValueError(f"{missing[0]!r} is missing")
        found = {key: _read(hint, value[key], key) for key, hint in hints.items() if key in value}
        return kind(**found)  # type: ignore[operator]
    outer, inner = get_origin(kind), get_args(kind)
    if outer is tuple and isinstance(value, list):
        return tuple(_read(inner[0], entry, name) for entry in value)
    if outer is Mapping and isinstance(value, dict):
        return {key: _read(inner[1], entry, key) for key, entry in value.items()}
    if kind is int and type(value) is int and 0 <= value < 2**63:
        return value
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (str, bool, str | None) and isinstance(value, kind):
        return value
    raise ValueError(f"{name} is {value!r:.80}, not of type {getattr(kind, '__name__', kind)}")


_hints = cache(get_type_hints)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raise ValueError for a repeated key, on whose value JSON parsers disagree."""
    contents = dict(pairs)
    if len(contents) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return contents


def regular(path: Path) -> Path:
    """Return the path; raise StoreError unless it is a regular file, because opening a pipe may block for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise StoreError(f"{path} is a directory, pipe, socket or device, not a file; copy the store again")
    return path


def inside(folder: Path, name: str) -> Path:
    """Return the path of the file `name` of a store; raise StoreError if it leads out of the store's folder."""
    pure = PurePosixPath(name)
    path = folder / name
    try:
        leads_out = not os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)
    except ValueError as error:  # a null character, or half of a pair of surrogates
        raise StoreError(f"{name!r} is no path of a file ({error}); copy the store again") from error
    if leads_out or pure.is_absolute() or ".." in pure.parts:
        raise StoreError(f"{name} leads out of the store {folder}; a store's files lie inside it")
    return path


# --- files and folders that survive a power cut -------------------------------------------------


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file, replacing an old one only when the new one is complete and on the disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb", buffering=0) as file:  # no buffer whose flush could fail in close()
                for piece in pieces:
                    left = memoryview(piece)
                    while left:
                        left = left[file.write(left) :]
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in DISK_FULL:
            what = f"the disk is full writing {path}; what was there before is kept; free some space"
            raise StoreError(what) from error
        raise StoreError(f"cannot write {path}: {error}") from error


def sync_folder(folder: Path) -> None:
    """Flush the file names of a folder to the disk, so that they survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class WorkFolder:
    """A temporary folder next to a target, locked by this process.

    The next WorkFolder removes folders without a lock, which killed processes left.
    """

    def __init__(self, target: Path) -> None:
        target = target.absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{target.name}.partial-"
        for left in target.parent.glob(f"{glob.escape(prefix)}*"):
            _remove_unless_locked(left)
        while True:
            self.path = target.with_name(f"{prefix}{secrets.token_hex(8)}")
            self.path.mkdir()
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # removed by another process before it was locked
                continue
            with suppress(OSError):  # a file system without locks, where nothing is removed either
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)

    def close(self) -> None:
        """Remove the folder, unless it was renamed, then release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_unless_locked(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # renamed or removed in the meantime
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # locked by another process, or a file system without locks
    finally:
        os.close(handle)
