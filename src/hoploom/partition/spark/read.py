"""Slices of a store's files, read where they are needed. Ids count through all types: those of the first, then on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import BinaryIO, NamedTuple

import numpy as np

from hoploom.errors import StoreError
from hoploom.partition.spark.exchange import Array
from hoploom.schema import Field, Schema
from hoploom.store import format as layout
from hoploom.store.format import PartRange, id_dtype
from hoploom.store.storage_path import StoragePath

INDPTR, IDS = Field("int64"), Field("int64")
CHUNK_EDGES = 1 << 20
CHUNK_NODES = 1 << 16


@dataclass(frozen=True)
class Buckets:
    """Equal ranges of ids, each small enough for a task."""

    num_ids: int
    size: int

    @property
    def count(self) -> int:
        return max(1, -(-self.num_ids // self.size))

    def span(self, bucket: int) -> tuple[int, int]:
        return min(self.num_ids, bucket * self.size), min(self.num_ids, (bucket + 1) * self.size)

    def of(self, ids: Array) -> Array:
        return ids // self.size


class Column:
    """An array's file that is open."""

    def __init__(self, file: BinaryIO, begin: int, field: Field) -> None:
        self._file, self._begin = file, begin
        self._dtype, self._shape = np.dtype(layout.npy_descr(field.dtype)), field.shape

    def read(self, begin: int, end: int) -> Array:
        """Rows [begin, end)."""
        rows = np.empty((end - begin, *self._shape), self._dtype)
        row_bytes = self._dtype.itemsize * int(np.prod(self._shape, dtype=np.int64))
        self._file.seek(self._begin + begin * row_bytes)
        target, got = memoryview(rows.reshape(-1).view(np.uint8).data), 0
        while got < len(target):
            count = self._file.readinto(target[got:])  # type: ignore[attr-defined]
            if not count:
                raise StoreError(f"{self._file.name} is shorter than its header says; copy the store again")
            got += count
        return rows


class Span(NamedTuple):
    """Consecutive nodes of one type in one part of a store."""

    part: int
    type: int
    first: int  # its place among the nodes of the part
    size: int
    place: int  # of the first node among those that were asked for


class InLists(NamedTuple):
    """The in-edges of consecutive nodes in one relation."""

    relation: int
    part: int
    first_edge: int  # of the first node, among all edges of the relation
    place: int  # of the first node among those that were asked for
    indptr: Array  # [n + 1] int64, from 0
    source: int  # what a source's number is counted from
    edges: "EdgeFile"


@dataclass(frozen=True)
class EdgeFile:
    """The sources of consecutive edges, in their file; read in chunks."""

    column: Column
    first: int
    num_sources: int
    what: str

    def read(self, begin: int, end: int) -> Array:
        """[end - begin] int64: the sources, counted from the first node of their type."""
        sources = self.column.read(self.first + begin, self.first + end).astype(np.int64)
        if sources.size and not 0 <= sources.min() <= sources.max() < self.num_sources:
            raise StoreError(f"a source of {self.what} is out of range; run hoploom check on the store")
        return sources


@dataclass(frozen=True)
class StoreOnPlace:
    """A store that all tasks reach."""

    place: StoragePath
    schema: Schema
    parts: Sequence[PartRange]

    @property
    def bounds(self) -> list[int]:
        """The first id of every type, and the end."""
        return list(accumulate((t.num_nodes for t in self.schema.node_types), initial=0))

    @contextmanager
    def column(self, name: str, field: Field, num_rows: int) -> Iterator[Column]:
        with self.place.open(name) as file:
            begin = layout.read_npy_header(file, name, field.dtype, (num_rows, *field.shape))
            yield Column(file, begin, field)

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """Where the nodes [begin, end) are."""
        for type_index, type_first in enumerate(self.bounds[:-1]):
            for number, part in enumerate(self.parts):
                first = type_first + part.first_nodes[type_index]
                low, high = max(begin, first), min(end, first + part.num_nodes[type_index])
                if low < high:
                    yield Span(number, type_index, low - first, high - low, low - begin)

    def in_lists(self, begin: int, end: int) -> Iterator[InLists]:
        """The in-edges of the nodes [begin, end), list by list; one is open at a time."""
        for span in self.spans(begin, end):
            for index, relation in enumerate(self.schema.relations):
                if self.schema.destinations[index] != span.type:
                    continue
                part, source = self.parts[span.part], self.schema.sources[index]
                name = layout.topology_file(span.part, relation, "indptr")
                with self.column(name, INDPTR, part.num_nodes[span.type] + 1) as column:
                    indptr = column.read(span.first, span.first + span.size + 1)
                num_edges = part.num_edges[index]
                if indptr[0] < 0 or indptr[-1] > num_edges or (np.diff(indptr) < 0).any():
                    raise StoreError(f"the indptr of {relation.key} is damaged; run hoploom check on the store")
                num_sources = self.schema.node_types[source].num_nodes
                indices = layout.topology_file(span.part, relation, "indices")
                with self.column(indices, Field(id_dtype(num_sources)), num_edges) as column:
                    edges = EdgeFile(column, int(indptr[0]), num_sources, " ".join(relation.key))
                    first = part.first_edges[index] + int(indptr[0])
                    first_source = self.bounds[source]
                    yield InLists(index, span.part, first, span.place, indptr - indptr[0], first_source, edges)

    def degrees(self, begin: int, end: int) -> Array:
        """[end - begin] int64: in-edges of all relations."""
        degrees = np.zeros(end - begin, np.int64)
        for lists in self.in_lists(begin, end):
            degrees[lists.place : lists.place + lists.indptr.size - 1] += np.diff(lists.indptr)
        return degrees

    def types(self, begin: int, end: int) -> Array:
        """[end - begin] int64: the number of each node's type."""
        return np.searchsorted(self.bounds, np.arange(begin, end), side="right") - 1

    def members(self, node_type: int, split: str, begin: int, end: int) -> Array:
        """The places of a split's members among the nodes [begin, end)."""
        name, found = self.schema.node_types[node_type].name, [np.empty(0, np.int64)]
        for span in self.spans(begin, end):
            part = self.parts[span.part]
            size = part.splits.get(name, {}).get(split, 0)
            if span.type != node_type or not size:
                continue
            low = part.first_nodes[node_type] + span.first
            with self.column(layout.split_file(span.part, name, split), IDS, size) as column:
                ends = [_bisect(column, size, low), _bisect(column, size, low + span.size)]
                found.append(column.read(*ends) - low + span.place)
        return np.concatenate(found)


def _bisect(column: Column, size: int, wanted: int) -> int:
    """How many of a file's ids, which ascend, are below the wanted one."""
    low, high = 0, size
    while high - low > CHUNK_NODES:
        middle = (low + high) // 2
        if int(column.read(middle, middle + 1)[0]) < wanted:
            low = middle + 1
        else:
            high = middle
    return low + int(np.searchsorted(column.read(low, high), wanted))
