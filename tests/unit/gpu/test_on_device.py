"""The hop loop on a device makes what the host's makes, without a word to the host until its sizes are read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.batches import same_value
from support.cases import store_of
from support.graphs import library, ring
from support.waiting import NoWaiting
from torch import Tensor

import hoploom
from hoploom.batch import Sampled, Seeds
from hoploom.gpu.batch_memory import map_tensors
from hoploom.gpu.capacity import Capacity, HopPlan, first_capacity, grow_capacity, plan_hops, used_capacity
from hoploom.gpu.device_hops import (
    NO_PICKS,
    DeviceBuffers,
    fault_of,
    make_buffers,
    make_maps,
    sample_on_device,
    sampled_of,
)
from hoploom.sample import Workspace, sample_hops
from hoploom.sample.hops import Sampling, make_sampling
from hoploom.store import Store

Make = Callable[[Capacity | None], tuple[HopPlan, DeviceBuffers, list[int]]]


def seeds_for(store: Store, node_type: str, nodes: list[int], *, disjoint: bool, first: int = 0) -> Seeds:
    index, ids = store.schema.type_index[node_type], torch.tensor(nodes)
    own = [ids if at == index else None for at in range(len(store.schema.node_types))]
    trees = [torch.arange(first, first + len(nodes)) if disjoint and at == index else None for at in range(len(own))]
    return Seeds(tuple(own), tuple(trees), None, first)


def on_the_host(store: Store, seeds: Seeds, sampling: Sampling, key: int) -> Sampled:
    return sample_hops(store.graph, Workspace(store.schema), seeds, sampling, key)


class Runs:
    """Batches of one store and one plan in the same buffers, as a loader or a graph makes them."""

    def __init__(self, store: Store, sampling: Sampling, seeds: Seeds, device: torch.device, **options: Any) -> None:
        placed = hoploom.place(store, topology=str(device), features=str(device)).placed
        assert placed is not None
        assert placed.lists is not None
        self.lists, self.seeds, self.device = placed.lists, seeds, device
        self.num_seeds = [0 if nodes is None else nodes.numel() for nodes in seeds.nodes]
        types = [at for at, count in enumerate(self.num_seeds) if count]
        self.plan = plan_hops(store.schema, sampling, types, **options)
        self.maps = make_maps(self.plan, device)
        self.use(first_capacity(self.plan, self.num_seeds))

    def use(self, room: Capacity) -> None:
        self.into = make_buffers(self.plan, room, self.device)

    def run(self, key: int) -> list[int]:
        seeds = map_tensors(self.seeds, lambda tensor: tensor.to(self.device))
        bits = torch.tensor(key, device=self.device)
        with NoWaiting():  # type: ignore[no-untyped-call]
            sample_on_device(self.lists, self.maps, seeds, bits, self.into)
        return self.into.totals[:, 0].tolist()

    def sampled(self, sizes: list[int]) -> Sampled:
        cut = sampled_of(self.into, sizes, self.seeds.first_tree, Tensor.clone)
        return map_tensors(cut, Tensor.cpu)  # type: ignore[no-any-return]


def same(ours: Sampled, theirs: Sampled) -> bool:
    return same_value(vars(ours), vars(theirs))


def test_a_relation_of_fanout_0_is_asked_for_nothing(device: torch.device) -> None:
    store = store_of(True, {})
    fanouts = {relation.key: [2, 0] if relation.name == "writes" else [0, 2] for relation in store.schema.relations}
    sampling = make_sampling(store.schema, fanouts)
    seeds = seeds_for(store, "paper", [3, 8], disjoint=False)
    runs = Runs(store, sampling, seeds, device)
    assert same(runs.sampled(runs.run(4)), on_the_host(store, seeds, sampling, 4))


def test_the_plan_of_a_ring_is_what_arithmetic_says(device: torch.device) -> None:
    """Node v has in-edges from v + 1 and v + 2: from node 0, two hops reach 1, 2 and then 3, 4."""
    store = hoploom.from_pyg(ring(12))
    runs = Runs(store, make_sampling(store.schema, [-1, -1]), seeds_for(store, "node", [0], disjoint=False), device)
    seen = used_capacity(runs.plan, runs.run(1))
    assert seen == Capacity(nodes=((1, 3, 5),), edges=((2, 6),), rows=((1,), (2,)), picks=((2,), (4,)))
    blocks = make_sampling(store.schema, [-1, -1], mode="blocks")
    runs = Runs(store, blocks, seeds_for(store, "node", [0], disjoint=False), device)
    seen = used_capacity(runs.plan, runs.run(1))
    assert seen == Capacity(nodes=((1, 3, 5),), edges=((2, 6),), rows=((1,), (3,)), picks=((2,), (6,)))


def test_first_room_holds_all_that_fanouts_allow_up_to_what_the_graph_has() -> None:
    schema = hoploom.from_pyg(ring(12)).schema
    plan = plan_hops(schema, make_sampling(schema, [2, 3]), [0])
    most = Capacity(nodes=((2, 6, 14),), edges=((4, 16),), rows=((2,), (4,)), picks=((4,), (12,)))
    assert first_capacity(plan, [2]) == most
    assert first_capacity(plan, [2], large=5).picks == ((4,), (5,))
    disjoint = plan_hops(schema, make_sampling(schema, [2, 3], disjoint=True), [0])
    assert first_capacity(disjoint, [2]).nodes == ((2, 2 + 4, 2 + 4 + 12),)
    everything = plan_hops(schema, make_sampling(schema, [-1]), [0])
    assert first_capacity(everything, [2]).picks == ((24,),)


def test_types_that_no_seed_leads_to_take_no_room() -> None:
    """Venues lead to papers, but nothing that papers are made of leads to venues in one hop."""
    schema = hoploom.from_pyg(library()).schema
    plan = plan_hops(schema, make_sampling(schema, [2, 2]), [schema.type_index["venue"]])
    (first, second) = plan.hops
    assert [schema.relations[ask.relation].name for ask in first] == ["appears_in"]
    assert {schema.relations[ask.relation].name for ask in second} == {"writes", "reviews", "cites", "prints"}


def _less(room: Capacity, what: str) -> Capacity:
    def shrunk(sizes: Any) -> Any:
        return tuple(map(shrunk, sizes)) if isinstance(sizes, tuple) else max(1, sizes - 1)

    return room._replace(**{what: shrunk(getattr(room, what))})


@pytest.mark.parametrize(
    ("what", "options"),
    [
        *(("rows", {}), ("picks", {"mode": "blocks"})),
        *(pytest.param(what, {"disjoint": True}, marks=pytest.mark.slow) for what in ("nodes", "edges")),
    ],
)
def test_a_batch_too_large_is_noticed_and_made_again(options: dict[str, Any], what: str, device: torch.device) -> None:
    store = hoploom.from_pyg(ring(40))
    sampling = make_sampling(store.schema, [2, 2], **options)
    seeds = seeds_for(store, "node", [0, 20, 7], disjoint=sampling.disjoint)
    runs = Runs(store, sampling, seeds, device)
    needed = used_capacity(runs.plan, runs.run(1))
    runs.use(needed)
    assert runs.into.capacity.holds(used_capacity(runs.plan, runs.run(1)))  # to the last entry
    room = _less(needed, what)
    for _ in range(8):
        runs.use(room)
        sizes = runs.run(1)
        seen = used_capacity(runs.plan, sizes)
        if room.holds(seen):
            break
        assert not room.holds(needed)
        room = grow_capacity(room, seen)
    assert room.holds(needed)
    assert same(runs.sampled(sizes), on_the_host(store, seeds, sampling, 1))


def test_pointers_group_the_edges_by_destination(device: torch.device) -> None:
    store = store_of(False, {})
    sampling = make_sampling(store.schema, [3, 2])
    runs = Runs(store, sampling, seeds_for(store, "node", [5, 9, 5, 30], disjoint=False), device, with_indptr=True)
    sizes = runs.run(3)
    destinations = runs.sampled(sizes).edge_index[0][1]
    num_expanded = sizes[runs.plan.nodes[0][2]]
    counts = torch.bincount(destinations, minlength=num_expanded)
    indptr = runs.into.layers[0][0].indptr
    assert indptr is not None
    assert indptr[: num_expanded + 1].tolist() == [0, *counts.cumsum(0).tolist()]
    assert indptr[num_expanded + 1 :].eq(NO_PICKS).all()


def test_a_damaged_source_is_the_fault_of_its_batch(device: torch.device) -> None:
    store = hoploom.from_pyg(ring(12))
    runs = Runs(store, make_sampling(store.schema, [-1]), seeds_for(store, "node", [4], disjoint=False), device)
    assert fault_of(runs.run(1)) is None
    runs.lists[0].indices[8:10] = 12
    assert "source id is out of range" in str(fault_of(runs.run(1)))
