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
        return bool((self.new_of_old.diff() == 1).all())  # a permutation that only rises


def order_nodes(
    parts: Mapping[str, Tensor], num_parts: int, visits: Mapping[str, Tensor] | None = None
) -> dict[str, NewOrder]:
    """New ids by node type: by part, then by visits (most first), then by old id.

    `parts` [num_nodes] gives each node its part, `visits` [num_nodes] what it was asked for in pre-sampling.
    """
    return {name: _order_type(of, num_parts, None if visits is None else visits[name]) for name, of in parts.items()}


def _order_type(parts: Tensor, num_parts: int, visits: Tensor | None) -> NewOrder:
    new_of_old = torch.empty(parts.numel(), dtype=torch.int64)
    bounds = [0]
    for part in range(num_parts):
        end = bounds[-1]
        if visits is not None:
            hottest = _hottest_first(torch.nonzero((parts == part) & (visits > 0)).view(-1), visits)
            new_of_old[hottest] = torch.arange(end, end + hottest.numel())
            end += hottest.numel()
        for begin in range(0, parts.numel(), PIECE):
            span = slice(begin, begin + PIECE)
            cold = parts[span] == part if visits is None else (parts[span] == part) & (visits[span] == 0)
            ids = torch.nonzero(cold).view(-1) + begin
            new_of_old[ids] = torch.arange(end, end + ids.numel())
            end += ids.numel()
        bounds.append(end)
    assert bounds[-1] == parts.numel(), "a node has no part"
    return NewOrder(new_of_old, tuple(bounds))


def _hottest_first(nodes: Tensor, visits: Tensor) -> Tensor:
    """By visits, equal ones as they stand."""
    return nodes[torch.sort(visits[nodes], descending=True, stable=True).indices]
