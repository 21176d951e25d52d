"""Parts by METIS, through the optional package pymetis. Holds both directions of every edge in memory."""

from typing import Any

import torch
from torch import Tensor

from hoploom import ops
from hoploom.config.extras import needs
from hoploom.errors import ConfigError
from hoploom.ops import PartitionRule, Topology

SCALE = 1000  # of a node's weight: so much for the mean node
MOST = 2**31 - 1  # nodes, and edges in both directions: METIS counts in 32 bits


def metis_parts(topology: Topology, is_seed: Tensor | None, rule: PartitionRule) -> Tensor:
    """[num_nodes] int16. A node's weight is itself, its in-edges and its being a seed, each kind with the same sum."""
    with needs("metis"):
        import pymetis
    _fits("nodes", topology.bounds[-1])
    ops.count_cut(topology, torch.zeros(topology.bounds[-1], dtype=torch.int16), rule.threads)  # reads and checks all
    indptr, ends, weights = _symmetric(topology)
    _fits("edges, both ways,", int(weights.sum()))
    options: Any = pymetis.Options(ufactor=max(1, int(1000 * rule.imbalance)), seed=rule.key % 2**31)
    _, parts = pymetis.part_graph(
        rule.num_parts,
        pymetis.CSRAdjacency(indptr.int().numpy(), ends.int().numpy()),
        vweights=_node_weights(topology, is_seed).int().numpy(),
        eweights=weights.int().numpy(),
        options=options,
    )
    return _fill_empty(torch.tensor(parts, dtype=torch.int16), rule.num_parts)


def _fits(what: str, count: int) -> None:
    if count > MOST:
        raise ConfigError(f"{count} {what} are more than METIS can count ({MOST}); use method 'stream'")


def _symmetric(topology: Topology) -> tuple[Tensor, Tensor, Tensor]:
    """Every pair of neighbours once in each direction, without loops, with how many edges link them."""
    num_nodes = topology.bounds[-1]
    pairs = [torch.empty(0, dtype=torch.int64)]
    for relation in topology.relations:
        for lists in relation.lists:
            num_lists = lists.indptr.numel() - 1
            own = torch.arange(num_lists) + (lists.first_node + topology.bounds[relation.destination])
            destinations = torch.repeat_interleave(own, lists.indptr.diff())
            sources = lists.indices.to(torch.int64) + topology.bounds[relation.source]
            kept = sources != destinations
            sources, destinations = sources[kept], destinations[kept]
            pairs += [sources * num_nodes + destinations, destinations * num_nodes + sources]
    found, counts = torch.unique(torch.cat(pairs), return_counts=True)
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(found // num_nodes, minlength=num_nodes), 0, out=indptr[1:])
    return indptr, found % num_nodes, counts


def _node_weights(topology: Topology, is_seed: Tensor | None) -> Tensor:
    num_nodes = topology.bounds[-1]
    degrees = torch.zeros(num_nodes, dtype=torch.int64)
    for relation in topology.relations:
        for lists in relation.lists:
            first = lists.first_node + topology.bounds[relation.destination]
            degrees[first : first + lists.indptr.numel() - 1] += lists.indptr.diff()
    weights = torch.full((num_nodes,), SCALE, dtype=torch.int64)
    for kind in (degrees, is_seed):
        if kind is not None and int(kind.sum()):
            weights += kind.to(torch.int64) * SCALE * num_nodes // int(kind.sum())
    return weights // max(1, int(weights.sum()) >> 30) + 1  # the sum must fit 31 bits


def _fill_empty(parts: Tensor, num_parts: int) -> Tensor:
    """METIS may leave parts of tiny graphs without a node."""
    for part in range(num_parts):
        counts = torch.bincount(parts.long(), minlength=num_parts)
        if counts[part] == 0:
            parts[torch.nonzero(parts == counts.argmax())[0, 0]] = part
    return parts
