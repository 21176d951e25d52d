"""A store to sample from within so much memory: what it maps is let go before it weighs too much, and read again.

Dropped pages stay in the page cache, so this costs little. A store that was opened by somebody else is left alone:
something may have been written to its tensors, and would be lost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch import Tensor

from hoploom.errors import StoreError
from hoploom.ops import Frontier, Picks, pool_trim
from hoploom.ops.partition import drop_pages
from hoploom.schema import Schema
from hoploom.store import Draw, GraphStore, Store, open_store
from hoploom.store.sharded import select, stitch
from hoploom.store.system_memory import resident_bytes

PIECE = 256  # nodes, over all relations, that are asked for between two looks at the memory: each may map 128 KiB


class BoundedStore:
    """A store, opened if it is a path, and how much the process may hold while it is sampled."""

    def __init__(self, given: Store | str | Path, memory: int) -> None:
        store = given if isinstance(given, Store) else open_store(given)
        self._maps = [] if isinstance(given, Store) else list(_maps_of(store))
        held = resident_bytes()
        self.memory = memory
        self._enough = held + max(0, memory - held) // 4
        is_large = held + sum(rows.nbytes for rows in self._maps) > self._enough
        graph = BoundedGraph(
            store.graph, self, max(16, PIECE // max(1, len(store.schema.relations))) if is_large else None
        )
        self.store = Store(store.schema, graph, store.features, store.parts)

    def drop(self) -> None:
        """Let go of pages, if much is held."""
        if resident_bytes() > self._enough:
            drop_pages(self._maps)

    def relieve(self) -> None:
        """Let go of recycled memory, too."""
        self.drop()
        if resident_bytes() > self._enough:
            pool_trim()


def _maps_of(store: Store) -> Iterator[Tensor]:
    """The topology as open_part has mapped it."""
    for lists in chain.from_iterable(part.lists for part in store.parts):
        columns = (lists.indptr, lists.indices, lists.weight, lists.edge_time)
        yield from (rows for rows in columns if rows is not None and rows.numel())


@dataclass(frozen=True)
class BoundedGraph:
    """A GraphStore that looks at the memory after every few nodes, and says which relation is damaged."""

    inner: GraphStore
    opened: BoundedStore
    piece: int | None  # nodes; None: whole frontiers at once

    @property
    def schema(self) -> Schema:
        return self.inner.schema

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """What the store answers, however its frontiers are cut."""
        longest = max((f.nodes.numel() for f in frontiers if f is not None), default=0)
        if self.piece is None or longest <= self.piece:
            return self._picks(frontiers, draw)
        orders = [None if f is None else f.nodes.argsort() for f in frontiers]  # so that a page is touched once
        places = [[] if order is None else _pieces(order, self.piece) for order in orders]
        answers = []
        for number in range(-(-longest // self.piece)):
            some = [
                select(f, p[number]) if f and number < len(p) else None for f, p in zip(frontiers, places, strict=True)
            ]
            answers.append(self._picks(some, draw))
            self.opened.drop()
        joined = []
        for index, destination in enumerate(self.schema.destinations):
            frontier = frontiers[destination]
            picks = [answer[index] for answer in answers][: len(places[destination])]
            joined.append(None if frontier is None else stitch(picks, places[destination], frontier))
        return joined

    def _picks(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        try:
            picked = self.inner.sample(frontiers, draw)
        except (IndexError, ValueError, RuntimeError, MemoryError) as error:
            raise self._damaged(self._culprit(frontiers, draw), str(error)) from error
        for index, picks in enumerate(picked):
            limit = self.schema.node_types[self.schema.sources[index]].num_nodes
            if picks is not None and picks.sources.numel():
                low, high = (int(end) for end in picks.sources.aminmax())
                if low < 0 or high >= limit:
                    wrong = low if low < 0 else high
                    raise self._damaged(index, f"source id {wrong} is out of range [0, {limit})")
        return picked

    def _culprit(self, frontiers: Sequence[Frontier | None], draw: Draw) -> int | None:
        """The relation that fails on its own."""
        for index, fanout in enumerate(draw.fanouts):
            alone = [fanout if other == index else 0 for other in range(len(draw.fanouts))]
            try:
                self.inner.sample(frontiers, draw._replace(fanouts=alone))
            except (IndexError, ValueError, RuntimeError, MemoryError):
                return index
        return None

    def _damaged(self, relation: int | None, what: str) -> StoreError:
        name = "the topology" if relation is None else " ".join(self.schema.relations[relation].key)
        return StoreError(f"{name}: {what}; the store is damaged, run hoploom check on it")


def _pieces(places: Tensor, size: int) -> list[Tensor]:
    return [places[begin : begin + size] for begin in range(0, places.numel(), size)]
