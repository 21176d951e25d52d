"""The hop loop on a device: the host starts kernels for the largest possible sizes, and reads all sizes at the end.

Costs idle programs, and memory for the largest sizes, but no hop waits for the host. As the host reads nothing, a batch
with fixed buffers can be captured in a CUDA graph. Nodes and edges beyond the capacity are counted, not stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hoploom.batch import Block, Sampled, Seeds
from hoploom.gpu.capacity import FAULT, Capacity, HopPlan, RelationHop
from hoploom.ops.kernels.launch import (
    LIST_DAMAGED,
    NODE_OUT_OF_RANGE,
    SOURCE_OUT_OF_RANGE,
    DeviceFrontier,
    DeviceLists,
    DevicePicks,
    DeviceSpan,
)
from hoploom.ops.kernels.relabel import DeviceNodeMap
from hoploom.ops.kernels.sample import sample
from hoploom.sample.hops import make_draw

NO_PICKS = torch.iinfo(torch.int64).max  # the offset in an indptr of nodes that no hop has expanded
Copy = Callable[[Tensor], Tensor]  # copies a slice of a buffer
MESSAGES = {
    NODE_OUT_OF_RANGE: "a node that is asked for its edges is not in the graph",
    LIST_DAMAGED: "indptr is damaged",
    SOURCE_OUT_OF_RANGE: "a source id is out of range",
}


@dataclass(frozen=True)
class DeviceEdges:
    """The sampled edges of one relation: of all hops, or of one message-flow block."""

    edge_index: Tensor  # [2, capacity] int64: local sources, local destinations
    edges: Tensor  # [capacity] int64 positions in the store
    indptr: Tensor | None  # [capacity of destinations + 1] int64: offset of each destination's edges, or NO_PICKS

    def first(self, count: int, copy: Copy) -> tuple[Tensor, Tensor]:
        """Return copies of the first `count` edges: edge_index [2, count] and positions in the store [count]."""
        return copy(self.edge_index[:, :count]), copy(self.edges[:count])


@dataclass(frozen=True)
class DeviceBuffers:
    """Buffers of a sampled batch on the device, and the sizes in use. Every batch overwrites them."""

    plan: HopPlan
    capacity: Capacity
    nodes: tuple[Tensor, ...]  # per type: [capacity] int64
    trees: tuple[Tensor | None, ...]  # per type: [capacity] int64; disjoint sampling only
    layers: tuple[tuple[DeviceEdges, ...], ...]  # per relation, within each hop's block or once for all hops
    sources: tuple[Tensor, ...]  # per relation: [capacity] int64 node ids of the picks; scratch
    totals: Tensor  # [slots, 2] int64, sizes in column 0: 16 bytes apart, so that all pointers are equally aligned

    def total(self, slot: int) -> Tensor:
        """Return entry `slot` of the array `totals`, such as a number of nodes, as a 0-dim tensor on the device."""
        return self.totals[slot, 0]

    @property
    def faults(self) -> Tensor:
        """The highest fault code of a kernel so far, [1] int64 on the device; 0 if there was no fault."""
        return self.totals[FAULT, :1]


def make_buffers(plan: HopPlan, capacity: Capacity, device: torch.device) -> DeviceBuffers:
    """Allocate buffers for batches of this capacity."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    num_nodes, num_edges = [max(own) for own in capacity.nodes], [max(own) for own in capacity.edges]
    nodes = tuple(map(empty, num_nodes))
    trees = tuple(empty(size) if plan.sampling.disjoint else None for size in num_nodes)
    layers = []
    for layer in range(plan.sampling.num_hops if plan.is_blocks else 1):
        capacities = capacity.picks[layer] if plan.is_blocks else num_edges
        indptrs = [empty(num_nodes[end] + 1) if plan.with_indptr else None for end in plan.schema.destinations]
        columns = zip(capacities, indptrs, strict=True)
        layers.append(tuple(DeviceEdges(empty(2, size), empty(size), indptr) for size, indptr in columns))
    sources = tuple(map(empty, num_edges))
    return DeviceBuffers(plan, capacity, nodes, trees, tuple(layers), sources, empty(plan.num_slots, 2))


def make_maps(plan: HopPlan, device: torch.device) -> tuple[DeviceNodeMap, ...]:
    """Return one map from node ids to local ids for each node type; the maps serve one batch at a time."""
    return tuple(DeviceNodeMap(node_type.num_nodes, device) for node_type in plan.schema.node_types)


def sample_on_device(
    lists: Sequence[DeviceLists], maps: Sequence[DeviceNodeMap], seeds: Seeds, key: Tensor, into: DeviceBuffers
) -> None:
    """Sample a batch of all parts into `into`, equal to that of `sample_hops`; `key` [] int64 has its key's bits."""
    plan = into.plan
    into.totals.zero_()
    for of_relations in into.layers:
        for edges in of_relations:
            if edges.indptr is not None:
                edges.indptr.fill_(NO_PICKS)
    for index, node_map in enumerate(maps):
        node_map.begin(into.nodes[index], into.trees[index])
        own = seeds.nodes[index]
        if own is not None:
            node_map.add_seeds(own, seeds.trees[index], into.total(plan.nodes[index][1]), into.faults)
    for hop, asks in enumerate(plan.hops):
        for ask in asks:
            _expand((lists[ask.relation], maps), seeds, key, into, (hop, ask))


def _expand(
    graph: tuple[DeviceLists, Sequence[DeviceNodeMap]],
    seeds: Seeds,
    key: Tensor,
    into: DeviceBuffers,
    at: tuple[int, RelationHop],
) -> None:
    """Sample in-edges of one relation in one hop, then give their sources local ids. `at` is (hop, relation)."""
    lists, maps = graph
    hop, ask = at
    relation, plan = ask.relation, into.plan
    source, destination = plan.schema.sources[relation], plan.schema.destinations[relation]
    begin, end = (into.total(slot) for slot in plan.frontier(hop, destination))
    span = DeviceSpan(begin, end, into.capacity.rows[hop][destination])
    frontier = DeviceFrontier(into.nodes[destination], span, into.trees[destination], seeds.times, seeds.first_tree)
    edges = into.layers[hop if plan.is_blocks else 0][relation]
    span = DeviceSpan(into.total(ask.begin), into.total(ask.end), into.capacity.picks[hop][relation])
    scratch = into.sources[relation][: edges.edges.numel()]
    picks = DevicePicks(scratch, edges.edges, edges.edge_index[1], span, edges.indptr)
    excluded = seeds.excluded[relation] if seeds.excluded else None
    rule = make_draw(plan.sampling, 0, hop).rule(relation)._replace(key=key, excluded=excluded)
    sample(lists, frontier, rule, picks, into.faults)
    if rule.fanout != 0:
        before, after = into.total(ask.before), into.total(ask.after)
        maps[source].add(picks, frontier, edges.edge_index[0], before, after, into.faults)


def sampled_of(filled: DeviceBuffers, sizes: Sequence[int], first_tree: int, copy: Copy) -> Sampled:
    """Return the batch in the buffers `filled`, with tensors copied by `copy`. `sizes` are the values of `totals`."""
    plan = filled.plan
    nodes = [copy(own[: sizes[slots[-1]]]) for own, slots in zip(filled.nodes, plan.nodes, strict=True)]
    trees = None
    if plan.sampling.disjoint:
        pairs = [(own, own_nodes) for own, own_nodes in zip(filled.trees, nodes, strict=True) if own is not None]
        trees = [copy(own[: own_nodes.numel()]).sub_(first_tree) for own, own_nodes in pairs]
    if plan.is_blocks:
        blocks = [_block(filled, sizes, hop, copy) for hop in reversed(range(plan.sampling.num_hops))]
        return Sampled(nodes, trees, [], [], None, None, blocks)
    layer = zip(filled.layers[0], plan.picks, strict=True)
    edge_index, edges = zip(*(own.first(sizes[spans[-1][1]], copy) for own, spans in layer), strict=True)
    num_nodes = [[sizes[end] - sizes[begin] for begin, end in pairwise(slots)] for slots in plan.nodes]
    num_edges = [[sizes[end] - sizes[begin] for begin, end in spans] for spans in plan.picks]
    return Sampled(nodes, trees, list(edge_index), list(edges), num_nodes, num_edges)


def _block(filled: DeviceBuffers, sizes: Sequence[int], hop: int, copy: Copy) -> Block:
    plan = filled.plan
    layer = zip(plan.schema.relations, filled.layers[hop], plan.picks, strict=True)
    found = {relation.key: edges.first(sizes[spans[hop][1]], copy) for relation, edges, spans in layer}
    slots = {t.name: own for t, own in zip(plan.schema.node_types, plan.nodes, strict=True)}
    return Block(
        {key: edge_index for key, (edge_index, _) in found.items()},
        {key: edges for key, (_, edges) in found.items()},
        {name: sizes[own[hop + 2]] for name, own in slots.items()},
        {name: sizes[own[hop + 1]] for name, own in slots.items()},
    )


def fault_of(sizes: Sequence[int]) -> IndexError | None:
    """Return the error for the fault code in `sizes`, the values of `totals`; None if there was no fault."""
    code = sizes[FAULT]
    return IndexError(f"{MESSAGES[code]}; run hoploom check on the store") if code else None
