"""Read the files of a store in pieces, from a shared path or an object store.

Node ids in this module are consecutive over all types: the nodes of the second type follow those of the first.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hoploom import ops
from hoploom.errors import StoreError
from hoploom.ops import EdgeLists
from hoploom.ops.assign_parts import FileLists, RelationLists, Topology
from hoploom.schema import Field, Schema
from hoploom.store import format as layout
from hoploom.store.fetch import manifest_at
from hoploom.store.format import PartRange, id_dtype
from hoploom.store.storage_path import StoragePath

Array = NDArray[Any]
INT64 = Field("int64")
CHUNK_EDGES = 1 << 20
CHUNK_NODES = 1 << 16
READERS, PIECE_BYTES = 16, 16 << 20  # threads that read files, and the bytes of one read
MOST_OPEN = 64  # idle files that stay open


def bounds_of(schema: Schema) -> list[int]:
    """Return the first id of every type, then the number of all nodes. A type's ids follow those of the type before."""
    return list(accumulate((t.num_nodes for t in schema.node_types), initial=0))


def read_into(file: BinaryIO, memory: memoryview) -> None:
    """Read from `file` until `memory` is full; raise StoreError if the file ends before that."""
    got = 0
    while got < len(memory):
        count = file.readinto(memory[got:])  # type: ignore[attr-defined]
        if not count:
            raise StoreError(f"{file.name} is shorter than its header says; copy the store again")
        got += count


class Column:
    """The open file of a stored array, of which any range of rows can be read."""

    def __init__(self, name: str, file: BinaryIO, begin: int, field: Field) -> None:
        self.name, self._file, self._begin = name, file, begin
        self._dtype, self._shape = np.dtype(layout.npy_descr(field.dtype)), field.shape

    def read(self, begin: int, end: int) -> Array:
        rows = np.empty((end - begin, *self._shape), self._dtype)
        row_bytes = self._dtype.itemsize * int(np.prod(self._shape, dtype=np.int64))
        self._file.seek(self._begin + begin * row_bytes)
        read_into(self._file, memoryview(rows.reshape(-1).view(np.uint8).data))
        return rows


class NodeSpan(NamedTuple):
    """Consecutive nodes of one type in one part of a store."""

    part: int
    type: int
    first: int  # index of the first node among the nodes of the part
    size: int
    offset: int  # index of the first node among the requested nodes


class InLists(NamedTuple):
    """The in-edges, in one relation, of consecutive nodes of one part."""

    relation: int
    part: int
    first: int  # index of the first edge among the edges of the relation in this part
    offset: int  # index of the first node among the requested nodes
    indptr: Array  # [n + 1] int64, from 0
    indices: Column
    num_sources: int  # of the source type

    def sources(self, begin: int, end: int) -> Array:
        """Read the sources of the in-edges [begin, end), [n] int64; raise StoreError if an id is out of range."""
        sources = self.indices.read(self.first + begin, self.first + end).astype(np.int64)
        if sources.size and not 0 <= sources.min() <= sources.max() < self.num_sources:
            raise StoreError(f"a source in {self.indices.name} is out of range; run hoploom check on the store")
        return sources


class ArrayFile(NamedTuple):
    """The name of an array's file, the field that describes a row, and the number of rows."""

    name: str
    field: Field
    num_rows: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.field.row_bytes


class ArrayReader:
    """A thread-safe reader of arrays' bytes. It keeps up to MOST_OPEN idle files open, until `close`."""

    def __init__(self, place: StoragePath, arrays: Sequence[ArrayFile]) -> None:
        self._place, self._arrays, self._lock = place, arrays, threading.Lock()
        self._idle: list[tuple[int, BinaryIO, int]] = []  # array, its file, where its values begin

    def read(self, array: int, begin: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes of array number `array`, starting at byte `begin` of its values."""
        name, field, num_rows = self._arrays[array]
        with self._lock:
            found = next((i for i, (number, _, _) in enumerate(self._idle) if number == array), None)
            opened = None if found is None else self._idle.pop(found)
        if opened is None:
            file = self._place.open(name)
            opened = array, file, layout.read_npy_header(file, name, field.dtype, (num_rows, *field.shape))
        _, file, offset = opened
        file.seek(offset + begin)
        read_into(file, memory)
        with self._lock:
            self._idle.append(opened)
            old = self._idle.pop(0)[1] if len(self._idle) > MOST_OPEN else None
        if old is not None:
            old.close()

    def read_all(self) -> list[torch.Tensor]:
        """Return all arrays as tensors, read by several threads."""
        rows = [torch.empty(array.num_rows, dtype=getattr(torch, array.field.dtype)) for array in self._arrays]
        raw = [memoryview(ops.byte_rows(array).reshape(-1).numpy().data) for array in rows]
        pieces = [(i, at) for i, array in enumerate(raw) for at in range(0, len(array), PIECE_BYTES)]
        with ThreadPoolExecutor(READERS) as threads:
            for done in [threads.submit(self.read, i, at, raw[i][at : at + PIECE_BYTES]) for i, at in pieces]:
                done.result()
        return rows

    def close(self) -> None:
        for _, file, _ in self._idle:
            file.close()
        self._idle.clear()


@dataclass(frozen=True)
class StoreFiles:
    """A store whose arrays are read from their files piece by piece, not mapped into memory."""

    place: StoragePath
    schema: Schema
    parts: Sequence[PartRange]

    @classmethod
    def at(cls, place: StoragePath) -> "StoreFiles":
        """Return the store at a path or URL; raise StoreError if there is none. Reads the manifest only."""
        _, manifest = manifest_at(place)
        return cls(place, manifest.schema, manifest.parts)

    @property
    def bounds(self) -> list[int]:
        return bounds_of(self.schema)

    @contextmanager
    def column(self, name: str, field: Field, num_rows: int) -> Iterator[Column]:
        """Open an array's file for the duration of the block."""
        with self.place.open(name) as file:
            begin = layout.read_npy_header(file, name, field.dtype, (num_rows, *field.shape))
            yield Column(name, file, begin, field)

    def spans(self, begin: int, end: int) -> Iterator[NodeSpan]:
        """Yield the nodes [begin, end) in spans, each within one type and one part."""
        for type_index, type_first in enumerate(self.bounds[:-1]):
            for number, part in enumerate(self.parts):
                first = type_first + part.first_nodes[type_index]
                low, high = max(begin, first), min(end, first + part.num_nodes[type_index])
                if low < high:
                    yield NodeSpan(number, type_index, low - first, high - low, low - begin)

    def in_lists(self, begin: int, end: int) -> Iterator[InLists]:
        """Yield the in-edges of nodes [begin, end) by type, part and relation. Read each before you take the next."""
        for span in self.spans(begin, end):
            for index, relation in enumerate(self.schema.relations):
                if self.schema.destinations[index] != span.type:
                    continue
                part, num_sources = self.parts[span.part], self.schema.node_types[self.schema.sources[index]].num_nodes
                name = layout.topology_file(span.part, relation, "indptr")
                with self.column(name, INT64, part.num_nodes[span.type] + 1) as column:
                    indptr = column.read(span.first, span.first + span.size + 1)
                num_edges = part.num_edges[index]
                if indptr[0] < 0 or indptr[-1] > num_edges or (np.diff(indptr) < 0).any():
                    raise StoreError(f"the indptr of {relation.key} is damaged; run hoploom check on the store")
                indices = layout.topology_file(span.part, relation, "indices")
                with self.column(indices, Field(id_dtype(num_sources)), num_edges) as column:
                    first = int(indptr[0])
                    yield InLists(index, span.part, first, span.offset, indptr - first, column, num_sources)

    @contextmanager
    def topology(self, free: int) -> Iterator[Topology]:
        """Yield all edges: in memory if they take at most `free` bytes, else to be read from the files when needed."""
        relations, arrays = [], list[ArrayFile]()
        for index, relation in enumerate(self.schema.relations):
            source, destination = self.schema.sources[index], self.schema.destinations[index]
            dtype = id_dtype(self.schema.node_types[source].num_nodes)
            lists = []
            for number, part in enumerate(self.parts):
                num_lists, num_edges = part.num_nodes[destination], part.num_edges[index]
                indptr, indices = (layout.topology_file(number, relation, name) for name in ("indptr", "indices"))
                arrays += [ArrayFile(indptr, INT64, num_lists + 1), ArrayFile(indices, Field(dtype), num_edges)]
                lists.append(FileLists(num_lists, num_edges, dtype == "int64", part.first_nodes[destination]))
            relations.append(RelationLists(" ".join(relation.key), source, destination, lists))
        with closing(ArrayReader(self.place, arrays)) as reader:
            if sum(array.num_bytes for array in arrays) > free:
                yield Topology(self.bounds, relations, reader.read)
                return
            columns = iter(reader.read_all())
        in_memory = [
            relation._replace(
                lists=[EdgeLists(next(columns), next(columns), lists.first_node) for lists in relation.lists]
            )
            for relation in relations
        ]
        yield Topology(self.bounds, in_memory)

    def members(self, node_type: str, split: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the members of a split, chunk by chunk, as pairs of the node type and ascending ids, [n] int64."""
        num_nodes = self.schema.node_type(node_type).num_nodes
        first = self.bounds[self.schema.type_index[node_type]]
        for begin in range(0, num_nodes, CHUNK_EDGES):
            end = min(num_nodes, begin + CHUNK_EDGES)
            yield node_type, torch.from_numpy(self.members_among(node_type, split, first + begin, first + end)) + begin

    def members_among(self, node_type: str, split: str, begin: int, end: int) -> Array:
        """Return which of the nodes [begin, end) are in a split: their indices in this range, ascending, [n] int64."""
        type_index, found = self.schema.type_index[node_type], [np.empty(0, np.int64)]
        for span in self.spans(begin, end):
            part = self.parts[span.part]
            size = part.splits.get(node_type, {}).get(split, 0)
            if span.type != type_index or not size:
                continue
            low = part.first_nodes[type_index] + span.first
            with self.column(layout.split_file(span.part, node_type, split), INT64, size) as column:
                ends = [_bisect(column, size, low), _bisect(column, size, low + span.size)]
                found.append(column.read(*ends) - low + span.offset)
        return np.concatenate(found)


def _bisect(column: Column, size: int, wanted: int) -> int:
    """Return how many of the `size` ascending ids in `column` are below `wanted`."""
    low, high = 0, size
    while high - low > CHUNK_NODES:
        middle = (low + high) // 2
        if int(column.read(middle, middle + 1)[0]) < wanted:
            low = middle + 1
        else:
            high = middle
    return low + int(np.searchsorted(column.read(low, high), wanted))
