"""Assign nodes to balanced parts with few edges between them, in the core. Edges are in memory or read from files."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom import _core
from hoploom.errors import StoreError
from hoploom.ops.sample import EdgeLists

MOST_PARTS = 2**15 - 1
MOST_NODES = 2**40 - 2
NODE_BYTES = 24  # of memory that assign_parts takes per node, at most
FIXED_BYTES = 250 << 20  # of memory that assign_parts takes for graphs of any size in addition, at most
CoreLists = tuple[NDArray[Any] | None, NDArray[Any] | None, int, int, int, int, str, int, int, bool]
# (array, begin, memory): fill `memory` with the bytes of an array from byte `begin` on. Array 2 * i is the indptr of a
# topology's i-th lists, array 2 * i + 1 their indices. Several threads call it at a time.
ReadArray = Callable[[int, int, memoryview], None]


class FileLists(NamedTuple):
    """The sizes of edge lists, for a range of destinations. The lists are in files, which `Topology.read` reads."""

    num_lists: int
    num_edges: int
    is_wide: bool  # sources are int64, else int32
    first_node: int


class RelationLists(NamedTuple):
    """The in-edges of one relation, split by destination into one or more ranges."""

    name: str  # for messages
    source: int  # index of the source type
    destination: int
    lists: Sequence[EdgeLists | FileLists]


class Topology(NamedTuple):
    """All edges of a graph. Node ids count through all types: first the nodes of type 0, then those of type 1, ..."""

    bounds: Sequence[int]  # type t has the ids bounds[t] to bounds[t + 1] - 1
    relations: Sequence[RelationLists]
    read: ReadArray | None = None  # reads the arrays of FileLists


class PartitionRule(NamedTuple):
    """Options of the partitioner: the number of parts, their limits, and the work to spend."""

    num_parts: int
    passes: int  # of refinement, each over all edges
    imbalance: float  # share by which a part may exceed the mean number of nodes of each type, edges and seeds
    threads: int
    key: int
    wide_ids: bool = False  # for tests: store ids as if there were more than 2^32 nodes


def assign_parts(topology: Topology, seed_bits: Tensor | None, rule: PartitionRule) -> Tensor:
    """Return the part of every node, [num_nodes] int16, for any number of threads; `seed_bits` has one bit per node."""
    parts = torch.empty(topology.bounds[-1], dtype=torch.int16)
    bits = None if seed_bits is None else seed_bits.numpy()
    limits = (rule.num_parts, rule.passes, rule.imbalance, rule.threads, rule.key, rule.wide_ids)
    _run(_core.assign_parts, *_arrays(topology), bits, *limits, parts.numpy())
    return parts


def count_cut(topology: Topology, parts: Tensor, threads: int) -> Tensor:
    """Return how many edges of each relation lead from one part to another: [num_relations] int64."""
    cut = torch.zeros(len(topology.relations), dtype=torch.int64)
    _run(_core.count_cut, *_arrays(topology), parts.numpy(), threads, cut.numpy())
    return cut


def spread_visits(topology: Topology, new_visits: Tensor, fanouts: Sequence[int], visits: Tensor, threads: int) -> None:
    """Add to `visits` [num_nodes] int64 the next hop's expected visits, from `new_visits` [num_nodes] float32.

    `fanouts` are by relation; -1: all edges.
    """
    hop = torch.tensor(fanouts, dtype=torch.int64).numpy()
    _run(_core.spread_visits, *_arrays(topology), new_visits.numpy(), hop, threads, visits.numpy())


def drop_pages(mapped: Sequence[Tensor]) -> None:
    """Free the memory of tensors that are maps of files; values written to these tensors are lost."""
    for rows in mapped:
        _core.drop_pages(rows.numpy())


def _run(call: Callable[..., None], *arguments: Any) -> None:
    try:
        call(*arguments)
    except IndexError as error:
        raise StoreError(f"{error}; the store is damaged, run hoploom check on it") from error


def _arrays(topology: Topology) -> tuple[list[CoreLists], NDArray[Any], ReadArray | None]:
    bounds = topology.bounds
    lists: list[CoreLists] = []
    for number, relation in enumerate(topology.relations):
        first_source, end = bounds[relation.source : relation.source + 2]
        for held in relation.lists:
            first = bounds[relation.destination] + held.first_node
            about = (first, first_source, end - first_source, number, relation.name)
            if isinstance(held, FileLists):
                lists.append((None, None, *about, held.num_lists, held.num_edges, held.is_wide))
            else:
                sizes = (held.indptr.numel() - 1, held.num_edges, held.indices.dtype == torch.int64)
                lists.append((held.indptr.numpy(), held.indices.numpy(), *about, *sizes))
    return lists, np.array(bounds, np.int64), topology.read
