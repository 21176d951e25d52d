"""Aggregation equals the messages written out, forward and backward, whatever the threads, dtypes and shapes."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.utils import scatter
from torch_geometric.utils import softmax as pyg_softmax

from hoploom import ConfigError, ops
from hoploom.ops import InEdges, rows
from hoploom.ops.reductions import add_ends

CASES = [
    ("sum", 0), ("sum", 1), ("sum", 3), ("mean", 0), ("mean", 3), ("max", 0), ("max", 1), ("max", 3), ("softmax", 1),
    ("softmax", 3),
]  # fmt: skip


def edge_index_of(num_sources: int, num_destinations: int, num_edges: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(n, (num_edges,), generator=generator) for n in (num_sources, num_destinations)]
    return torch.stack(ends)


def by_messages(x: Tensor, edge_index: Tensor, reduce: str, weights: Tensor | None, num_destinations: int) -> Tensor:
    """The aggregate as PyG makes it: one message per edge, then a scatter. Weights in the order of edge_index."""
    sources, destinations = edge_index
    if reduce == "softmax":
        assert weights is not None
        weights, reduce = pyg_softmax(weights, destinations, num_nodes=num_destinations), "sum"
    messages = x[sources]
    if weights is not None:
        messages = messages * weights.repeat_interleave(x.shape[1] // weights.shape[1], dim=1)
    return scatter(messages, destinations, 0, num_destinations, reduce)


@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 120)),
    case=st.sampled_from(CASES),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=80)
def test_an_aggregate_is_the_scatter_of_its_messages(
    sizes: tuple[int, int, int], case: tuple[str, int], threads: int, seed: int
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    num_sources, num_destinations, num_edges = sizes
    reduce, heads = case
    edge_index = edge_index_of(*sizes, seed)
    edges = InEdges.of(edge_index, num_sources, num_destinations)
    order = torch.arange(num_edges) if edges.permutation is None else edges.permutation
    x = torch.randn(num_sources, 12, dtype=torch.float64)
    weights = torch.randn(num_edges, heads, dtype=torch.float64) if heads else None
    given_weights = None if weights is None else weights[order]
    expected = by_messages(x, edge_index, reduce, weights, num_destinations)
    torch.testing.assert_close(ops.aggregate(x, edges, reduce, given_weights), expected)


@pytest.mark.parametrize(("reduce", "heads"), CASES)
def test_gradients_are_those_of_finite_differences(reduce: str, heads: int) -> None:
    torch.manual_seed(1)
    edges = InEdges.of(edge_index_of(9, 7, 40), 9, 7)
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(40, heads, dtype=torch.float64, requires_grad=True) if heads else None
    if weights is None:
        assert torch.autograd.gradcheck(lambda x: ops.aggregate(x, edges, reduce), (x,))
    else:
        assert torch.autograd.gradcheck(lambda x, w: ops.aggregate(x, edges, reduce, w), (x, weights))


@pytest.mark.parametrize(("reduce", "heads"), CASES)
def test_one_thread_and_three_give_the_same_bits(reduce: str, heads: int) -> None:
    edges, start = InEdges.of(edge_index_of(3000, 2000, 40_000), 3000, 2000), torch.randn(3000, 24)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        x = start.clone().requires_grad_()
        weights = torch.linspace(-1, 1, 40_000 * heads).view(-1, heads).requires_grad_() if heads else None
        out = ops.aggregate(x, edges, reduce, weights)
        (out * out).sum().backward()
        found.append([out, x.grad, None if weights is None else weights.grad])
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize(("reduce", "heads"), CASES)
def test_lists_without_any_edge_give_zeros(reduce: str, heads: int) -> None:
    edges, weights = InEdges.of(torch.empty(2, 0, dtype=torch.int64), 3, 2), torch.ones(0, heads) if heads else None
    assert ops.aggregate(torch.ones(3, 6), edges, reduce, weights).tolist() == [[0] * 6] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_floats_come_back_as_they_went_in(dtype: torch.dtype) -> None:
    edges = InEdges.of(edge_index_of(50, 20, 300), 50, 20)
    x = torch.randn(50, 16).to(dtype).requires_grad_()
    out = ops.aggregate(x, edges, "mean")
    out.sum().backward()
    exact = ops.aggregate(x.detach().double(), edges, "mean")
    assert out.dtype == x.grad.dtype == dtype
    torch.testing.assert_close(out.double(), exact, atol=1e-2 if dtype != torch.float32 else 1e-6, rtol=1e-2)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("reduce", "heads"), [case for case in CASES if case[0] != "max"])
def test_sums_of_bfloat16_are_sums_of_float32_that_are_rounded_once(reduce: str, heads: int, threads: int) -> None:
    torch.set_num_threads(threads)
    edges, start = InEdges.of(edge_index_of(900, 600, 9000), 900, 600), torch.randn(900, 2, 24).bfloat16()
    start[0], start[1, 0, :3] = 1e38, torch.tensor([math.inf, -math.inf, math.nan])
    weights = torch.linspace(-1, 1, 9000 * heads).view(-1, heads) if heads else None
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x = start[:, 0].to(dtype).requires_grad_()  # rows with gaps between them
        own = None if weights is None else weights.clone().requires_grad_()
        out = ops.aggregate(x, edges, reduce, own)
        out.backward(torch.randn(600, 24, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype))
        found.append([out.bfloat16(), x.grad.bfloat16(), torch.zeros(1) if own is None else own.grad])
    for narrow, wide in zip(*found, strict=True):
        assert torch.equal(narrow.nan_to_num(7), wide.nan_to_num(7))
        assert torch.equal(narrow.isinf(), wide.isinf())


def test_torch_adds_other_gradients_in_place_to_that_of_an_aggregate(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sum_rows = list[int](), rows.sum_rows

    def noted(*arguments: Any) -> Tensor:
        out = sum_rows(*arguments)
        made.append(out.data_ptr())
        return out

    monkeypatch.setattr(rows, "sum_rows", noted)
    x = torch.randn(4, 3, requires_grad=True)
    (x.sin().sum() + ops.aggregate(x, InEdges.of(torch.tensor([[0, 1, 3], [0, 0, 1]]), 4, 2), "sum").sum()).backward()
    assert x.grad is not None
    assert x.grad.data_ptr() == made[1]


def test_rows_may_lie_apart_and_have_heads() -> None:
    edges, wide = InEdges.of(edge_index_of(10, 5, 30), 10, 5), torch.randn(10, 20)
    torch.testing.assert_close(ops.aggregate(wide[:, :8], edges), ops.aggregate(wide[:, :8].contiguous(), edges))
    torch.testing.assert_close(ops.aggregate(wide.t()[:10].t(), edges), ops.aggregate(wide[:, :10].clone(), edges))
    assert ops.aggregate(wide.view(10, 4, 5), edges, "softmax", torch.zeros(30, 4)).shape == (5, 4, 5)


def test_the_greatest_takes_the_gradient_and_the_first_of_equals_wins() -> None:
    edges = InEdges.of(torch.tensor([[0, 1, 2], [0, 0, 0]]), 3, 1)
    x = torch.tensor([[1.0, 5.0], [3.0, 5.0], [3.0, 0.0]], requires_grad=True)
    ops.aggregate(x, edges, "max").backward(torch.tensor([[10.0, 20.0]]))
    assert x.grad.tolist() == [[0, 20], [10, 0], [0, 0]]


def test_a_list_without_edges_gives_zeros_and_a_nan_stays_one() -> None:
    edges = InEdges.of(torch.tensor([[0, 1], [0, 0]]), 2, 3)
    for reduce in ("sum", "mean", "max"):
        out = ops.aggregate(torch.tensor([[math.nan], [-2.0]]), edges, reduce)
        assert math.isnan(out[0, 0])
        assert out[1:].tolist() == [[0], [0]]


def test_great_scores_do_not_overflow() -> None:
    edges = InEdges.of(torch.tensor([[0, 1], [0, 0]]), 2, 1)
    assert ops.softmax(torch.tensor([[1e30], [-1e30]]), edges).tolist() == [[1], [0]]


def test_a_head_is_the_first_lists_alone() -> None:
    edges = InEdges.of(torch.tensor([[3, 1, 2, 0, 1], [0, 0, 1, 2, 2]]), 4, 4)
    head = edges.head(2, 4)
    assert (head.num_destinations, head.num_edges, head.sources.tolist()) == (2, 3, [3, 1, 2])
    assert head.in_degrees_of_sources.tolist() == [2, 1, 2, 0]
    assert head.sources.data_ptr() == edges.sources.data_ptr()


def test_every_list_gets_one_loop_in_place_of_its_own() -> None:
    edges = InEdges.of(torch.tensor([[0, 1, 1, 0], [0, 0, 1, 2]]), 3, 3)
    looped = edges.with_loops
    assert (looped.sources.tolist(), looped.indptr.tolist()) == ([1, 0, 1, 0, 2], [0, 2, 3, 5])
    assert edges.in_degrees_of_sources.tolist() == [1, 0, 1]


def test_edges_grouped_by_source_are_the_same_edges() -> None:
    edges = InEdges.of(edge_index_of(8, 6, 50), 8, 6)
    out = edges.transposed
    pairs = torch.stack([torch.repeat_interleave(torch.arange(8), out.indptr.diff()), out.destinations.long()])
    own = torch.stack([edges.sources.long(), edges.destinations])
    assert torch.equal(own[:, out.places], pairs)


@given(
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 60)),
    spare=st.integers(0, 9),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_edges_on_a_device_are_those_on_the_cpu(
    sizes: tuple[int, int, int], spare: int, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sources, num_destinations, _ = sizes
    num_destinations = min(num_sources, num_destinations)  # for loops: destinations are sources
    edge_index = edge_index_of(num_sources, num_destinations, sizes[2], seed)
    edges = InEdges.of(edge_index, num_sources, num_destinations)
    head = max(1, num_destinations // 2)
    expected = [contents(edges), contents(edges.head(head, num_sources))]
    assert_same(contents(with_rubbish(edges, spare)), expected[0])
    with monkeypatch.context() as patch:
        patch.setattr(rows, "runs_in_core", lambda tensor: False)
        grouped = InEdges.of(edge_index.to(dtype), num_sources, num_destinations)
        assert torch.equal(grouped.sources.long(), edge_index[0][grouped.permutation])
        found = with_rubbish(grouped, spare)
        assert_same(contents(found), expected[0])
        assert_same(contents(found.head(head, num_sources)), expected[1])


def with_rubbish(edges: InEdges, spare: int) -> InEdges:
    """The same lists in an array of sources that goes on behind them."""
    sources = torch.cat([edges.sources, torch.full((spare,), 2**31 - 1, dtype=edges.sources.dtype)])
    return InEdges(edges.indptr, sources, edges.num_sources)


def contents(edges: InEdges) -> dict[str, Tensor]:
    """All that edges tell of their lists, without what stands behind them."""
    length, out_edges, looped = int(edges.indptr[-1]), edges.transposed, edges.with_loops
    assert not edges.are_loops[length:].any()
    assert bool((looped.sources < edges.num_sources).all())
    assert bool((edges.senders < edges.num_sources).all())
    assert bool((edges.destinations < edges.num_destinations).all())
    places = torch.arange(length) if out_edges.places is None else out_edges.places
    by_edge = {name: getattr(edges, name)[:length] for name in ("sources", "senders", "destinations", "are_loops")}
    return by_edge | {
        "indptr": edges.indptr,
        "degrees": edges.degrees,
        "in_degrees": edges.in_degrees_of_sources,
        "out_indptr": out_edges.indptr,
        "out_destinations": out_edges.destinations[:length],
        "out_places": places[:length],
        "looped_indptr": looped.indptr,
        "looped_sources": looped.sources[: int(looped.indptr[-1])],
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, values in expected.items():
        assert torch.equal(found[name].long(), values.long()), name


def test_an_end_out_of_range_is_refused_on_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "runs_in_core", lambda tensor: False)
    for edge_index in ([[3], [0]], [[0], [2]], [[-1], [0]], [[0], [-1]]):
        with pytest.raises(RuntimeError, match="out of range"):
            InEdges.of(torch.tensor(edge_index), 3, 2)


def test_no_node_at_one_end_means_no_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "runs_in_core", lambda tensor: False)
    edges = InEdges(torch.tensor([0, 3]), torch.tensor([0, 1, 1]), 2)
    assert edges.head(0, 2).num_edges == 0
    assert InEdges(torch.tensor([0, 0]), torch.tensor([7, 7]), 0).num_edges == 0
    x = torch.ones(2, 1, requires_grad=True)
    add_ends(x, torch.ones(0, 1), edges.head(0, 2)).sum().backward()


@pytest.mark.parametrize(("reduce", "heads"), CASES)
def test_what_stands_behind_the_lists_changes_nothing(reduce: str, heads: int) -> None:
    exact = InEdges.of(edge_index_of(9, 7, 40), 9, 7)
    edges, x = with_rubbish(exact, 5), torch.randn(9, 6)
    weights = torch.randn(45, heads) if heads else None
    found = []
    for one, length in ((exact, 40), (edges, 45)):
        rows = x.clone().requires_grad_()
        given = None if weights is None else weights[:length].clone().requires_grad_()
        out = ops.aggregate(rows, one, reduce, given)
        out.square().sum().backward()
        found.append([out, rows.grad, *([] if given is None else [given.grad[:40]])])
        assert given is None or not given.grad[40:].any()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("reduce", "x", "weights", "message"),
    [
        ("median", torch.ones(3, 2), None, "choose one of"),
        ("sum", torch.ones(4, 2), None, "a row for each of 3 sources"),
        ("sum", torch.ones(3), None, "a row for each of 3 sources"),
        ("sum", torch.ones(3, 2, dtype=torch.int64), None, "give floats"),
        ("softmax", torch.ones(3, 2), None, "needs weights"),
        ("max", torch.ones(3, 2), torch.ones(3), "each of 2 edges"),
        ("sum", torch.ones(3, 2), torch.ones(3), "each of 2 edges"),
        ("sum", torch.ones(3, 2), torch.ones(2, 4), "each of 2 edges"),
        ("sum", torch.ones(3, 2), torch.ones(2, 1, 1), "each of 2 edges"),
    ],
)
def test_what_does_not_fit_the_edges_is_refused(reduce: str, x: Tensor, weights: Tensor | None, message: str) -> None:
    edges = InEdges.of(torch.tensor([[0, 2], [0, 1]]), 3, 2)
    with pytest.raises(ConfigError, match=message):
        ops.aggregate(x, edges, reduce, weights)


@pytest.mark.parametrize(
    ("indptr", "sources"), [([0, 3], [0, 1]), ([1, 2], [0, 1]), ([0, 2, 1, 2], [0, 1]), ([0, 2], [0, 7])]
)
def test_lists_that_do_not_hold_are_refused_before_anything_is_read(indptr: list[int], sources: list[int]) -> None:
    edges = InEdges(torch.tensor(indptr), torch.tensor(sources), 3)
    for reduce in ("sum", "max"):
        with pytest.raises(IndexError):
            ops.aggregate(torch.ones(3, 2), edges, reduce)
