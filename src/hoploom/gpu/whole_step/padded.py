"""Views of a batch whose arrays have a fixed size, of which only the device knows how much is filled.

All sizes are numbers of the host, so that the same kernels can be replayed for every batch. Rows beyond a batch's own
have empty lists: they are computed and reach nothing. What that wastes is what a batch leaves unused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hoploom.nn.layers import LayerView
from hoploom.ops import InEdges
from hoploom.schema import RelationName

NO_PICKS = torch.iinfo(torch.int64).max  # in `indptr`, for rows that no hop has expanded


@dataclass(frozen=True)
class PaddedEdges:
    """The picks of one relation up to some hop, in arrays of fixed size. Ends are local ids."""

    sources: Tensor  # [at least most] int64; what stands beyond the picks does not matter
    indptr: Tensor  # [most destinations + 1] int64: where each one's picks begin; NO_PICKS beyond those expanded
    total: Tensor  # [] int64: how many picks there are
    most: int  # and can be

    def grouped(self, num_sources: int, num_destinations: int, whole: InEdges | None = None) -> InEdges:
        """By destination. Nodes further out begin where these picks end, so their lists become empty."""
        indptr = torch.minimum(self.indptr[: num_destinations + 1], self.total)
        return InEdges(indptr, self.sources[: self.most], num_sources, whole=whole)


def padded_views(
    hops: Sequence[Mapping[RelationName, PaddedEdges]],
    most_nodes: Mapping[str, Sequence[int]],
    num_layers: int,
    *,
    are_blocks: bool = False,
) -> list[LayerView]:
    """One view per layer, from the input layer on, as `views_of` has them for a batch of its own size.

    `hops` are from the seeds inwards: each with all picks up to it, or for blocks with its own. `most_nodes` are a
    type's nodes within 0, 1, ... hops at most; a batch beyond that must not come here.
    """
    wholes: dict[RelationName, InEdges] = {}
    if not are_blocks:
        last = {name: counts[-1] for name, counts in most_nodes.items()}
        wholes = {key: one.grouped(last[key[0]], last[key[2]]) for key, one in hops[-1].items()}
    views = []
    for follow in range(num_layers - 1, -1, -1):  # layers that follow, so many hops away are a layer's destinations
        sources, destinations = (_within(most_nodes, hop) for hop in (follow + 1, follow))
        edges = {
            key: one.grouped(sources[key[0]], destinations[key[2]], wholes.get(key))
            for key, one in hops[min(follow, len(hops) - 1)].items()
        }
        views.append(LayerView(edges, sources, destinations))
    return views


def _within(most_nodes: Mapping[str, Sequence[int]], hops: int) -> dict[str, int]:
    return {name: counts[min(hops, len(counts) - 1)] for name, counts in most_nodes.items()}
