"""The format on disk: file names, store.json, .npy headers. docs/format.md is its specification."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np

from hoploom.errors import StoreError
from hoploom.schema import DTYPES, Field, NodeType, Relation, Schema

FORMAT, VERSION = "hoploom-store", 1
STORE_FILE = "store.json"
NPY_DTYPES = {"bfloat16": "<u2", "bool": "|b1", "uint8": "|u1", "int8": "|i1"}


@dataclass(frozen=True)
class PartRange:
    """What one part holds, by node type and by relation."""

    first_nodes: tuple[int, ...]
    num_nodes: tuple[int, ...]
    first_edges: tuple[int, ...]
    num_edges: tuple[int, ...]
    splits: Mapping[str, Mapping[str, int]]  # node type -> split -> size


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The contents of store.json."""

    schema: Schema
    parts: tuple[PartRange, ...]
    files: Mapping[str, FileEntry]


def _plain(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")


def part_folder(part: int) -> str:
    return f"part-{part:05d}"


def node_file(part: int, node_type: str, field: str) -> str:
    return f"{part_folder(part)}/nodes/{_plain(node_type)}/{_plain(field)}.npy"


def split_file(part: int, node_type: str, split: str) -> str:
    return f"{part_folder(part)}/nodes/{_plain(node_type)}/split.{_plain(split)}.npy"


def edge_file(part: int, relation: Relation, field: str) -> str:
    """A field of a relation's edges, in CSC order."""
    return f"{relation_folder(part, relation)}/{_plain(field)}.npy"


def topology_file(part: int, relation: Relation, column: str) -> str:
    """Columns the sampler reads: indptr, indices, weight, time."""
    return f"{relation_folder(part, relation)}/csc.{column}.npy"


def relation_folder(part: int, relation: Relation) -> str:
    return f"{part_folder(part)}/relations/{'~'.join(map(_plain, relation.key))}"


def npy_descr(dtype: str) -> str:
    return NPY_DTYPES.get(dtype) or f"<{np.dtype(dtype).kind}{np.dtype(dtype).itemsize}"


def write_npy_header(file: BinaryIO, dtype: str, shape: tuple[int, ...]) -> int:
    """Write a header and return its size."""
    header = {"descr": npy_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def read_npy_header(file: BinaryIO, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Check a header against what is expected; returns where the values begin."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not .npy version 1.0")
        found, fortran, descr = np.lib.format.read_array_header_1_0(file)
    except ValueError as error:
        raise StoreError(f"{name} has no readable .npy header ({error}); copy the file again") from error
    if fortran or descr != np.dtype(npy_descr(dtype)) or found != shape:
        raise StoreError(f"{name} holds {descr} {found}, but store.json says {dtype} {shape}; copy the store again")
    return file.tell()


def to_json(manifest: Manifest) -> str:
    schema = manifest.schema
    contents = {
        "format": FORMAT,
        "version": VERSION,
        "homogeneous": schema.homogeneous,
        "weight": schema.weight,
        "time": schema.time,
        "node_types": [asdict(t) for t in schema.node_types],
        "relations": [asdict(r) for r in schema.relations],
        "parts": [asdict(part) for part in manifest.parts],
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
    }
    return json.dumps(contents, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Read and check store.json."""
    path = folder / STORE_FILE
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StoreError(f"{folder} is no store: it has no {STORE_FILE}") from error
    except NotADirectoryError as error:
        raise StoreError(f"{folder} is no store: it is not a directory") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StoreError(f"{path} is damaged: {error}") from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise StoreError(f"{path} is no store: its format is not {FORMAT!r}")
    version = contents.get("version")
    if not isinstance(version, int) or version < 1 or version > VERSION:
        raise StoreError(f"{path} has format version {version!r}, this Hoploom reads up to {VERSION}; upgrade Hoploom")
    try:
        return _parse(contents)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _parse(contents: Mapping[str, Any]) -> Manifest:
    node_types = tuple(
        NodeType(t["name"], _count(t["num_nodes"]), _fields(t["fields"]), dict(t["splits"]))
        for t in contents["node_types"]
    )
    relations = tuple(
        Relation(r["source"], r["name"], r["destination"], _count(r["num_edges"]), _fields(r["fields"]))
        for r in contents["relations"]
    )
    schema = Schema(node_types, relations, bool(contents["homogeneous"]), contents["weight"], contents["time"])
    parts = tuple(
        PartRange(
            first_nodes=tuple(map(_count, p["first_nodes"])),
            num_nodes=tuple(map(_count, p["num_nodes"])),
            first_edges=tuple(map(_count, p["first_edges"])),
            num_edges=tuple(map(_count, p["num_edges"])),
            splits={t: {name: _count(size) for name, size in sizes.items()} for t, sizes in p["splits"].items()},
        )
        for p in contents["parts"]
    )
    files = {name: FileEntry(_count(f["bytes"]), _count(f["crc32"])) for name, f in contents["files"].items()}
    return Manifest(schema, parts, files)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _fields(fields: Mapping[str, Any]) -> dict[str, Field]:
    unknown = [f["dtype"] for f in fields.values() if f["dtype"] not in DTYPES]
    if unknown:
        raise ValueError(f"dtype {unknown[0]!r} is unknown")
    return {name: Field(f["dtype"], tuple(map(_count, f["shape"]))) for name, f in fields.items()}


def inside(folder: Path, name: str) -> Path:
    """The path of a store's file; StoreError if it leads out of the store."""
    pure = PurePosixPath(name)
    path = folder / name
    root = os.path.realpath(folder)
    if pure.is_absolute() or ".." in pure.parts or not os.path.realpath(path).startswith(root + os.sep):
        raise StoreError(f"{name} leads out of the store {folder}; a store's files lie inside it")
    return path
