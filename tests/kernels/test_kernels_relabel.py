"""Local ids made on the device: those of the core's map and of the Python reference, whatever the map's kind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference
from support.kernel_forms import ids, no_faults, number, span_of
from support.kernel_maps import FAR, Hop, Made, begin_batch, is_empty, kinds, make, wanted
from torch import Tensor

from hoploom.keys import mix
from hoploom.ops.kernels.launch import SOURCE_OUT_OF_RANGE, DeviceFrontier, DevicePicks
from hoploom.ops.kernels.relabel import FIRST_TABLE, PROBES, DeviceNodeMap

batches = st.lists(
    st.tuples(
        st.lists(st.integers(0, 29), max_size=6),
        st.lists(st.lists(st.integers(0, 29), max_size=40).map(Hop), max_size=3),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=6)
@given(batches)
def test_both_kinds_of_map_equal_the_core_batch_after_batch(
    device: torch.device, drawn: list[tuple[list[int], list[Hop]]]
) -> None:
    for node_map in kinds(30, device):
        for seeds, hops in drawn:
            assert make(node_map, seeds, hops) == wanted(seeds, hops, 30)


@settings(max_examples=6)
@given(st.data())
def test_a_node_in_two_trees_is_two_nodes(device: torch.device, data: st.DataObject) -> None:
    num_trees = data.draw(st.integers(1, 4))
    seeds = data.draw(st.lists(st.integers(0, 9), min_size=num_trees, max_size=num_trees))
    hops = []
    for _ in range(data.draw(st.integers(1, 3))):
        trees = data.draw(st.lists(st.integers(0, num_trees - 1), min_size=1, max_size=5))
        destinations = data.draw(st.lists(st.integers(0, len(trees) - 1), max_size=20))
        sources = data.draw(st.lists(st.integers(0, 9), min_size=len(destinations), max_size=len(destinations)))
        hops.append(Hop(sources, destinations, trees))
    made = make(DeviceNodeMap(10, device), seeds, hops, trees=range(num_trees))
    keys = [(hop.trees[at], source) for hop in hops for at, source in zip(hop.destinations, hop.sources, strict=True)]
    nodes, local = reference.relabel(list(enumerate(seeds)), keys)
    assert made.trees is not None
    assert list(zip(made.trees, made.nodes, strict=True)) == nodes
    assert [place for hop in made.local for place in hop] == local


def test_one_node_in_hundreds_of_trees_is_as_many_nodes(device: torch.device) -> None:
    hop = Hop([7] * 400, range(399, -1, -1), range(400))
    made = make(DeviceNodeMap(10, device), [7, 7], [hop], 400, trees=[0, 399])
    assert (made.trees, made.local) == ([0, 399, *range(398, 0, -1)], [[1, *range(2, 400), 0]])


def test_ids_above_two_to_the_31_are_hashed(device: torch.device) -> None:
    seeds = [FAR - 1, 2**31, 2**32 + 5, FAR - 1]
    hops = [Hop([5, 2**32 + 5, 2**33 + 5, 2**31]), Hop([2**33 + 5, 0, FAR - 2, 5])]
    assert make(DeviceNodeMap(FAR, device), seeds, hops) == wanted(seeds, hops, FAR)


def test_one_map_serves_batches_with_and_without_trees(device: torch.device) -> None:
    node_map, hop = DeviceNodeMap(10, device), [Hop([1, 2, 1], [0, 1, 1], [0, 1])]
    for _ in range(2):
        assert make(node_map, [1, 2], hop).nodes == [1, 2]
        assert make(node_map, [1, 2], hop, trees=[0, 1]).nodes == [1, 2, 1]
    assert is_empty(node_map)
    assert is_empty(node_map, with_trees=True)


@pytest.mark.parametrize("budget", [1 << 20, 0])
@pytest.mark.parametrize(("capacity", "size"), [(1, 3), (4, 6), (7, 8)])
def test_a_batch_too_large_stays_as_it_is_and_harms_no_later_one(
    device: torch.device, budget: int, capacity: int, size: int
) -> None:
    node_map = DeviceNodeMap(20, device, budget)
    seeds, hops = [0, 1, 2], [Hop([3, 4, 3, 5]), Hop([6, 7, 3, 0]), Hop([8, 9])]
    for _ in range(2):
        made = make(node_map, seeds, hops, capacity)
        assert made.size == size  # of the first hop beyond it
        assert made.nodes == list(range(capacity))  # the array is as long as it was
        assert all(place < capacity for hop in made.local for place in hop)
        assert is_empty(node_map)
        assert make(node_map, seeds, hops, 10) == wanted(seeds, hops, 20)


def test_a_hop_that_outgrows_the_capacity_gives_the_size_it_needs(device: torch.device) -> None:
    for node_map in kinds(500, device):
        assert make(node_map, [0], [Hop(range(450))], capacity=10).size == 450
        assert is_empty(node_map)
        assert make(node_map, [0], [Hop([1, 0])]) == Made(2, [0, 1], None, [[1, 0]], 0)


@pytest.mark.slow
def test_a_run_of_full_slots_too_long_to_probe_makes_the_batch_too_large(device: torch.device) -> None:
    crowd = [node for node in range(12_000) if mix(mix(0, 0), node) % FIRST_TABLE < 40][: PROBES + 60]
    assert len(crowd) == PROBES + 60
    node_map = DeviceNodeMap(FAR, device)
    assert make(node_map, [], [Hop(crowd)], capacity=FIRST_TABLE // 2).size == FIRST_TABLE // 2 + 1
    assert is_empty(node_map)
    assert make(node_map, [], [Hop(crowd)], capacity=FIRST_TABLE) == wanted([], [Hop(crowd)], FAR)


def test_sources_that_are_no_nodes_are_a_fault_and_take_no_place(device: torch.device) -> None:
    for node_map in kinds(10, device):
        made = make(node_map, [4], [Hop([5, 10, -1, 4, FAR, 6])])
        assert (made.nodes, made.fault) == ([4, 5, 6], SOURCE_OUT_OF_RANGE)
        assert [made.local[0][at] for at in (0, 3, 5)] == [1, 0, 2]
        assert is_empty(node_map)


def test_a_seed_that_is_no_node_is_a_fault(device: torch.device) -> None:
    for node_map in kinds(10, device):
        begin_batch(node_map, 4)
        faults = no_faults(device)
        node_map.add_seeds(ids([3, 10, -1], device), None, number(-1, device), faults)
        assert int(faults) == SOURCE_OUT_OF_RANGE
        assert is_empty(node_map)


def test_picks_beyond_their_arrays_are_left_alone(device: torch.device) -> None:
    for node_map in kinds(10, device):
        begin_batch(node_map, 8)
        before, after, local = number(-1, device), number(-1, device), ids([-1] * 3, device)
        node_map.add_seeds(ids([9], device), None, before, no_faults(device))
        array = ids([1, 2, 1], device)
        picks = DevicePicks(array, array, array, span_of(1, 9, device))
        node_map.add(picks, DeviceFrontier(array, picks.span), local, before, after, no_faults(device))
        assert (local.tolist(), int(after)) == ([-1, 1, 2], 3)


def test_a_map_of_no_nodes_takes_no_nodes(device: torch.device) -> None:
    assert make(DeviceNodeMap(0, device), [], [Hop([0])]) == Made(0, [], None, [[0]], SOURCE_OUT_OF_RANGE)


def test_what_failed_half_way_is_forgotten(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> Tensor:
        raise MemoryError

    for node_map in kinds(10, device):
        with monkeypatch.context() as patched:
            patched.setattr(torch, "cumsum", no_memory)
            with pytest.raises(MemoryError):
                make(node_map, [1], [Hop([2, 3])])
        assert is_empty(node_map)


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [1 << 30, 0])
def test_a_replayed_batch_reads_its_arrays_anew_and_knows_no_earlier_one(budget: int) -> None:
    device = torch.device("cuda")
    node_map = DeviceNodeMap(1000, device, budget)
    seeds, sources, local = (torch.zeros(size, dtype=torch.int64, device=device) for size in (4, 400, 400))
    nodes, faults = torch.zeros(404, dtype=torch.int64, device=device), no_faults(device)
    before, after = number(0, device), number(0, device)
    picks = DevicePicks(sources, sources, sources, span_of(0, 400, device))

    def batch() -> None:
        node_map.begin(nodes)
        node_map.add_seeds(seeds, None, before, faults)
        node_map.add(picks, DeviceFrontier(nodes, picks.span), local, before, after, faults)

    batch()  # compiles, and gives the map its room
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch()
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, 1000, (404,), generator=random)
        seeds.copy_(drawn[:4])
        sources.copy_(drawn[4:])
        graph.replay()
        want = wanted(drawn[:4].tolist(), [Hop(drawn[4:].tolist())], 1000)
        assert (nodes[: int(after)].tolist(), local.tolist()) == (want.nodes, want.local[0])
        made = make(node_map, [1, 2], [Hop([3, 1])], capacity=10)  # a batch between replays
        assert made == wanted([1, 2], [Hop([3, 1])], 1000)
