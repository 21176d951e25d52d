"""A store that is read and sampled within a limit of memory: mapped pages are dropped after reading.

Dropped pages stay in the page cache, so this costs little. A store that the caller has opened keeps its pages, because
dropping them would lose writes to its tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoploom import ops
from hoploom.errors import ConfigError, StoreError
from hoploom.load.presample import Presampling, visited
from hoploom.ops import Frontier, Picks, pool_trim
from hoploom.ops.assign_parts import drop_pages
from hoploom.sample.hops import Fanouts
from hoploom.schema import EDGE_ID, NodeType, Relation, TypeKey
from hoploom.store import Draw, Part, Store, open_store
from hoploom.store.base import destinations, range_of
from hoploom.store.sharded import merge_picks, select_frontier
from hoploom.system import resident_bytes

CHUNK_BYTES = 4 << 20
PIECE = 256  # nodes, over all relations, sampled between two checks of memory: each node may map 128 KiB
FAILURES = (IndexError, ValueError, RuntimeError, MemoryError)  # of a sampler whose topology is damaged
SMALL = 1 << 30  # bytes: with less memory batches are made one at a time


class EdgeSpan(NamedTuple):
    """The edges [begin, end) of one relation in one part, with their sources and destinations."""

    begin: int
    end: int
    sources: Tensor  # [end - begin], in their own dtype
    destinations: Tensor  # [end - begin] int64


class BoundedStore:
    """Reads and samples a store, open or a path, within a memory limit. Samplers take its attribute `store`."""

    def __init__(self, given: Store | str | Path, memory: int) -> None:
        store = given if isinstance(given, Store) else open_store(given)
        store.refuse_learned("partition")
        self.schema, self.parts, self.memory = store.schema, opened_parts(store), memory
        self.ranges = [range_of(part) for part in store.parts]
        for node_type in self.schema.node_types:
            for name in node_type.fields:
                if any((node_type.name, name) not in part.tables for part in self.parts):
                    raise ConfigError(f"{name!r} of {node_type.name!r} is in no part; give the path of a saved store")
        self._is_mapped = not isinstance(given, Store)
        lists = [lists for part in self.parts for lists in part.lists] if self._is_mapped else []
        columns = [rows for of in lists for rows in (of.indptr, of.indices, of.weight, of.edge_time)]
        self._maps = [rows for rows in columns if rows is not None and rows.numel()]
        held = resident_bytes()
        self._enough = held + max(0, memory - held) // 4
        is_large = held + sum(rows.nbytes for rows in self._maps) > self._enough
        self._piece = max(16, PIECE // max(1, len(self.schema.relations))) if is_large else None
        self._graph = store.graph
        self.store = Store(store.schema, self, store.features, store.parts)

    def drop(self) -> None:
        """Drop the mapped pages of the store if the process holds too much memory."""
        if resident_bytes() > self._enough:
            drop_pages(self._maps)

    def batches(self, fanouts: Fanouts, seeds: Any, plan: Presampling) -> Iterator[list[Tensor]]:
        """Sample batches as training would; yield the distinct nodes of each batch: one [n] int64 per node type."""
        threads = 0 if self.memory < SMALL else plan.num_threads
        for nodes in visited(self.store, fanouts, seeds, replace(plan, num_threads=threads)):
            yield nodes
            self.drop()
            if resident_bytes() > self._enough:
                pool_trim()

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """Return each relation's picks. To limit memory, long frontiers are sampled in chunks; picks do not change."""
        longest = max((f.nodes.numel() for f in frontiers if f is not None), default=0)
        if self._piece is None or longest <= self._piece:
            return self._picks(frontiers, draw)
        # in the order of the ids, so that a page is touched once
        places = [() if f is None else torch.split(f.nodes.argsort(), self._piece) for f in frontiers]
        answers = []
        for number in range(-(-longest // self._piece)):
            some = [
                select_frontier(f, p[number]) if f and number < len(p) else None
                for f, p in zip(frontiers, places, strict=True)
            ]
            answers.append(self._picks(some, draw))
            self.drop()
        joined = []
        for index, destination in enumerate(self.schema.destinations):
            frontier = frontiers[destination]
            picks = [answer[index] for answer in answers][: len(places[destination])]
            joined.append(None if frontier is None else merge_picks(picks, places[destination], frontier))
        return joined

    def _picks(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        try:
            picked = self._graph.sample(frontiers, draw)
        except FAILURES as error:
            name = self._failing(frontiers, draw)
            raise StoreError(
                f"sampling {name} fails: {error}; the store is damaged, run hoploom check on it"
            ) from error
        for relation, source, picks in zip(self.schema.relations, self.schema.sources, picked, strict=True):
            limit = self.schema.node_types[source].num_nodes
            if picks is not None and picks.sources.numel():
                low, high = (int(end) for end in picks.sources.aminmax())
                if low < 0 or high >= limit:
                    wrong = f"source id {low if low < 0 else high} of {relation.key} is out of range [0, {limit})"
                    raise StoreError(f"{wrong}; the store is damaged, run hoploom check on it")
        return picked

    def _failing(self, frontiers: Sequence[Frontier | None], draw: Draw) -> str:
        """Sample one relation at a time; return the name of the first that fails, for an error message."""
        for index, (relation, fanout) in enumerate(zip(self.schema.relations, draw.fanouts, strict=True)):
            try:
                alone = [fanout if other == index else 0 for other in range(len(draw.fanouts))]
                self._graph.sample(frontiers, draw._replace(fanouts=alone))
            except FAILURES:
                return str(relation.key)
        return "the topology"

    def rows(self, part: int, owner: TypeKey, field: str, begin: int, end: int) -> Tensor:
        """Return a copy of rows [begin, end) of a part's field. `owner` is the node type or relation of the field."""
        tables = self.parts[part].tables
        table = tables[owner, field]
        if not table.by_edge_id or (owner, EDGE_ID) not in tables:
            return self._copied(table.rows, begin, end)
        rows = table.rows[self._copied(tables[owner, EDGE_ID].rows, begin, end)]
        ops.require_whole([table.rows])
        return rows

    def edge_spans(self, part: int, relation: int, edge_bytes: int) -> Iterator[EdgeSpan]:
        """Yield a part's edges of a relation in chunks, in stored order. An edge's fields take `edge_bytes` bytes."""
        lists, step = self.parts[part].lists[relation], max(1, CHUNK_BYTES // (edge_bytes + 16))
        for first, last in pieces(lists.indptr.numel() - 1, 8):
            indptr = self._copied(lists.indptr, first, last + 1)
            if bool((indptr[1:] < indptr[:-1]).any()) or int(indptr[0]) < 0 or int(indptr[-1]) > lists.num_edges:
                key = self.schema.relations[relation].key
                raise StoreError(f"the indptr of {key} is damaged; run hoploom check, and copy the store again")
            for begin in range(int(indptr[0]), int(indptr[-1]), step):
                end = min(int(indptr[-1]), begin + step)
                ends = destinations(indptr, lists.first_node + first, begin, end)
                yield EdgeSpan(begin, end, self._copied(lists.indices, begin, end), ends)

    def _copied(self, rows: Tensor, begin: int, end: int) -> Tensor:
        ops.read_soon(rows[begin:end])
        copy = rows[begin:end].clone()
        ops.require_whole([rows])
        if self._is_mapped and begin < end:  # with the rows before them, which may share a page
            drop_pages([ops.byte_rows(rows[max(0, 2 * begin - end) : end])])
        return copy


def opened_parts(store: Store) -> Sequence[Part]:
    """Return the store's parts; raise ConfigError if nodes are in parts that are not open."""
    for index, node_type in enumerate(store.schema.node_types):
        held = sum(part.num_nodes[index] for part in store.parts)
        if held != node_type.num_nodes:
            raise ConfigError(f"{held} of {node_type.num_nodes} nodes of {node_type.name!r} are open; open all parts")
    return store.parts


def pieces(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (begin, end) that divide `num_rows` rows into chunks of about CHUNK_BYTES."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    return ((begin, min(num_rows, begin + step)) for begin in range(0, num_rows, step))


def row_bytes(owner: NodeType | Relation) -> int:
    """Return the bytes that all fields of one node or one edge take together."""
    return sum(field.row_bytes for field in owner.fields.values())
