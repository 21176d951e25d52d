"""A part that is not at hand: it answers nothing, and says what was asked of it.

With it in place a store opened by one part routes ids as the whole store does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Never

import torch
from torch import Tensor

from hoploom.errors import StoreError
from hoploom.ops import Frontier, Picks
from hoploom.schema import DTYPES, Owner, Schema
from hoploom.store.base import Draw, Wanted


@dataclass(frozen=True)
class Absent:
    """Both seams over a range of nodes that lies elsewhere."""

    schema: Schema
    number: int
    held: tuple[int, ...]  # the parts that are at hand

    def sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        """No picks for no frontier; StoreError for any other."""
        for index, relation in enumerate(self.schema.relations):
            frontier = frontiers[self.schema.destinations[index]]
            if frontier is not None and draw.fanouts[index] != 0:
                self._refuse(f"the in-edges of node {int(frontier.nodes[0])} of {relation.destination!r}")
        return [None] * len(self.schema.relations)

    def gather(self, wanted: Sequence[Wanted], *, pinned: bool = False) -> list[Tensor]:
        """No rows for no ids; StoreError for any other."""
        for owner, name, ids in wanted:
            if ids.numel():
                what = "node" if isinstance(owner, str) else "edge"
                self._refuse(f"{name!r} of {what} {int(ids[0])} of {owner!r}")
        return [self._none_of(owner, name) for owner, name, _ in wanted]

    def _none_of(self, owner: Owner, name: str) -> Tensor:
        described = self.schema.node_type(owner) if isinstance(owner, str) else self.schema.relation(owner)
        field = described.fields[name]
        return torch.empty((0, *field.shape), dtype=DTYPES[field.dtype])

    def _refuse(self, what: str) -> Never:
        held = ", ".join(map(str, self.held))
        message = (
            f"part {self.number} holds {what}, opened were parts {held}; open part {self.number} too, or the whole"
        )
        raise StoreError(message)
