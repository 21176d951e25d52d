"""Hard candidates: destinations that are near a source, but no true link of it.

All nodes of both types get a score for some sources at a time. Trades time for exactness: nothing is sampled.
"""

from typing import Literal

import torch
from torch import Tensor

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.load.arguments import canonical, read_tensor
from hoploom.schema import RelationName, read_ids
from hoploom.store import Store
from hoploom.store.base import sampled_edges
from hoploom.system import require_memory

SCORES = 1 << 23  # scores that are in memory at a time
EDGE_BYTES = 160  # of memory per edge, beside the scores
STEPS, RESTART = 20, 0.15  # of personalised PageRank


def hard_candidates(
    store: Store, relation: RelationName, sources: Tensor, k: int, *, by: Literal["common", "ppr"] = "common"
) -> Tensor:
    """Return the `k` nearest destinations to which each source has no edge: [num_sources, k] int64; -1: no more.

    Edges of the relation are walked in both directions; copies count once. "common" counts paths of two edges, which
    are common neighbours, or of three edges between two types. "ppr" is personalised PageRank after 20 exact steps.
    Of equally near destinations, the lowest id is first.

    >>> hard_candidates(store, ("user", "rates", "item"), links[0], 20)  # for LinkNeighborLoader(candidates=)
    """
    key = canonical(store.schema, relation)
    num_sources, num_nodes = (store.schema.node_type(key[end]).num_nodes for end in (0, 2))
    given = read_ids("sources", read_tensor("sources", sources), num_sources, ConfigError)
    wanted, places = torch.unique(given, return_inverse=True)
    if by not in ("common", "ppr"):
        raise ConfigError(f"by is {by!r:.80}; choose 'common' or 'ppr'")
    if as_int("k", k, 1, "give how many destinations to find for each source") > num_nodes:
        raise ConfigError(f"k is {k}, and there are {num_nodes} nodes of {key[2]!r}; give at most that many")
    first = 0 if key[0] == key[2] else num_sources  # in the matrix, of destinations
    size, num_edges = first + num_nodes, store.schema.relation(key).num_edges
    way_out = "take fewer edges, or uniform candidates"
    require_memory(num_edges * EDGE_BYTES + 32 * max(SCORES, size), f"the {num_edges:,} edges of {key} take", way_out)
    pieces = [torch.stack(ends) for ends in sampled_edges(store.graph, store.schema.relation_index[key])]
    ends = torch.cat(pieces, dim=1)
    left, right = torch.cat([ends[0], ends[1] + first]), torch.cat([ends[1] + first, ends[0]])
    pairs = torch.unique((left * size + right)[left != right])
    rows, columns = pairs // size, pairs % size
    weights = torch.ones(pairs.numel(), dtype=torch.float64)
    if by == "ppr":
        weights /= torch.bincount(rows, minlength=size)[columns]
    matrix = torch.sparse_coo_tensor(
        torch.stack([rows, columns]), weights, (size, size), is_coalesced=True, check_invariants=False
    )
    found = [torch.empty(0, k, dtype=torch.int64)]
    for some in torch.split(wanted, max(1, SCORES // size)):
        start = torch.zeros(size, some.numel(), dtype=torch.float64)
        start[some, torch.arange(some.numel())] = 1
        reached = start
        for _ in range(STEPS if by == "ppr" else 2 if first == 0 else 3):
            reached = torch.sparse.mm(matrix, reached)
            reached = RESTART * start + (1 - RESTART) * reached if by == "ppr" else reached
        scores = reached[first:].t().contiguous()
        own = ends[:, torch.isin(ends[0], some)]
        scores[torch.searchsorted(some, own[0]), own[1]] = 0
        if first == 0:
            scores[torch.arange(some.numel()), some] = 0
        nearest = scores.sort(dim=1, descending=True, stable=True)
        found.append(torch.where(nearest.values > 0, nearest.indices, -1)[:, :k])
    return torch.cat(found)[places]
