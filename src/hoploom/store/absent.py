"""A part that is not at hand: it answers nothing, and says what was asked of it.

With it in place a store opened by one part routes ids as the whole store does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Never

import torch
from torch import Tensor

from hoploom.errors import StoreError
from hoploom.ops import Frontier, Picks
from hoploom.schema import Schema
from hoploom.store.base import Draw, Wanted


@dataclass(frozen=True)
class Absent:
    """Both seams over a range of nodes that lies elsewhere."""

    schema: Schema
    number: int
    held: tuple[int, ...]  # the parts that are at hand

    @property
    def is_here(self) -> bool:
        return True  # it answers by itself, if only with an error

    def begin_sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> Callable[[], list[Picks | None]]:
        """No picks for no frontier; StoreError for any other."""
        return partial(self._sample, frontiers, draw)

    def begin_gather(
        self, wanted: Sequence[Wanted], places: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Callable[[], None]:
        """No rows for no ids; StoreError for any other."""
        return partial(self._gather, wanted, places)

    def split(self, node_type: str, name: str) -> Tensor:
        """None: what of a split lies elsewhere is left out."""
        return torch.empty(0, dtype=torch.int64)

    def _sample(self, frontiers: Sequence[Frontier | None], draw: Draw) -> list[Picks | None]:
        for index, relation in enumerate(self.schema.relations):
            frontier = frontiers[self.schema.destinations[index]]
            if frontier is not None and draw.fanouts[index] != 0:
                self._refuse(f"the in-edges of node {int(frontier.nodes[0])} of {relation.destination!r}")
        return [None] * len(self.schema.relations)

    def _gather(self, wanted: Sequence[Wanted], places: Sequence[Tensor]) -> None:
        for (owner, name, ids), place in zip(wanted, places, strict=True):
            if place.numel():
                what = "node" if isinstance(owner, str) else "edge"
                self._refuse(f"{name!r} of {what} {int(ids[place[0]])} of {owner!r}")

    def _refuse(self, what: str) -> Never:
        held = ", ".join(map(str, self.held))
        message = (
            f"part {self.number} holds {what}, opened were parts {held}; open part {self.number} too, or the whole"
        )
        raise StoreError(message)
