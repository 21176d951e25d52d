"""Which wishes to move are granted, from their sums alone: by way (from part, to part) and by rank.

All wishes of a way up to some rank move. No part gets more than it may hold of any kind; nodes that leave make room for
those that come at the same time. Parts that hold too much send nodes away that did not wish to go.
"""

from dataclasses import dataclass

import numpy as np

from hoploom.partition.spark.exchange import Array

CLASSES = 4  # of wishes: great gains, small gains, then nodes that would lose little, or more
WISHED = 2  # of them


@dataclass(frozen=True)
class WishRanks:
    """The ranks of wishes: each class is divided by a hash, so that a part of it can be granted."""

    num_parts: int

    @property
    def per_class(self) -> int:
        return 8 if self.num_parts <= 128 else 2

    @property
    def count(self) -> int:
        return CLASSES * self.per_class

    @property
    def wished(self) -> int:
        """WishRanks below this are of nodes that gain."""
        return WISHED * self.per_class


def grant(demand: Array, held: Array, most: Array, ranks: WishRanks) -> Array:
    """[num_parts, num_parts] int64: wishes of a way with ranks below this are granted.

    `demand` [parts from, parts to, ranks, kinds] is what would move, `held` [parts, kinds] what parts have now, `most`
    [kinds] what they may hold.
    """
    parts = np.arange(ranks.num_parts)
    sums = np.zeros((ranks.num_parts, ranks.num_parts, ranks.count + 1, most.size), np.int64)
    np.cumsum(demand, axis=2, out=sums[:, :, 1:])
    limits = np.full((ranks.num_parts, ranks.num_parts), ranks.wished)
    while True:  # fewer may come to where it would be too much, until nowhere is
        moving = sums[parts[:, None], parts, limits]
        coming, net = moving.sum(0), held + moving.sum(0) - moving.sum(1)
        over = ((net > most) & (coming > 0)).any(1)
        if not over.any():
            break
        limits[:, over] = np.maximum(limits[:, over] - 1, 0)
    _relieve(sums, limits, net, most)
    return limits


def _relieve(sums: Array, limits: Array, net: Array, most: Array) -> None:
    """Parts that are too full send more away, those first that lose least, while others have room."""
    steps = True
    while steps:
        steps = False
        for part in np.nonzero((net > most).any(1))[0]:
            for to in np.argsort((net / most).max(1), kind="stable"):
                limit = limits[part, to]
                if limit + 1 == sums.shape[2] or not (net[part] > most).any():
                    continue
                step = sums[part, to, limit + 1] - sums[part, to, limit]
                if to != part and ((net[to] + step <= most) | (step == 0)).all():
                    net[to] += step
                    net[part] -= step
                    limits[part, to] += 1
                    steps = True


def moved(demand: Array, limits: Array) -> Array:
    """[parts, kinds] int64: how much more, or less, parts hold once the wishes below the limits are granted."""
    below = np.arange(demand.shape[2]) < limits[:, :, None]
    moving = (demand * below[..., None]).sum(2)
    gained: Array = moving.sum(0) - moving.sum(1)
    return gained
