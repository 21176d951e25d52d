"""Expected visits: how often an epoch of training is expected to read each node, computed hop by hop from the seeds.

A batch reads a node once, however many of its nodes sampled it, so each hop continues from the nodes that a batch is
expected to reach for the first time. Needs no sampling, and reads all edges once in every hop but the first. Sums are
of whole numbers: their order does not matter.
"""

from collections.abc import Sequence

import numpy as np

from hoploom.load.presample import BATCH_SIZE
from hoploom.partition.store_files import CHUNK_EDGES, Array, InLists, StoreFiles

ONE = 1 << 20  # a visit: sums count millionths of visits
SQUARINGS = 10  # of 1 - x / 2^10, for e^-x: all processors multiply alike
MOST_PER_BATCH = 64  # visits to a node; e^-64 is nothing
MOST_VISITS = 1 << 61  # to a node in an epoch, in units: adding as many again does not overflow
PER_DOUBLING = 16  # classes of visits
NODES = 1 << 22  # whose lists are open at a time


def expected_visits(files: StoreFiles, node_type: str, split: str, fanouts: Sequence[Sequence[int]]) -> Array:
    """Return the expected visits of an epoch from a split's members: [num_nodes] int64, in units of 1 / ONE.

    `fanouts` are by hop and relation.
    """
    num_nodes = files.bounds[-1]
    visits, before = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64)
    visits[files.members(node_type, split, 0, num_nodes)] = ONE
    num_batches = max(1, -(-int(visits.sum()) // ONE // BATCH_SIZE))
    for fanout in fanouts:
        new = (_reached(visits, num_batches) - _reached(before, num_batches)).astype(np.float32)
        before[:] = visits
        for begin in range(0, num_nodes, NODES):
            for lists in files.in_lists(begin, min(num_nodes, begin + NODES)):
                if fanout[lists.relation]:
                    _spread(lists, new[begin:], fanout[lists.relation], visits)
        np.minimum(visits, MOST_VISITS, out=visits)
    return visits


def _reached(visits: Array, num_batches: int) -> Array:
    """Return the number of batches expected to have each node, in units."""
    per_batch = np.minimum(visits / (ONE * num_batches), MOST_PER_BATCH)
    absent = 1 - per_batch / (1 << SQUARINGS)
    for _ in range(SQUARINGS):
        absent = absent * absent
    reached: Array = (1 - absent) * (ONE * num_batches)
    return reached


def _spread(lists: InLists, new: Array, fanout: int, visits: Array) -> None:
    """Add to each source its share of the new visits of its destinations."""
    degrees = np.diff(lists.indptr)
    amounts = new[lists.offset : lists.offset + degrees.size]
    if fanout > 0:
        amounts = amounts * np.minimum(1, fanout / np.maximum(degrees, 1))
    amounts = np.rint(amounts).astype(np.int64)
    for first in range(0, int(lists.indptr[-1]), CHUNK_EDGES):
        last = min(int(lists.indptr[-1]), first + CHUNK_EDGES)
        low = int(np.searchsorted(lists.indptr, first, side="right")) - 1
        high = int(np.searchsorted(lists.indptr, last))
        if amounts[low:high].any():
            given = np.repeat(amounts[low:high], np.diff(lists.indptr[low : high + 1].clip(first, last)))
            np.add.at(visits, lists.edges.read(first, last) + lists.first_source, given)


def visit_classes(visits: Array) -> Array:
    """Return 0 for no visits, else a class that grows by PER_DOUBLING with every doubling: [n] int16."""
    share, doublings = np.frexp(visits.astype(np.float64))
    classes: Array = PER_DOUBLING * (doublings.astype(np.int64) - 1) + (2 * PER_DOUBLING * share).astype(np.int64)
    return classes.clip(0).astype(np.int16)
