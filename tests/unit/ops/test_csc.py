"""COO to CSC: stable, in range, and within its memory."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hoploom
from hoploom import ops

MEMORY = """
import os
import sys

import torch
from hoploom import ops

def high_water() -> int:
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # every thread rounds up to whole pages
num_nodes, num_edges = 100_000, 6_000_000
edge_index = torch.randint(num_nodes, (2, num_edges))
if sys.argv[1] == "hub":
    edge_index[1, :-1], edge_index[1, -1] = num_nodes // 2, 0
ops.build_csc(edge_index[:, :1000], num_nodes, num_nodes)
ops.pool_trim()
open("/proc/self/clear_refs", "w").write("5")
before = high_water()
csc = ops.build_csc(edge_index, num_nodes, num_nodes)
result = sum(column.numel() * column.element_size() for column in csc)
print((high_water() - before) / result)
"""


def _stable(edge_index: Tensor) -> Tensor:
    return torch.sort(edge_index[1], stable=True).indices


@settings(max_examples=80)
@given(num_sources=st.integers(1, 9), num_ends=st.integers(1, 9), num_edges=st.integers(0, 60), seed=st.integers(0, 99))
def test_lists_hold_the_edges_of_each_destination_in_their_order(
    num_sources: int, num_ends: int, num_edges: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randint(num_sources, (num_edges,), generator=generator)
    destinations = torch.randint(num_ends, (num_edges,), generator=generator)
    edge_index = torch.stack([sources, destinations])
    csc = ops.build_csc(edge_index, num_sources, num_ends)
    order = torch.arange(num_edges) if csc.permutation is None else csc.permutation
    assert torch.equal(order, _stable(edge_index))
    assert torch.equal(csc.indices.long(), sources[order])
    assert torch.equal(csc.indptr.diff(), torch.bincount(destinations, minlength=num_ends))
    assert csc.indices.dtype == torch.int32


@pytest.mark.parametrize("skew", [1, 30])
def test_lists_of_many_buckets_hold_the_edges_in_their_order(skew: int) -> None:
    generator = torch.Generator().manual_seed(skew)
    num_nodes, num_edges = 100_000, 300_000
    ends = (torch.rand(2, num_edges, generator=generator) ** skew * num_nodes).long().clamp_(max=num_nodes - 1)
    csc, order = ops.build_csc(ends, num_nodes, num_nodes), _stable(ends)
    assert csc.permutation is not None
    assert torch.equal(csc.permutation, order)
    assert torch.equal(csc.indices.long(), ends[0][order])
    assert torch.equal(csc.indptr.diff(), torch.bincount(ends[1], minlength=num_nodes))


def test_edges_in_order_need_no_permutation() -> None:
    assert ops.build_csc(torch.tensor([[3, 1, 2], [0, 0, 4]]), 5, 5).permutation is None
    assert ops.build_csc(torch.tensor([[3, 1, 2], [4, 0, 0]]), 5, 5).permutation is not None


def test_ids_take_64_bits_where_32_do_not_hold_them() -> None:
    far = 2**31 + 5
    csc = ops.build_csc(torch.tensor([[far, 0], [1, 0]]), far + 1, 2)
    assert (csc.indices.dtype, csc.indices.tolist()) == (torch.int64, [0, far])


def test_lists_are_in_time_order_where_times_are_given() -> None:
    edge_index = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    by_edge = ops.build_csc(edge_index, 4, 2, edge_time=torch.tensor([5, 1, 3, 0]))
    assert by_edge.indices.tolist() == [1, 2, 0, 3]
    by_source = ops.build_csc(edge_index, 4, 2, source_time=torch.tensor([9, 8, 7, 6]))
    assert by_source.indices.tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("bad", [[[0, 5], [0, 0]], [[0, 0], [0, 5]], [[-1, 0], [0, 0]]])
def test_ids_out_of_range_are_named(bad: list[list[int]]) -> None:
    with pytest.raises(hoploom.DataError, match=r"out of range \[0, 5\)"):
        ops.build_csc(torch.tensor(bad), 5, 5)


@pytest.mark.parametrize("ends", ["anywhere", pytest.param("hub", marks=pytest.mark.slow)])
def test_the_peak_is_below_2_2_times_the_result(ends: str) -> None:
    command = [sys.executable, "-c", MEMORY, ends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert 0.9 < float(done.stdout) < 2.2
