"""Estimate how often an epoch of training reads each node, hop by hop from the seeds: the expected visits.

A batch reads a node once, even if several nodes sample it. Each hop therefore continues from the nodes that a batch is
expected to reach for the first time. Nothing is sampled; all edges are read once in every hop but the first. Visits are
summed as integers, so that the order of the edges does not matter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hoploom.load.presample import BATCH_SIZE
from hoploom.ops.assign_parts import spread_visits
from hoploom.partition.assign import topology_of
from hoploom.partition.store_files import READERS, StoreFiles

ONE = 1 << 20  # one visit, as an integer: sums count about millionths of visits
SQUARINGS = 10  # e^-x is 1 - x / 2^10, squared 10 times: unlike exp, the same bits on all processors
MOST_PER_BATCH = 64  # visits to a node; e^-64 is about 0
PER_DOUBLING = 16  # visit classes between x and 2 x visits
CHUNK_NODES = 1 << 20


def expected_visits(
    files: StoreFiles, node_type: str, split: str, fanouts: Sequence[Sequence[int]], memory: int
) -> Tensor:
    """Return each node's expected visits in an epoch with these seeds: [num_nodes] int64, in units of 1 / ONE.

    The seeds are the members of `split`. `fanouts` has a number per hop and relation. Edges stay in memory if they fit.
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
    """Return the expected number of batches that contain each node, in units of 1 / ONE: [n] float64."""
    per_batch = (visits.double() / (ONE * num_batches)).clamp_(max=MOST_PER_BATCH)
    absent = 1 - per_batch / (1 << SQUARINGS)
    for _ in range(SQUARINGS):
        absent = absent * absent
    return (1 - absent) * (ONE * num_batches)


def visit_classes(visits: Tensor) -> Tensor:
    """Return each node's visit class, [n] int16: 0 for no visits; twice the visits give a class PER_DOUBLING higher."""
    classes = torch.empty(visits.shape, dtype=torch.int16)
    for chunk, found in zip(torch.split(visits, CHUNK_NODES), torch.split(classes, CHUNK_NODES), strict=True):
        share, doublings = torch.frexp(chunk.double())
        found.copy_((PER_DOUBLING * (doublings - 1) + (2 * PER_DOUBLING * share).int()).clamp_(min=0))
    return classes
