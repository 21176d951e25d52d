"""Arrays in reach of this process, in memory or mapped: both seams over one range of nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hoploom import ops
from hoploom.ops import EdgeLists, Frontier, Picks
from hoploom.schema import EDGE_ID, Owner, Schema
from hoploom.store.base import Draw, Wanted


@dataclass(frozen=True)
class Table:
    """The rows of one field."""

    rows: Tensor  # [n, ...]
    first: int = 0  # the id of the first row
    by_edge_id: bool = False  # rows stand in the user's own edge order, not in CSC order
    raw: Tensor = field(init=False, repr=False, compare=False)  # [n, bytes per row] uint8, the same memory

    def __post_init__(self) -> None:
        count = self.rows.shape[0]
        width = self.rows[0].numel() * self.rows.element_size() if count else 1
        raw = self.rows.reshape(-1).view(torch.uint8).view(count, width) if count and width else None
        object.__setattr__(self, "raw", torch.empty(count, width, dtype=torch.uint8) if raw is None else raw)

    def gather(self, ids: Tensor, *, pinned: bool) -> Tensor:
        """The rows of these ids, in recycled memory."""
        raw = ops.empty((ids.numel(), self.raw.shape[1]), torch.uint8, pinned=pinned)
        ops.gather(self.raw, ids, raw, self.first)
        return raw.view(-1).view(self.rows.dtype).view(ids.numel(), *self.rows.shape[1:])


@dataclass(frozen=True)
class Part:
    """A contiguous range of nodes of every type, with their in-edges and fields."""

    schema: Schema
    first_nodes: tuple[int, ...]  # per node type
    num_nodes: tuple[int, ...]  # per node type
    lists: tuple[EdgeLists, ...]  # per relation
    tables: Mapping[tuple[Owner, str], Table]
    splits: Mapping[tuple[str, str], Tensor]  # (node type, split) -> [n] int64 node ids

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """One hop of every relation whose destination type has a frontier."""
        out: list[Picks | None] = []
        for index, lists in enumerate(self.lists):
            frontier = frontiers[self.schema.destinations[index]]
            skip = frontier is None or draw.fanouts[index] == 0
            out.append(None if skip or frontier is None else ops.sample(lists, frontier, draw.rule(index)))
        return out

    def gather(self, wanted: Sequence[Wanted], *, pinned: bool = False) -> list[Tensor]:
        """Rows of this part's fields."""
        edge_ids: dict[tuple[Owner, int], Tensor] = {}  # read once, however many fields stand in the user's order
        rows = []
        for owner, name, ids in wanted:
            table = self.tables[owner, name]
            if (table.by_edge_id or name == EDGE_ID) and (owner, EDGE_ID) in self.tables:
                key = owner, id(ids)
                if key not in edge_ids:
                    edge_ids[key] = self.tables[owner, EDGE_ID].gather(ids, pinned=pinned)
                ids = edge_ids[key]
            rows.append(ids if name == EDGE_ID else table.gather(ids, pinned=pinned))
        return rows
