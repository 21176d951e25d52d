"""Assign nodes by METIS, with the optional package pymetis. Holds both directions of every edge in memory."""

from typing import Any

import torch
from torch import Tensor

from hoploom import ops
from hoploom.config.extras import needs
from hoploom.errors import ConfigError
from hoploom.ops import EdgeLists, PartitionRule, Topology
from hoploom.store.base import scan_edges

SCALE = 1000  # of a node's weight: so much for the mean node
MOST = 2**31 - 1  # nodes, and edges in both directions: METIS counts in 32 bits


def metis_parts(topology: Topology, seed_bits: Tensor | None, rule: PartitionRule, most: int = MOST) -> Tensor:
    """Return the part of every node, [num_nodes] int16, balancing nodes, in-edges and seeds alike."""
    with needs("metis"):
        import pymetis
    num_nodes = topology.bounds[-1]
    _check_count("nodes", num_nodes, most)
    ops.count_cut(topology, torch.zeros(num_nodes, dtype=torch.int16), rule.threads)  # reads and checks all
    sources, destinations = _edges(topology)
    is_seed = None
    if seed_bits is not None:
        is_seed = (seed_bits.view(-1, 1) >> torch.arange(8, dtype=torch.uint8) & 1).view(-1)[:num_nodes]
    kept = sources != destinations
    forth, back = sources * num_nodes + destinations, destinations * num_nodes + sources
    found, weights = torch.unique(torch.cat([forth[kept], back[kept]]), return_counts=True)
    _check_count("edges, both ways,", int(weights.sum()), most)
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(found // num_nodes, minlength=num_nodes), 0, out=indptr[1:])
    options: Any = pymetis.Options(ufactor=max(1, int(1000 * rule.imbalance)), seed=rule.key % 2**31)
    _, parts = pymetis.part_graph(
        rule.num_parts,
        pymetis.CSRAdjacency(indptr.int().numpy(), (found % num_nodes).int().numpy()),
        vweights=_node_weights(torch.bincount(destinations, minlength=num_nodes), is_seed).int().numpy(),
        eweights=weights.int().numpy(),
        options=options,
    )
    return _fill_empty(torch.tensor(parts, dtype=torch.int16), rule.num_parts)


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise ConfigError(f"{count} {what} are more than METIS can count ({most}); use method 'stream'")


def _edges(topology: Topology) -> tuple[Tensor, Tensor]:
    """Return both ends of every edge, with ids counted through all types."""
    pairs = [torch.empty(2, 0, dtype=torch.int64)]
    for name, source, destination, all_lists in topology.relations:
        firsts = torch.tensor([[topology.bounds[source]], [topology.bounds[destination]]])
        for lists in all_lists:
            assert isinstance(lists, EdgeLists)
            pairs += [torch.stack([ids.to(torch.int64), ends]) + firsts for ids, ends in scan_edges(lists, name)]
    sources, destinations = torch.cat(pairs, dim=1)
    return sources, destinations


def _node_weights(degrees: Tensor, is_seed: Tensor | None) -> Tensor:
    num_nodes = degrees.numel()
    weights = torch.full((num_nodes,), SCALE, dtype=torch.int64)
    for kind in (degrees, is_seed):
        if kind is not None and int(kind.sum()):
            weights += kind.to(torch.int64) * SCALE * num_nodes // int(kind.sum())
    return weights // max(1, int(weights.sum()) >> 30) + 1  # the sum must fit 31 bits


def _fill_empty(parts: Tensor, num_parts: int) -> Tensor:
    """Move nodes to empty parts, which METIS may leave in tiny graphs."""
    for part in range(num_parts):
        counts = torch.bincount(parts.long(), minlength=num_parts)
        if counts[part] == 0:
            parts[torch.nonzero(parts == counts.argmax())[0, 0]] = part
    return parts
