"""Map the files of a store. Nothing is copied, and the cost does not depend on the graph's size."""

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
    """Return the parts whose node files are in a folder: on a host of a cluster, its own ones."""
    folder = Path(path)
    manifest = layout.read_manifest(folder)
    lacking = {name.partition("/")[0] for name in manifest.files if not os.path.exists(layout.inside(folder, name))}
    return [part for part in range(len(manifest.parts)) if layout.part_folder(part) not in lacking]


def topology_fits(path: str | Path, budget: int | None = None) -> bool:
    """Return whether the topology of all parts is here and takes at most half of the memory, or of a budget."""
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
    for node_type in schema.node_types:
        splits: Counter[str] = Counter()
        for part in parts:
            splits.update(part.splits.get(node_type.name, {}))
        if dict(splits) != dict(node_type.splits):
            what = f"the parts hold splits {dict(splits)} of {node_type.name!r}, not {dict(node_type.splits)}"
            raise StoreError(f"{folder}: {what}")
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


def exceeds_memory(manifest: Manifest, parts: Sequence[int], *, whole_topology: bool = False) -> bool:
    """Return whether these parts take more than all memory; `whole_topology` adds the edges of the others."""
    folders = {layout.part_folder(part) for part in parts}
    opened = (
        entry.bytes
        for name, entry in manifest.files.items()
        if name.partition("/")[0] in folders or (whole_topology and Path(name).name.startswith("csc."))
    )
    return sum(opened) > memory_limit()


def open_part(folder: Path, manifest: Manifest, part: int, *, scattered: bool = False) -> Part:
    """Map one part. With `scattered`, the kernel reads no pages around the requested ones."""
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
    opened = _open_edges(folder, manifest, part, needs_fields=True, scattered=scattered)
    return replace(opened, tables=tables | dict(opened.tables), splits=splits)


def open_topology(folder: Path, manifest: Manifest, part: int, *, scattered: bool = False) -> Part:
    """Map one part's topology and the edge fields that are here, without the fields and splits of nodes."""
    try:
        return _open_edges(folder, manifest, part, needs_fields=False, scattered=scattered)
    except StoreError as error:
        files = f"{layout.part_folder(part)}/relations/*/csc.*.npy"
        raise StoreError(f"topology='all' needs {files}: {error}, or open the store with topology='own'") from error


def _open_edges(folder: Path, manifest: Manifest, part: int, *, needs_fields: bool, scattered: bool) -> Part:
    schema, held = manifest.schema, manifest.parts[part]
    lists = tuple(_open_lists(folder, manifest, part, index, scattered) for index in range(len(schema.relations)))
    tables: dict[tuple[Owner, str], Table] = {}
    for index, relation in enumerate(schema.relations):
        for name, field in relation.fields.items():
            file = layout.edge_file(part, relation, name)
            if needs_fields or (file in manifest.files and os.path.exists(layout.inside(folder, file))):
                shape = (held.num_edges[index], *field.shape)
                rows = map_array(folder, manifest, file, field.dtype, shape, scattered=scattered)
                tables[relation.key, name] = Table(rows, held.first_edges[index])
    return Part(schema, held.first_nodes, held.num_nodes, lists, tables, {})


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

    def column(name: str, dtype: str, count: int) -> Tensor:
        file = layout.topology_file(part, relation, name)
        return map_array(folder, manifest, file, dtype, (count,), scattered=scattered and name != "indptr")

    indptr = column("indptr", "int64", num_nodes + 1)
    if int(indptr[0]) != 0 or int(indptr[-1]) != num_edges:
        file = layout.topology_file(part, relation, "indptr")
        raise StoreError(f"{file} runs from {int(indptr[0])} to {int(indptr[-1])}, not from 0 to {num_edges}")
    return EdgeLists(
        indptr,
        column("indices", id_dtype(source.num_nodes), num_edges),
        held.first_nodes[destination],
        held.first_edges[index],
        column("weight", "float32", num_edges) if schema.weight in relation.fields else None,
        column("time", "int64", num_edges) if timed else None,
    )


def map_array(
    folder: Path, manifest: Manifest, name: str, dtype: str, shape: tuple[int, ...], *, scattered: bool = False
) -> Tensor:
    """Map one .npy file as a tensor. Writes to the tensor stay in this process."""
    entry = manifest.files.get(name)
    if entry is None:
        raise StoreError(f"{name} is not listed in store.json; copy the store again")
    path, count = layout.inside(folder, name), math.prod(shape)
    try:
        with layout.regular(path).open("rb") as file:
            size = file.seek(0, 2)
            if size != entry.bytes:
                what = f"{name} has {size} bytes, store.json says {entry.bytes}"
                raise StoreError(f"{what}: truncated or changed; copy it again")
            file.seek(0)
            offset = layout.read_npy_header(file, name, dtype, shape)
            needed = count * DTYPES[dtype].itemsize
            if size - offset != needed:
                raise StoreError(f"{name} has {size - offset} bytes of values, {needed} are needed; copy it again")
            pages = MappedFile(file.fileno(), size, os.fsencode(path).decode("utf-8", "replace"))
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(f"{name} is missing from {folder}; copy the store again") from error
    except OSError as error:
        raise StoreError(f"{name} of {folder} cannot be read: {error}") from error
    if scattered:
        pages.read_scattered()
    if count == 0:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(pages, dtype=DTYPES[dtype], count=count, offset=offset).view(*shape)


def read_array(path: Path, field: Field) -> Tensor:
    """Return the rows of a .npy file that was just written, read into memory."""
    return torch.from_numpy(np.load(path, allow_pickle=False)).view(DTYPES[field.dtype])
