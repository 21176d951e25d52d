"""A store read from its first byte to its last, in memory that does not grow with it.

Files are read, not mapped: pages of a map count as the process's own for as long as it stands.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import ConfigError, StoreError
from hoploom.ops import EdgeLists
from hoploom.schema import DTYPES, EDGE_ID, Field, NodeType, Owner, Relation, Schema
from hoploom.store import Part, Store
from hoploom.store import format as layout
from hoploom.store.base import range_of
from hoploom.store.disk import check_manifest
from hoploom.store.edges import destinations
from hoploom.store.format import Manifest, PartRange, id_dtype

CHUNK_BYTES = 4 << 20
NODES = 1 << 19  # whose list ends are read together


class EdgeSpan(NamedTuple):
    """Some edges of a part's relation: positions [begin, end) in the part, and where each leads."""

    begin: int
    end: int
    destinations: Tensor  # [end - begin] int64


class StoreReader(Protocol):
    """A store's columns, any rows of them, counted from the first row of a part."""

    @property
    def schema(self) -> Schema: ...

    @property
    def parts(self) -> Sequence[PartRange]: ...

    def rows(self, part: int, owner: Owner, field: str, begin: int, end: int) -> Tensor: ...

    def topology(self, part: int, relation: int, column: str, begin: int, end: int) -> Tensor: ...

    def split(self, part: int, node_type: str, name: str) -> Tensor: ...


def read_store(store: Store | str | Path) -> StoreReader:
    """A reader of a directory, or of a store whose parts are all within this process."""
    if not isinstance(store, Store):
        folder = Path(store)
        manifest = layout.read_manifest(folder)
        check_manifest(folder, manifest)
        return FileReader(folder, manifest)
    for index, node_type in enumerate(store.schema.node_types):
        held = sum(part.num_nodes[index] for part in store.parts)
        if held != node_type.num_nodes:
            raise ConfigError(
                f"{held} of {node_type.num_nodes} nodes of {node_type.name!r} are at hand; open all parts"
            )
    for node_type in store.schema.node_types:
        for name in node_type.fields:
            if any((node_type.name, name) not in part.tables for part in store.parts):
                raise ConfigError(
                    f"{name!r} of {node_type.name!r} lies elsewhere; give the path of a store, or save it"
                )
    return TensorReader(store.schema, [range_of(part) for part in store.parts], store.parts)


class FileReader:
    """A store's files."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.schema, self.parts = manifest.schema, manifest.parts
        self._folder, self._manifest = folder, manifest

    def rows(self, part: int, owner: Owner, field: str, begin: int, end: int) -> Tensor:
        schema, held = self.schema, self.parts[part]
        if isinstance(owner, str):
            name = layout.node_file(part, owner, field)
            return self._read(
                name, schema.node_type(owner).fields[field], held.num_nodes[schema.type_index[owner]], begin, end
            )
        name, count = (
            layout.edge_file(part, schema.relation(owner), field),
            held.num_edges[schema.relation_index[owner]],
        )
        return self._read(name, schema.relation(owner).fields[field], count, begin, end)

    def topology(self, part: int, relation: int, column: str, begin: int, end: int) -> Tensor:
        schema, held = self.schema, self.parts[part]
        name = layout.topology_file(part, schema.relations[relation], column)
        if column == "indptr":
            return self._read(name, Field("int64"), held.num_nodes[schema.destinations[relation]] + 1, begin, end)
        dtype = id_dtype(schema.node_types[schema.sources[relation]].num_nodes)
        return self._read(name, Field(dtype), held.num_edges[relation], begin, end)

    def split(self, part: int, node_type: str, name: str) -> Tensor:
        size = self.parts[part].splits.get(node_type, {}).get(name, 0)
        if size == 0:
            return torch.empty(0, dtype=torch.int64)
        return self._read(layout.split_file(part, node_type, name), Field("int64"), size, 0, size)

    def _read(self, name: str, field: Field, num_rows: int, begin: int, end: int) -> Tensor:
        rows = torch.empty((end - begin, *field.shape), dtype=DTYPES[field.dtype])
        try:
            with layout.inside(self._folder, name).open("rb") as file:
                offset = layout.read_npy_header(file, name, field.dtype, (num_rows, *field.shape))
                file.seek(offset + begin * field.row_bytes)
                if rows.numel() and file.readinto(rows.view(-1).view(torch.uint8).numpy().data) != rows.nbytes:
                    raise StoreError(f"{name} of {self._folder} ends too early: it is truncated; copy it again")
        except FileNotFoundError as error:
            raise StoreError(f"{name} is missing from {self._folder}; copy the store again") from error
        except OSError as error:
            raise error if isinstance(error, StoreError) else StoreError(f"{name} cannot be read: {error}") from error
        return rows


class TensorReader:
    """A store in memory. What is read of a map is copied before it is asked whether the file is whole."""

    def __init__(self, schema: Schema, ranges: Sequence[PartRange], parts: Sequence[Part]) -> None:
        self.schema, self.parts = schema, ranges
        self._held = parts

    def rows(self, part: int, owner: Owner, field: str, begin: int, end: int) -> Tensor:
        table, order = self._held[part].tables[owner, field], self._held[part].tables.get((owner, EDGE_ID))
        by_order = table.by_edge_id and order is not None
        if not by_order or order is None:
            return _copied(table.rows, begin, end)
        rows = table.rows[_copied(order.rows, begin, end)]
        ops.require_whole([table.rows])
        return rows

    def topology(self, part: int, relation: int, column: str, begin: int, end: int) -> Tensor:
        lists: EdgeLists = self._held[part].lists[relation]
        return _copied(lists.indptr if column == "indptr" else lists.indices, begin, end)

    def split(self, part: int, node_type: str, name: str) -> Tensor:
        ids = self._held[part].splits.get((node_type, name), torch.empty(0, dtype=torch.int64))
        return _copied(ids, 0, ids.numel())


def _copied(rows: Tensor, begin: int, end: int) -> Tensor:
    some = rows[begin:end].clone()
    ops.require_whole([rows])
    return some


def pieces(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Rows in chunks of about CHUNK_BYTES."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    return ((begin, min(num_rows, begin + step)) for begin in range(0, num_rows, step))


def row_bytes(owner: NodeType | Relation) -> int:
    """What all fields of a node or an edge take."""
    return sum(field.row_bytes for field in owner.fields.values())


def edge_spans(reader: StoreReader, part: int, relation: int, edge_bytes: int) -> Iterator[EdgeSpan]:
    """A part's edges of a relation in chunks, in order."""
    schema, held = reader.schema, reader.parts[part]
    index = schema.destinations[relation]
    num_nodes, first_node = held.num_nodes[index], held.first_nodes[index]
    step = max(1, CHUNK_BYTES // (edge_bytes + 16))
    for node in range(0, num_nodes, NODES):
        indptr = reader.topology(part, relation, "indptr", node, min(num_nodes, node + NODES) + 1)
        if bool((indptr[1:] < indptr[:-1]).any()) or int(indptr[0]) < 0 or int(indptr[-1]) > held.num_edges[relation]:
            key = schema.relations[relation].key
            raise StoreError(
                f"the indptr of {key} in part {part} is damaged; run hoploom check, and copy the store again"
            )
        for begin in range(int(indptr[0]), int(indptr[-1]), step):
            end = min(int(indptr[-1]), begin + step)
            yield EdgeSpan(begin, end, destinations(indptr, first_node + node, begin, end))
