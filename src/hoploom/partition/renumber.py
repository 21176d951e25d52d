"""Numbering nodes anew: part after part, and within a part the hottest first, so that every cache is a prefix.

Memory is one number per node, and beside it what one part needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1 << 20  # nodes that are looked at together


@dataclass(frozen=True)
class NewOrder:
    """The new numbers of a type's nodes."""

    new_of_old: Tensor  # [num_nodes] int64
    bounds: tuple[int, ...]  # part p holds the new ids bounds[p] to bounds[p + 1] - 1

    @property
    def moves_nothing(self) -> bool:
        spans = ((begin, min(begin + PIECE, self.bounds[-1])) for begin in range(0, self.bounds[-1], PIECE))
        return all(torch.equal(self.new_of_old[begin:end], torch.arange(begin, end)) for begin, end in spans)


def order_nodes(
    parts: Mapping[str, Tensor], num_parts: int, visits: Mapping[str, Tensor] | None = None
) -> dict[str, NewOrder]:
    """New ids by node type: by part, then by visits (most first), then by old id.

    `parts` [num_nodes] gives each node its part, `visits` [num_nodes] what it was asked for in pre-sampling.
    """
    return {name: _order_type(of, num_parts, None if visits is None else visits[name]) for name, of in parts.items()}


def _order_type(parts: Tensor, num_parts: int, visits: Tensor | None) -> NewOrder:
    places = Places(parts, num_parts)
    if visits is not None:
        hottest = torch.nonzero(visits).view(-1)
        hottest = hottest[torch.sort(visits[hottest], descending=True, stable=True).indices]
        for begin in range(0, hottest.numel(), PIECE):
            places.give(hottest[begin : begin + PIECE])
    for begin in range(0, parts.numel(), PIECE):
        ids = torch.arange(begin, min(parts.numel(), begin + PIECE))
        places.give(ids if visits is None else ids[visits[ids] == 0])
    return NewOrder(places.new_of_old, places.bounds)


class Places:
    """The places of parts, handed out from the first on."""

    def __init__(self, parts: Tensor, num_parts: int) -> None:
        sizes = torch.zeros(num_parts, dtype=torch.int64)
        for begin in range(0, parts.numel(), PIECE):
            sizes += torch.bincount(parts[begin : begin + PIECE], minlength=num_parts)  # fails where a node has no part
        self.bounds = (0, *sizes.cumsum(0).tolist())
        self.new_of_old = torch.empty(parts.numel(), dtype=torch.int64)
        self._parts, self._next = parts, torch.tensor(self.bounds[:-1])

    def give(self, nodes: Tensor) -> None:
        """The next places of their parts to these nodes, in their order."""
        owners, order = torch.sort(self._parts[nodes], stable=True)
        counts = torch.bincount(owners, minlength=self._next.numel())
        shift = self._next - (counts.cumsum(0) - counts)  # from the place among these nodes to that among all
        self.new_of_old[nodes[order]] = torch.arange(nodes.numel()) + shift[owners.long()]
        self._next += counts
