"""Expected visits: how often an epoch of training is expected to read each node, computed hop by hop from the seeds.

A batch reads a node once, however many of its nodes sampled it, so each hop continues from the nodes that a batch is
expected to reach for the first time. Needs no sampling, and reads all edges once in every hop but the first. Sums are
of whole numbers: their order does not matter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hoploom.load.presample import BATCH_SIZE
from hoploom.ops.assign_parts import spread_visits
from hoploom.partition.assign import topology_of
from hoploom.partition.store_files import READERS, StoreFiles

ONE = 1 << 20  # a visit: sums count millionths of visits
SQUARINGS = 10  # of 1 - x / 2^10, for e^-x: all processors multiply alike
MOST_PER_BATCH = 64  # visits to a node; e^-64 is nothing
PER_DOUBLING = 16  # classes of visits
CHUNK_NODES = 1 << 20


def expected_visits(
    files: StoreFiles, node_type: str, split: str, fanouts: Sequence[Sequence[int]], memory: int
) -> Tensor:
    """Return the expected visits of an epoch from a split's members: [num_nodes] int64, in units of 1 / ONE.

    `fanouts` are by hop and relation. Edges are held if they fit `memory` bytes.
    """
    first, num_nodes = files.bounds[files.schema.type_index[node_type]], files.bounds[-1]
    visits, before = torch.zeros(num_nodes, dtype=torch.int64), torch.zeros(num_nodes, dtype=torch.int64)
    num_seeds = 0
    for _, ids in files.members(node_type, split):
        visits[ids + first] = ONE
        num_seeds += ids.numel()
    num_batches, new = max(1, -(-num_seeds // BATCH_SIZE)), torch.empty(num_nodes)
    with topology_of(files, memory) as topology:
        for hop in fanouts:
            for chunk, was, given in zip(*(torch.split(of, CHUNK_NODES) for of in (visits, before, new)), strict=True):
                given.copy_(_reached(chunk, num_batches) - _reached(was, num_batches))
            before.copy_(visits)
            spread_visits(topology, new, hop, visits, READERS)
    return visits


def _reached(visits: Tensor, num_batches: int) -> Tensor:
    """Return the number of batches expected to have each node, in units: [n] float64."""
    per_batch = (visits.double() / (ONE * num_batches)).clamp_(max=MOST_PER_BATCH)
    absent = 1 - per_batch / (1 << SQUARINGS)
    for _ in range(SQUARINGS):
        absent = absent * absent
    return (1 - absent) * (ONE * num_batches)


def visit_classes(visits: Tensor) -> Tensor:
    """Return 0 for no visits, else a class that grows by PER_DOUBLING with every doubling: [n] int16."""
    classes = torch.empty(visits.shape, dtype=torch.int16)
    for chunk, found in zip(torch.split(visits, CHUNK_NODES), torch.split(classes, CHUNK_NODES), strict=True):
        share, doublings = torch.frexp(chunk.double())
        found.copy_((PER_DOUBLING * (doublings - 1) + (2 * PER_DOUBLING * share).int()).clamp_(min=0))
    return classes
