"""Kernels that sample, where lists are long, ids large, room short or files damaged."""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from support import reference
from support.kernel_forms import (
    UNWRITTEN,
    frontier_of,
    lists_of,
    no_faults,
    number,
    picks_of,
    rule_of,
    span_of,
    written,
)
from torch import Tensor

from hoploom import ops
from hoploom.ops.kernels.launch import (
    LIST_DAMAGED,
    NODE_OUT_OF_RANGE,
    SOURCE_OUT_OF_RANGE,
    DeviceFrontier,
    DeviceLists,
    launch,
)
from hoploom.ops.kernels.sample import sample
from hoploom.ops.kernels.scored import exact_log

KEY, STREAM = 0xFEDCBA9876543210, 2 << 16 | 5


def rule(fanout: int, **flags: bool) -> ops.Rule:
    return ops.Rule(KEY, STREAM, fanout, **flags)


def check_star(degree: int, device: torch.device, picked: ops.Rule, time: int | None = None) -> None:
    """A node of `degree` in-edges between two of none and one of two: as the core picks from them until `time`."""
    indptr, nodes = [0, 0, degree, degree, degree + 2], [3, 1, 0, 2, 3]
    indices = torch.arange(degree + 2) * 7 % 1000 + (1 << 33)
    weight = (torch.arange(degree + 2) * 31 % 17).float() / 7
    edge_time = None if time is None else torch.arange(degree + 2)
    trees, times = (None, None) if time is None else ([0] * 5, [time])
    lists = lists_of(indptr, indices, device, weight, edge_time)
    picks, faults = picks_of(degree + 4 if picked.fanout < 0 else 5 * picked.fanout, device, 5), no_faults(device)
    sample(lists, frontier_of(nodes, device, trees, times), rule_of(picked, device), picks, faults)
    edge_lists = ops.EdgeLists(torch.tensor(indptr), indices, weight=weight, edge_time=edge_time)
    columns = [None if time is None else torch.tensor(column) for column in (trees, [time] * 5)]
    counts, sources, edges = ops.sample(edge_lists, ops.Frontier(torch.tensor(nodes), *columns), picked)
    assert picks.indptr is not None
    assert picks.indptr.tolist() == [0, *counts.cumsum(0).tolist()]
    assert (written(picks)[:2], int(faults)) == ((sources.tolist(), edges.tolist()), 0)


@pytest.mark.parametrize(
    "flags", [{}, {"replace": True}, {"last": True}, {"weighted": True}, {"labor": True}], ids="-".join
)
@pytest.mark.parametrize("time", [1001, pytest.param(None, marks=pytest.mark.slow)])
def test_a_list_of_over_a_thousand_times_the_fanout(device: torch.device, flags: dict[str, bool], time: int) -> None:
    check_star(1400, device, rule(1, **flags), time)


def test_a_long_list_is_given_whole(device: torch.device) -> None:
    check_star(5000, device, rule(-1))
    check_star(1200, device, rule(-1, weighted=True))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [3, 130])
def test_a_population_above_65536_takes_wide_draws(device: torch.device, fanout: int, replace: bool) -> None:
    check_star(70_000, device, rule(fanout, replace=replace))


@pytest.mark.parametrize("flags", [{"labor": True}, {"weighted": True}], ids="-".join)
def test_of_equal_scores_the_first_win(device: torch.device, flags: dict[str, bool]) -> None:
    """One source, or infinite weights; in two chunks of a list."""
    weight = torch.full([1100], math.inf)
    lists = lists_of([0, 1100], torch.full([1100], 4), device, weight)
    picks = picks_of(1200, device)
    sample(lists, frontier_of([0], device), rule_of(rule(600, **flags), device), picks, no_faults(device))
    assert (written(picks)[1], set(picks.edges[600:].tolist())) == (list(range(600)), {UNWRITTEN})


@pytest.fixture
def sparse_indptr(tmp_path: Path, device: torch.device) -> Tensor:
    """Lists of 2^31 + 4 nodes, all empty but the last of 40 edges. A file of holes, or memory of the device."""
    size = (1 << 31) + 5
    if device.type == "cuda":
        if torch.cuda.mem_get_info(device)[0] < 10 * size:
            pytest.skip("needs 20 GB of device memory")
        indptr = torch.zeros(size, dtype=torch.int64, device=device)
    else:
        indptr = torch.from_file(str(tmp_path / "indptr"), shared=True, size=size, dtype=torch.int64)
    indptr[-1] = 40
    return indptr


def test_node_ids_above_two_to_the_31(device: torch.device, sparse_indptr: Tensor) -> None:
    node, sources = (1 << 31) + 3, range(1 << 40, (1 << 40) + 40)
    lists = DeviceLists(sparse_indptr, torch.tensor(sources).to(device), device, torch.ones(40, device=device))
    edges = reference.Edges(sources, [1.0] * 40)
    both: list[dict[str, bool]] = [{}, {"replace": True}, {"weighted": True}, {"weighted": True, "replace": True}]
    for flags in (*both, {"labor": True}):
        for fanout in (5, 70):  # few and many
            picks, faults = picks_of(70, device), no_faults(device)
            picked = rule_of(rule(fanout, **flags), device)
            sample(lists, frontier_of([node, node - 1], device), picked, picks, faults)
            offsets = reference.pick(reference.Rule(KEY, STREAM, fanout, **flags), node, edges)
            assert written(picks) == ([sources[offset] for offset in offsets], offsets, [0] * len(offsets))
            assert int(faults) == 0


def test_sources_above_two_to_the_31_have_times(device: torch.device, sparse_indptr: Tensor) -> None:
    """The same array as times: 0 of all nodes, 40 of the last."""
    last = (1 << 31) + 4
    lists = lists_of([0, 3], torch.tensor([last - 1, 1 << 31, last]), device, source_time=sparse_indptr)
    for time, sources in ((39, [last - 1, 1 << 31]), (40, [last - 1, 1 << 31, last]), (-1, [])):
        picks, faults = picks_of(3, device), no_faults(device)
        sample(lists, frontier_of([0], device, [0], [time]), rule_of(rule(-1), device), picks, faults)
        assert (written(picks)[0], int(faults)) == (sources, 0)


RULES = [
    rule(-1),
    rule(0),
    rule(2),
    rule(100),
    rule(2, replace=True),
    rule(2, weighted=True),
    rule(2, weighted=True, replace=True),
    rule(2, labor=True),
]
every_rule = pytest.mark.parametrize("picked", RULES, ids=lambda picked: " ".join(map(str, picked[2:])))


def three_lists(device: torch.device) -> DeviceLists:
    return lists_of([0, 3, 7, 9], torch.arange(9, dtype=torch.int32), device, torch.ones(9))


@pytest.mark.parametrize("picked", [*RULES, rule(2, last=True)], ids=lambda picked: " ".join(map(str, picked[2:])))
@pytest.mark.parametrize("spare", [3])
def test_an_empty_frontier_has_no_picks(device: torch.device, picked: ops.Rule, spare: int) -> None:
    for trees in (None, []):
        picks, faults = picks_of(4, device, num_places=8, begin=3), no_faults(device)
        lists = replace(three_lists(device), edge_time=None if trees is None else torch.arange(9, device=device))
        frontier = frontier_of([], device, trees, trees, begin=2, spare=spare)
        sample(lists, frontier, rule_of(picked, device), picks, faults)
        assert picks.indptr is not None
        assert (int(picks.span.end), picks.indptr.tolist()) == (3, [UNWRITTEN] * 2 + [3] + [UNWRITTEN] * 6)
        assert (picks.sources.tolist(), int(faults)) == ([UNWRITTEN] * 4, 0)


@every_rule
def test_what_is_beyond_the_room_is_counted_but_not_written(device: torch.device, picked: ops.Rule) -> None:
    every, some, none = (picks_of(room, device, 4, begin=1) for room in (700, 4, 0))
    for picks in (every, some, none):
        frontier = frontier_of([0, 1, 2, 1], device)
        sample(three_lists(device), frontier, rule_of(picked, device), picks, no_faults(device))
        assert picks.indptr is not None
        assert int(picks.span.end) == int(every.span.end) == int(picks.indptr[-1])
    assert int(every.span.end) > 4 or picked.fanout == 0
    for column in ("sources", "edges", "destinations"):
        assert getattr(some, column).tolist() == getattr(every, column)[:4].tolist()


def test_a_frontier_ends_with_its_room_and_with_the_most_rows_there_can_be(device: torch.device) -> None:
    nodes = torch.tensor([2, 1, 0], device=device)
    beyond = [((begin, 90, 40), edges) for begin, edges in ((1, [3, 4, 5, 6, 0, 1, 2]), (3, []), (50, []))]
    for (begin, end, most), edges in (*beyond, ((0, 3, 2), [7, 8, 3, 4, 5, 6])):
        picks, faults = picks_of(9, device, num_places=3), no_faults(device)
        frontier = DeviceFrontier(nodes, span_of(begin, end, device, most=most))
        sample(three_lists(device), frontier, rule_of(rule(-1), device), picks, faults)
        assert (written(picks)[1], int(faults)) == (edges, 0)


@every_rule
@pytest.mark.parametrize(
    ("indptr", "bad", "code"),
    [
        ([0, 3, 7, 9], -1, NODE_OUT_OF_RANGE),
        ([0, 3, 7, 9], 3, NODE_OUT_OF_RANGE),
        ([4, 3, 7, 9], 0, LIST_DAMAGED),
        ([0, 3, 7, 10], 2, LIST_DAMAGED),
    ],
    ids=str,
)
def test_a_node_out_of_range_or_a_damaged_list_has_no_picks_and_is_reported(
    device: torch.device, picked: ops.Rule, indptr: Sequence[int], bad: int, code: int
) -> None:
    """The first node and the third have the picks that they have alone."""
    good = 1 if code == LIST_DAMAGED else 2
    weight, indices = torch.ones(9), torch.arange(9)
    faulty, sound = picks_of(700, device), picks_of(700, device)
    for picks, nodes in ((faulty, [1, bad, good]), (sound, [1, good])):
        faults, lists = no_faults(device), lists_of(indptr, indices, device, weight)
        sample(lists, frontier_of(nodes, device), rule_of(picked, device), picks, faults)
        assert int(faults) == (code if picks is faulty else 0)
    sources, edges, destinations = written(faulty)
    assert (sources, edges) == written(sound)[:2]
    assert [place // 2 for place in destinations] == written(sound)[2]


def test_a_source_without_a_time_is_reported_and_the_worst_fault_kept(device: torch.device) -> None:
    lists = lists_of([0, 2, 4], torch.tensor([0, 5, 0, 1]), device, source_time=torch.tensor([1, 2]))
    faults = no_faults(device)
    for nodes, edges, code in (([1], [2, 3], 0), ([1, 9], [2, 3], 1), ([0, 1], [2, 3], 3), ([9], [], 3)):
        picks = picks_of(9, device)
        frontier = frontier_of(nodes, device, trees=[0] * len(nodes), times=[9])
        sample(lists, frontier, rule_of(rule(-1), device), picks, faults)
        assert (written(picks)[1], int(faults)) == (edges, code)
    assert int(faults) == SOURCE_OUT_OF_RANGE


@triton.jit
def log_of(x, out, size, BLOCK: tl.constexpr):  # noqa: N803
    place = tl.arange(0, BLOCK)
    tl.store(out + place, exact_log(tl.load(x + place, mask=place < size, other=0.5)), mask=place < size)


def test_logarithms_equal_the_references_to_the_last_bit(device: torch.device) -> None:
    root = math.sqrt(0.5)
    values = [2.0**-53, 1 - 2.0**-53, 0.5, root, math.nextafter(root, 0), math.nextafter(root, 1), 1e-9]
    values += [reference.Draws(KEY, node, 0).unit(0) for node in range(1000)]
    x = torch.tensor(values, dtype=torch.float64, device=device)
    logs = torch.empty_like(x)
    launch(log_of, (1,), x, logs, len(values), device=device, BLOCK=1024)
    assert [struct.pack("d", log) for log in logs.tolist()] == [
        struct.pack("d", reference.exact_log(value)) for value in values
    ]


@pytest.mark.gpu
@every_rule
def test_a_captured_hop_replays_with_another_key_and_frontier(device: torch.device, picked: ops.Rule) -> None:
    lists, frontier, picks = three_lists(device), frontier_of([0, 1, 2], device), picks_of(700, device, 3)
    key, faults = number(1, device), no_faults(device)
    replayed = picked._replace(key=key)
    sample(lists, frontier, replayed, picks, faults)  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(lists, frontier, replayed, picks, faults)
    key.copy_(number(KEY, device))
    frontier.nodes.copy_(torch.tensor([2, 0, 1]))
    graph.replay()
    expected = picks_of(700, device)
    sample(lists, frontier_of([2, 0, 1], device), rule_of(picked, device), expected, faults)
    assert written(picks) == written(expected)
