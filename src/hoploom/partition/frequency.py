"""Assign nodes by frequency: a node goes to the part whose batches visit it most, as far as equal sizes allow.

The seeds are distributed over the parts first, in order of their ids, and each part's batches are sampled as in
training. Takes six bytes per node and part, and one pass over the nodes per part if they prefer the same parts. The
in-edges are not balanced.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hoploom.load.presample import AS_TRAINED
from hoploom.partition.bounded_store import BoundedStore
from hoploom.sample.hops import Fanouts

LEAST_BATCHES, MOST_BATCHES = 8, 256  # of a part; else as many as an epoch has


def frequency_parts(
    opened: BoundedStore, num_parts: int, seeds: Iterable[tuple[str, Tensor]], fanouts: Fanouts
) -> Mapping[str, Tensor]:
    """Return the part of every node, by type: [num_nodes] int16. Seeds (type, ids) keep the part they get first."""
    schema = opened.schema
    counts = {t.name: t.num_nodes for t in schema.node_types}
    parts = {name: torch.full((count,), -1, dtype=torch.int16) for name, count in counts.items()}
    visits = {name: torch.zeros(num_parts, count, dtype=torch.int16) for name, count in counts.items()}
    firsts = dict(zip(counts, torch.tensor([0, *counts.values()]).cumsum(0).tolist(), strict=False))
    for node_type, ids in seeds:
        shares = torch.split(ids, _even(ids.numel(), num_parts, firsts[node_type]).tolist())
        for part, share in enumerate(shares):
            parts[node_type][share] = part
            epoch = -(-share.numel() // AS_TRAINED.batch_size)
            plan = replace(AS_TRAINED, batches=range(max(LEAST_BATCHES, min(MOST_BATCHES, epoch))))
            given = share if schema.homogeneous else (node_type, share)
            for nodes in opened.batches(fanouts, given, plan) if share.numel() else ():
                for of_type, visited in zip(visits.values(), nodes, strict=True):
                    of_type[part][visited] += 1  # each node stands once in a batch
    for name, placed in parts.items():
        _place(placed, visits.pop(name), _even(counts[name], num_parts, firsts[name]))
    return parts


def _even(count: int, num_parts: int, first: int) -> Tensor:
    """Return sizes of parts that differ by at most one, continuing the rotation of earlier types."""
    places = (torch.arange(num_parts) - first) % num_parts
    return count // num_parts + (places < count % num_parts).to(torch.int64)


def _place(parts: Tensor, visits: Tensor, sizes: Tensor) -> None:
    """Assign nodes without a part (-1) to the part with space that visits them most.

    `visits` are [num_parts, num_nodes]. If a part is full, the nodes with the largest loss elsewhere stay. Unvisited
    nodes fill the parts up, in order of their ids.
    """
    room = sizes - torch.bincount(parts[parts >= 0].long(), minlength=sizes.numel())
    left = torch.nonzero((parts < 0) & visits.any(0)).view(-1)
    while left.numel():  # in every round a part is filled, or all are placed
        having = torch.nonzero(room).view(-1)
        wanted = visits[having][:, left]
        most, best = wanted.max(0)
        lost = most - wanted.scatter_(0, best[None], -1).max(0).values  # if the second best has it
        order = torch.sort(lost, descending=True, stable=True).indices
        waiting = []
        for place, part in enumerate(having.tolist()):
            nodes = left[order[best[order] == place]]
            parts[nodes[: room[part]]] = part
            waiting.append(nodes[room[part] :])
            room[part] -= nodes.numel() - waiting[-1].numel()
        left = torch.cat(waiting).sort().values
    parts[parts < 0] = torch.repeat_interleave(torch.arange(sizes.numel(), dtype=torch.int16), room)
