"""Opening a store: map its files, copy nothing. The cost does not depend on the graph's size."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hoploom.errors import ConfigError, StoreError
from hoploom.ops import EdgeLists, MappedFile
from hoploom.schema import DTYPES, EDGE_ID, Field, Owner, check_schema
from hoploom.store import format as layout
from hoploom.store.base import Part, Table
from hoploom.store.format import Manifest, id_dtype
from hoploom.system import memory_limit


def held_parts(path: str | Path) -> list[int]:
    """The parts of which a folder holds the files of nodes: its own part's on a host of a cluster, else all."""
    folder = Path(path)
    manifest = layout.read_manifest(folder)
    lacking = {name.partition("/")[0] for name in manifest.files if not os.path.exists(layout.inside(folder, name))}
    return [part for part in range(len(manifest.parts)) if layout.part_folder(part) not in lacking]


def topology_fits(path: str | Path, budget: int | None = None) -> bool:
    """Whether the topology of all parts is here, and takes no more than half of the memory, or of a budget."""
    folder = Path(path)
    manifest = layout.read_manifest(folder)
    columns = [name for name in manifest.files if Path(name).name.startswith("csc.")]
    size = sum(manifest.files[name].bytes for name in columns)
    return (
        all(os.path.exists(layout.inside(folder, name)) for name in columns) and size <= (budget or memory_limit()) // 2
    )


def check_manifest(folder: Path, manifest: Manifest) -> None:
    """Raise StoreError unless the parts cover every node and edge once, in order."""
    schema, parts = manifest.schema, manifest.parts
    try:
        check_schema(schema)
    except ConfigError as error:
        raise StoreError(f"{folder}: {error}; store.json is damaged") from error
    if not parts:
        raise StoreError(f"{folder} has no parts")
    widths = {len(part.first_nodes) for part in parts} | {len(part.num_nodes) for part in parts}
    edge_widths = {len(part.first_edges) for part in parts} | {len(part.num_edges) for part in parts}
    if widths != {len(schema.node_types)} or edge_widths != {len(schema.relations)}:
        raise StoreError(f"{folder}: a part does not list every type and relation; store.json is damaged")
    _check_splits(folder, manifest)
    spans = [
        (f"nodes of {t.name}", t.num_nodes, [(part.first_nodes[i], part.num_nodes[i]) for part in parts])
        for i, t in enumerate(schema.node_types)
    ]
    spans += [
        (f"edges of {r.key}", r.num_edges, [(part.first_edges[i], part.num_edges[i]) for part in parts])
        for i, r in enumerate(schema.relations)
    ]
    for what, total, held in spans:
        *firsts, end = accumulate((count for _, count in held), initial=0)
        if [first for first, _ in held] != firsts:
            raise StoreError(f"{folder}: the parts do not cover the {what} once and in order; store.json is damaged")
        if end != total:
            raise StoreError(f"{folder}: the parts hold {end} {what}, not {total}; store.json is damaged")


def _check_splits(folder: Path, manifest: Manifest) -> None:
    for node_type in manifest.schema.node_types:
        held: Counter[str] = Counter()
        for part in manifest.parts:
            held.update(part.splits.get(node_type.name, {}))
        if dict(held) != dict(node_type.splits):
            declared = dict(node_type.splits)
            raise StoreError(f"{folder}: the parts hold splits {dict(held)} of {node_type.name!r}, not {declared}")


def exceeds_memory(manifest: Manifest, parts: Sequence[int], *, whole_topology: bool = False) -> bool:
    """Whether these parts, and perhaps the edges of the others, take more than the memory that there is."""
    folders = {layout.part_folder(part) for part in parts}
    opened = (
        entry.bytes
        for name, entry in manifest.files.items()
        if name.partition("/")[0] in folders or (whole_topology and Path(name).name.startswith("csc."))
    )
    return sum(opened) > memory_limit()


def open_part(folder: Path, manifest: Manifest, part: int, *, scattered: bool = False) -> Part:
    """Map one part. `scattered`: the kernel reads from the disk what is asked for, and nothing around it."""
    schema, held = manifest.schema, manifest.parts[part]
    tables: dict[tuple[Owner, str], Table] = {}
    splits: dict[tuple[str, str], Tensor] = {}
    for index, node_type in enumerate(schema.node_types):
        for name, field in node_type.fields.items():
            shape = (held.num_nodes[index], *field.shape)
            file = layout.node_file(part, node_type.name, name)
            rows = map_array(folder, manifest, file, field.dtype, shape, scattered=scattered)
            tables[node_type.name, name] = Table(rows, held.first_nodes[index])
        for split, size in held.splits.get(node_type.name, {}).items():
            file = layout.split_file(part, node_type.name, split)
            splits[node_type.name, split] = map_array(folder, manifest, file, "int64", (size,))
    tables |= _edge_tables(folder, manifest, part, only_here=False, scattered=scattered)
    return replace(_open_topology(folder, manifest, part, scattered), tables=tables, splits=splits)


def _edge_tables(
    folder: Path, manifest: Manifest, part: int, *, only_here: bool, scattered: bool
) -> dict[tuple[Owner, str], Table]:
    """The fields of edges; of those whose files are here, or of all."""
    tables: dict[tuple[Owner, str], Table] = {}
    for index, relation in enumerate(manifest.schema.relations):
        for name, field in relation.fields.items():
            file = layout.edge_file(part, relation, name)
            if only_here and not (file in manifest.files and os.path.exists(layout.inside(folder, file))):
                continue
            shape = (manifest.parts[part].num_edges[index], *field.shape)
            rows = map_array(folder, manifest, file, field.dtype, shape, scattered=scattered)
            tables[relation.key, name] = Table(rows, manifest.parts[part].first_edges[index])
    return tables


def open_topology(folder: Path, manifest: Manifest, part: int, *, scattered: bool = False) -> Part:
    """Map one part's topology, and the fields of edges that lie beside it; fields and splits of nodes are left out."""
    try:
        opened = _open_topology(folder, manifest, part, scattered)
        tables = _edge_tables(folder, manifest, part, only_here=True, scattered=scattered)
        return replace(opened, tables=tables)
    except StoreError as error:
        files = f"{layout.part_folder(part)}/relations/*/csc.*.npy"
        raise StoreError(f"topology='all' needs {files}: {error}, or open the store with topology='own'") from error


def _open_topology(folder: Path, manifest: Manifest, part: int, scattered: bool) -> Part:
    held = manifest.parts[part]
    lists = tuple(
        _open_lists(folder, manifest, part, index, scattered) for index in range(len(manifest.schema.relations))
    )
    return Part(manifest.schema, held.first_nodes, held.num_nodes, lists, {}, {})


def _open_lists(folder: Path, manifest: Manifest, part: int, index: int, scattered: bool) -> EdgeLists:
    schema, held = manifest.schema, manifest.parts[part]
    relation = schema.relations[index]
    destination = schema.destinations[index]
    num_nodes, num_edges = held.num_nodes[destination], held.num_edges[index]
    source = schema.node_types[schema.sources[index]]
    timed = schema.time in relation.fields or schema.time in source.fields
    for name in (schema.weight, schema.time, EDGE_ID):
        field = relation.fields.get(name or "") or (source.fields.get(name or "") if name == schema.time else None)
        if field is not None and math.prod(field.shape) != 1:
            raise StoreError(
                f"{name!r} of {relation.key} has shape {field.shape}, not one number; store.json is damaged"
            )

    def column(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        file = layout.topology_file(part, relation, name)
        return map_array(folder, manifest, file, dtype, shape, scattered=scattered and name != "indptr")

    indptr = column("indptr", "int64", (num_nodes + 1,))
    if int(indptr[0]) != 0 or int(indptr[-1]) != num_edges:
        file = layout.topology_file(part, relation, "indptr")
        raise StoreError(f"{file} runs from {int(indptr[0])} to {int(indptr[-1])}, not from 0 to {num_edges}")
    return EdgeLists(
        indptr,
        column("indices", id_dtype(source.num_nodes), (num_edges,)),
        held.first_nodes[destination],
        held.first_edges[index],
        column("weight", "float32", (num_edges,)) if schema.weight in relation.fields else None,
        column("time", "int64", (num_edges,)) if timed else None,
    )


def map_array(
    folder: Path, manifest: Manifest, name: str, dtype: str, shape: Sequence[int], *, scattered: bool = False
) -> Tensor:
    """Map one .npy file. Writes to the tensor stay in this process."""
    entry = manifest.files.get(name)
    if entry is None:
        raise StoreError(f"{name} is not listed in store.json; copy the store again")
    try:
        pages, offset = _map(layout.inside(folder, name), name, entry.bytes, (dtype, tuple(shape)))
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(f"{name} is missing from {folder}; copy the store again") from error
    except OSError as error:
        raise StoreError(f"{name} of {folder} cannot be read: {error}") from error
    if scattered:
        pages.read_scattered()
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    return torch.frombuffer(pages, dtype=DTYPES[dtype], count=count, offset=offset).view(*shape)


def _map(path: Path, name: str, listed: int, expected: tuple[str, tuple[int, ...]]) -> tuple[MappedFile, int]:
    """The file's pages, and where its values begin. What is expected: dtype and shape."""
    with layout.regular(path).open("rb") as file:
        size = file.seek(0, 2)
        if size != listed:
            raise StoreError(f"{name} has {size} bytes, store.json says {listed}: truncated or changed; copy it again")
        file.seek(0)
        offset = layout.read_npy_header(file, name, *expected)
        needed = math.prod(expected[1]) * DTYPES[expected[0]].itemsize
        if size - offset != needed:
            raise StoreError(f"{name} has {size - offset} bytes of values, {needed} are needed; copy it again")
        return MappedFile(file.fileno(), size, os.fsencode(path).decode("utf-8", "replace")), offset


def read_array(path: Path, field: Field) -> Tensor:
    """The rows of one .npy file that was just written, read into memory."""
    values = np.load(path, allow_pickle=False)
    return torch.from_numpy(values).view(DTYPES[field.dtype])
