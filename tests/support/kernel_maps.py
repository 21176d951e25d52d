"""Batches of local ids made by kernels' node maps, as lists, and by the core's."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hoploom import ops
from hoploom.ops.kernels.launch import DeviceFrontier, DevicePicks
from hoploom.ops.kernels.relabel import EMPTY_SLOT, DeviceNodeMap
from support import reference
from support.kernel_forms import ids, no_faults, number, span_of

FAR = 2**40  # nodes of a graph that no direct map holds


class Hop(NamedTuple):
    """Sources, and the place of each one's frontier node in `trees`."""

    sources: Sequence[int]
    destinations: Sequence[int] = ()
    trees: Sequence[int] = ()


class Made(NamedTuple):
    size: int
    nodes: list[int]
    trees: list[int] | None
    local: list[list[int]]
    fault: int


def make(
    node_map: DeviceNodeMap,
    seeds: Sequence[int],
    hops: Sequence[Hop],
    capacity: int = 64,
    trees: Sequence[int] | None = None,
) -> Made:
    """One batch: all hops in one array of picks, with programs for three picks more than there are."""
    device = node_map.device
    sources = [source for hop in hops for source in hop.sources]
    places = [place for hop in hops for place in hop.destinations or [0] * len(hop.sources)]
    spare = [FAR] * 5  # beyond a hop's end lies what is no node
    array, local = ids([*sources, *spare], device), ids([-1] * (len(sources) + 5), device)
    sizes = [number(-1, device) for _ in range(len(hops) + 1)]
    begin_batch(node_map, capacity, with_trees=trees is not None)
    begin, faults = 0, no_faults(device)
    node_map.add_seeds(ids(seeds, device), None if trees is None else ids(trees, device), sizes[0], no_faults(device))
    for hop, before, after in zip(hops, sizes[:-1], sizes[1:], strict=True):
        end = begin + len(hop.sources)
        span = span_of(begin, end, device, end - begin + 3)
        picks = DevicePicks(array, array, ids([*places, *spare], device), span)
        frontier = DeviceFrontier(array, span, ids(hop.trees, device) if hop.trees else None)
        node_map.add(picks, frontier, local, before, after, faults)
        begin = end
    assert local[len(sources) :].tolist() == [-1] * 5
    size = int(sizes[-1])
    split = [part.tolist() for part in local[: len(sources)].split([len(hop.sources) for hop in hops])]
    batch_trees = None if node_map.trees is None else node_map.trees[:size].tolist()
    return Made(size, node_map.nodes[:size].tolist(), batch_trees, split, int(faults))


def wanted(seeds: Sequence[int], hops: Sequence[Hop], num_nodes: int) -> Made:
    core = ops.NodeMap(num_nodes)
    core.add_seeds(torch.tensor(seeds, dtype=torch.int64))
    local = [
        core.add(torch.tensor(hop.sources, dtype=torch.int64), torch.tensor([len(hop.sources)])).tolist()
        for hop in hops
    ]
    nodes, flat = reference.relabel(seeds, [source for hop in hops for source in hop.sources])
    assert (flat, core.nodes().tolist()) == ([place for hop in local for place in hop], nodes)
    return Made(len(nodes), nodes, None, local, 0)


def begin_batch(node_map: DeviceNodeMap, capacity: int, *, with_trees: bool = False) -> None:
    nodes = torch.empty(capacity, dtype=torch.int64, device=node_map.device)
    node_map.begin(nodes, torch.empty_like(nodes) if with_trees else None)


def is_empty(node_map: DeviceNodeMap, **how: bool) -> bool:
    begin_batch(node_map, 1, **how)
    return bool((node_map._begun().slots == EMPTY_SLOT).all())


def kinds(num_nodes: int, device: torch.device) -> list[DeviceNodeMap]:
    return [DeviceNodeMap(num_nodes, device), DeviceNodeMap(num_nodes, device, budget=0)]
