"""How ids travel: as int32, counted from the first one of a range, where the range has no more than 2^31 of them.

Ids of a request and positions of edges are counted from the first one that the part has, sources from 0. Costs a pass
over the ids on either side and saves half of their bytes. What comes as int64 is taken as it is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoploom import ops
from hoploom.ops import Picks
from hoploom.schema import Owner, Schema
from hoploom.store.format import PartRange

MOST = 1 << 31  # ids of a range that int32 has room for
WIDTHS = (torch.int32, torch.int64)


class IdRange(NamedTuple):
    """Ids from the first one on."""

    first: int
    size: int

    def sent(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        """The ids, or those at some places, as they are sent."""
        if self.size <= MOST:
            return ops.narrow(ids, self.first, places)
        return ids if places is None else ops.select(ids, places)

    def come(self, ids: Tensor) -> Tensor:
        """Ids that were sent, as int64; IndexError for those that are not in the range."""
        return ops.owned(ids, self.first, self.size)


class Narrowing:
    """What one part's ids are counted from."""

    def __init__(self, schema: Schema, held: PartRange) -> None:
        self.nodes = [IdRange(*of_type) for of_type in zip(held.first_nodes, held.num_nodes, strict=True)]
        edges = [IdRange(*of_relation) for of_relation in zip(held.first_edges, held.num_edges, strict=True)]
        sources = [IdRange(0, schema.node_types[index].num_nodes) for index in schema.sources]
        counts = [IdRange(0, of_relation.size) for of_relation in edges]
        self._columns = list(zip(counts, sources, edges, strict=True))  # of picks, by relation
        self._owned: dict[Owner, IdRange] = {
            of.name: own for of, own in zip(schema.node_types, self.nodes, strict=True)
        }
        self._owned |= {of.key: own for of, own in zip(schema.relations, edges, strict=True)}

    def of(self, owner: Owner) -> IdRange:
        """The ids of an owner that the part has."""
        return self._owned[owner]

    def picks_sent(self, relation: int, picks: Picks) -> list[Tensor]:
        """The columns of picks as they are sent."""
        return [ids.sent(column) for ids, column in zip(self._columns[relation], picks, strict=True)]

    def picks_come(self, relation: int, columns: Sequence[Any]) -> Picks | None:
        """Picks that were sent, as int64; None if the columns cannot be picks."""
        for column in columns:
            if column.dtype not in WIDTHS or column.dim() != 1:
                return None
        counts, sources, edges = columns
        return ops.widen_picks(counts, sources, edges, self._columns[relation][2].first)
