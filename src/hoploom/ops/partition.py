"""Nodes to parts: few edges between parts, no part too full. The edges stay where they lie, read several times."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from hoploom import _core
from hoploom.errors import StoreError
from hoploom.ops.sample import EdgeLists

MOST_PARTS = 2**15 - 1
MOST_NODES = 2**32 - 2
CoreLists = tuple[NDArray[Any], NDArray[Any], int, int, int, int, str, bool]  # as _core takes a relation's lists


class RelationLists(NamedTuple):
    """The in-edges of one relation, in one piece or several."""

    name: str  # for messages
    source: int  # the number of the source type
    destination: int
    lists: Sequence[EdgeLists]


class Topology(NamedTuple):
    """All edges of a graph. Here a node's id counts through all types: those of the first type, then of the second."""

    bounds: Sequence[int]  # type t has the ids bounds[t] to bounds[t + 1] - 1
    relations: Sequence[RelationLists]
    mapped: bool = False  # all lists are maps of files that nobody writes to: pages are let go once they are read


class PartitionRule(NamedTuple):
    """How nodes are assigned to parts."""

    num_parts: int
    passes: int  # of refinement
    imbalance: float  # how much more than the mean a part may hold: of nodes of any type, edges, seeds
    threads: int
    key: int


def assign_parts(topology: Topology, is_seed: Tensor | None, rule: PartitionRule) -> Tensor:
    """[num_nodes] int16: the part of every node; the same for any number of threads."""
    parts = torch.empty(topology.bounds[-1], dtype=torch.int16)
    marks = None if is_seed is None else is_seed.view(torch.uint8).numpy()
    try:
        _core.assign_parts(
            *_arrays(topology),
            marks,
            rule.num_parts,
            rule.passes,
            rule.imbalance,
            rule.threads,
            rule.key,
            parts.numpy(),
        )
    except IndexError as error:
        raise StoreError(f"{error}; the store is damaged, run hoploom check on it") from error
    return parts


def count_cut(topology: Topology, parts: Tensor, threads: int) -> Tensor:
    """[number of relations] int64: how many edges of each lead from one part to another."""
    cut = torch.zeros(len(topology.relations), dtype=torch.int64)
    try:
        _core.count_cut(*_arrays(topology), parts.numpy(), threads, cut.numpy())
    except IndexError as error:
        raise StoreError(f"{error}; the store is damaged, run hoploom check on it") from error
    return cut


def drop_pages(mapped: Sequence[Tensor]) -> None:
    """Let go of the pages of tensors that are maps of files; whatever was written to them would be lost."""
    for rows in mapped:
        _core.drop_pages(rows.numpy())


def _arrays(topology: Topology) -> tuple[list[CoreLists], NDArray[Any]]:
    bounds = topology.bounds
    lists = [
        (
            held.indptr.numpy(),
            held.indices.numpy(),
            bounds[relation.destination] + held.first_node,
            bounds[relation.source],
            bounds[relation.source + 1] - bounds[relation.source],
            number,
            relation.name,
            topology.mapped,
        )
        for number, relation in enumerate(topology.relations)
        for held in relation.lists
    ]
    return lists, torch.tensor(bounds, dtype=torch.int64).numpy()
